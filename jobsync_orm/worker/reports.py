"""What executors report, and what becomes of it when it has been written down: one part of a worker's pump."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING

from jobsync_orm.logs import fields
from jobsync_orm.models.states import AttemptOutcome, JobState
from jobsync_orm.queue.jobs import Ending
from jobsync_orm.worker.finishing import Finishing

if TYPE_CHECKING:
    from jobsync_orm.queue.jobs import ClaimedJob
    from jobsync_orm.worker.attempts import Attempt
    from jobsync_orm.worker.pump import Pump

__all__ = ["Reports"]

logger = logging.getLogger("jobsync_orm")

# A server that has not answered by now is asked again on a new connection.
ANSWER_SEC = 10.0


class Reports:
    """See above.

    Parameters
    ----------
    pump : Pump
        Whose part this is. All calls but :meth:`add` are of its thread.
    batch : int
        Most endings of one statement.
    """

    def __init__(self, pump: Pump, batch: int) -> None:
        self._pump = pump
        self._finishing = Finishing(pump.queue.statements, batch, ANSWER_SEC, self.lost)
        self._reports: deque[tuple[Attempt, Ending]] = deque()

    @property
    def there_are(self) -> bool:
        """Whether something has been reported that has not been taken in."""
        return bool(self._reports)

    @property
    def unwritten(self) -> int:
        """How many endings the database has not acknowledged."""
        return len(self._finishing)

    @property
    def too_late(self) -> int:
        """How many attempts ended too late."""
        return self._finishing.lost

    def write_at(self) -> float:
        """When there is something to write, of what has been taken in."""
        return self._finishing.due_at()

    def add(self, attempt: Attempt, ending: Ending) -> None:
        """An attempt has ended."""
        self._reports.append((attempt, ending))

    def take(self) -> None:
        """Take in what has been reported; the first report of each attempt counts."""
        reports = self._reports
        if not reports:
            return
        ended: list[tuple[Attempt, Ending]] = []
        while reports:
            report = reports.popleft()
            attempt = report[0]
            if not attempt.over:
                attempt.over = True
                ended.append(report)
        lasted = [(a.job.type, e.ended_at - e.began_at) for a, e in ended if e.outcome != "released"]
        self._pump.claiming.room.learn(lasted)
        self._finishing.add(ended)

    def lost(self, attempt: Attempt) -> None:
        """Its job turned out to be somebody else's."""
        self._pump.under_way.pop((attempt.job.id, attempt.job.attempt), None)
        if self._pump.keyed is not None:
            self._pump.keyed.settled(attempt.job, JobState.PENDING)
        self._pump.counters.lost += 1
        if self._pump.queue.audience.active:
            self._pump.telling.lost(attempt)

    def write(self) -> None:
        """Write one batch of endings down."""
        pump = self._pump
        done, waiting = self._finishing.write(pump.line.session)
        if done and pump.queue.audience.active:
            pump.telling.ended(done)
        under_way, counters = pump.under_way, pump.counters
        completed = 0
        for attempt, ending in done:
            under_way.pop((ending.job_id, ending.attempt), None)
            if attempt.job.key is not None and pump.keyed is not None:
                pump.keyed.settled(attempt.job, ending.state)
            outcome = ending.outcome
            if outcome is AttemptOutcome.COMPLETED:
                completed += 1
            elif outcome is AttemptOutcome.RELEASED:
                counters.released += 1
                pump.claiming.look_again(attempt.job.type, attempt.job.priority)
            elif outcome in (AttemptOutcome.FAILED, AttemptOutcome.TIMEOUT, AttemptOutcome.DISCARDED):
                counters.failed += 1
                _tell_failed(pump.node_name, attempt.job, ending)
            elif outcome is AttemptOutcome.DIED:
                counters.lost += 1
            if ending.delay is not None and pump.delayed is not None:
                pump.delayed(ending.delay)
        counters.completed += completed
        if waiting:
            pump.waiting.update(waiting)

    def release(self, attempts: Iterable[Attempt]) -> None:
        """Give jobs back that have not begun, or are not waited for any longer."""
        now = time.monotonic()
        for attempt in attempts:
            job = attempt.job
            began = attempt.ran_since()
            released = Ending(job.id, job.attempt, AttemptOutcome.RELEASED, JobState.PENDING, began, now)
            self._reports.append((attempt, released))


def _tell_failed(node: str, job: ClaimedJob, ending: Ending) -> None:
    what = f"job {job.id} ({job.type}), attempt {job.attempt}: {ending.error}"
    if ending.state is JobState.FAILED:
        logger.error(
            "%s; it has failed for good%s",
            what,
            f"\n{ending.traceback}" if ending.traceback else "",
            extra=fields("job_failed", node, job=job),
        )
    else:
        logger.warning("%s; again in %.3g s", what, ending.delay or 0, extra=fields("attempt_failed", node, job=job))
