"""Ends attempts that take longer than their job's timeout, in a thread of its own.

So nothing delays it: neither a database that does not answer, nor a handler. It asks the executors a few times a second
what they run, since when; an attempt is ended within ``LOOK_SEC`` after its time is over. How it is ended is for its
executor: a child process is killed, a task cancelled, a thread told and replaced.

Time is ``time.monotonic()``, so setting a clock ends nothing. Stopping the machine or this process does not stop it
everywhere: where it goes on, attempts that have been stopped may be found to be over, as the database finds too.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from jobsync_orm.logs import fields
from jobsync_orm.queue.backoff import Backoff

if TYPE_CHECKING:
    from jobsync_orm.worker.attempts import Attempt, Executor

__all__ = ["LOOK_SEC", "Watchdog"]

logger = logging.getLogger("jobsync_orm")

LOOK_SEC: Final = 0.25

# Longest that a worker waits for this thread, which may be in a backoff of the application's.
STOP_SEC: Final = 2.0


class Watchdog:
    """Watches what the executors of one worker run.

    Parameters
    ----------
    executors : mapping
        Kind -> executor.
    name : str
        Of the thread.
    """

    def __init__(self, executors: Mapping[str, Executor], name: str = "jobsync-watchdog") -> None:
        self._executors = executors
        self._ended: dict[Executor, set[Attempt]] = {}
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch, name=name[:40], daemon=True)

    def start(self) -> None:
        """Start watching."""
        self._thread.start()

    def stop(self, seconds: float = STOP_SEC) -> None:
        """Stop watching, and wait for the end of that for so long, at most ``STOP_SEC``."""
        self._end.set()
        if self._thread.is_alive():
            self._thread.join(min(seconds, STOP_SEC))

    def _watch(self) -> None:
        wait = 0.0
        while not self._end.wait(wait):
            wait = LOOK_SEC
            for executor in self._executors.values():
                try:
                    executor.look(time.monotonic())
                    wait = min(wait, self._look(executor))
                except BaseException:
                    # Whatever is wrong with one attempt, the others have timeouts too.
                    logger.exception(
                        "%s: looking for attempts that take too long failed",
                        self._thread.name,
                        extra=fields("watchdog_failed"),
                    )

    def _look(self, executor: Executor) -> float:
        """End what is late; returns the seconds until the next is."""
        running = executor.running()
        now = time.monotonic()
        soonest = LOOK_SEC
        ended = self._ended.get(executor, set())
        late = set()
        for attempt in running:
            left = attempt.ends_at() - now
            if left > 0:
                soonest = min(soonest, left)
                continue
            late.add(attempt)
            if attempt not in ended:  # a task has a while to give way
                job = attempt.job
                logger.warning(
                    "job %d (%s) has taken more than %g s: ending it",
                    job.id,
                    job.type,
                    job.timeout,
                    extra=fields("timeout", attempt.context.worker, job=job),
                )
                self._give_up(executor, attempt)
        self._ended[executor] = late
        return soonest

    def _give_up(self, executor: Executor, attempt: Attempt) -> None:
        if isinstance(attempt.handler.backoff, Backoff):
            executor.give_up(attempt, "timeout")
            return
        # The application's function is asked when to try again, and the timeouts of others do not wait for it.
        threading.Thread(
            target=executor.give_up, args=(attempt, "timeout"), name="jobsync-timeout", daemon=True
        ).start()
