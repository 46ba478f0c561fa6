"""The application's sessions: bound to a job, their commits are fenced."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, TypeVar

from jobsync_orm.job.ownership import OwnershipCalls

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncSession
    from sqlalchemy.orm import Session

    from jobsync_orm.orm.owned_session import Bindable

__all__ = ["SessionCalls"]

S = TypeVar("S", bound="Bindable")
AnySession = TypeVar("AnySession", bound="Session")
AnyAsyncSession = TypeVar("AnyAsyncSession", bound="AsyncSession")
T = TypeVar("T")


class SessionCalls(OwnershipCalls):
    """See :class:`~jobsync_orm.Job`."""

    # sqlalchemy.orm is imported when it is needed: a worker that only hashes tasks starts without it.

    def bind(self, session: S) -> S:
        """Fence the commits of a session: what it writes is stored only if the tokens are still this node's.

        A commit that wrote rows of :class:`~jobsync_orm.TokenOwned` models of which one token is no longer this node's
        raises :class:`~jobsync_orm.OwnershipLost` and leaves nothing. ``docs/fence.md`` says which writes are seen.

        Parameters
        ----------
        session : Session, scoped_session, AsyncSession or async_scoped_session
            Of a scoped session the one of this thread or task. Binding it again changes nothing. If it is in a
            transaction already, what it wrote before is not checked.

        Returns
        -------
        The same session.

        Raises
        ------
        ConfigurationError
            The session is bound to another job, or is none.
        """
        from jobsync_orm.orm import owned_session

        return owned_session.bind(session, self)

    def run(self, session_factory: Callable[[], AnySession], work: Callable[[AnySession], T], attempts: int = 5) -> T:
        """Call ``work(session)`` and commit; once more from the start if tokens were lost meanwhile.

        Parameters
        ----------
        session_factory : callable
            Makes a session: a ``sessionmaker``, say. The session is bound to this job, and closed in the end.
        work : callable
            Called with the session, each time with a new one. It must read the rows it works on itself, so that it
            sees which are owned now, and must not do outside of the transaction what cannot be done twice.
        attempts : int
            How often at most. It is repeated, after a short pause, on ``OwnershipLost``, on a serialization failure
            and on a deadlock.

        Returns
        -------
        What ``work`` returned, the transaction being committed. Objects of the session are detached and, with
        ``expire_on_commit``, cannot be read any more: return values.

        Raises
        ------
        OwnershipLost
            In the last attempt too.
        ConfigurationError
            ``attempts`` is less than 1.
        """
        from jobsync_orm.orm import rerun

        return rerun.run(self, session_factory, work, attempts)

    async def run_async(
        self,
        session_factory: Callable[[], AnyAsyncSession],
        work: Callable[[AnyAsyncSession], Awaitable[T]],
        attempts: int = 5,
    ) -> T:
        """As :meth:`run`, for an ``async_sessionmaker`` and a coroutine function."""
        from jobsync_orm.orm import rerun

        return await rerun.run_async(self, session_factory, work, attempts)
