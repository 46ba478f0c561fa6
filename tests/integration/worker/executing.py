"""An executor on its own, without a worker: what is submitted, and what it reports."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any

from jobsync_orm import CoordinationConfig
from jobsync_orm.queue import CancelFlag, ClaimedJob, Ending, JobContext, JobQueue
from jobsync_orm.worker.attempts import Attempt
from jobsync_orm.worker.watchdog import Watchdog
from tests.integration.cluster import wait_for


class Bench:
    """Runs attempts in the executor that ``make`` makes of a queue and a report."""

    def __init__(self, make: Callable[..., Any], slots: int = 2) -> None:
        self.queue = JobQueue(CoordinationConfig(url="postgresql+psycopg://nobody@localhost:1/nowhere"))
        self.endings: dict[int, Ending] = {}
        self.reports: list[int] = []
        self.executor = make(self.queue, slots, self._report)
        self._numbers = itertools.count(1)
        self._watchdog = Watchdog({"it": self.executor})

    def _report(self, attempt: Attempt, ending: Ending) -> None:
        self.reports.append(attempt.job.id)
        self.endings.setdefault(attempt.job.id, ending)

    def __enter__(self) -> Bench:
        self.executor.start()
        self._watchdog.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._watchdog.stop()
        self.executor.stop(0)

    def submit(self, type: str, timeout: float = 60, **payload: Any) -> Attempt:
        id = next(self._numbers)
        job = ClaimedJob(id, type, 0, 1, 0, 3, timeout, None, payload, 0, 0)
        context = JobContext(self.queue, job, "w1", CancelFlag())
        attempt = Attempt(job, self.queue.handlers[type], context, time.monotonic())
        self.executor.submit(attempt)
        return attempt

    def ending(self, attempt: Attempt) -> Ending:
        """How it ended, when it has."""
        ending = wait_for(lambda: self.endings.get(attempt.job.id), f"{attempt.job.type} has ended")
        assert isinstance(ending, Ending)
        return ending

    def run(self, type: str, timeout: float = 60, **payload: Any) -> Ending:
        return self.ending(self.submit(type, timeout, **payload))
