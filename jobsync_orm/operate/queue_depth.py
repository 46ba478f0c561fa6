"""How many jobs are in the queue: a few figures for a screen. All others are those of ``JobQueue.stats()``.

It costs little, however long the queue's table is: see ``jobsync_orm/queue/figures.py``, which reads.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from sqlalchemy import Engine

from jobsync_orm.config import CoordinationConfig
from jobsync_orm.models.states import FINISHED, JobState
from jobsync_orm.naming import Names
from jobsync_orm.operate.missing import ready
from jobsync_orm.queue import JobQueue

__all__ = ["QueueDepth", "queue_depth"]


@dataclass(frozen=True, slots=True)
class QueueDepth:
    """Jobs that are not finished.

    Attributes
    ----------
    counts : mapping of JobState to int
        In each state that is not a finished one.
    estimated : frozenset of JobState
        Those whose count is an estimate: there are thousands.
    oldest_pending_sec : float or None
        For how long the job that has been ready longest has been so, in seconds.
    """

    counts: Mapping[JobState, int]
    estimated: frozenset[JobState]
    oldest_pending_sec: float | None


def queue_depth(engine: Engine, names: Names) -> QueueDepth:
    """The jobs that are not finished.

    Raises
    ------
    SchemaNotReady
        There are no tables.
    """
    queue = JobQueue(CoordinationConfig(engine=engine, appname=names.appname, schema=names.schema))
    with ready(names):
        types = queue.depths().values()
    counts: Counter[JobState] = Counter({state: 0 for state in JobState if state not in FINISHED})
    for stats in types:
        counts.update({state: number for state, number in stats.counts.items() if state not in FINISHED})
    estimated = frozenset(state for stats in types for state in stats.estimated if state not in FINISHED)
    ages = [stats.oldest_pending_sec for stats in types if stats.oldest_pending_sec is not None]
    return QueueDepth(counts, estimated, max(ages, default=None))
