"""The worker that a user starts."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar

from jobsync_orm.exceptions import ConfigurationError, ForkedJob, NotRunning
from jobsync_orm.job import Job
from jobsync_orm.job.life import check_node_name
from jobsync_orm.logs import fields
from jobsync_orm.observe import Audience, WorkerStopped
from jobsync_orm.queue import JobQueue
from jobsync_orm.worker.assembly import Sizes, assemble
from jobsync_orm.worker.health import WorkerHealth, examine
from jobsync_orm.worker.joining import Joining
from jobsync_orm.worker.leaving import LEAVE_LEAST_SEC, NODE_SEC
from jobsync_orm.worker.pump import Pump
from jobsync_orm.worker.readiness import check_tables
from jobsync_orm.worker.signals import StopSignals
from jobsync_orm.worker.upkeep import Upkeep
from jobsync_orm.worker.watchdog import Watchdog

if TYPE_CHECKING:
    from jobsync_orm.queue import Handler

__all__ = ["JobWorker"]

logger = logging.getLogger("jobsync_orm")

T = TypeVar("T")

# Jobs that have a worker: two workers of one node could not tell their attempts apart.
_taken: weakref.WeakSet[Job] = weakref.WeakSet()
_guard = threading.Lock()

# How often a worker looks whether it is to stop, in seconds: in the main thread, and in the application's event loop.
SIGNAL_LOOK_SEC = 1.0
STOP_LOOK_SEC = 0.1

# Longest to wait for this node to leave its cluster where the database is away.
GONE_SEC = 0.5


class JobWorker:
    """Runs the jobs of a queue: ``JobWorker(queue, concurrency=8).run()``.

    Parameters
    ----------
    queue : JobQueue
        Whose jobs; its handlers have been registered.
    concurrency : int
        How many jobs run at once in threads.
    processes : int, optional
        How many run at once in child processes, of handlers of kind ``"process"``. None takes as many as this
        process has CPUs.
    async_concurrency : int
        How many coroutine handlers run at once, all in one event loop.
    job : Job, optional
        The running node of the cluster that this worker is. None makes one for as long as the worker runs.
    node_name : str, optional
        Name of the node to make. None takes the first of ``{hostname}-1``, ``{hostname}-2``, ... that nobody has, so
        that a worker started again after a crash takes over what it left.
    types : iterable of str, optional
        The types to run. None runs all that have a handler.
    batch : int
        Most jobs of one statement, and most that are taken in advance.
    poll_sec : float
        Seconds between looks for jobs of which no notification told.
    grace_sec : float
        Seconds that stopping takes at most, whatever the database does; up to one more if they are less than five. What
        runs is waited for until two seconds before the end, or a quarter of the grace if that is less: what is left
        then is given back, and does not count as a failure.

    Raises
    ------
    ConfigurationError
        A value out of range, or ``job`` and ``node_name`` both given.
    UnknownJobType
        One of ``types`` has no handler.
    """

    def __init__(
        self,
        queue: JobQueue,
        concurrency: int = 8,
        *,
        processes: int | None = None,
        async_concurrency: int = 100,
        job: Job | None = None,
        node_name: str | None = None,
        types: Iterable[str] | None = None,
        batch: int = 1000,
        poll_sec: float = 1.0,
        grace_sec: float = 30,
    ) -> None:
        if not isinstance(queue, JobQueue):
            raise ConfigurationError(f"JobWorker needs a JobQueue, not {queue!r}: write JobWorker(JobQueue(...))")
        if job is not None and not isinstance(job, Job):
            raise ConfigurationError(f"job={job!r} is no Job: give a running one, or node_name=... to name a new one")
        _check_whole("concurrency", concurrency, 10_000)
        if processes is None:
            processes = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        _check_whole("processes", processes, 10_000)
        _check_whole("async_concurrency", async_concurrency, 10_000)
        _check_whole("batch", batch, 10_000)
        _check_seconds("poll_sec", poll_sec, 0.01)
        _check_seconds("grace_sec", grace_sec, 0)
        if job is not None and node_name is not None:
            raise ConfigurationError("give job or node_name, not both: the job has a name")
        if node_name is not None:
            check_node_name(node_name)
        if isinstance(types, str) or not isinstance(types, Iterable | None):
            raise ConfigurationError(f"types={types!r} must be a list of types")
        self.queue = queue
        self.concurrency = concurrency
        self._sizes = Sizes(concurrency, processes, async_concurrency, batch, poll_sec)
        self._types = None if types is None else tuple(types)
        for type in self._types or ():
            queue.handler_of(type)
        self._given = job
        self.audience = Audience() if job is None else job.audience
        """Who is told what happens to this worker's node; what happens to jobs is told by the queue's."""
        self._node_name = node_name
        self._grace_sec = grace_sec
        self._lifecycle = threading.RLock()
        self._job: Job | None = None
        self._joining: Joining | None = None
        self._pump: Pump | None = None
        self._upkeep: Upkeep | None = None
        self._watchdog: Watchdog | None = None
        self._stopping = threading.Event()
        self._stopped = False
        self._stop_by = math.inf  # when it is to have stopped, if it has not started by then
        self._took_job = False
        self._pid = os.getpid()

    def register_handler(self, type: str, function: Callable[..., Any], **options: Any) -> None:
        """The same as ``queue.register``, before the worker starts.

        Raises
        ------
        NotRunning
            It has been started: it would not run jobs of this type.
        """
        if self._pump is not None:
            raise NotRunning(f"register the handler of {type!r} before the worker is started")
        self.queue.register(type, function, **options)

    @property
    def node_name(self) -> str | None:
        """Name of this worker's node; None until it has started, if it was given neither a name nor a job."""
        job = self._job or self._given
        return job.node_name if job is not None else self._node_name

    @property
    def job(self) -> Job:
        """The node that this worker is.

        Raises
        ------
        NotRunning
            It has not been started.
        """
        if self._job is None:
            raise NotRunning("this worker has not been started: use worker.run() or worker.start()")
        return self._job

    @property
    def is_running(self) -> bool:
        """Whether jobs are claimed and run."""
        return self._pump is not None and self._pump.is_alive and not self._stopping.is_set()

    def health(self) -> WorkerHealth:
        """Whether this worker does its work, and if not, why. Never raises, never waits; see :mod:`.health`."""
        pump = self._pump
        if self._stopped or (self._stopping.is_set() and (pump is None or not pump.is_alive)):
            state: Literal["new", "running", "stopping", "stopped"] = "stopped"
        elif pump is None:
            state = "new"
        else:
            state = "stopping" if self._stopping.is_set() else "running"
        rescued = 0 if self._upkeep is None else self._upkeep.rescue.rescued
        return examine(state, self._job, pump, rescued, self._sizes.poll_sec)

    def __repr__(self) -> str:
        name = self._job.node_name if self._job is not None else self._node_name or "not started"
        return f"<{type(self).__name__} {name} of {self.queue!r}>"

    def start(self) -> Self:
        """Join the cluster and begin to run jobs. Returns at once; see :meth:`run`.

        Raises
        ------
        ConfigurationError
            No handler is registered, or ``job`` has a worker already.
        NotRunning
            It has been started before, or ``job`` does not run.
        ForkedJob
            By the process that this one is a fork of.
        TimeoutError, NodeNameInUse, ClusterMismatch, SchemaNotReady, PooledConnection
            See :meth:`Job.start() <jobsync_orm.Job.start>`.
        """
        if self._pump is not None and os.getpid() != self._pid:
            raise ForkedJob(
                f"this worker was started by process {self._pid}, which this one is a fork of: make and start a "
                "JobWorker after the fork"
            )
        with self._lifecycle:
            if self._pump is not None or self._stopped:
                raise NotRunning("this worker has been started or stopped before; make a new JobWorker")
            handlers = self._handlers()
            self._pid = os.getpid()
            self._joining = Joining(self.queue.config, self._node_name, self._make_job, self._stopping)
            if self._given is not None or not self.queue.config.create_tables:
                # Before it is a node: one that comes and goes would move everybody's tokens.
                self._joining.reach(lambda: check_tables(self.queue))
            self._job = job = self._join(self._joining)
            try:
                with _guard:
                    if job in _taken:
                        raise ConfigurationError(
                            f"{job.node_name} has a JobWorker already: a second one needs its own Job"
                        )
                    _taken.add(job)
                    self._took_job = True
                self._joining.refuse_if_stopped()
                self._pump = self._make_pump(job, handlers)
                self._watchdog = Watchdog(self._pump.executors, f"jobsync-watchdog-{job.node_name}")
                self._pump.start()
                self._watchdog.start()
                # By a signal handler that has interrupted this: it found less than there is now.
                if self._stopped:
                    self._joining.refuse_if_stopped()
            except BaseException:
                until = time.monotonic() + LEAVE_LEAST_SEC
                if self._pump is not None and self._pump.is_alive:
                    self._pump.drain(0)
                    self._pump.join(LEAVE_LEAST_SEC)
                self._leave(until)
                raise
        logger.info(
            "%s runs jobs of %s",
            job.node_name,
            ", ".join(sorted(handlers)),
            extra=fields("worker_started", job.node_name),
        )
        return self

    def _handlers(self) -> dict[str, Handler]:
        known = self.queue.handlers
        if self._types is None and not known:
            raise ConfigurationError("the queue has no handlers: import the modules that register them first")
        return {type: self.queue.handler_of(type) for type in (known if self._types is None else self._types)}

    def _join(self, joining: Joining) -> Job:
        job = self._given
        if job is not None:
            if not job.is_running or job.coordination_config is None:
                job.check_process()
                raise NotRunning(f"{job.node_name} does not run: start it before its JobWorker")
            if job.names != self.queue.names:
                raise ConfigurationError(f"{job.node_name} is a node of another cluster than the queue's")
            return job
        return joining.join()

    def _make_job(self, node_name: str, seconds: float) -> Job:
        job = Job(node_name, self.queue.config, wait_on_enter=seconds, on_rebalance=self._rebalanced)
        job.audience = self.audience
        return job

    def _rebalanced(self) -> None:
        if self._upkeep is not None:
            self._upkeep.rebalanced()

    def _make_pump(self, job: Job, handlers: dict[str, Handler]) -> Pump:
        pump, self._upkeep = assemble(self.queue, job, handlers, self._sizes)
        return pump

    def stop(self, grace_sec: float | None = None) -> None:
        """Claim nothing more, wait for what runs, give back what has not ended by then, and leave the cluster.

        May be called more than once, and from any thread; a later call may shorten the wait. A handler that calls it
        does not wait: it is one of those that are waited for.

        Parameters
        ----------
        grace_sec : float, optional
            Seconds this takes at most, as the worker's own. None takes that.
        """
        if os.getpid() != self._pid:
            return
        grace = self._grace_sec if grace_sec is None else max(0.0, grace_sec)
        self._stop_soon(grace)
        if not self._acquire():
            logger.warning(
                "%s: its start has not given up in time; going on without it",
                self.node_name,
                extra=fields("worker_hangs", self.node_name),
            )
            return
        try:
            pump = self._pump  # a start under way has given up first
        finally:
            self._lifecycle.release()
        if pump is not None:
            pump.drain(grace)
            me = threading.current_thread()
            if any(executor.is_mine(me) for executor in pump.executors.values()):
                threading.Thread(target=self.stop, args=(grace,), name="jobsync-stop", daemon=True).start()
                return
            while pump.is_alive and not pump.join(_piece(pump.end_by)):
                if time.monotonic() > pump.end_by:
                    logger.warning(
                        "%s: the queue's loop has not ended in time; going on without it",
                        self.node_name,
                        extra=fields("worker_hangs", self.node_name),
                    )
                    break
        with self._lifecycle:
            if not self._stopped:
                self._stopped = True
                self._leave(self._stop_by if pump is None else pump.end_by)

    def _acquire(self) -> bool:
        """Take ``_lifecycle``, from a start that is giving up, before this worker is to have stopped."""
        while not self._lifecycle.acquire(timeout=_piece(self._stop_by)):
            if time.monotonic() > self._stop_by:
                return False
        return True

    def _leave(self, until: float) -> None:
        """Let go of everything, by this moment of ``time.monotonic()``."""
        pump, job = self._pump, self._job
        try:
            if pump is not None:
                pump.close()
            if self._watchdog is not None:
                self._watchdog.stop(max(0.0, until - time.monotonic()))
        finally:
            if job is not None:
                if self._took_job:
                    with _guard:
                        _taken.discard(job)
                if job is not self._given:
                    leaving = threading.Thread(target=job.stop, name="jobsync-leave", daemon=True)
                    leaving.start()
                    left = until - time.monotonic()
                    if pump is not None and pump.is_away:
                        leaving.join(min(GONE_SEC, max(NODE_SEC, left)))
                    else:  # the database has just answered
                        leaving.join(max(LEAVE_LEAST_SEC, left))
            self.queue.audience.tell(WorkerStopped(self.node_name or ""))

    def run(self) -> None:
        """Start, run jobs until SIGTERM or SIGINT or :meth:`stop`, and stop.

        A second signal does not wait for what runs, and a third one ends the process; see
        :mod:`jobsync_orm.worker.signals`. Outside of the main thread signals are left alone.

        Raises
        ------
        NotRunning
            The queue's loop has failed, by a defect. Also what :meth:`start` raises.
        """
        with self._signals():
            try:
                self._start_in_time()
                while not self._stopping.wait(SIGNAL_LOOK_SEC):
                    self._check_pump()
            finally:
                self.stop()

    async def run_async(self) -> None:
        """:meth:`run`, next to what else the running event loop does: ``await worker.run_async()``.

        The worker has its own threads, and coroutine handlers an event loop of their own. Cancelling this stops the
        worker as a signal does, and waits for it; cancelling it once more is like a second signal.
        """
        with self._signals():
            try:
                await self._in_thread(self._start_in_time, self._stop_soon)
                while not self._stopping.is_set():
                    self._check_pump()
                    await asyncio.sleep(STOP_LOOK_SEC)
            finally:
                await self._in_thread(self.stop, self._stop_now)

    async def _in_thread(self, call: Callable[[], object], on_cancel: Callable[[], None]) -> None:
        """Run ``call``, and wait for its end, whatever comes."""
        task = asyncio.ensure_future(asyncio.to_thread(call))
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            on_cancel()
            await asyncio.gather(task, return_exceptions=True)
            raise

    def _check_pump(self) -> None:
        """A process that runs nothing any more is to end, so that somebody starts another one."""
        if self._pump is not None and not self._pump.is_alive and not self._stopping.is_set():
            raise NotRunning(f"{self.node_name}: the queue's loop has failed, the log says why")

    def _signals(self) -> StopSignals:
        return StopSignals(self._stop_soon, self._stop_now)

    def _start_in_time(self) -> None:
        """Start in another thread, which is left behind if it does not give up when this worker is to stop: nothing
        ends a driver that connects to a server that does not answer."""
        failures: list[BaseException] = []

        def start() -> None:
            try:
                self.start()
            except BaseException as error:  # noqa: BLE001  # raised below
                failures.append(error)

        if self._stopping.is_set():
            return
        starting = threading.Thread(target=start, name="jobsync-start", daemon=True)
        starting.start()
        while starting.is_alive() and time.monotonic() < self._stop_by:
            starting.join(STOP_LOOK_SEC)
        for failure in failures:
            if not (isinstance(failure, NotRunning) and self._stopping.is_set()):
                raise failure

    def _stop_soon(self, grace_sec: float | None = None) -> None:
        """Make :meth:`run` stop."""
        grace = self._grace_sec if grace_sec is None else grace_sec
        self._stop_by = min(self._stop_by, time.monotonic() + max(grace, LEAVE_LEAST_SEC))
        self._stopping.set()
        if self._joining is not None:
            self._joining.give_up()

    def _stop_now(self) -> None:
        """Do not wait for what runs."""
        self._stop_soon(0)
        if self._pump is not None:
            self._pump.drain(0)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def _piece(until: float) -> float:
    """Seconds to wait for at once. In pieces: a signal that comes just before a wait does not end it."""
    return min(SIGNAL_LOOK_SEC, max(0.01, until - time.monotonic()))


def _check_whole(name: str, value: Any, most: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
        raise ConfigurationError(f"{name}={value!r} must be a whole number from 1 to {most}")


def _check_seconds(name: str, value: Any, least: float) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool) or not least <= value < float("inf"):
        raise ConfigurationError(f"{name}={value!r} must be a number of seconds, at least {least}")
