"""Claims on tasks, and the audit of what was done."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from jobsync_orm.audit import AuditBook, Done
from jobsync_orm.claim_book import ClaimBook
from jobsync_orm.claims import Claim, Desk, LoneDesk, complete_async, finished
from jobsync_orm.exceptions import ClaimRefused, ConfigurationError
from jobsync_orm.hashing import task_key
from jobsync_orm.job.ownership import OwnershipCalls
from jobsync_orm.logs import fields
from jobsync_orm.observe import TaskClaims
from jobsync_orm.open_tasks import OpenTasks
from jobsync_orm.tasks import Task, task_ids

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

    from jobsync_orm.claims import AnyAsyncSession, AnySession

__all__ = ["TaskCalls"]

logger = logging.getLogger("jobsync_orm")

# A refusal is explained by a statement of its own. If by then nothing speaks against the claim, it is tried again.
TRIES = 3


class TaskCalls(OwnershipCalls):
    """See :class:`~jobsync_orm.Job`."""

    _tasks: OpenTasks
    _desk: Desk | LoneDesk | None = None
    _claims: ClaimBook | None
    _audit: AuditBook | None

    def _reset(self) -> None:
        super()._reset()
        self._claims = self._audit = None
        if self.coordination_config is None:
            if self._desk is None:
                self._tasks = OpenTasks()
                self._desk = LoneDesk(self._tasks)
            return
        if self._desk is not None:
            self._desk.close()
        self._tasks, self._desk = OpenTasks(), None

    def _before_leaving(self) -> None:
        """Write the audit, but do not wait without end for a database that does not answer: leaving matters more."""
        super()._before_leaving()
        if self._audit is None or self.coordination_config is None:
            return

        def write() -> None:
            try:
                self.write_audit()
            except Exception:
                logger.exception(
                    "%s: the audit could not be written while stopping",
                    self.node_name,
                    extra=fields("audit_not_written", self.node_name, self.token_version),
                )

        writer = threading.Thread(target=write, name="jobsync-audit", daemon=True)
        writer.start()
        writer.join(self.coordination_config.callback_timeout_sec)
        if writer.is_alive():
            logger.error(
                "%s: the audit has not been written in time while stopping",
                self.node_name,
                extra=fields("audit_not_written", self.node_name, self.token_version),
            )

    def _claim_book(self) -> ClaimBook:
        with self._engine_guard:
            if self._claims is None:
                assert self.names is not None
                self._claims = ClaimBook(self._application_engine(), self.names, self.node_name, self._date)
            return self._claims

    def _audit_book(self) -> AuditBook:
        with self._engine_guard:
            if self._audit is None:
                assert self.names is not None
                self._audit = AuditBook(self._application_engine(), self.names, self.node_name, self._date)
            return self._audit

    def _claim_desk(self) -> Desk | LoneDesk:
        with self._engine_guard:
            if self._desk is None:
                self._desk = Desk(self.node_name, self._claim_book(), self._tasks, self._touch, self.audience)
            return self._desk

    def _touch(self, session: Session, tokens: Sequence[int]) -> bool:
        """Have the fence of ``session``, if it is bound to this job, hold ``tokens`` at COMMIT. False if it has none.

        Raises
        ------
        OwnershipLost
            One of them was not this node's when the transaction began.
        ConfigurationError
            The session is bound to another job.
        """
        from jobsync_orm.orm import fenced_transaction, owned_session

        job = owned_session.job_of(session)
        if job is None:
            return False
        if job is not self:
            raise ConfigurationError(
                f"the session is bound to the job {job.node_name}, and this is a task of {self.node_name}"
            )
        connection = session.connection()
        transaction = fenced_transaction.transaction_of(connection)
        if transaction is None:
            return False
        transaction.touch(connection, (), set(tokens))
        return True

    # -- claims ------------------------------------------------------------------------------------------------

    def claim_task(self, task: Task | Any) -> Claim:
        """Claim one task: the exclusive, recorded right to work on it, if its token is this node's.

        The claim and the check of ownership are one statement. Use the claim in a ``with`` or ``async with`` block:
        success completes it and writes its audit row, an error releases it.

        Parameters
        ----------
        task : Task, int, str, UUID
            Task or task id.

        Returns
        -------
        Claim
            In standalone mode it is kept in memory, exclusive in this process.

        Raises
        ------
        ClaimRefused
            It cannot be claimed; ``reason`` and ``holder`` say why.
        UnstableTaskId, InvalidTaskId
            The id cannot be hashed to the same token by every worker.
        """
        id = task.id if isinstance(task, Task) else task
        refused: ClaimRefused | None = None
        for _ in range(TRIES):
            claims = self._claim([id])
            if claims:
                self._tell_claims(1, 0)
                return claims[0]
            refused = self._refusal(id)
            # What this life of the node has claimed it may claim anew, unless a transaction holds it.
            if refused is not None and (refused.reason, refused.holder) != ("claimed", self.node_name):
                self._tell_claims(0, 1)
                raise refused
        self._tell_claims(0, 1)
        raise refused or ClaimRefused(
            f"task {id!r}: {self.node_name} cannot know at the moment whether its token is its own", "in doubt", None
        )

    async def claim_task_async(self, task: Task | Any) -> Claim:
        """:meth:`claim_task`, without blocking the event loop: ``async with await job.claim_task_async(task):``."""
        (claim,) = await self._claiming(lambda: [self.claim_task(task)])
        return claim

    def claim_tasks(self, tasks: Iterable[Task | Any]) -> list[Claim]:
        """Claim many tasks in one statement.

        Returns
        -------
        list of Claim
            For those that could be claimed, in the order in which they were given.
        """
        return self._claim_many(_many(tasks))

    async def claim_tasks_async(self, tasks: Iterable[Task | Any]) -> list[Claim]:
        """:meth:`claim_tasks`, without blocking the event loop."""
        ids = _many(tasks)
        return await self._claiming(lambda: self._claim_many(ids))

    def complete_claims(self, claims: Sequence[Claim], session: AnySession | None = None) -> None:
        """Complete many claims and write their audit rows, in one statement.

        Parameters
        ----------
        claims : sequence of Claim
            Of this job. One given twice counts once.
        session : Session or scoped_session, optional
            As in :meth:`Claim.complete <jobsync_orm.Claim.complete>`.

        Raises
        ------
        OwnershipLost
            Some of them are lost; the error names their tokens. With a session nothing is written; without one the
            others have been completed.
        ClaimEnded
            One of them has been completed or released before; nothing is written.
        """
        self._claim_desk().complete(self._own(claims), session)

    async def complete_claims_async(self, claims: Sequence[Claim], session: AnyAsyncSession | None = None) -> None:
        """:meth:`complete_claims`, in the transaction of an AsyncSession or in one of its own."""
        await complete_async(self._claim_desk(), self._own(claims), session)

    def _own(self, claims: Sequence[Claim]) -> Sequence[Claim]:
        for claim in claims:
            if not isinstance(claim, Claim):
                raise ConfigurationError(f"{claim!r} is no Claim: give what claim_task() and claim_tasks() returned")
        return claims

    async def _claiming(self, call: Callable[[], list[Claim]]) -> list[Claim]:
        task = asyncio.ensure_future(asyncio.to_thread(call))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            # The thread goes on; nobody is left to work on what it obtains.
            await asyncio.gather(task, return_exceptions=True)
            if task.exception() is None:
                for claim in task.result():
                    await finished(asyncio.to_thread(claim._let_go))
            raise

    def _mine(self, ids: Iterable[Any]) -> dict[str, tuple[Any, int]]:
        """The tasks this node may say yes to: text of id -> id and token."""
        mine: dict[str, tuple[Any, int]] = {}
        for id in ids:
            if self.can_claim_task(id):
                mine.setdefault(task_key(id), (id, self._token_of(id)))
        return mine

    def _life(self) -> tuple[str, int]:
        """This life of the node, empty while it has none, and the epoch it knows."""
        coordinator = self._coordinator
        if coordinator is None:
            return "", 0
        return coordinator.incarnation, coordinator.ownership.held.epoch

    def _claim(self, ids: list[Any]) -> list[Claim]:
        mine = self._mine(ids)
        life, known = self._life()
        if not mine or (not life and self.coordination_config is not None):
            return []
        return self._claim_desk().claim(mine, life, known)

    def _claim_many(self, ids: list[Any]) -> list[Claim]:
        claims = self._claim(ids)
        self._tell_claims(len(claims), len(ids) - len(claims))
        return claims

    def _tell_claims(self, taken: int, refused: int) -> None:
        if taken:
            self.audience.tell(TaskClaims(self.node_name, "taken", taken))
        if refused:
            self.audience.tell(TaskClaims(self.node_name, "refused", refused))

    def _refusal(self, id: Any) -> ClaimRefused | None:
        key, token = task_key(id), self._token_of(id)
        if self._tasks.has(key):
            return ClaimRefused(f"task {id!r} has been claimed by this process", "claimed here", self.node_name)
        life, known = self._life()
        if self.coordination_config is None:
            return None
        if not life or not self.is_running:
            self.check_process()
            return ClaimRefused(f"{self.node_name} is not running and owns nothing", "not running", None)
        return self._claim_book().refusal(key, token, life, known)

    def set_claim(self, task: Task | Any | Iterable[Task | Any]) -> list[str]:
        """Record an exclusive claim on each task, whether or not its token is this node's.

        Parameters
        ----------
        task : Task, task id, or an iterable of them
            Text, bytes and mappings are one id and never taken apart.

        Returns
        -------
        list of str
            Text of the ids now claimed by this node (claims it already had included), ascending. A task missing from
            it is claimed by another node. Empty in standalone mode.
        """
        tokens = {task_key(id): self._token_of(id) for id in task_ids(task)}
        if self.coordination_config is None:
            return []
        life = self._running().incarnation
        if not tokens or not life:
            return []
        return sorted(claim.key for claim in self._claim_book().mark(tokens, life))

    def release_claim(self, task: Task | Any | Iterable[Task | Any]) -> list[str]:
        """End this node's claims on these tasks; returns the text of the ids whose claim ended.

        A :class:`~jobsync_orm.Claim` on one of them can then no longer be completed.
        """
        keys = [task_key(id) for id in task_ids(task)]
        if self.coordination_config is None:
            return []
        life = self._running().incarnation
        if not keys or not life:
            return []
        ended = self._claim_book().unset(keys, life)
        self._tasks.drop(ended)
        return sorted(ended)

    # -- audit -------------------------------------------------------------------------------------------------

    def add_task(self, task: Task | Any) -> bool:
        """Claim ``task`` and put it down for the audit, if it is this node's to do.

        Returns
        -------
        bool
            False where the task is not this node's, or is claimed by another or by a :class:`~jobsync_orm.Claim` of
            this process. Always False in standalone mode, which has no audit.
        """
        id = task.id if isinstance(task, Task) else task
        return bool(self._add([id]))

    def add_tasks(self, tasks: Iterable[Task | Any]) -> list[str]:
        """:meth:`add_task` for many, in one statement.

        Returns
        -------
        list of str
            Text of the ids added, in the order in which they were given. Empty in standalone mode.
        """
        return self._add(_many(tasks))

    def _add(self, ids: list[Any]) -> list[str]:
        mine = self._mine(ids)
        life, known = self._life()
        if not mine or not life:
            return []
        keys = self._tasks.add(mine)
        added: list[str] = []
        try:
            if keys:
                rows = self._claim_book().claim({key: mine[key][1] for key in keys}, life, known)
                claimed = {row.key: row for row in rows}
                done = [claimed[key] for key in keys if key in claimed]
                self._audit_book().add([Done(row.key, row.token, row.epoch, row.fence, row.at) for row in done])
                added = [row.key for row in done]
            self._tell_claims(len(added), len(mine) - len(added))
        finally:
            missing = set(added)
            self._tasks.remove(key for key in keys if key not in missing)
        return added

    def write_audit(self) -> None:
        """Write the added tasks to the audit and end their claims, in one transaction.

        A database error raises, and what is not written stays down for the next call.
        """
        if self._audit is not None:
            self._audit.write(lambda done: self._tasks.remove(entry.key for entry in done))

    def get_audit(self) -> list[dict[str, str]]:
        """Audit rows of the processing date, of all nodes, oldest first.

        Returns
        -------
        list of dict
            With keys ``node`` and ``task_id``. Empty in standalone mode.
        """
        return [] if self.coordination_config is None else self._audit_book().read()


def _many(tasks: Iterable[Task | Any]) -> list[Any]:
    if isinstance(tasks, Task | str | bytes):
        raise ConfigurationError(f"{tasks!r} is one task: give an iterable of tasks")
    return [task.id if isinstance(task, Task) else task for task in tasks]
