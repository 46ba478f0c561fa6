"""The application's sessions: bound to a job, their commits are fenced."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine
from typing import TYPE_CHECKING, Any, TypeVar, TypeVarTuple, overload

from jobsync_orm.job.ownership import OwnershipCalls

if TYPE_CHECKING:
    from sqlalchemy import Row, Select
    from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session
    from sqlalchemy.orm import Session, scoped_session

    from jobsync_orm.orm.owned_session import Bindable

    SyncSession = Session | scoped_session[Any]
    AnyAsync = AsyncSession | async_scoped_session[Any]

__all__ = ["SessionCalls"]

S = TypeVar("S", bound="Bindable")
AnySession = TypeVar("AnySession", bound="Session")
AnyAsyncSession = TypeVar("AnyAsyncSession", bound="AsyncSession")
T = TypeVar("T")
T2 = TypeVar("T2")
Ts = TypeVarTuple("Ts")


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
            How often at most. It is repeated, after a short pause, on ``OwnershipLost``, on a serialization failure,
            on a deadlock, and when the server ended the session by ``idle_in_transaction_session_timeout``.

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

    # The first of each three is for SQLAlchemy 2.0, where select(Item) is a Select[tuple[Item]].

    @overload
    def claim(self, session: SyncSession, statement: Select[tuple[T]], limit: int = 100) -> list[T]: ...

    @overload
    def claim(self, session: SyncSession, statement: Select[T], limit: int = 100) -> list[T]: ...

    @overload
    def claim(self, session: SyncSession, statement: Select[T, T2, *Ts], limit: int = 100) -> list[Row[T, T2, *Ts]]: ...

    @overload
    def claim(
        self, session: AnyAsync, statement: Select[tuple[T]], limit: int = 100
    ) -> Coroutine[Any, Any, list[T]]: ...

    @overload
    def claim(self, session: AnyAsync, statement: Select[T], limit: int = 100) -> Coroutine[Any, Any, list[T]]: ...

    @overload
    def claim(
        self, session: AnyAsync, statement: Select[T, T2, *Ts], limit: int = 100
    ) -> Coroutine[Any, Any, list[Row[T, T2, *Ts]]]: ...

    def claim(self, session: Any, statement: Any, limit: int = 100) -> Any:
        """Take rows to work on: owned by this node, and locked until the session's transaction ends.

        Rows that another transaction has locked are passed over, so two workers never get the same row. Rows of a token
        that is on the move are not returned. The session is bound to this job (:meth:`bind`): should a token move
        after this call, the commit of what was written for its rows raises ``OwnershipLost``.

        Parameters
        ----------
        session : Session, scoped_session, AsyncSession or async_scoped_session
            Where the rows are locked. Unflushed changes are flushed first.
        statement : Select
            ``select(Item)`` with its conditions and order, or a select of columns of ``Item``. Joined entities are
            neither filtered nor locked.
        limit : int
            How many rows at most, 1 or more. Fewer may be returned although there are more: when some were locked or
            on the move, or when joins repeat a row.

        Returns
        -------
        list
            In the order of the statement: objects, as the database has them now; values, of one column; or Rows, of
            several. For an async session an awaitable of it.

        Raises
        ------
        FilterNotApplicable
            The statement is no select of exactly one ``TokenOwned`` entity, or PostgreSQL cannot lock its rows.
        ConfigurationError
            A bad ``limit``; a statement with a LIMIT, OFFSET, FOR UPDATE, DISTINCT or GROUP BY of its own; isolation
            level AUTOCOMMIT; a session bound to another job; rows of another cluster.
        NotRunning
            The job has not been started, or has been stopped.
        sqlalchemy.exc.DBAPIError
            Under REPEATABLE READ and SERIALIZABLE, with SQLSTATE 40001: a token has changed since the transaction
            began. Repeat the transaction, as :meth:`run` does.
        """
        from jobsync_orm.orm import claiming

        return claiming.claim(session, self, statement, limit)
