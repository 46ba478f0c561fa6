"""Share one PostgreSQL database between several workers, from SQLAlchemy.

The public names; each module's docstring is its manual.
"""

from jobsync_orm.config import CoordinationConfig
from jobsync_orm.coordinator import RebalanceEvent, RevokeEvent
from jobsync_orm.exceptions import (
    ClusterMismatch,
    ConfigurationError,
    FilterNotApplicable,
    InvalidPattern,
    InvalidTaskId,
    JobsyncError,
    LockConflict,
    LockNotAcquired,
    NodeNameInUse,
    NotRunning,
    SchemaNotReady,
    UnstableTaskId,
)
from jobsync_orm.job import Job
from jobsync_orm.tasks import Task

__all__ = [
    "ClusterMismatch",
    "ConfigurationError",
    "CoordinationConfig",
    "FilterNotApplicable",
    "InvalidPattern",
    "InvalidTaskId",
    "Job",
    "JobsyncError",
    "LockConflict",
    "LockNotAcquired",
    "NodeNameInUse",
    "NotRunning",
    "RebalanceEvent",
    "RevokeEvent",
    "SchemaNotReady",
    "Task",
    "UnstableTaskId",
]
