"""How a worker's pump stops: within its grace, whatever the database and the executors do. One part of the pump.

What runs is waited for until shortly before the grace is over. Then what can be ended is ended, what has not ended is
given back, and everything is written down, for as long as there is time.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from jobsync_orm.coordinator.session import Session, SessionLost, StatementFailed
from jobsync_orm.logs import fields

if TYPE_CHECKING:
    from jobsync_orm.worker.attempts import Executor
    from jobsync_orm.worker.pump import Pump

__all__ = ["LEAVE_LEAST_SEC", "NODE_SEC", "Leaving"]

logger = logging.getLogger("jobsync_orm")

# Of its grace, a worker that stops keeps so much for giving back what has not ended and writing everything down, but no
# more than this share. With a grace that is short it takes a second for that in any case.
LEAVE_SEC, LEAVE_SHARE, LEAVE_LEAST_SEC = 2.0, 0.25, 1.0

# Of that, a process has so much to end.
EXIT_SEC = 0.5

# What its node has of that, to leave the cluster.
NODE_SEC = 0.3

# Between tries to write down how attempts ended.
TRY_SEC, LOOK_SEC = 0.05, 0.02


class Leaving:
    """See above.

    Parameters
    ----------
    pump : Pump
        Whose part this is.
    """

    def __init__(self, pump: Pump) -> None:
        self._pump = pump
        self._begun = threading.Event()
        self.wait_until = math.inf
        """Until when attempts are waited for; ``time.monotonic()``."""
        self.end_by = math.inf
        """When the worker is to have left, its node included."""
        self.in_order = False
        """Whether the database was there to the end."""
        self.farewells: list[Callable[[Session], None]] = []
        """Done last, when everything is written down."""

    @property
    def has_begun(self) -> bool:
        """Whether nothing is claimed any more."""
        return self._begun.is_set()

    def begin(self, grace_sec: float) -> None:
        """Claim nothing more. A second call may shorten the grace. Any thread may call this."""
        now = time.monotonic()
        wait_sec = grace_sec - min(LEAVE_SEC, LEAVE_SHARE * grace_sec)
        self.wait_until = min(self.wait_until, now + wait_sec)
        self.end_by = min(self.end_by, now + max(grace_sec - EXIT_SEC, wait_sec + LEAVE_LEAST_SEC))
        # A statement that hangs leaves time for another try.
        self._pump.line.hang_until(self.wait_until + (self.end_by - self.wait_until) / 4)
        self._begun.set()

    def is_due(self) -> bool:
        """Whether there is nothing left to wait for."""
        if not self._begun.is_set():
            return False
        pump = self._pump
        return time.monotonic() >= self.wait_until or not (pump.under_way or pump.reports.there_are)

    def leave(self) -> None:
        """Give back what has not ended, and write everything down."""
        pump = self._pump
        pump.claiming.give_back_unbegun()
        until = self.end_by - NODE_SEC
        # What can be ended is ended before its job is given to others; threads are told.
        now = time.monotonic()
        self.end_executors(now + max(0.0, until - now) / 2)
        pump.reports.take()
        unfinished = [attempt for attempt in pump.under_way.values() if not attempt.over]
        for attempt in unfinished:
            attempt.context.cancelled.set("stopping")
        pump.reports.release(unfinished)
        pump.line.hang_until(until)
        while not pump.line.is_given_up:
            pump.reports.take()
            if not pump.reports.unwritten:
                self._say_farewell()
                return
            try:
                if not pump.line.is_open and not pump.connect():
                    break
                if pump.reports.write_at() <= time.monotonic():
                    pump.reports.write()
                else:
                    time.sleep(LOOK_SEC)
            except (SessionLost, StatementFailed) as error:
                logger.warning(
                    "%s: %s while stopping; trying again",
                    pump.node_name,
                    error,
                    extra=fields("stop_failed", pump.node_name),
                )
                time.sleep(TRY_SEC)
            if time.monotonic() > until:
                break
        pump.reports.take()
        if unwritten := pump.reports.unwritten:
            logger.warning(
                "%s: how %d attempts ended could not be written down: they will be taken for dead, and run again",
                pump.node_name,
                unwritten,
                extra=fields("endings_unwritten", pump.node_name),
            )

    def end_executors(self, until: float | None = None) -> None:
        """All at once, and without those that take longer than until this moment; None takes a second at most."""
        if until is None:
            now = time.monotonic()
            until = now + min(LEAVE_LEAST_SEC, max(0.0, self.end_by - now))
        ending = []
        for executor in self._pump.executors.values():
            thread = threading.Thread(target=self._end_executor, args=(executor,), name="jobsync-ending", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # the system has no more of them
                self._end_executor(executor)
            else:
                ending.append(thread)
        for thread in ending:
            thread.join(max(0.0, until - time.monotonic()))

    def _end_executor(self, executor: Executor) -> None:
        try:
            executor.stop(0)
        except Exception:
            # What has ended is written down in any case.
            logger.exception(
                "%s: an executor did not stop in order",
                self._pump.node_name,
                extra=fields("executor_failed", self._pump.node_name),
            )

    def _say_farewell(self) -> None:
        line = self._pump.line
        if not line.is_open:
            return  # others will notice
        try:
            for farewell in self.farewells:
                farewell(line.session)
        except (SessionLost, StatementFailed) as error:
            logger.warning(
                "%s: %s while stopping", self._pump.node_name, error, extra=fields("stop_failed", self._pump.node_name)
            )
        self.in_order = line.is_open
