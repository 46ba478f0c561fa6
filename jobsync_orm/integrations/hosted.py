"""A job in a process whose life belongs to something else: a worker process of a web server.

What the integrations with web frameworks have in common. A :class:`Host` starts the job of such a process, under a name
that no other process has, and on wish a :class:`~jobsync_orm.JobWorker` on it; it stops both politely; and it answers
the two probes. Its methods that start and stop wait; a program with an event loop calls them in a thread.
"""

from __future__ import annotations

import datetime
import os
import shlex
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypedDict

from jobsync_orm.config import CoordinationConfig
from jobsync_orm.exceptions import ConfigurationError, NotRunning
from jobsync_orm.job import Job
from jobsync_orm.job.life import check_node_name
from jobsync_orm.worker import JobWorker
from jobsync_orm.worker.joining import Joining

__all__ = ["Host", "JobOptions", "Probe", "drained_reason"]

STANDALONE = "standalone"


class JobOptions(TypedDict, total=False):
    """Arguments of :class:`~jobsync_orm.Job` that are passed on as they are."""

    date: datetime.date | datetime.datetime | None
    wait_on_exit: float
    lock_provider: Callable[[Job], object] | None
    clear_existing_locks: bool
    on_rebalance: Callable[..., object] | None
    on_revoke: Callable[..., object] | None


@dataclass(frozen=True, slots=True)
class Probe:
    """The answer to a probe.

    Attributes
    ----------
    ok : bool
        What it answers.
    problems : tuple of str
        Why not. Without anything that the database or its driver has said, which may name hosts and users.
    node : str or None
        The node's name; None as long as it has none.
    """

    ok: bool
    problems: tuple[str, ...] = ()
    node: str | None = None

    def as_json(self, yes: str, no: str) -> dict[str, Any]:
        """As the body of an answer, with ``yes`` or ``no`` for its status."""
        return {"status": yes if self.ok else no, "node": self.node, "problems": list(self.problems)}


def drained_reason(node: str) -> str:
    """Why a process is not ready whose node is drained."""
    return f"the node is drained and takes nothing new until it is undrained (jobsync-orm undrain {shlex.quote(node)})"


class Host:
    """One process's job, and its worker if it has one.

    Parameters
    ----------
    config : CoordinationConfig, optional
        Where the cluster is. None makes a standalone job, for tests without a database.
    node_name : str, optional
        This process's name. None takes the first of ``{hostname}-1``, ``{hostname}-2``, ... that no live process has.
    wait_on_enter : float
        Seconds that starting may take, until the database is reached and this node has its tokens.
    worker : callable, optional
        Called with the running job; makes the :class:`~jobsync_orm.JobWorker` to run in this process, as in
        ``lambda job: JobWorker(queue, job=job)``.
    options : JobOptions
        Other arguments of :class:`~jobsync_orm.Job`.

    Raises
    ------
    ConfigurationError
        ``config`` is none, or ``node_name`` cannot be a name.
    """

    def __init__(
        self,
        config: CoordinationConfig | None,
        options: JobOptions,
        node_name: str | None = None,
        wait_on_enter: float = 120,
        worker: Callable[[Job], JobWorker] | None = None,
    ) -> None:
        if config is not None and not isinstance(config, CoordinationConfig):
            raise ConfigurationError(
                f"a CoordinationConfig is needed, not {type(config).__name__}: write CoordinationConfig(url=...) or "
                "CoordinationConfig(engine=...)"
            )
        if node_name is not None:
            check_node_name(node_name)
        self._config = config
        self._options = options
        self._node_name = node_name
        self._wait_on_enter = wait_on_enter
        self._make_worker = worker
        self._stopping = threading.Event()
        self._joining: Joining | None = None
        self._job: Job | None = None
        self._worker: JobWorker | None = None
        self._pid = os.getpid()

    @property
    def job(self) -> Job:
        """The running job.

        Raises
        ------
        NotRunning
            It has not been started, or it has been stopped.
        """
        if self._job is None or self._stopping.is_set():
            raise NotRunning(
                "this process's job is not running: the server starts it when the application starts up, and stops "
                "it when the application shuts down"
            )
        return self._job

    @property
    def worker(self) -> JobWorker | None:
        """The worker; None if there is none."""
        return self._worker

    def start_job(self) -> Job:
        """Join the cluster and wait until this node has its tokens.

        Raises
        ------
        NotRunning
            It has been started before, or :meth:`give_up` was called meanwhile.
        TimeoutError, NodeNameInUse, ClusterMismatch, SchemaNotReady, PooledConnection, ConfigurationError
            See :meth:`Job.start() <jobsync_orm.Job.start>`.
        """
        if self._job is not None or self._stopping.is_set():
            raise NotRunning("this process's job has been started before: an application starts up once")
        self._pid = os.getpid()
        if self._config is None:
            self._job = self._make_job(self._node_name or STANDALONE, 0).start()
        else:
            self._joining = Joining(self._config, self._node_name, self._make_job, self._stopping, self._wait_on_enter)
            self._job = self._joining.join()
        return self._job

    def _make_job(self, node_name: str, seconds: float) -> Job:
        return Job(node_name, self._config, wait_on_enter=seconds, **self._options)

    def give_up(self) -> None:
        """Make :meth:`start_job` that waits in another thread leave the cluster and raise NotRunning."""
        self._stopping.set()
        if self._joining is not None:
            self._joining.give_up()

    def start_worker(self) -> None:
        """Begin to run jobs, if there is a worker.

        Raises
        ------
        ConfigurationError
            ``worker`` has made something else, or a worker of another node.
        """
        if self._make_worker is None:
            return
        job = self.job
        worker = self._make_worker(job)
        if not isinstance(worker, JobWorker):
            raise ConfigurationError(f"worker(job) must return a JobWorker, not {type(worker).__name__}")
        if worker.node_name != job.node_name:
            raise ConfigurationError("the JobWorker must be this process's node: write JobWorker(queue, job=job)")
        self._worker = worker.start()

    def stop_worker(self) -> None:
        """Wait for the jobs that run, within the worker's grace. From now on this process is not ready."""
        self._stopping.set()
        if self._worker is not None:
            self._worker.stop()

    def stop_job(self) -> None:
        """Hand the tokens over and leave the cluster."""
        self._stopping.set()
        if self._job is not None:
            self._job.stop()

    def live(self) -> Probe:
        """Whether this process works; no only where a restart would help. From memory, at once.

        A database that is away is none of these cases: each process comes back by itself, and restarting all of them
        helps nobody.
        """
        problems = []
        if self._job is not None and not self._stopping.is_set():
            if os.getpid() != self._pid:
                problems.append("this process is a fork of the one that started the job: start it after the fork")
            elif not self._job.is_running:
                problems.append("the job's loop has ended by itself; the log says why")
            elif self._worker is not None and not self._worker.is_running:
                problems.append("the worker's loop has ended by itself; the log says why")
        return self._probe(problems)

    def ready(self) -> Probe:
        """Whether this process may say yes to its tokens, its worker runs jobs, and nobody has drained it.

        From memory, at once.
        """
        if self._job is None:
            return self._probe(["the job has not been started"])
        if self._stopping.is_set():
            return self._probe(["the job is leaving its cluster"])
        problems = list(self.live().problems)
        if not problems and not self._job.am_i_healthy():
            problems.append("the node's lease has run out, or its connection is being made anew")
        if not problems and self._worker is not None:
            # What comes after the colon is the database's or the driver's.
            problems += [problem.partition(": ")[0] for problem in self._worker.health().problems]
        if not problems and (self._job.am_i_drained() or (self._worker is not None and self._worker.health().drained)):
            problems.append(drained_reason(self._job.node_name))
        return self._probe(problems)

    def _probe(self, problems: list[str]) -> Probe:
        return Probe(not problems, tuple(problems), None if self._job is None else self._job.node_name)
