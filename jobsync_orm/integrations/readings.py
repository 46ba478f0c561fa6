"""What is read when somebody asks for metrics: of a job, a queue or a worker in memory, and of the cluster's tables.

The tables are read by a thread of their own, at most every ``read_every_sec``, with short statements that lock nothing
and that the server ends after ``deadline_sec``. Whoever asks waits no longer than that, and gets what was read last; or
nothing, if that is too old to be true.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Literal
from weakref import ref

from jobsync_orm.autocommit import bounded
from jobsync_orm.exceptions import ConfigurationError
from jobsync_orm.integrations.catalogue import (
    ABANDONED,
    APPLIED_EPOCH,
    DRAINING,
    EPOCH,
    HEALTHY,
    JOBS,
    LAST_HEARTBEAT,
    LEADER,
    LEASE_REMAINING,
    LIVE_NODES,
    NODES,
    OLDEST,
    PARKED,
    READ_FAILURES,
    RUNNING,
    TOKENS_OWNED,
    TURN,
    WORKER_HEALTHY,
    Change,
    Types,
)
from jobsync_orm.job import Job
from jobsync_orm.logs import fields
from jobsync_orm.models.states import FINISHED
from jobsync_orm.naming import Names
from jobsync_orm.observe import Audience
from jobsync_orm.operate import Operations, TokenTally
from jobsync_orm.queue import JobQueue
from jobsync_orm.worker import JobWorker

__all__ = ["Reads", "Source", "appname_of"]

logger = logging.getLogger("jobsync_orm")

Reads = Literal["leader", "always", "never"]

# What was read is told for so many times read_every_sec, should it not be possible to read it again.
KEPT = 3


def appname_of(names: Names) -> str:
    """How a cluster is called in metrics: its appname, with its schema if it has one."""
    return names.appname if names.schema is None else f"{names.schema}.{names.appname}"


class Source:
    """One job, queue or worker. It is not kept alive.

    Parameters
    ----------
    thing : Job, JobQueue or JobWorker
        What is read.
    reads : str
        When to read the cluster's tables: ``leader``, only while this node leads; ``always``; ``never``.
    read_every_sec : float
        At most so often.
    deadline_sec : float
        Longest that a read may take, and be waited for.
    types : Types
        Keeps the number of job types bounded.

    Raises
    ------
    ConfigurationError
        ``thing`` is something else, or a standalone job; or a setting is out of range.
    """

    def __init__(
        self, thing: Job | JobQueue | JobWorker, reads: Reads, read_every_sec: float, deadline_sec: float, types: Types
    ) -> None:
        if reads not in ("leader", "always", "never"):
            raise ConfigurationError(f"reads={reads!r} must be 'leader', 'always' or 'never'")
        for name, value in (("read_every_sec", read_every_sec), ("deadline_sec", deadline_sec)):
            if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < float("inf"):
                raise ConfigurationError(f"{name}={value!r} must be a number of seconds above 0")
        names: Names | None
        self.audiences: tuple[Audience, ...]
        if isinstance(thing, JobWorker):
            names, self.audiences = thing.queue.names, (thing.audience, thing.queue.audience)
        elif isinstance(thing, Job | JobQueue):
            names, self.audiences = thing.names, (thing.audience,)
        else:
            raise ConfigurationError(f"{thing!r} has no metrics: give a Job, a JobQueue or a JobWorker")
        if names is None:
            raise ConfigurationError(f"{thing!r} is standalone: it is in no cluster that could be measured")
        self.appname = appname_of(names)
        self.reads = reads
        self._thing: ref[Any] = ref(thing)
        self._types = types
        self._tally = TokenTally()
        self._table = _Table(self._read, read_every_sec, deadline_sec)

    @property
    def is_gone(self) -> bool:
        """Whether nobody else has the thing any more."""
        return self._thing() is None

    def is_of(self, thing: object) -> bool:
        """Whether this is the source of ``thing``."""
        return self._thing() is thing

    @property
    def node(self) -> str | None:
        """Name of the node, if it has one."""
        thing = self._thing()
        return None if thing is None or isinstance(thing, JobQueue) else thing.node_name

    def listens_to(self, audience: Audience) -> bool:
        """Whether events of ``audience`` are this source's."""
        return any(one is audience for one in self.audiences)

    def figures(self) -> Iterator[Change]:
        """What there is to read now."""
        thing = self._thing()
        job = thing._job if isinstance(thing, JobWorker) else thing if isinstance(thing, Job) else None
        if isinstance(job, Job):
            yield from _of_node(self.appname, job)
        if isinstance(thing, JobWorker):
            yield from _of_worker(self.appname, thing)
        if self.reads == "always" or (self.reads == "leader" and isinstance(job, Job) and job.am_i_leader()):
            yield from self._table.latest()
            yield READ_FAILURES, (self.appname,), self._table.failures

    def _read(self, within_sec: float) -> list[Change]:
        thing = self._thing()
        found: list[Change] = []
        job = thing._job if isinstance(thing, JobWorker) else thing
        if isinstance(job, Job) and job.is_running and job.names is not None:
            status = Operations(bounded(job._application_engine(), within_sec), job.names).again(self._tally)
            active = sum(node.condition != "away" for node in status.nodes)
            for metric, value in ((NODES, active), (PARKED, status.tokens.unowned), (DRAINING, status.tokens.draining)):
                found.append((metric, (self.appname,), float(value)))
        queue = thing.queue if isinstance(thing, JobWorker) else thing
        if isinstance(queue, JobQueue):
            found += self._of_queue(queue, within_sec)
        return found

    def _of_queue(self, queue: JobQueue, within_sec: float) -> Iterator[Change]:
        jobs: dict[tuple[str, str], float] = {}
        oldest: dict[str, float] = {}
        for type, stats in queue.depths(within_sec).items():
            name = self._types(type)
            for state, many in stats.counts.items():
                if state not in FINISHED:
                    jobs[name, state.value] = jobs.get((name, state.value), 0) + many
            oldest[name] = max(oldest.get(name, 0.0), stats.oldest_pending_sec or 0.0)
        for (name, state_name), number in jobs.items():
            yield JOBS, (self.appname, name, state_name), number
        for name, seconds in oldest.items():
            yield OLDEST, (self.appname, name), seconds


def _of_node(app: str, job: Job) -> Iterator[Change]:
    coordinator = job._coordinator
    if coordinator is None:
        return
    labels = (app, job.node_name)
    healthy, ownership = coordinator.healthy, coordinator.ownership
    yield TOKENS_OWNED, labels, ownership.view.count if healthy else 0
    yield EPOCH, labels, coordinator.epoch
    yield APPLIED_EPOCH, labels, ownership.held.epoch
    yield LEASE_REMAINING, labels, coordinator.lease_left_sec
    yield HEALTHY, labels, float(healthy)
    yield LEADER, labels, float(coordinator.leads)
    yield LIVE_NODES, labels, coordinator.live_nodes
    if coordinator.last_beat_at is not None:
        yield LAST_HEARTBEAT, labels, coordinator.last_beat_at


def _of_worker(app: str, worker: JobWorker) -> Iterator[Change]:
    health = worker.health()
    if health.node is None:
        return
    labels = (app, health.node)
    yield WORKER_HEALTHY, labels, float(health.ok)
    yield RUNNING, labels, health.running
    yield ABANDONED, labels, health.abandoned
    if health.turn_sec is not None:
        yield TURN, labels, health.turn_sec


class _Table:
    """What was read from the tables, and the thread that reads."""

    def __init__(self, read: Callable[[float], list[Change]], every_sec: float, deadline_sec: float) -> None:
        self._read = read
        self._every_sec = every_sec
        self._deadline_sec = deadline_sec
        self._guard = threading.Lock()
        self._found: list[Change] = []
        self._found_at = self._asked_at = float("-inf")
        self._reading: threading.Event | None = None
        self._pid = os.getpid()
        self.failures = 0

    def latest(self) -> list[Change]:
        """What was read last, not longer ago than it may be."""
        if self._pid != os.getpid():  # a forked child: the thread that was reading is the parent's
            self._pid, self._guard, self._reading = os.getpid(), threading.Lock(), None
        with self._guard:
            reading = self._reading
            if reading is None and time.monotonic() - self._asked_at >= self._every_sec:
                self._asked_at = time.monotonic()
                reading = self._reading = threading.Event()
                threading.Thread(target=self._run, args=(reading,), name="jobsync-metrics", daemon=True).start()
        if reading is not None:
            reading.wait(self._deadline_sec)
        too_old = time.monotonic() - self._found_at > KEPT * self._every_sec
        return [] if too_old else self._found

    def _run(self, reading: threading.Event) -> None:
        try:
            self._found = self._read(self._deadline_sec)
            self._found_at = time.monotonic()
        except Exception as error:  # noqa: BLE001  # of the database: metrics of this process are told all the same
            self.failures += 1
            logger.warning("metrics of the cluster could not be read: %s", error, extra=fields("metrics_unread"))
        finally:
            with self._guard:
                self._reading = None
            reading.set()
