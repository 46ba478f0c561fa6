"""Fires periodic jobs. See :mod:`jobsync_orm.queue.schedule` for what is promised."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Protocol

from jobsync_orm.coordinator.clock import now
from jobsync_orm.coordinator.session import Row as Answer
from jobsync_orm.coordinator.session import StatementFailed, array
from jobsync_orm.exceptions import JobsyncError
from jobsync_orm.logs import fields
from jobsync_orm.queue.cron import Cron
from jobsync_orm.queue.schedule import Schedule
from jobsync_orm.queue.statements import QueueStatements

__all__ = ["Ticking"]

logger = logging.getLogger("jobsync_orm")

# The rows are looked at this often even if no tick is near: another worker may have changed one.
LOOK_SEC = 15.0

# After a statement that failed.
AGAIN_SEC = 1.0

# After a firing that changed nothing. Mostly another worker has fired; but the one that had the row locked may have
# done no more than declare it.
NOT_FIRED_SEC = 0.2

TIMEOUT_SEC = 10.0

# Jobs were inserted, but the schedule's row was not updated; see the statement ``fire``.
DIVISION_BY_ZERO = "22012"

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
MICROSECOND = timedelta(microseconds=1)


class Executes(Protocol):
    """A session that runs one statement in a transaction of its own."""

    def execute(self, sql: str, *params: str | int | float | bool | None, timeout: float) -> list[Answer]: ...


@dataclass(frozen=True, slots=True)
class Row:
    """A schedule's row as it was seen; ``fired_until`` in microseconds since 1970."""

    name: str
    type: str
    cron: str
    timezone: str
    fired_until: int


class Ticking:
    """A duty of the pump: fires what is due, and says when it is to be called next.

    Parameters
    ----------
    statements : QueueStatements
        Of the queue.
    schedules : mapping of str to Schedule
        By name, as this process declares them. More may be added while it runs.
    channel : str
        On which workers hear that there are jobs.
    node : str
        This worker, for the log.
    """

    def __init__(self, statements: QueueStatements, schedules: Mapping[str, Schedule], channel: str, node: str) -> None:
        self._sql = statements
        self._schedules = schedules
        self._channel = channel
        self._node = node
        self._known: set[str] = set()
        self._declared: set[str] = set()
        self._crons: dict[tuple[str, str], Cron | None] = {}
        self._complained: set[tuple[str, ...]] = set()
        self._due_at = 0.0

    def due_at(self) -> float:
        """When it is to run next, by the monotonic clock."""
        return self._due_at if self._known == self._schedules.keys() else 0.0

    def woken(self, payloads: set[str]) -> None:
        """Nothing that is notified makes a tick come sooner."""

    def run(self, session: Executes) -> None:
        """Fire every schedule that is due."""
        self._due_at = now() + AGAIN_SEC
        schedules = dict(self._schedules)
        self._known = set(schedules)
        if not schedules:
            self._due_at = float("inf")
            return
        # Once in a worker's life, unless somebody removes a row: two versions do not overwrite each other for ever.
        self._declare(session, [s for name, s in schedules.items() if name not in self._declared])
        moment, rows = self._look(session, schedules)
        # Taken after the answer, so that the tick has come when it is called again.
        looked_at = now()
        self._declared = {row.name for row in rows}
        waits = [self._turn(session, schedules[row.name], row, moment) for row in rows]
        if len(rows) < len(schedules):
            waits.append(AGAIN_SEC)
        self._due_at = looked_at + min([LOOK_SEC, *waits])

    def _declare(self, session: Executes, schedules: list[Schedule]) -> None:
        if schedules:
            session.execute(
                self._sql.declare,
                array(s.name for s in schedules),
                array(s.type for s in schedules),
                array(s.cron.expression for s in schedules),
                array(s.cron.timezone for s in schedules),
                timeout=TIMEOUT_SEC,
            )

    def _look(self, session: Executes, names: Iterable[str]) -> tuple[datetime, list[Row]]:
        [(moment, rows)] = session.execute(self._sql.schedules, array(names), timeout=TIMEOUT_SEC)
        return EPOCH + int(moment or 0) * MICROSECOND, [Row(*row) for row in json.loads(rows or "[]")]

    def _turn(self, session: Executes, schedule: Schedule, row: Row, moment: datetime) -> float:
        """Fire one schedule if it is due. Returned: seconds after ``moment`` until it is to be looked at again."""
        cron = self._cron(schedule, row)
        if cron is None:
            return LOOK_SEC
        fired_until = EPOCH + row.fired_until * MICROSECOND
        if fired_until - moment > timedelta(minutes=1):
            self._complain(
                (row.name, "ahead"),
                f"has been fired until {fired_until}, and the database's clock says {moment}; nothing is fired until "
                f"it gets there (queue.forget_schedule({row.name!r}) begins anew)",
            )
        due = schedule.due(cron, fired_until, moment)
        if due is not None:
            fired_until, ticks = due
            try:
                if not self._fire(session, schedule, row, cron, fired_until, ticks):
                    return NOT_FIRED_SEC
            except StatementFailed as failed:
                if failed.sqlstate == DIVISION_BY_ZERO:
                    self._complain(
                        (row.name, "suppressed"),
                        "cannot be fired: a trigger or rule on the table of schedules suppresses the UPDATE that says "
                        "until when it has been, so nothing was enqueued; remove that trigger, or let it return NEW",
                    )
                    return LOOK_SEC
                # One that the database refuses must not keep the others from being fired.
                logger.exception(
                    "%s: periodic job %r could not be enqueued; trying again",
                    self._node,
                    row.name,
                    extra=fields("tick_failed", self._node),
                )
                return AGAIN_SEC
        following = cron.next(fired_until)
        return LOOK_SEC if following is None else max(0.0, (following - moment).total_seconds())

    def _fire(
        self, session: Executes, schedule: Schedule, row: Row, cron: Cron, until: datetime, ticks: list[datetime]
    ) -> bool:
        """Enqueue the jobs of ``ticks`` if nobody has changed the row. Returned: whether that was so."""
        jobs = [schedule.job(cron, tick) for tick in ticks]
        keyed = schedule.key is not None
        [(fired, inserted, _)] = session.execute(
            self._sql.fire,
            row.name,
            row.type,
            row.cron,
            row.timezone,
            row.fired_until,
            (until - EPOCH) // MICROSECOND,
            array(json.dumps(payload) for payload, _ in jobs),
            array(idempotency_key for _, idempotency_key in jobs),
            schedule.priority,
            schedule.key,
            schedule.max_retries,
            schedule.timeout,
            schedule.retry_blocks_key,
            self._channel,
            json.dumps([[row.type, schedule.priority, keyed]]),
            schedule.max_retries_given,
            schedule.timeout_given,
            timeout=TIMEOUT_SEC,
        )
        if fired == "0":
            return False
        if not ticks:
            logger.warning(
                "%s: periodic job %r has missed its ticks until %s",
                self._node,
                row.name,
                until,
                extra=fields("tick_missed", self._node),
            )
        elif inserted == "[]":
            logger.info(
                "%s: periodic job %r is unfinished and not enqueued again",
                self._node,
                row.name,
                extra=fields("tick_skipped", self._node),
            )
        return True

    def _cron(self, schedule: Schedule, row: Row) -> Cron | None:
        """The row's expression; None if this process cannot fire it."""
        if row.type != schedule.type:
            self._complain(
                (row.name, row.type),
                f"is one of type {row.type!r} since another worker has started, and of type {schedule.type!r} here; "
                "this worker leaves it to others",
            )
            return None
        if (row.cron, row.timezone) == (schedule.cron.expression, schedule.cron.timezone):
            return schedule.cron
        key = row.cron, row.timezone
        if key not in self._crons:
            try:
                self._crons[key] = Cron(*key)
            except JobsyncError as error:
                self._crons[key] = None
                self._complain((row.name, *key), f"cannot be fired by this worker: {error}")
        if self._crons[key] is not None:
            self._complain(
                (row.name, *key),
                f"goes by {row.cron!r} ({row.timezone}) since another worker has started, not by "
                f"{schedule.cron.expression!r} ({schedule.cron.timezone}) as this one has it",
            )
        return self._crons[key]

    def _complain(self, about: tuple[str, ...], what: str) -> None:
        """Say so once."""
        if about not in self._complained:
            self._complained.add(about)
            logger.warning(
                "%s: periodic job %r %s", self._node, about[0], what, extra=fields("schedule_unusable", self._node)
            )
