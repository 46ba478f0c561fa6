"""What a handler knows of the attempt it is, and whether it is still wanted."""

from __future__ import annotations

import datetime
import threading
from typing import TYPE_CHECKING, Any, Literal

from jobsync_orm.exceptions import JobCancelled

if TYPE_CHECKING:
    from jobsync_orm.queue.core import QueueCore
    from jobsync_orm.queue.jobs import ClaimedJob

__all__ = ["CancelFlag", "CancelReason", "JobContext"]

CancelReason = Literal["timeout", "cancelled", "lost", "stopping"]

_WHY: dict[CancelReason, str] = {
    "timeout": "it has taken longer than its timeout",
    "cancelled": "its job was cancelled",
    "lost": "its job is another worker's by now",
    "stopping": "its worker stops",
}

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

    __slots__ = ("cancelled", "job", "queue", "worker")

    def __init__(self, queue: QueueCore, job: ClaimedJob, worker: str, cancelled: CancelFlag) -> None:
        self.queue = queue
        self.job = job
        self.worker = worker
        self.cancelled = cancelled

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
