"""Share one PostgreSQL database between several workers, from SQLAlchemy.

The public names; each module's docstring is its manual. The names of the ORM surface are imported when they are first
used, so that a worker which only hashes tasks does not wait for ``sqlalchemy.orm`` when it starts; so are those of the
queue, and the module ``jobsync_orm.migrate``.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from jobsync_orm.claims import Claim
from jobsync_orm.config import CoordinationConfig
from jobsync_orm.coordinator import RebalanceEvent, RevokeEvent
from jobsync_orm.exceptions import (
    ClaimEnded,
    ClaimRefused,
    ClusterMismatch,
    ConfigurationError,
    FenceNotApplicable,
    FilterNotApplicable,
    ForkedJob,
    InvalidJob,
    InvalidPattern,
    InvalidPayload,
    InvalidPosition,
    InvalidTaskId,
    JobCancelled,
    JobConflict,
    JobsyncError,
    LeaseLost,
    LockConflict,
    LockNotAcquired,
    NodeNameInUse,
    NotEnqueued,
    NotFinished,
    NotRunning,
    OwnershipLost,
    SchemaNotReady,
    SessionMisused,
    UnknownJob,
    UnknownJobType,
    UnstableTaskId,
)
from jobsync_orm.job import Job
from jobsync_orm.tasks import Task

if TYPE_CHECKING:
    from jobsync_orm.models import JobPriority, JobState
    from jobsync_orm.orm import (
        OwnedQuerySession,
        OwnedSession,
        ShardedQuery,
        TokenOwned,
        enable_sqlite,
        filter_session,
        owned_by,
        unfilter_session,
    )
    from jobsync_orm.queue import Backoff, Discard, Enqueued, JobContext, JobQueue, NewJob, Retry, Snooze
    from jobsync_orm.worker import JobWorker

__all__ = [
    "Backoff",
    "Claim",
    "ClaimEnded",
    "ClaimRefused",
    "ClusterMismatch",
    "ConfigurationError",
    "CoordinationConfig",
    "Discard",
    "Enqueued",
    "FenceNotApplicable",
    "FilterNotApplicable",
    "ForkedJob",
    "InvalidJob",
    "InvalidPattern",
    "InvalidPayload",
    "InvalidPosition",
    "InvalidTaskId",
    "Job",
    "JobCancelled",
    "JobConflict",
    "JobContext",
    "JobPriority",
    "JobQueue",
    "JobState",
    "JobWorker",
    "JobsyncError",
    "LeaseLost",
    "LockConflict",
    "LockNotAcquired",
    "NewJob",
    "NodeNameInUse",
    "NotEnqueued",
    "NotFinished",
    "NotRunning",
    "OwnedQuerySession",
    "OwnedSession",
    "OwnershipLost",
    "RebalanceEvent",
    "Retry",
    "RevokeEvent",
    "SchemaNotReady",
    "SessionMisused",
    "ShardedQuery",
    "Snooze",
    "Task",
    "TokenOwned",
    "UnknownJob",
    "UnknownJobType",
    "UnstableTaskId",
    "enable_sqlite",
    "filter_session",
    "owned_by",
    "unfilter_session",
]

_ELSEWHERE = {
    **dict.fromkeys(
        (
            "OwnedQuerySession",
            "OwnedSession",
            "ShardedQuery",
            "TokenOwned",
            "enable_sqlite",
            "filter_session",
            "owned_by",
            "unfilter_session",
        ),
        "jobsync_orm.orm",
    ),
    **dict.fromkeys(("JobPriority", "JobState"), "jobsync_orm.models"),
    **dict.fromkeys(
        ("Backoff", "Discard", "Enqueued", "JobContext", "JobQueue", "NewJob", "Retry", "Snooze"), "jobsync_orm.queue"
    ),
    "JobWorker": "jobsync_orm.worker",
}


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "migrate"})


def __getattr__(name: str) -> Any:
    if name == "migrate":
        return import_module("jobsync_orm.migrate")
    if name in _ELSEWHERE:
        return getattr(import_module(_ELSEWHERE[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
