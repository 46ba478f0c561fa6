"""Look at a cluster and its queue again and again, at little cost.

| statement | locks | if the process stops right there |
|---|---|---|
| all of a look | nothing | nothing |

A look is several statements, one after the other: the cluster's (see ``cluster.py``), the attempts that have ended
since the last look, and, now and then, the queue's depth and the latest rebalances. What takes long is done less often,
so that a large cluster is not kept busy by who watches it. Whom it sees to have lost its session, it tells the leader
(see ``alarm.py``).
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from sqlalchemy import Engine, text

from jobsync_orm.autocommit import Autocommit
from jobsync_orm.config import CoordinationConfig
from jobsync_orm.naming import Names
from jobsync_orm.operate.alarm import Alarm
from jobsync_orm.operate.cluster import Operations
from jobsync_orm.operate.counting import TokenTally
from jobsync_orm.operate.missing import check_given
from jobsync_orm.operate.picture import ClusterStatus, Rebalance
from jobsync_orm.operate.queue_depth import QueueDepth, queue_depth
from jobsync_orm.queue import JobQueue, Pause

__all__ = ["Ended", "Look", "Watch"]

# Seconds before the first look whose attempts are counted.
BACK_SEC = 60

# Attempts may be committed in another order than they ended in: so many seconds are counted again with each look.
LATE_SEC = 2

REBALANCES = 10

# The queue's depth is read at most so often, and takes at most one part in so many of the time.
DEPTH_SEC = 1.0
SHARE = 10


@dataclass(frozen=True, slots=True)
class Ended:
    """Attempts that ended in one second.

    Attributes
    ----------
    second : int
        Since 1970, by the database's clock.
    completed, failed : int
        Failed are those that count as failures, and those discarded.
    """

    second: int
    completed: int
    failed: int


@dataclass(frozen=True, slots=True)
class Look:
    """A cluster and its queue at one moment, or nearly so.

    Attributes
    ----------
    cluster : ClusterStatus
    rebalances : tuple of Rebalance
        The latest, newest first.
    queue : QueueDepth
        Up to a second older, or more where that takes long to read.
    paused : tuple of Pause
        Of the same moment as ``queue``.
    ended : tuple of Ended
        For the seconds since the last look, and two before; in place of what was said of these before. A second in
        which nothing ended is left out.
    """

    cluster: ClusterStatus
    rebalances: tuple[Rebalance, ...]
    queue: QueueDepth
    paused: tuple[Pause, ...]
    ended: tuple[Ended, ...]


class Watch:
    """Looks at one cluster.

    Parameters
    ----------
    engine : Engine
        A synchronous engine on its database; it should keep its connection.
    names : Names
        The cluster.
    """

    def __init__(self, engine: Engine, names: Names) -> None:
        check_given(engine, names)
        self._engine = engine
        self._names = names
        self._operations = Operations(engine, names)
        self._tally = TokenTally()
        self._alarm = Alarm(engine, names)
        self._database = Autocommit(engine)
        self._control = JobQueue(
            CoordinationConfig(engine=engine, appname=names.appname, schema=names.schema), wake=False
        )
        self._ended = text(f"""
            SELECT CAST(floor(extract(epoch FROM ended_at)) AS bigint), count(*) FILTER (WHERE outcome = 'completed'),
                count(*) FILTER (WHERE outcome IN ('failed', 'timeout', 'discarded', 'died'))
            FROM {names.text("job_attempt")} WHERE ended_at >= to_timestamp(:since) GROUP BY 1 ORDER BY 1""")
        self._since: int | None = None
        self._epoch = -1
        self._rebalances: tuple[Rebalance, ...] = ()
        self._queue: tuple[QueueDepth, tuple[Pause, ...]] | None = None
        self._queue_due = 0.0

    def look(self) -> Look:
        """Look now.

        Raises
        ------
        SchemaNotReady
            There is no cluster.
        sqlalchemy.exc.DBAPIError
            The database does not answer. Look again.
        """
        cluster = self._operations.again(self._tally)
        self._alarm.heed(cluster)
        if cluster.epoch != self._epoch:
            self._rebalances = tuple(self._operations.rebalances(REBALANCES))
            self._epoch = cluster.epoch
        second = int(cluster.at.timestamp())
        since = second - BACK_SEC if self._since is None else self._since
        rows, _ = self._database.repeat(self._ended, {"since": since})
        self._since = second - LATE_SEC
        queue, paused = self._depth()
        return Look(cluster, self._rebalances, queue, paused, tuple(Ended(*row) for row in rows))

    def _depth(self) -> tuple[QueueDepth, tuple[Pause, ...]]:
        began = time.monotonic()
        if self._queue is None or began >= self._queue_due:
            self._queue = queue_depth(self._engine, self._names), tuple(self._control.paused())
            took = time.monotonic() - began
            self._queue_due = began + max(DEPTH_SEC, took * SHARE)
        return self._queue
