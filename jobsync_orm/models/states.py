"""What a queued job can be, and how an attempt can end."""

from __future__ import annotations

from enum import IntEnum, StrEnum

__all__ = ["FINISHED", "LIVE", "AttemptOutcome", "JobPriority", "JobState"]


class JobState(StrEnum):
    """Where a job stands. Three are final: COMPLETED, FAILED and CANCELLED."""

    PENDING = "pending"
    """Ready: the next free worker takes it."""
    SCHEDULED = "scheduled"
    """Becomes ready at its ``run_at``: enqueued for later, or snoozed."""
    BLOCKED = "blocked"
    """Waits for the jobs it was enqueued ``after``."""
    PROCESSING = "processing"
    """A worker has it."""
    RETRYING = "retrying"
    """An attempt has failed, and it is ready again at its ``run_at``."""
    COMPLETED = "completed"
    FAILED = "failed"
    """Failed for good, or discarded. Kept for inspection and :meth:`~jobsync_orm.JobQueue.retry`."""
    CANCELLED = "cancelled"


FINISHED = (JobState.COMPLETED, JobState.FAILED, JobState.CANCELLED)
LIVE = tuple(state for state in JobState if state not in FINISHED)


class JobPriority(IntEnum):
    """Names for three priorities. Any integer is one; the larger goes first."""

    LOW = -10
    NORMAL = 0
    HIGH = 10


class AttemptOutcome(StrEnum):
    """How an attempt ended."""

    COMPLETED = "completed"
    FAILED = "failed"
    """It raised."""
    TIMEOUT = "timeout"
    CANCELLED = "cancelled"
    SNOOZED = "snoozed"
    DISCARDED = "discarded"
    RELEASED = "released"
    """Given back by a worker that stopped or had taken too many; not counted."""
    DIED = "died"
    """Its worker died, or held it past its deadline."""
