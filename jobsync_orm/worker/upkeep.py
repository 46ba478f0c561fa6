"""The duties of one worker, tied to its pump."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from jobsync_orm.worker.maintenance import Figures, Orders, Place, Presence, Promotion, Rescue, Unblocking
from jobsync_orm.worker.unserved import Unserved

if TYPE_CHECKING:
    from jobsync_orm.worker.attempts import Why
    from jobsync_orm.worker.pump import Pump

__all__ = ["Upkeep"]

# Attempts that were claimed less than this many seconds ago are not asked about yet: most are over by then.
YOUNG_SEC = 0.5


class Upkeep:
    """Gives ``pump`` the duties of ``maintenance.py``.

    Parameters
    ----------
    pump : Pump
        Of this worker; it has not been started.
    incarnation : callable
        This life of the node; empty while it is no member.
    concurrency : int
        Slots of the worker, for its row.
    poll_sec : float
        Seconds between looks for jobs of which no notification told.
    """

    def __init__(self, pump: Pump, incarnation: Callable[[], str], concurrency: int, poll_sec: float) -> None:
        self._pump = pump
        sql, node = pump.queue.statements, pump.node_name
        self.promotion = Promotion(sql, self._ready, poll_sec)
        self.rescue = Rescue(sql, node, self._ready, pump.queue.audience)
        self.presence = Presence(
            sql,
            node,
            incarnation,
            sorted(pump.handlers),
            concurrency,
            self._figures,
            self.rescue.at_once,
            lambda: pump.finishes,
        )
        orders = Orders(sql, self._held, self._pause, self._give_up, self._drain, node)
        unblocking = Unblocking(sql, node, pump.waiting, self._ready)
        # First what may tell that there is something to claim, or nothing to be claimed.
        pump.duties += [orders, self.rescue, self.promotion, unblocking, self.presence, Unserved(sql, node)]
        pump.delayed = self.promotion.expect
        pump.leaving.farewells += [
            lambda session: unblocking.run(session) if pump.waiting else None,
            self.presence.leave,
        ]

    def rebalanced(self) -> None:
        """The cluster has changed: somebody may have died. Any thread may call this."""
        self.rescue.at_once()
        self._pump.wake()

    def _ready(self, places: Sequence[Place]) -> None:
        pump = self._pump
        if not places:  # somebody else was faster, and may have left some
            pump.survey_soon()
        for type, priority, keyed in places:
            if not keyed:
                pump.look_again(type, priority)
        if keyed_places := [place for place in places if place[2]]:
            payload = json.dumps(keyed_places)
            for duty in pump.duties:
                duty.woken({payload})

    def _held(self) -> Iterable[tuple[int, int]]:
        old = time.monotonic() - YOUNG_SEC
        for key, attempt in self._pump.under_way.items():
            if attempt.claimed_at > old:  # they are in order
                break
            if not attempt.over:
                yield key

    def _pause(self, types: frozenset[str]) -> None:
        self._pump.paused = set(types)
        self._pump.survey_soon()

    def _drain(self, drained: bool) -> None:
        self._pump.drained = drained
        self._pump.survey_soon()

    def _give_up(self, job_id: int, attempt: int, why: Why) -> None:
        found = self._pump.under_way.get((job_id, attempt))
        if found is not None:
            self._pump.give_up(found, why)

    def _figures(self) -> Figures:
        counters = self._pump.counters
        running = sum(a.began_at is not None and not a.over for a in self._pump.under_way.values())
        return Figures(running, counters.completed, counters.failed, counters.claimed_at)
