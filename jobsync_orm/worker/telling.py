"""What a worker tells observers of its jobs: one part of its pump, idle while there are none."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

from jobsync_orm.models.states import AttemptOutcome
from jobsync_orm.observe import AttemptsEnded, EndedAttempt, JobsClaimed, WokenUp

if TYPE_CHECKING:
    from jobsync_orm.queue.jobs import Ending
    from jobsync_orm.worker.attempts import Attempt
    from jobsync_orm.worker.pump import Pump

__all__ = ["Telling"]

# Somebody else had been given the job meanwhile.
LOST = "lost"


class Telling:
    """See above. All calls are of the pump's thread, and only while somebody listens."""

    def __init__(self, pump: Pump) -> None:
        self._pump = pump
        self._audience = pump.queue.audience
        self._node = pump.node_name

    def claimed(self, types: Iterable[str]) -> None:
        """Jobs of these types have been claimed."""
        self._audience.tell(JobsClaimed(self._node, Counter(types)))

    def woken(self, many: int) -> None:
        """Notifications have come."""
        self._audience.tell(WokenUp(self._node, many))

    def ended(self, done: Iterable[tuple[Attempt, Ending]]) -> None:
        """Attempts have ended, and are written down."""
        self._audience.tell(AttemptsEnded(self._node, tuple([self._attempt(*item) for item in done])))

    def lost(self, attempt: Attempt) -> None:
        """An attempt has ended, and its job was somebody else's."""
        ended = EndedAttempt(attempt.job.type, LOST, "", self._waited(attempt), None)
        self._audience.tell(AttemptsEnded(self._node, (ended,)))

    def _attempt(self, attempt: Attempt, ending: Ending) -> EndedAttempt:
        outcome = LOST if ending.outcome is AttemptOutcome.DIED else ending.outcome.value
        took = None if attempt.began_at is None else max(0.0, ending.ended_at - attempt.began_at)
        return EndedAttempt(attempt.job.type, outcome, ending.state.value, self._waited(attempt), took)

    def _waited(self, attempt: Attempt) -> float | None:
        offset = self._pump.claiming.clock_offset
        if attempt.began_at is None or not offset:
            return None
        return max(0.0, attempt.began_at + (offset - attempt.job.ready_at) / 1e6)
