"""How a process that was not given a node becomes one: under a name that is free, once the database can be reached.

A database that does not answer is waited for, ``enter_sec`` seconds in all, and the log says so every ``SAY_SEC``. One
that refuses this worker (no such database or role, a wrong password, no such host) will not be another one in a minute:
that is an error at once.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from jobsync_orm.config import CoordinationConfig
from jobsync_orm.coordinator.admission import refusal
from jobsync_orm.coordinator.session import SessionLost
from jobsync_orm.exceptions import NodeNameInUse, NotRunning
from jobsync_orm.job import Job
from jobsync_orm.logs import fields
from jobsync_orm.worker.names import FreeName

__all__ = ["Joining"]

logger = logging.getLogger("jobsync_orm")

T = TypeVar("T")

# Longest a worker tries to reach its database when it starts.
ENTER_SEC = 120.0

# Between two tries, and between two lines of the log.
TRY_SEC, SAY_SEC = 0.5, 30.0


class Joining:
    """The start of one worker, as far as its database and its cluster have a part in it.

    Parameters
    ----------
    config : CoordinationConfig
        Where the cluster is.
    node_name : str, optional
        Name of the node to make. None takes the first that is free.
    make : callable
        Makes the job, given its name and the seconds that its start may take. More than once if a name is taken.
    stopping : threading.Event
        Set when the worker is to stop, however far it has got.
    enter_sec : float, optional
        Seconds that all of it may take. None takes ``ENTER_SEC``.
    """

    def __init__(
        self,
        config: CoordinationConfig,
        node_name: str | None,
        make: Callable[[str, float], Job],
        stopping: threading.Event,
        enter_sec: float | None = None,
    ) -> None:
        self._config = config
        self._node_name = node_name
        self._make = make
        self._stopping = stopping
        self._enter_sec = ENTER_SEC if enter_sec is None else enter_sec
        self._until = time.monotonic() + self._enter_sec
        self._job: Job | None = None

    def join(self) -> Job:
        """A job of this worker's, running.

        Raises
        ------
        NotRunning
            The worker was stopped meanwhile.
        ConfigurationError, TimeoutError, JobsyncError
            See :meth:`reach` and :meth:`Job.start() <jobsync_orm.Job.start>`.
        """
        if self._node_name is not None:
            try:
                return self._started(self._node_name, self._enter_sec)
            except NodeNameInUse as error:
                raise NodeNameInUse(
                    f"{error}. Leave node_name out, and each process takes a name of its own"
                ) from error
        if self._config.create_tables:
            from jobsync_orm import migrate

            migrate.upgrade(self._config)
        with FreeName(self._config) as free:
            while True:
                try:
                    return self._started(self.reach(free.next), max(1.0, self._until - time.monotonic()))
                except NodeNameInUse:
                    # A live one that was just making its connection anew.
                    if time.monotonic() > self._until:
                        raise

    def reach(self, call: Callable[[], T]) -> T:
        """``call``, once the database can be reached.

        Raises
        ------
        ConfigurationError
            The database refuses this worker.
        TimeoutError
            It could not be reached in time.
        NotRunning
            The worker was stopped meanwhile.
        """
        say_at = 0.0
        while True:
            self.refuse_if_stopped()
            try:
                return call()
            except SessionLost as lost:
                if (refused := refusal(lost, self._config)) is not None:
                    raise refused from lost
                left = self._until - time.monotonic()
                if left <= 0:
                    raise TimeoutError(
                        f"the database could not be reached in {self._enter_sec:.0f} s: {lost}"
                    ) from lost
                if time.monotonic() >= say_at:
                    say_at = time.monotonic() + SAY_SEC
                    logger.warning(
                        "waiting for the database: %s; trying for %.0f s more",
                        lost,
                        left,
                        extra=fields("waiting_for_database", self._node_name),
                    )
                self._stopping.wait(TRY_SEC)

    def give_up(self) -> None:
        """Make :meth:`join` end that waits in another thread. ``stopping`` is set."""
        if self._job is not None:
            self._job.give_up()

    def refuse_if_stopped(self) -> None:
        """Raise NotRunning if the worker is to stop."""
        if self._stopping.is_set():
            raise NotRunning("this worker was stopped while it was starting")

    def _started(self, node_name: str, seconds: float) -> Job:
        self._job = job = self._make(node_name, seconds)
        try:
            self.refuse_if_stopped()
            return job.start()
        finally:
            self._job = None
