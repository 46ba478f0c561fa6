"""Claim: the exclusive right to work on one task now, as its holder has it in hand.

::

    with job.claim_task("invoice-7") as claim:
        send(invoice, token=claim.fence)

The block's success completes the claim: its audit row is written and its row in the claim table deleted, in one
transaction, and only if the task's token has been this node's all the time. An error in the block releases it. Where
the work is in the same database, complete the claim in the transaction that does it, as its last statement::

    with job.claim_task("invoice-7") as claim, Session(engine) as session:
        session.add(Payment(...))
        claim.complete(session)
        session.commit()

Then work, audit row and ownership are committed together, or nothing is.

A completion that comes too late raises :class:`~jobsync_orm.OwnershipLost`; no audit row is written. ``claim.fence`` is
a number that only grows for a task, whoever claims it: see :mod:`jobsync_orm.claim_book`, which also says what each
statement locks.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from sqlalchemy.exc import DBAPIError

from jobsync_orm.claim_book import ClaimBook, Claimed
from jobsync_orm.exceptions import ClaimEnded, OwnershipLost
from jobsync_orm.logs import fields
from jobsync_orm.observe import Audience, FenceRejected, TaskClaims
from jobsync_orm.open_tasks import OpenTasks
from jobsync_orm.sqlstates import SERIALIZATION_FAILURE, sqlstate

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session
    from sqlalchemy.orm import Session, scoped_session

    AnySession = Session | scoped_session[Any]
    AnyAsyncSession = AsyncSession | async_scoped_session[Any]

__all__ = ["Claim", "Desk", "LoneDesk"]

logger = logging.getLogger("jobsync_orm")

# States of a claim. One that is completed in a transaction whose end is not known yet is "in transaction".
OPEN, ENDING, IN_TRANSACTION, COMPLETED, RELEASED, LOST = (
    "open",
    "being ended",
    "completed in a transaction that has not been committed",
    "completed",
    "released",
    "lost",
)


class Claim:
    """The right of this node to work on one task, until it is completed or released.

    Made by ``job.claim_task`` and ``job.claim_tasks``. Use it in a ``with`` or an ``async with`` block, or call
    :meth:`complete` or :meth:`release`.

    Attributes
    ----------
    task_id : object
        The task's id, as it was given.
    token : int
        Its token.
    epoch : int
        The epoch at which this node had got the token. 0 in standalone mode.
    fence : int
        Greater than that of any claim on this task before. Give it to what the work changes outside the database.
    """

    __slots__ = ("_desk", "_state", "claimed", "epoch", "fence", "task_id", "token")

    def __init__(self, task_id: Any, claimed: Claimed, desk: Desk | LoneDesk) -> None:
        self.task_id = task_id
        self.token = claimed.token
        self.epoch = claimed.epoch
        self.fence = claimed.fence
        self.claimed = claimed
        self._desk = desk
        self._state = OPEN

    def __repr__(self) -> str:
        return f"<Claim on {self.task_id!r}, token {self.token}, fence {self.fence}: {self._state}>"

    def complete(self, session: AnySession | None = None) -> None:
        """End the claim and write its audit row.

        Parameters
        ----------
        session : Session or scoped_session, optional
            Do it in the present transaction of this session, to be committed with the work. Make it the last
            statement. If the transaction is rolled back the claim is as it was, and may be completed again.

        Raises
        ------
        OwnershipLost
            The token has not been this node's all the time, or the claim has ended with its node's life or by
            ``job.release_claim``. Nothing is written.
        ClaimEnded
            It has been completed or released before.
        ConfigurationError
            ``session`` is an AsyncSession: use :meth:`complete_async`.
        """
        self._desk.complete([self], session)

    async def complete_async(self, session: AnyAsyncSession | None = None) -> None:
        """:meth:`complete`, in the transaction of an AsyncSession or in one of its own."""
        await complete_async(self._desk, [self], session)

    def release(self) -> bool:
        """End the claim without an audit row, so that the task can be claimed again. False if it has ended before."""
        return self._desk.release(self)

    async def release_async(self) -> bool:
        """:meth:`release`, without blocking the event loop."""
        return await asyncio.to_thread(self.release)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None and self._state == OPEN:
            try:
                self.complete()
            except BaseException:
                self._let_go()
                raise
        else:
            self._let_go()

    def _let_go(self) -> None:
        """:meth:`release`, by who has something else to raise: where the database does not answer, only here.

        What is left in the claim table then ends with this node's life, or with the next claim on the task.
        """
        if self._state not in (OPEN, IN_TRANSACTION):
            return
        try:
            self.release()
        except Exception:
            logger.warning(
                "%r could not be released in the database; it ends with this node's life",
                self,
                exc_info=True,
                extra=fields("claim_not_released", epoch=self.epoch),
            )
            self._desk.abandon(self)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._state in (OPEN, IN_TRANSACTION):
            await finished(asyncio.to_thread(self.__exit__, kind, error, trace))


async def finished(call: Any) -> Any:
    """The result of ``call``, which is not abandoned half done: a cancellation waits for its end."""
    task = asyncio.ensure_future(call)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.gather(task, return_exceptions=True)
        raise


async def complete_async(
    desk: Desk | LoneDesk, claims: Sequence[Claim], session: AnyAsyncSession | None = None
) -> None:
    """Complete ``claims`` in the transaction of an AsyncSession, or in one of its own."""
    if session is None:
        await finished(asyncio.to_thread(desk.complete, claims, None))
    else:
        from jobsync_orm.transactions import run_in

        await run_in(session, lambda behind: desk.complete(claims, behind))


def _behind(session: Any) -> Session:
    from jobsync_orm.transactions import session_of

    return session_of(session, "complete_async(session)")


class Desk:
    """Gives out the claims of one node and takes them back.

    Parameters
    ----------
    node : str
        This node.
    book : ClaimBook
        Their SQL.
    tasks : OpenTasks
        What this process works on.
    touch : callable
        Called with a session and tokens; True if the session itself makes sure at COMMIT that they are this node's.
    audience : Audience
        Who is told how claims end.
    """

    def __init__(
        self,
        node: str,
        book: ClaimBook,
        tasks: OpenTasks,
        touch: Callable[[Session, Sequence[int]], bool],
        audience: Audience,
    ) -> None:
        self._node = node
        self._book = book
        self._tasks = tasks
        self._touch = touch
        self._audience = audience
        self._guard = threading.RLock()
        self._closed = False

    def close(self) -> None:
        """This life of the node is over, and its claims with it."""
        self._closed = True

    def claim(self, wanted: dict[str, tuple[Any, int]], life: str, known: int) -> list[Claim]:
        """Claim tasks, given as text of id -> id and token. Returns those obtained, in that order."""
        asking = object()
        keys = self._tasks.open(wanted, asking)
        claims: list[Claim] = []
        try:
            if keys:
                rows = {row.key: row for row in self._book.claim({k: wanted[k][1] for k in keys}, life, known)}
                claims = [Claim(wanted[key][0], rows[key], self) for key in keys if key in rows]
                self._tasks.hand_over(((claim.claimed.key, claim) for claim in claims), asking)
        finally:
            self._tasks.close(keys, asking)
        return claims

    def complete(self, claims: Sequence[Claim], session: Any) -> None:
        """See :meth:`Claim.complete`; of several, those that can be completed are, unless there is a ``session``."""
        behind = None if session is None else _behind(session)
        claims = list(dict.fromkeys(claims))
        if not claims:
            return
        after = self._begin(claims)
        try:
            if self._closed:
                after.update(dict.fromkeys(claims, LOST))
                raise self._loss(claims, {})
            if behind is None:
                self._complete(claims, after)
            else:
                self._complete_in(behind, claims, after)
        finally:
            self._end(after)

    def _complete(self, claims: Sequence[Claim], after: dict[Claim, str]) -> None:
        done = self._book.complete([claim.claimed for claim in claims])
        lost = []
        for claim in claims:
            after[claim] = COMPLETED if claim.claimed.key in done else LOST
            if after[claim] is LOST:
                lost.append(claim)
        self._tell("completed", len(claims) - len(lost))
        if not lost:
            return
        rows = [claim.claimed for claim in lost]
        try:
            _, owners = self._book.standing(rows)
            self._book.release(rows)
        except DBAPIError as error:  # they are lost all the same
            raise self._loss(lost, {}) from error
        raise self._loss(lost, owners)

    def _complete_in(self, session: Session, claims: Sequence[Claim], after: dict[Claim, str]) -> None:
        from jobsync_orm import transactions

        rows = [claim.claimed for claim in claims]
        fenced = self._touch(session, [claim.token for claim in claims])
        try:
            if self._book.complete_in(session, rows, fenced=fenced):
                after.update(dict.fromkeys(claims, IN_TRANSACTION))
                transactions.at_commit(session, lambda: self._settle(claims))
                return
            valid, owners = self._book.standing(rows, session)
        except DBAPIError as error:
            if sqlstate(error.orig) != SERIALIZATION_FAILURE:
                raise
            # A row has changed since the snapshot of this transaction, which is over. A new one shows how.
            valid, owners = self._book.standing(rows)
            if len(valid) == len(rows):
                raise
            raise self._loss([claim for claim in claims if claim.claimed.key not in valid], owners) from error
        lost = [claim for claim in claims if claim.claimed.key not in valid]
        before = self._book.completed([claim.claimed for claim in lost], session)
        if ended := [claim for claim in lost if claim.claimed.key in before]:
            after.update(dict.fromkeys(ended, COMPLETED))
            raise ClaimEnded(f"{ended[0]!r}: a transaction before this one has completed it; roll this one back")
        raise self._loss(lost or claims, owners)

    def _loss(self, lost: Sequence[Claim], owners: dict[int, str | None]) -> OwnershipLost:
        tokens = {claim.token for claim in lost}
        self._tell("lost", len(lost))
        self._audience.tell(FenceRejected(self._node, "claim"))
        error = OwnershipLost(tokens, owners, self._node)
        error.add_note(f"claims that could not be completed: {', '.join(repr(claim.task_id) for claim in lost[:5])}")
        return error

    def release(self, claim: Claim) -> bool:
        """See :meth:`Claim.release`."""
        with self._guard:
            before = claim._state
            if before not in (OPEN, IN_TRANSACTION):
                return False
            claim._state = ENDING
        after = before
        try:
            there = not self._closed and bool(self._book.release([claim.claimed]))
            # One completed in a transaction that is still open is locked, and left alone.
            after = RELEASED if there or before == OPEN else before
        finally:
            self._end({claim: after})
        if there:
            self._tell("released", 1)
        return there

    def abandon(self, claim: Claim) -> None:
        """Nobody here works on it any more, whatever the claim table says: this process may claim the task anew."""
        self._end({claim: RELEASED})

    def _begin(self, claims: Sequence[Claim]) -> dict[Claim, str]:
        with self._guard:
            for claim in claims:
                if claim._state not in (OPEN, IN_TRANSACTION):
                    raise ClaimEnded(f"{claim!r}: it can be ended once")
            before = {claim: claim._state for claim in claims}
            for claim in claims:
                claim._state = ENDING
            return before

    def _end(self, after: dict[Claim, str]) -> None:
        with self._guard:
            for claim, state in after.items():
                claim._state = state
                # One completed in a transaction is nobody's any more: its row in the claim table decides from here on.
                if state != OPEN:
                    self._tasks.close([claim.claimed.key], claim)

    def _settle(self, claims: Sequence[Claim]) -> None:
        """The transaction they were completed in has been committed."""
        with self._guard:
            for claim in claims:
                if claim._state == IN_TRANSACTION:
                    claim._state = COMPLETED
        self._tell("completed", len(claims))

    def _tell(self, result: str, many: int) -> None:
        if many:
            self._audience.tell(TaskClaims(self._node, result, many))


class LoneDesk:
    """The claims of a standalone job: in memory, exclusive in this process."""

    def __init__(self, tasks: OpenTasks) -> None:
        self._tasks = tasks
        self._numbers = itertools.count(1)
        self._guard = threading.RLock()

    def close(self) -> None:
        """They do not end with this life of the node."""

    def claim(self, wanted: dict[str, tuple[Any, int]], life: str, known: int) -> list[Claim]:
        """As :meth:`Desk.claim`."""
        claims = []
        for key, (task_id, token) in wanted.items():
            with self._guard:  # so that numbers grow in the order in which claims are given
                claim = Claim(task_id, Claimed(key, token, 0, next(self._numbers), 0, life), self)
                if self._tasks.open([key], claim):
                    claims.append(claim)
        return claims

    def complete(self, claims: Sequence[Claim], session: Any) -> None:
        """End claims. There is no audit."""
        if session is not None:
            _behind(session)
        with self._guard:
            for claim in claims:
                if claim._state != OPEN:
                    raise ClaimEnded(f"{claim!r}: it can be ended once")
            for claim in claims:
                self._end(claim, COMPLETED)

    def release(self, claim: Claim) -> bool:
        """As :meth:`Desk.release`."""
        with self._guard:
            if claim._state != OPEN:
                return False
            self._end(claim, RELEASED)
            return True

    def abandon(self, claim: Claim) -> None:
        """As :meth:`Desk.abandon`."""
        self.release(claim)

    def _end(self, claim: Claim, state: str) -> None:
        claim._state = state
        self._tasks.close([claim.claimed.key], claim)
