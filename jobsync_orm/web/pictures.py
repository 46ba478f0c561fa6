"""What the process keeps of the cluster and the queue, so that many who look cost no more than one.

A :class:`Picture` is read anew when somebody asks and the last one is older than its period: a second, half a second
for the cluster, a tenth while a node is gone or tokens are on their way, which takes a second or two. Of a database in
which reading takes long, less often, so that reading takes up a quarter of the time at most. All who ask meanwhile get
the same one. If it cannot be read, they get the last one, its age, and what is wrong.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from sqlalchemy import Engine

from jobsync_orm.exceptions import JobsyncError
from jobsync_orm.logs import fields
from jobsync_orm.naming import Names
from jobsync_orm.operate import (
    Alarm,
    ClusterStatus,
    Operations,
    Rebalance,
    StoredPin,
    Throughput,
    TokenTally,
    list_pins,
    parked_pins,
    throughput,
)
from jobsync_orm.queue import JobQueue, QueueStats
from jobsync_orm.queue.control import Pause
from jobsync_orm.web.answers import UNANSWERED, said
from jobsync_orm.web.workbench import Workbench

__all__ = ["ClusterPicture", "ClusterReader", "Kept", "Picture", "PinsPicture", "QueuePicture", "QueueReader", "Sample"]

logger = logging.getLogger("jobsync_orm.web")

PERIOD_SEC = 1.0

# Of the cluster, and while a node is gone or tokens move.
CLUSTER_SEC, UNSETTLED_SEC = 0.5, 0.1

# Reading takes up one part in so many of the time, at most.
SHARE = 4

# Seconds between two readings of what changes slowly, or takes longer to find out.
SLOW_SEC = 5.0

# How far back plots go, and how many points and rebalances are kept.
HISTORY_SEC, SAMPLES, REBALANCES = 600.0, 600, 60

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Kept(Generic[T]):
    """What somebody who asks is given.

    Attributes
    ----------
    value : object or None
        The last that was read. None: nothing was yet.
    age_sec : float
        How old it is.
    next_sec : float
        In how many seconds asking again may give something newer.
    problem : str or None
        Why there is nothing newer, if reading failed.
    """

    value: T | None
    age_sec: float
    next_sec: float
    problem: str | None


class Picture(Generic[T]):
    """Something that is read anew at most every so often.

    Parameters
    ----------
    read : callable
        Reads it, in a thread; never called twice at a time.
    bench : Workbench
        Whose threads.
    period_sec : callable
        Given the last one, after how many seconds it is too old.
    """

    def __init__(self, read: Callable[[], T], bench: Workbench, period_sec: Callable[[T], float]) -> None:
        self._read, self._bench, self._period = read, bench, period_sec
        self._value: T | None = None
        self._read_at = self._due_at = 0.0
        self._problem: str | None = None
        self._reading: asyncio.Future[None] | None = None

    async def get(self) -> Kept[T]:
        """The picture: the last one, if it is young enough."""
        if time.monotonic() >= self._due_at:
            if self._reading is None or self._reading.done():
                self._reading = asyncio.ensure_future(self._renew())
            # Whoever goes away does not end it for the others.
            await asyncio.shield(self._reading)
        now = time.monotonic()
        return Kept(self._value, now - self._read_at, max(0.0, self._due_at - now), self._problem)

    def outdate(self) -> None:
        """Have it read anew by who asks next: something has been written."""
        self._due_at = 0.0

    async def _renew(self) -> None:
        began = time.monotonic()
        try:
            value = await self._bench.do(self._read)
        except (JobsyncError, *UNANSWERED) as error:
            if self._problem is None:
                logger.warning(
                    "the dashboard cannot read the database: %s",
                    getattr(error, "orig", error),
                    extra=fields("dashboard_blind"),
                )
            self._problem = said(error)
            self._due_at = time.monotonic() + PERIOD_SEC
            return
        ended = time.monotonic()
        self._value, self._read_at, self._problem = value, ended, None
        self._due_at = max(began + self._period(value), ended + (SHARE - 1) * (ended - began))


@dataclass(frozen=True, slots=True)
class Sample:
    """Some numbers at one moment, for a plot: ``at`` in seconds since 1970 by the database's clock."""

    at: float
    values: dict[str, int]


class _Samples:
    """The latest samples: only where something has changed, as what is plotted stays as it was until then."""

    def __init__(self) -> None:
        self._samples: deque[Sample] = deque(maxlen=SAMPLES)

    def add(self, at: float, values: dict[str, int]) -> tuple[Sample, ...]:
        while len(self._samples) > 1 and self._samples[1].at < at - HISTORY_SEC:
            self._samples.popleft()
        if not self._samples or self._samples[-1].values != values:
            self._samples.append(Sample(at, values))
        return tuple(self._samples)


@dataclass(frozen=True, slots=True)
class ClusterPicture:
    """The cluster; its latest rebalances, newest first; how many tokens each node had lately."""

    status: ClusterStatus
    rebalances: tuple[Rebalance, ...]
    owned: tuple[Sample, ...]


class ClusterReader:
    """Reads :class:`ClusterPicture`: one statement mostly, which touches no tokens, or some of them."""

    def __init__(self, engine: Engine, names: Names) -> None:
        self._operations = Operations(engine, names)
        self._alarm = Alarm(engine, names)
        self._last: ClusterPicture | None = None
        self._tally = TokenTally()
        self._samples = _Samples()

    def read(self) -> ClusterPicture:
        last, status = self._last, self._operations.again(self._tally)
        self._alarm.heed(status)
        if last is None or status.last_rebalance != last.status.last_rebalance:
            rebalances = tuple(self._operations.rebalances(REBALANCES))
        else:
            rebalances = last.rebalances
        counts = {node.node: node.owned for node in status.tokens.nodes}
        owned = self._samples.add(status.at.timestamp(), {**counts, "": status.tokens.unowned})
        self._last = ClusterPicture(status, rebalances, owned)
        return self._last

    @staticmethod
    def period_sec(picture: ClusterPicture) -> float:
        """How long it is good for."""
        status = picture.status
        moving = status.tokens.draining or status.tokens.unowned > status.tokens.parked or status.tokens.at < status.at
        gone = any(node.condition in ("cut off", "joining") for node in status.nodes)
        return UNSETTLED_SEC if moving or gone else CLUSTER_SEC


@dataclass(frozen=True, slots=True)
class PinsPicture:
    """The newest pins, and those that park tokens."""

    pins: tuple[StoredPin, ...]
    parked: tuple[StoredPin, ...]

    @classmethod
    def read(cls, engine: Engine, names: Names) -> PinsPicture:
        """As they are now, a hundred of each at most."""
        return cls(tuple(list_pins(engine, names)), tuple(parked_pins(engine, names)))


@dataclass(frozen=True, slots=True)
class QueuePicture:
    """The queue: depth each second; the rest, which costs more, every five seconds.

    Attributes
    ----------
    at : float
        Seconds since 1970 by the database's clock, when ``rates`` and what is beside them were read.
    depths, rates : dict of str to QueueStats
        For each job type.
    workers : list of dict
        As of :meth:`~jobsync_orm.JobQueue.worker_stats`.
    paused : list of Pause
    ended : Throughput
        Of the last five minutes.
    waiting : tuple of Sample
        How many jobs were ready, in work, and due later.
    """

    at: float
    depths: dict[str, QueueStats]
    rates: QueueStats
    workers: list[dict[str, Any]]
    paused: list[Pause]
    ended: Throughput
    waiting: tuple[Sample, ...]


class QueueReader:
    """Reads :class:`QueuePicture`."""

    def __init__(self, engine: Engine, queue: JobQueue) -> None:
        self._engine, self._queue = engine, queue
        self._last: QueuePicture | None = None
        self._slow_at = 0.0
        self._samples = _Samples()

    def read(self) -> QueuePicture:
        now, last = time.monotonic(), self._last
        slow = last is None or now - self._slow_at >= SLOW_SEC
        if last is None or slow:
            rates = self._queue.stats()
            depths = rates.by_type
            ended = self._ended(None if last is None else last.ended)
            workers, at = self._queue.worker_stats(), ended.at
            self._slow_at = now
        else:
            depths, rates, ended, workers = self._queue.depths(), last.rates, last.ended, last.workers
            at = last.at
        waiting = self._samples.add(at + (now - self._slow_at), _totals(depths))
        self._last = QueuePicture(at, depths, rates, workers, self._queue.paused(), ended, waiting)
        return self._last

    def _ended(self, before: Throughput | None) -> Throughput:
        if before is None:
            return throughput(self._engine, self._queue.names)
        # The last stretch but one may have got attempts that were committed late.
        since = int(before.at) - 2 * before.every_sec
        new = throughput(self._engine, self._queue.names, since=since)
        kept = [one for one in before.ended if new.at - 300 <= one.at < new.since]
        first = max(before.since, int(new.at) - 300)
        return Throughput(new.at, min(first, new.since), new.every_sec, (*kept, *new.ended))


def _totals(depths: dict[str, QueueStats]) -> dict[str, int]:
    def total(*states: str) -> int:
        return sum(stats.counts[state] for stats in depths.values() for state in stats.counts if state in states)

    return {
        "ready": total("pending"),
        "processing": total("processing"),
        "later": total("scheduled", "retrying", "blocked"),
    }
