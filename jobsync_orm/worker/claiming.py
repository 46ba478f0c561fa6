"""What a worker claims, when, and how many: one part of its pump.

From the lanes of jobs without a key and from the keys that are this worker's, whichever has the more urgent, as many as
there is room for. What turned out to be too many goes back.
"""

from __future__ import annotations

import json
import math
import time
from typing import TYPE_CHECKING

from jobsync_orm.coordinator.session import SessionLost, StatementFailed, array
from jobsync_orm.queue.handlers import option_arrays
from jobsync_orm.queue.jobs import claimed
from jobsync_orm.worker.lanes import Lanes
from jobsync_orm.worker.room import Room

if TYPE_CHECKING:
    from jobsync_orm.worker.attempts import Executor
    from jobsync_orm.worker.pump import Pump

__all__ = ["Claiming"]

# A server that has not answered by now is asked again on a new connection.
ANSWER_SEC = 10.0

# A claim that failed is tried again after this time.
FAILED_SEC = 0.5

# Claims of one turn for one executor, where jobs with a key and without are as urgent as each other.
MOST_CLAIMS = 8

# A survey takes this share of the time at most.
SURVEY_SHARE = 20

# Jobs taken in advance go back when they have waited for a slot this long. How often that is looked at.
STALE_SEC, STALE_LOOK_SEC = 1.0, 0.25

# Nothing more is claimed while so many batches of ended attempts could not be written down.
MOST_UNWRITTEN = 3

# Of an answer with claimed jobs: with longer ones fewer jobs are claimed at a time.
MOST_CHARACTERS = 8_000_000


class Claiming:
    """See above.

    Parameters
    ----------
    pump : Pump
        Whose part this is. All calls are of its thread.
    batch : int
        Most jobs of one statement.
    """

    def __init__(self, pump: Pump, batch: int) -> None:
        self._pump = pump
        self._sql = pump.queue.statements
        self._batch = batch
        self.room = Room(batch)
        self.survey_at = 0.0
        self.stale_at = 0.0
        self._survey_not_before = 0.0
        self._lanes = Lanes(pump.queue.ageing_sec)
        self.clock_offset = 0.0
        """The database's clock less ``time.monotonic()``, in microseconds; 0 as long as it is not known."""
        self._claim_most = batch
        self._claim_not_before = 0.0

    def connected(self) -> None:
        """The connection is new. What happened meanwhile, nobody has told."""
        self.survey_at = self._survey_not_before = 0.0

    def look_again(self, type: str, priority: int) -> None:
        """There may be jobs of this type and priority that no claim has seen."""
        if type in self._pump.handlers:
            self._lanes.look_again(type, priority, int(time.monotonic() * 1e6 + self.clock_offset))

    def survey_soon(self) -> None:
        """Look everywhere."""
        self.survey_at = min(self.survey_at, self._survey_not_before)

    def survey(self) -> None:
        """Ask for all lanes that have jobs."""
        pump = self._pump
        began = time.monotonic()
        ((answer, clock),) = pump.line.session.prepared(self._sql.survey, array(pump.handlers), timeout=ANSWER_SEC)
        now = time.monotonic()
        self._lanes.surveyed([(type, priority, at) for type, priority, at in json.loads(answer or "[]")])
        self.clock_offset = int(clock or 0) - now * 1e6
        self._survey_not_before = now + SURVEY_SHARE * (now - began)
        self.survey_at = max(now + pump.poll_sec, self._survey_not_before)

    def _allowed(self, kind: str, executor: Executor) -> dict[str, int]:
        """How many jobs to claim for an executor, by type. Empty if there is nothing to claim."""
        pump = self._pump
        free = executor.free()
        allowed: dict[str, int] = {}
        for type, handler in pump.handlers.items():
            if handler.kind != kind or type in pump.paused:
                continue
            ahead = self.room.ahead(type, executor.slots)
            # Not one by one: each claim is a commit.
            if free > 0 or free + ahead > ahead // 2:
                allowed[type] = min(self._claim_most, free + ahead)
        return {type: many for type, many in allowed.items() if many > 0}

    def _may_claim(self) -> bool:
        pump = self._pump
        too_many = pump.reports.unwritten > MOST_UNWRITTEN * self._batch
        return bool(pump.incarnation) and "" not in pump.paused and not too_many

    def claim_all(self) -> None:
        """Claim for each executor what it has room for."""
        pump = self._pump
        if not self._may_claim() or time.monotonic() < self._claim_not_before:
            return
        answered_at = pump.counters.claimed_at
        for kind, executor in pump.executors.items():
            try:
                for _ in range(MOST_CLAIMS):
                    allowed = self._allowed(kind, executor)
                    if not allowed or not self._claim_next(allowed):
                        break
            except (StatementFailed, SessionLost) as error:
                # It may have been too much for the time or the memory there is.
                self._claim_most = max(1, self._claim_most // 2)
                self._claim_not_before = time.monotonic() + FAILED_SEC
                pump.chores.fails("claiming", error)
                raise
        if pump.counters.claimed_at != answered_at:
            pump.failing.pop("claiming", None)

    def _claim_next(self, allowed: dict[str, int]) -> bool:
        """Claim from lanes or of keys, whichever has the more urgent, down to the other's urgency. Whether to go on."""
        pump = self._pump
        now = time.monotonic()
        lanes = self._lanes.urgency(allowed, now)
        keys = math.inf if pump.keyed is None else pump.keyed.keys.urgency(allowed, now)
        if keys <= lanes and keys < math.inf:
            self._claim_keyed(allowed, lanes)
        else:
            self._claim(allowed, keys)
        return keys < math.inf

    def _claim_keyed(self, allowed: dict[str, int], before: float) -> None:
        pump = self._pump
        assert pump.keyed is not None
        jobs = pump.keyed.claim(pump.line.session, allowed, before, pump.incarnation)
        self._claim_most = min(self._batch, 2 * self._claim_most)
        if jobs:
            pump.submit(jobs)

    def _claim(self, allowed: dict[str, int], before: float) -> None:
        pump = self._pump
        began = time.monotonic()
        walks = self._lanes.plan(allowed, began, before)
        if not walks:
            return
        most = max(walk.most for walk in walks)
        ((answer,),) = pump.line.session.prepared(
            self._sql.claim,
            array([walk.lane.type for walk in walks]),
            array([walk.lane.priority for walk in walks]),
            array([walk.mark[0] for walk in walks]),
            array([walk.mark[1] for walk in walks]),
            array([walk.most for walk in walks]),
            most,
            pump.node_name,
            pump.incarnation,
            *option_arrays(pump.handlers, [walk.lane.type for walk in walks]),
            timeout=ANSWER_SEC,
        )
        jobs = claimed(answer)
        if len(answer or "") > MOST_CHARACTERS:
            self._claim_most = max(1, min(self._claim_most, len(jobs)) // 2)
        else:
            self._claim_most = min(self._batch, 2 * self._claim_most)
        if jobs:
            pump.submit(jobs)
        else:
            pump.counters.claimed_at = time.monotonic()
        self._lanes.claimed(walks, jobs, most, began, time.monotonic())

    def give_back_stale(self) -> None:
        """Jobs taken in advance whose slots turned out to be busy for longer are for other workers."""
        pump = self._pump
        now = time.monotonic()
        if now < self.stale_at:
            return
        self.stale_at = now + STALE_LOOK_SEC
        stale = {
            attempt.handler.kind
            for attempt in list(pump.under_way.values())
            if attempt.began_at is None and not attempt.over and now - attempt.claimed_at > STALE_SEC
        }
        for kind in stale:
            attempts = pump.executors[kind].withdraw()
            for type in {attempt.job.type for attempt in attempts}:
                self.room.stalled(type, STALE_SEC)
            pump.reports.release(attempts)

    def give_back_unbegun(self) -> None:
        """Of a worker that stops, or is drained: what waits for a slot."""
        pump = self._pump
        for executor in pump.executors.values():
            pump.reports.release(executor.withdraw())

    def due_at(self) -> float:
        """When to claim, or to give back, unless a notification or a report comes first."""
        pump = self._pump
        due = [math.inf]
        if pump.under_way:
            due.append(self.stale_at)
        if self._may_claim():
            for kind, executor in pump.executors.items():
                allowed = self._allowed(kind, executor)
                if allowed:
                    at = self._lanes.due_at(allowed)
                    if pump.keyed is not None:
                        at = min(at, pump.keyed.keys.due_at(allowed, time.monotonic()))
                    due.append(max(at, self._claim_not_before))
        return min(due)
