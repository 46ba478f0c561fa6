"""Attempts that this worker holds without knowing, or under the name of a life that is over: one part of its pump.

A claim whose answer was lost has taken jobs that nobody runs. And a node that was taken for dead and has joined anew
has another incarnation, which its attempts have to bear before somebody rescues them.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from jobsync_orm.coordinator.session import array
from jobsync_orm.logs import fields
from jobsync_orm.queue.jobs import claimed

if TYPE_CHECKING:
    from jobsync_orm.worker.attempts import Attempt
    from jobsync_orm.worker.pump import Pump

__all__ = ["Adopting"]

logger = logging.getLogger("jobsync_orm")

# A server that has not answered by now is asked again on a new connection.
ANSWER_SEC = 10.0

# What could not be had is tried again after this time.
FAILED_SEC = 0.5

# After a new connection: when to look for jobs that a claim took whose answer was lost. The server may go on with a
# statement for a while after its client has left.
ADOPT_SEC = (0.0, 1.0, 5.0, ANSWER_SEC, 30.0)


class Adopting:
    """See above.

    Parameters
    ----------
    pump : Pump
        Whose part this is. All calls are of its thread.
    incarnation : callable
        This life of the node in its cluster, or an empty text while it is no member.
    """

    def __init__(self, pump: Pump, incarnation: Callable[[], str]) -> None:
        self._pump = pump
        self._sql = pump.queue.statements
        self._incarnation = incarnation
        self._adopt_at: list[float] = []
        self._stranded: list[Attempt] = []  # claimed in a life of the node that is over
        self._restamp_at = 0.0

    def connected(self) -> None:
        """The connection is new: a claim may have been under way on the one before."""
        now = time.monotonic()
        self._adopt_at = [now + sec for sec in ADOPT_SEC]

    def adopt_at(self) -> float:
        """When to look for jobs of lost answers."""
        return self._adopt_at[0] if self._adopt_at else math.inf

    def restamp_at(self) -> float:
        """When attempts of the life before are to be had again."""
        return self._restamp_at if self._stranded else math.inf

    def check_incarnation(self) -> None:
        """See whether this node has been taken for dead and has joined anew: its attempts then bear another life's
        name, and whoever looks for jobs of dead nodes takes them."""
        pump = self._pump
        now_called = self._incarnation()
        if now_called == pump.incarnation or not now_called:
            return
        pump.incarnation = now_called
        self._stranded = list(pump.under_way.values())
        self._restamp_at = pump.claiming.survey_at = 0.0

    def restamp(self) -> None:
        """Have the attempts of the life before go on in this one, if nobody has taken them yet. Often nothing to do."""
        pump = self._pump
        if not self._stranded:
            return
        attempts = [attempt for attempt in self._stranded if not attempt.over]
        if not attempts:
            self._stranded = []
            return
        if time.monotonic() < self._restamp_at:
            return
        self._restamp_at = time.monotonic() + FAILED_SEC
        ids, numbers = array(a.job.id for a in attempts), array(a.job.attempt for a in attempts)
        ((answer,),) = pump.line.session.execute(
            self._sql.restamp, ids, numbers, pump.node_name, pump.incarnation, timeout=ANSWER_SEC
        )
        kept = set(json.loads(answer or "[]"))
        missing = [attempt for attempt in attempts if attempt.job.id not in kept]
        ids, numbers = array(a.job.id for a in missing), array(a.job.attempt for a in missing)
        ((answer,),) = pump.line.session.execute(self._sql.lost, ids, numbers, timeout=ANSWER_SEC)
        # Held by somebody's transaction: that of the attempt itself, perhaps, which is about to commit.
        held = {id for id, _, under_way, _ in json.loads(answer or "[]") if under_way}
        self._stranded = [attempt for attempt in missing if attempt.job.id in held]
        taken = [attempt for attempt in missing if attempt.job.id not in held]
        logger.warning(
            "%s has joined anew: %d attempts under way go on, %d have been taken from it",
            pump.node_name,
            len(kept),
            len(taken),
            extra=fields("attempts_kept", pump.node_name),
        )
        for attempt in taken:
            pump.give_up(attempt, "lost")

    def adopt(self) -> None:
        """Run what this node holds and does not know of: jobs of a claim whose answer was lost."""
        pump = self._pump
        if not pump.incarnation or pump.stops:
            self._adopt_at = []
            return
        del self._adopt_at[0]
        session, incarnation = pump.line.session, pump.incarnation
        ((answer,),) = session.execute(self._sql.held, incarnation, timeout=ANSWER_SEC)
        unknown = [id for id, attempt in json.loads(answer or "[]") if (id, attempt) not in pump.under_way]
        if unknown:
            ((answer,),) = session.execute(self._sql.adopt, array(unknown), incarnation, timeout=ANSWER_SEC)
            jobs = [job for job in claimed(answer) if (job.id, job.attempt) not in pump.under_way]
            logger.warning(
                "%s: %d jobs were claimed by a statement whose answer was lost",
                pump.node_name,
                len(jobs),
                extra=fields("claim_adopted", pump.node_name),
            )
            pump.submit([job for job in jobs if job.type in pump.handlers])
