"""The job queue: enqueue in your own transaction, run on any worker.

See :class:`JobQueue`, and ``docs/queue.md``.
"""

from __future__ import annotations

from jobsync_orm.queue.backoff import Backoff
from jobsync_orm.queue.bulk import BulkCalls
from jobsync_orm.queue.context import CancelFlag, JobContext
from jobsync_orm.queue.control import ControlCalls, Pause
from jobsync_orm.queue.figures import QueueStats
from jobsync_orm.queue.handlers import Handler, HandlerCalls
from jobsync_orm.queue.job_status import JobStatus
from jobsync_orm.queue.jobs import ClaimedJob, Ending
from jobsync_orm.queue.manual import ManualCalls
from jobsync_orm.queue.new_jobs import Enqueued, NewJob
from jobsync_orm.queue.outcomes import Discard, Retry, Snooze
from jobsync_orm.queue.periodic import ScheduleCalls
from jobsync_orm.queue.retention import RetentionCalls
from jobsync_orm.queue.schedule import Schedule, ScheduleStatus
from jobsync_orm.queue.waiting import WaitCalls

__all__ = [
    "Backoff",
    "CancelFlag",
    "ClaimedJob",
    "Discard",
    "Ending",
    "Enqueued",
    "Handler",
    "JobContext",
    "JobQueue",
    "JobStatus",
    "NewJob",
    "Pause",
    "QueueStats",
    "Retry",
    "Schedule",
    "ScheduleStatus",
    "Snooze",
]


class JobQueue(ScheduleCalls, ManualCalls, BulkCalls, HandlerCalls, ControlCalls, WaitCalls, RetentionCalls):
    """Jobs in the application's own database.

    Parameters
    ----------
    config : CoordinationConfig, optional
        Where the database is, and the cluster whose workers run the jobs.
    engine : Engine or AsyncEngine, optional
        The same for the default cluster, by an engine of the application's.
    session_factory : callable, optional
        Makes the sessions that handlers get as ``ctx.session``; a ``sessionmaker``, say.
    max_payload_bytes : int
        Longest payload, as JSON text in UTF-8.
    ageing_sec : float
        Seconds of waiting that weigh as much as one point of priority: a LOW job (-10) goes before a HIGH one (10) that
        is 20 times as many seconds younger.
    check_types : bool
        Whether enqueueing a job raises ``UnknownJobType`` if no handler for its type is registered here, unless the
        call says otherwise.
    wake : bool
        Whether workers are told at once of jobs that are ready, by a thread and a connection of this process. Without
        it they find them when they look by themselves, within a second.

    Raises
    ------
    ConfigurationError
        Neither or both of ``config`` and ``engine``, or a value out of range.
    """
