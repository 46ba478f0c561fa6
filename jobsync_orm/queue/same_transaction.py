"""Work, completion and result in one transaction: ``ctx.session`` and ``await ctx.async_session()``.

::

    @queue.handler("charge")
    def charge(ctx: JobContext, order_id: int) -> dict:
        order = ctx.session.get(Order, order_id)
        order.paid = True
        ctx.enqueue("send_receipt", {"order_id": order_id})
        return {"order": order_id}

The session opens its transaction when it is first used. When the handler returns, the job's completion, its result and
the attempt's row are written in that transaction and committed with what the handler wrote: all of it is stored, or
nothing. So what a handler does *in this session* is done exactly once, however often its workers die. (What it does
elsewhere, an e-mail or a request, is done at least once.)

The completion is the last statement before COMMIT, and names the attempt. If the job is another worker's by then (this
one was paused, or took longer than its ``timeout``), it changes no row, everything is rolled back, and the attempt is
forgotten.

- A handler that raises has its session rolled back, whatever it raises; the failure is recorded in a transaction of its
  own.
- The handler must not commit: a part of its work would be stored without the rest. ``commit()``, and leaving a
  ``with ctx.session.begin()`` or a ``with ctx.session`` block, raise :class:`~jobsync_orm.exceptions.SessionMisused`;
  an attempt in which that happened fails, even if the handler catches it. Savepoints (``ctx.session.begin_nested()``)
  are fine, and so is ``rollback()``: what was written before is gone, what is written after is committed.
- The session comes from the queue's ``session_factory``, so it is of the application's class and may have its events.
  It must be on the database of the queue, and not in AUTOCOMMIT. Each handler that uses one needs a connection of the
  engine's pool while it runs.
- Under REPEATABLE READ and SERIALIZABLE the completion fails with a serialization failure if the job's row has changed
  since the transaction began, by ``ctx.heartbeat()`` for example. See below.

What happens when
-----------------
The server ends the transaction for a conflict with another (a deadlock, a serialization failure), or the connection
    breaks. The attempt has failed, which counts, but it is tried again within a second and not after the backoff.
The connection breaks while COMMIT is on its way.
    Nobody knows then whether it was committed. The attempt is reported as failed, by a write that names it: if the
    commit was done, the job is completed, no longer this attempt's, and that write changes nothing. If the server is
    still at it, the job's row is locked and skipped, and the report is repeated.
The process stops between the completion and COMMIT.
    A process that has died is noticed by the server, which rolls back. One that is paused holds the lock on its job's
    row, so that nobody can take the job (rescue skips it), and the locks of whatever the handler wrote. Set
    ``idle_in_transaction_session_timeout`` on the application's engine to bound that; this is the one place where the
    queue has a transaction open while it is not inside a round trip.
"""

from __future__ import annotations

import sys
from time import monotonic
from typing import TYPE_CHECKING, Any

from sqlalchemy import Connection, event
from sqlalchemy.orm import Session, SessionTransaction, scoped_session, sessionmaker

from jobsync_orm.exceptions import ConfigurationError, LeaseLost, SessionMisused
from jobsync_orm.orm.fenced_transaction import is_autocommit

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncSession

    from jobsync_orm.queue.core import QueueCore
    from jobsync_orm.queue.jobs import ClaimedJob

__all__ = ["AsyncSameTransaction", "SameTransaction", "open_async_session", "open_session"]


def open_session(queue: QueueCore) -> Session:
    """A new session on the queue's database.

    Raises
    ------
    ConfigurationError
        The queue's ``session_factory`` makes something else.
    """
    factory = queue.session_factory
    if factory is None or _makes_async(factory):
        return Session(queue.engine)
    session = factory()
    if isinstance(session, scoped_session):
        session = session()
    if not isinstance(session, Session):
        raise ConfigurationError(
            f"session_factory made a {type(session).__name__}, and ctx.session is to be a Session: give JobQueue a "
            "sessionmaker"
        )
    return session


def open_async_session(queue: QueueCore) -> AsyncSession:
    """A new asynchronous session on the queue's database.

    Raises
    ------
    ConfigurationError
        The queue's ``session_factory`` makes something else, and is no ``sessionmaker`` for the other handlers.
    """
    from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session

    factory = queue.session_factory
    if factory is None or isinstance(factory, sessionmaker | scoped_session):
        return AsyncSession(queue.async_engine())
    session = factory()
    if isinstance(session, async_scoped_session):
        session = session()
    if not isinstance(session, AsyncSession):
        raise ConfigurationError(
            f"session_factory made a {type(session).__name__}, and ctx.async_session() is to be an AsyncSession: give "
            "JobQueue an async_sessionmaker"
        )
    return session


def _makes_async(factory: Any) -> bool:
    # Whoever has such a factory has imported the module. A program without asyncio may lack greenlet, which it needs.
    if "sqlalchemy.ext.asyncio" not in sys.modules:
        return False
    from sqlalchemy.ext.asyncio import async_scoped_session, async_sessionmaker

    return isinstance(factory, async_sessionmaker | async_scoped_session)


class SameTransaction:
    """The session of one attempt, which nobody but this object commits.

    Parameters
    ----------
    queue : JobQueue
        Whose job it is.
    job : ClaimedJob
        The job.
    session : Session
        A new session.
    """

    def __init__(self, queue: QueueCore, job: ClaimedJob, session: Session) -> None:
        self.session = session
        self._queue = queue
        self._job = job
        self._committing = False
        self._rolled_back = False
        self._misused: SessionMisused | None = None
        self._listeners = (
            ("after_begin", self._after_begin),
            ("before_commit", self._before_commit),
            ("after_rollback", self._after_rollback),
            ("after_transaction_end", self._after_transaction_end),
        )
        for name, listener in self._listeners:
            event.listen(session, name, listener)

    def commit(self, result: str | None, error: str | None, began: float) -> tuple[int, ...]:
        """Write that the attempt has completed, and commit it with all that was done in the session.

        Parameters
        ----------
        result : str or None
            JSON.
        error : str or None
            Why there is no result.
        began : float
            ``time.monotonic()`` of when the handler was called.

        Returns
        -------
        tuple of int
            Jobs that wait for this one.

        Raises
        ------
        LeaseLost
            The job is no longer this attempt's. Nothing is stored.
        SessionMisused
            The handler has committed or closed the session.
        """
        if self._misused is not None:
            raise self._misused
        # First all that the handler has done, so that the job's row is locked as briefly as can be, and last.
        self.session.flush()
        row = self.session.execute(
            self._queue.statements.settle_one,
            {
                "id": self._job.id,
                "attempt": self._job.attempt,
                "result": result,
                "error": error,
                "took": monotonic() - began,
            },
            bind_arguments={"mapper": self._queue.models.QueuedJob},
        ).one_or_none()
        if row is None:
            raise LeaseLost(
                f"attempt {self._job.attempt} of job {self._job.id} is over: another worker has the job, or it is "
                "finished. Nothing the attempt wrote in ctx.session is stored"
            )
        self._committing = True
        self.session.commit()
        return tuple(row[0])

    def close(self) -> None:
        """Let go of the session; what has not been committed is rolled back."""
        for name, listener in self._listeners:
            event.remove(self.session, name, listener)
        self.session.close()

    def _after_begin(self, session: Session, transaction: SessionTransaction, connection: Connection) -> None:
        if is_autocommit(connection):
            raise ConfigurationError(
                "ctx.session is in AUTOCOMMIT, so nothing would be committed together: give JobQueue a session_factory "
                "on an engine of another isolation level"
            )

    def _before_commit(self, session: Session) -> None:
        if not self._committing and session.get_nested_transaction() is None:
            raise self._misuse(
                "ctx.session is committed by the queue when the handler has returned, together with the job's "
                "completion. Leave out commit(), or `with ctx.session.begin():`; for a part that may be undone use "
                "ctx.session.begin_nested()"
            )

    def _after_rollback(self, session: Session) -> None:
        if session.get_nested_transaction() is None:
            self._rolled_back = True

    def _after_transaction_end(self, session: Session, transaction: SessionTransaction) -> None:
        if transaction.parent is not None:
            return
        if not self._committing and not self._rolled_back:
            self._misuse(
                "the handler has closed ctx.session, so what it did in it is rolled back. Leave out close(), or "
                "`with ctx.session:`; the queue closes it"
            )
        self._rolled_back = False

    def _misuse(self, message: str) -> SessionMisused:
        error = SessionMisused(message)
        if self._misused is None:
            self._misused = error
        return error


class AsyncSameTransaction:
    """The same, of an asynchronous session."""

    def __init__(self, queue: QueueCore, job: ClaimedJob, session: AsyncSession) -> None:
        self.session = session
        self._behind = SameTransaction(queue, job, session.sync_session)

    async def commit(self, result: str | None, error: str | None, began: float) -> tuple[int, ...]:
        """As :meth:`SameTransaction.commit`."""
        return await self.session.run_sync(lambda _: self._behind.commit(result, error, began))

    async def close(self) -> None:
        """As :meth:`SameTransaction.close`."""
        await self.session.run_sync(lambda _: self._behind.close())
