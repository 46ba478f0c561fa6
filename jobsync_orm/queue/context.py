"""What a handler knows of the attempt it is, whether it is still wanted, and the session it may work in."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import logging
import threading
from collections.abc import Callable
from time import monotonic
from typing import TYPE_CHECKING, Any, Literal

from jobsync_orm.exceptions import JobCancelled, LeaseLost, SessionMisused
from jobsync_orm.logs import fields
from jobsync_orm.queue.options import seconds

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncSession
    from sqlalchemy.orm import Session

    from jobsync_orm.queue.core import QueueCore
    from jobsync_orm.queue.jobs import ClaimedJob
    from jobsync_orm.queue.same_transaction import AsyncSameTransaction, SameTransaction

__all__ = ["CancelFlag", "CancelReason", "JobContext"]

CancelReason = Literal["timeout", "cancelled", "lost", "stopping"]

_WHY: dict[CancelReason, str] = {
    "timeout": "it has taken longer than its timeout",
    "cancelled": "its job was cancelled",
    "lost": "its job is another worker's by now",
    "stopping": "its worker stops",
}

logger = logging.getLogger("jobsync_orm")

EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)

# Of the flags that somebody waits for: so few that one lock does for all.
_waiting = threading.Lock()


class CancelFlag:
    """Whether an attempt is no longer wanted, and why; like a :class:`threading.Event`, but made in no time.

    Attributes
    ----------
    reason : str or None
        ``"timeout"``, ``"cancelled"``, ``"lost"`` (another worker has the job) or ``"stopping"`` (the worker is). None
        as long as it is wanted.
    """

    __slots__ = ("_event", "reason")

    def __init__(self) -> None:
        self.reason: CancelReason | None = None
        self._event: threading.Event | None = None

    def __bool__(self) -> bool:
        return self.reason is not None

    def is_set(self) -> bool:
        """Whether the attempt is no longer wanted."""
        return self.reason is not None

    def set(self, reason: CancelReason = "cancelled") -> None:
        """The attempt is no longer wanted. The first reason counts."""
        with _waiting:
            if self.reason is None:
                self.reason = reason
            event = self._event
        if event is not None:
            event.set()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it is set, at most ``timeout`` seconds. True if it is."""
        with _waiting:
            if self.reason is not None:
                return True
            if self._event is None:
                self._event = threading.Event()
            event = self._event
        return event.wait(timeout)


class JobContext:
    """The attempt that a handler runs as: its first argument.

    Attributes
    ----------
    cancelled : CancelFlag
        Set when the attempt is no longer wanted: ``ctx.cancelled.is_set()``, ``ctx.cancelled.wait(5)``.
    job : ClaimedJob
        The job as it was claimed.
    worker : str
        Name of the worker that runs it.
    """

    # Read by who runs the attempt: until when (time.monotonic()) it may run if that is not its timeout, whom to tell of
    # it, whether the handler is a coroutine function, the transaction it has opened, and whether it has ended.
    __slots__ = ("cancelled", "is_async", "job", "limit", "on_extend", "over", "queue", "transaction", "worker")

    def __init__(self, queue: QueueCore, job: ClaimedJob, worker: str, cancelled: CancelFlag) -> None:
        self.queue = queue
        self.job = job
        self.worker = worker
        self.cancelled = cancelled
        self.limit: float | None = None
        self.on_extend: Callable[[float], None] | None = None
        self.is_async = False
        self.transaction: SameTransaction | AsyncSameTransaction | None = None
        self.over = False

    def __repr__(self) -> str:
        return f"<JobContext of {self.job.type!r} job {self.job.id}, attempt {self.job.attempt}>"

    @property
    def id(self) -> int:
        """The job's id."""
        return self.job.id

    @property
    def type(self) -> str:
        """The job's type."""
        return self.job.type

    @property
    def attempt(self) -> int:
        """Number of this attempt, from 1. ``(id, attempt)`` is never run twice: a key for what is done outside."""
        return self.job.attempt

    @property
    def failures(self) -> int:
        """How many attempts before this one have failed."""
        return self.job.failures

    @property
    def max_retries(self) -> int:
        """How many may fail before the job has failed for good."""
        return self.job.max_retries

    @property
    def key(self) -> str | None:
        """The job's key."""
        return self.job.key

    @property
    def payload(self) -> Any:
        """The payload, as it is stored."""
        return self.job.payload

    @property
    def enqueued_at(self) -> datetime.datetime:
        """When the job was enqueued, by the database's clock."""
        return EPOCH + datetime.timedelta(microseconds=self.job.created_at)

    def check(self) -> None:
        """Go on only if the attempt is still wanted. To be called now and then by work that takes long.

        Raises
        ------
        JobCancelled
            It is not.
        """
        reason = self.cancelled.reason
        if reason is not None:
            raise JobCancelled(
                f"attempt {self.job.attempt} of job {self.job.id} is to stop: {_WHY.get(reason, reason)}"
            )

    @property
    def session(self) -> Session:
        """A session whose transaction is committed together with the job's completion and result.

        Opened when it is first used; :mod:`jobsync_orm.queue.same_transaction` says what holds for it. Its engine is
        the queue's, or it is made by the queue's ``session_factory``.

        Raises
        ------
        SessionMisused
            The handler is a coroutine function (use :meth:`async_session`), or has returned.
        """
        from jobsync_orm.queue.same_transaction import SameTransaction, open_session

        if self.is_async:
            raise SessionMisused("ctx.session would block the event loop: use `await ctx.async_session()`")
        if self.transaction is None:
            self._still_running()
            self.transaction = SameTransaction(self.queue, self.job, open_session(self.queue))
        session: Any = self.transaction.session
        return session  # type: ignore[no-any-return]

    async def async_session(self) -> AsyncSession:
        """:attr:`session` for a coroutine function: the same one at each call.

        Raises
        ------
        SessionMisused
            The handler is no coroutine function (use :attr:`session`), or has returned.
        """
        from jobsync_orm.queue.same_transaction import AsyncSameTransaction, open_async_session

        if not self.is_async:
            raise SessionMisused("await ctx.async_session() is for coroutine functions: use ctx.session")
        if self.transaction is None:
            self._still_running()
            self.transaction = AsyncSameTransaction(self.queue, self.job, open_async_session(self.queue))
        session: Any = self.transaction.session
        return session  # type: ignore[no-any-return]

    def _still_running(self) -> None:
        if self.over:
            raise SessionMisused(f"attempt {self.job.attempt} of job {self.job.id} has ended, and its session with it")

    def enqueue(self, type: str, payload: Any = None, **options: Any) -> Any:
        """Enqueue a job in this attempt's session: it exists if, and only if, this attempt completes.

        In a coroutine function ``await`` it.

        Parameters
        ----------
        type, payload, **options
            As for :meth:`~jobsync_orm.JobQueue.enqueue`.

        Returns
        -------
        Enqueued
            Its id, and whether it is a new one.
        """
        payload = {} if payload is None else payload
        queue: Any = self.queue
        if self.is_async:
            return self._enqueue_async(queue, type, payload, options)
        return queue.enqueue(self.session, type, payload, **options)

    async def _enqueue_async(self, queue: Any, type: str, payload: Any, options: dict[str, Any]) -> Any:
        return await queue.enqueue(await self.async_session(), type, payload, **options)

    def extend(self, seconds: float) -> None:
        """Let this attempt run for ``seconds`` from now, whatever its timeout.

        Sends one statement, in a transaction of its own.

        Raises
        ------
        LeaseLost
            The job is no longer this attempt's: another worker has it, or it is finished.
        JobCancelled
            The job is to be cancelled.
        InvalidJob
            ``seconds`` is no number above 0.
        """
        wanted = _seconds(seconds)
        limit = monotonic() + wanted
        values = {"id": self.job.id, "attempt": self.job.attempt, "seconds": wanted}
        rows, _ = self.queue._autocommit.repeat(self.queue.statements.extend, values)
        if not rows:
            self.cancelled.set("lost")
            raise LeaseLost(
                f"attempt {self.job.attempt} of job {self.job.id} is over: {_WHY['lost']}, or it is finished"
            )
        if rows[0][0]:
            self.cancelled.set("cancelled")
        self.limit = limit
        if self.on_extend is not None:
            self.on_extend(limit)
        self.check()

    def heartbeat(self) -> None:
        """Let this attempt run for its whole timeout once more, from now; otherwise as :meth:`extend`.

        It is no sign of life: that the worker's process is alive is known without it.
        """
        self.extend(self.job.timeout)

    async def extend_async(self, seconds: float) -> None:
        """:meth:`extend`, without blocking the event loop."""
        await asyncio.to_thread(self.extend, seconds)

    async def heartbeat_async(self) -> None:
        """:meth:`heartbeat`, without blocking the event loop."""
        await asyncio.to_thread(self.heartbeat)

    def close(self) -> None:
        """The attempt is over: what it did in its session, and has not been committed, is rolled back."""
        self.over = True
        transaction: Any = self.transaction
        if transaction is not None:
            self.transaction = None
            try:
                transaction.close()
            except Exception:
                # The connection is gone, and its transaction with it.
                logger.debug(
                    "the session of %r could not be closed",
                    self,
                    exc_info=True,
                    extra=fields("session_not_closed", self.worker, job=self.job),
                )

    async def close_async(self) -> None:
        """:meth:`close`, of a coroutine function."""
        self.over = True
        transaction: Any = self.transaction
        if transaction is not None:
            self.transaction = None
            # Not left half done when the task is cancelled once more: the connection goes back to its pool.
            closing = asyncio.ensure_future(transaction.close())
            with contextlib.suppress(Exception):
                await asyncio.shield(closing)


def _seconds(value: float) -> float:
    return seconds("seconds", value, above=0)
