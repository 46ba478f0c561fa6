"""What a pump does beside running jobs, one thing at a time, in turn: one part of a worker's pump."""

from __future__ import annotations

import logging
import math
import time
from typing import TYPE_CHECKING, Protocol

from jobsync_orm.coordinator.session import Session, SessionLost, StatementFailed
from jobsync_orm.logs import fields

if TYPE_CHECKING:
    from jobsync_orm.worker.pump import Pump

__all__ = ["Chores", "Duty"]

logger = logging.getLogger("jobsync_orm")

# What failed is tried again after this time.
FAILED_SEC = 0.5


class Duty(Protocol):
    """Something the pump does now and then, in its thread and on its connection."""

    def due_at(self) -> float:
        """When it is to run next; ``time.monotonic()``."""

    def run(self, session: Session) -> None:
        """Do it. What it raises is logged, and it is tried again after half a second."""

    def woken(self, payloads: set[str]) -> None:
        """These notifications have come on the queue's channel."""


class Chores:
    """The duties, the survey of lanes, and the look for jobs of lost answers.

    Parameters
    ----------
    pump : Pump
        Whose part this is. All calls are of its thread.
    """

    def __init__(self, pump: Pump) -> None:
        self._pump = pump
        self.first = True
        """Whether all that is due is done before the next claim."""
        self._not_before: dict[Duty, float] = {}
        self._last = -1

    def connected(self) -> None:
        """The connection is new. What happened meanwhile, nobody has told."""
        self.first = True
        for duty in self._pump.duties:
            duty.woken({""})

    def due_at(self) -> float:
        """When the next one is due."""
        return min(self._due())

    def do_first(self) -> None:
        """All that is due, if that is to be done before the next claim: what has been ordered holds for it."""
        if not self.first:
            return
        self.first = False
        for _ in range(len(self._pump.duties) + 2):
            if not self.do_one():
                break

    def do_one(self) -> bool:
        """Do one thing that is due, in turn: a claim never waits for all of them, and none of them for another."""
        pump = self._pump
        now, due = time.monotonic(), self._due()
        for step in range(1, len(due) + 1):
            number = (self._last + step) % len(due)
            if due[number] <= now:
                self._last = number
                if number < len(pump.duties):
                    self._do(pump.duties[number])
                elif number == len(pump.duties):
                    pump.claiming.survey()
                else:
                    pump.adopting.adopt()
                return True
        return False

    def fails(self, what: str, error: Exception) -> None:
        """For the worker's health."""
        since, _ = self._pump.failing.get(what, (time.monotonic(), ""))
        self._pump.failing[what] = (since, str(error))

    def _due(self) -> list[float]:
        """When each duty is due, a survey, and a look for jobs of lost answers."""
        pump = self._pump
        due = [max(duty.due_at(), self._not_before.get(duty, 0.0)) for duty in pump.duties]
        due.append(math.inf if pump.stops else pump.claiming.survey_at)
        due.append(pump.adopting.adopt_at())
        return due

    def _do(self, duty: Duty) -> None:
        pump, name = self._pump, type(duty).__name__
        try:
            duty.run(pump.line.session)
            self._not_before.pop(duty, None)
            pump.failing.pop(name, None)
        except SessionLost:
            raise
        except Exception as error:
            self._not_before[duty] = time.monotonic() + FAILED_SEC
            self.fails(name, error)
            if isinstance(error, StatementFailed):
                logger.warning(
                    "%s: %s: %s; trying again",
                    pump.node_name,
                    name,
                    error,
                    extra=fields("chore_failed", pump.node_name),
                )
            else:
                logger.exception(
                    "%s: %s failed; trying again", pump.node_name, name, extra=fields("chore_failed", pump.node_name)
                )
