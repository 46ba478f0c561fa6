"""Checkpoints of long-running tasks."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

from jobsync_orm.checkpoints import CheckpointBook, LoneCheckpoints
from jobsync_orm.claims import Claim, finished
from jobsync_orm.exceptions import NotRunning, OwnershipLost
from jobsync_orm.hashing import task_key
from jobsync_orm.job.tasks import TaskCalls
from jobsync_orm.observe import FenceRejected
from jobsync_orm.positions import position_text
from jobsync_orm.tasks import Task

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

    from jobsync_orm.claims import AnyAsyncSession, AnySession

__all__ = ["CheckpointCalls"]

T = TypeVar("T")


class CheckpointCalls(TaskCalls):
    """See :class:`~jobsync_orm.Job`."""

    _checkpoints: CheckpointBook | LoneCheckpoints | None = None

    def _reset(self) -> None:
        super()._reset()
        if self.coordination_config is not None:
            self._checkpoints = None
        elif self._checkpoints is None:
            self._checkpoints = LoneCheckpoints()

    def _checkpoint_book(self) -> CheckpointBook | LoneCheckpoints:
        with self._engine_guard:
            if self._checkpoints is None:
                assert self.names is not None
                self._checkpoints = CheckpointBook(self._application_engine(), self.names, self.node_name)
            return self._checkpoints

    def checkpoint(self, task: Task | Any, position: Any, session: AnySession | None = None) -> None:
        """Store how far the work on ``task`` has come, if its token is this node's.

        Parameters
        ----------
        task : Task, int, str, UUID
            Task or task id.
        position : dict, list, str, int, float or bool
            JSON. It comes back equal from :meth:`last_checkpoint`, except that a tuple comes back as a list.
        session : Session or scoped_session, optional
            Make it part of the present transaction of this session, as its last statement.

        Raises
        ------
        InvalidPosition
            The position cannot be stored; nothing has been sent.
        OwnershipLost
            The token is not this node's, or it has been another's since this node's open claim on the task was made.
            Nothing is stored.
        NotRunning
            The job has not been started, or has been stopped.
        ConfigurationError
            ``session`` is an AsyncSession: use :meth:`checkpoint_async`.
        """
        text = position_text(position)
        key, token = self._named(task)
        behind = self._behind(session, "checkpoint_async(task, position, session)")
        life, known = self._standing(key)
        fenced = behind is not None and self._touch(behind, [token])
        with self._telling_refusal():
            self._checkpoint_book().write(key, token, text, life, known, behind, fenced=fenced)

    async def checkpoint_async(self, task: Task | Any, position: Any, session: AnyAsyncSession | None = None) -> None:
        """:meth:`checkpoint`, in the transaction of an AsyncSession or in one of its own."""
        if session is None:
            await finished(asyncio.to_thread(self.checkpoint, task, position))
        else:
            await _run_in(session, lambda behind: self.checkpoint(task, position, behind))

    def last_checkpoint(self, task: Task | Any, session: AnySession | None = None) -> Any:
        """The position stored last, whichever node stored it, or None.

        Parameters
        ----------
        task : Task, int, str, UUID
            Task or task id.
        session : Session or scoped_session, optional
            Read it in the present transaction of this session.
        """
        key, _ = self._named(task)
        behind = self._behind(session, "last_checkpoint_async(task, session)")
        return self._checkpoint_book().last(key, behind)

    async def last_checkpoint_async(self, task: Task | Any, session: AnyAsyncSession | None = None) -> Any:
        """:meth:`last_checkpoint`, in the transaction of an AsyncSession or in one of its own."""
        if session is None:
            return await asyncio.to_thread(self.last_checkpoint, task)
        return await _run_in(session, lambda behind: self.last_checkpoint(task, behind))

    def clear_checkpoint(self, task: Task | Any, session: AnySession | None = None) -> bool:
        """Delete the stored position, if the task's token is this node's. Returns whether there was one.

        Parameters and errors are those of :meth:`checkpoint`.
        """
        key, token = self._named(task)
        behind = self._behind(session, "clear_checkpoint_async(task, session)")
        life, known = self._standing(key)
        fenced = behind is not None and self._touch(behind, [token])
        with self._telling_refusal():
            return self._checkpoint_book().clear(key, token, life, known, behind, fenced=fenced)

    async def clear_checkpoint_async(self, task: Task | Any, session: AnyAsyncSession | None = None) -> bool:
        """:meth:`clear_checkpoint`, in the transaction of an AsyncSession or in one of its own."""
        if session is None:
            return bool(await finished(asyncio.to_thread(self.clear_checkpoint, task)))
        return await _run_in(session, lambda behind: self.clear_checkpoint(task, behind))

    @contextlib.contextmanager
    def _telling_refusal(self) -> Iterator[None]:
        try:
            yield
        except OwnershipLost:
            self.audience.tell(FenceRejected(self.node_name, "checkpoint"))
            raise

    def _named(self, task: Task | Any) -> tuple[str, int]:
        id = task.id if isinstance(task, Task) else task
        return task_key(id), self._token_of(id)

    def _behind(self, session: AnySession | None, awaitable: str) -> Session | None:
        if session is None:
            return None
        from jobsync_orm.transactions import session_of

        return session_of(session, awaitable)

    def _standing(self, key: str) -> tuple[str, int]:
        """The life and the epoch that a write relies on: those of the open claim on the task, if there is one."""
        claim = self._tasks.holder(key)
        if isinstance(claim, Claim):
            return claim.claimed.life, claim.epoch
        if not self.is_running:
            self.check_process()
            raise NotRunning(f"{self.node_name} is not running and owns nothing")
        life, known = self._life()
        return life or NO_LIFE, known


# Of a node that has been taken for dead and has not joined again yet: owns nothing.
NO_LIFE = "00000000-0000-0000-0000-000000000000"


async def _run_in(session: AnyAsyncSession, call: Callable[[Session], T]) -> T:
    from jobsync_orm.transactions import run_in

    return await run_in(session, call)
