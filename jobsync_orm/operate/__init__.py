"""What operators see and do: the layer below the command line, for any program that watches a cluster.

Everything here works on an :class:`~sqlalchemy.Engine` and the :class:`~jobsync_orm.naming.Names` of a cluster, without
a running :class:`~jobsync_orm.Job`, and is synchronous (from a coroutine: ``await asyncio.to_thread(...)``). Answers
are frozen dataclasses; :func:`as_json` makes plain values of them::

    from jobsync_orm.naming import Names
    from jobsync_orm.operate import Operations, as_json

    operations = Operations(engine, Names("sync_"))
    status = operations.status()
    print(status.healthy, [node.name for node in status.nodes], as_json(status))

Reading is one statement that locks nothing, in a transaction of its own. What is written, and what it locks, stands in
the module that writes it.
"""

from __future__ import annotations

from jobsync_orm.operate.alarm import Alarm
from jobsync_orm.operate.as_json import as_json
from jobsync_orm.operate.cluster import Operations
from jobsync_orm.operate.counting import TokenTally
from jobsync_orm.operate.dependents import TokenColumn
from jobsync_orm.operate.draining import Remaining, drain, undrain, watch_drain
from jobsync_orm.operate.evicting import Member, Watched, evict, expel, find_member
from jobsync_orm.operate.jobs import FoundJob, JobFilter, JobFinder
from jobsync_orm.operate.picture import (
    ClusterStatus,
    DrainOrder,
    NodeStatus,
    NodeTokens,
    Rebalance,
    TokenHolder,
    TokenStatus,
)
from jobsync_orm.operate.pins import StoredPin, add_pin, list_pins, parked_pins
from jobsync_orm.operate.planning import PlannedLoad, PlannedMove, Preview, plan_soon, preview
from jobsync_orm.operate.queue_depth import QueueDepth, queue_depth
from jobsync_orm.operate.resharding import Resharded, Survey, reshard, survey
from jobsync_orm.operate.searching import WALKED, JobsFound, search_jobs
from jobsync_orm.operate.tasks import Explanation, PatternMatch, PinOnToken, TaskClaim, TaskPlace, explain, where
from jobsync_orm.operate.throughput import Ended, Throughput, throughput
from jobsync_orm.operate.trail import AuditEntry, read_audit
from jobsync_orm.operate.waiting import why_it_waits

__all__ = [
    "WALKED",
    "Alarm",
    "AuditEntry",
    "ClusterStatus",
    "DrainOrder",
    "Ended",
    "Explanation",
    "FoundJob",
    "JobFilter",
    "JobFinder",
    "JobsFound",
    "Member",
    "NodeStatus",
    "NodeTokens",
    "Operations",
    "PatternMatch",
    "PinOnToken",
    "PlannedLoad",
    "PlannedMove",
    "Preview",
    "QueueDepth",
    "Rebalance",
    "Remaining",
    "Resharded",
    "StoredPin",
    "Survey",
    "TaskClaim",
    "TaskPlace",
    "Throughput",
    "TokenColumn",
    "TokenHolder",
    "TokenStatus",
    "TokenTally",
    "Watched",
    "add_pin",
    "as_json",
    "drain",
    "evict",
    "expel",
    "explain",
    "find_member",
    "list_pins",
    "parked_pins",
    "plan_soon",
    "preview",
    "queue_depth",
    "read_audit",
    "reshard",
    "search_jobs",
    "survey",
    "throughput",
    "undrain",
    "watch_drain",
    "where",
    "why_it_waits",
]
