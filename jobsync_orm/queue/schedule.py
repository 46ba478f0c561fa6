"""What a periodic job is, and which of its ticks get a job. See :mod:`jobsync_orm.queue.periodic`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Literal

from jobsync_orm.queue.cron import Cron

__all__ = ["MOST_MISSED", "ON_TIME_SEC", "Missed", "Schedule", "ScheduleStatus"]

# Firings made up for after an outage, with missed="all".
MOST_MISSED = 1000

# A tick noticed this late has not been missed yet: a worker may have been reconnecting.
ON_TIME_SEC = 60.0

Missed = Literal["latest", "skip", "all"]


@dataclass(frozen=True, slots=True)
class Schedule:
    """A periodic job as this process declares it. See :meth:`~jobsync_orm.JobQueue.add_periodic`."""

    name: str
    type: str
    cron: Cron
    payload: Mapping[str, Any]
    missed: Missed
    overlap: bool
    tick_as: str | None
    priority: int
    key: str | None
    max_retries: int
    timeout: float
    retry_blocks_key: bool
    max_retries_given: bool
    timeout_given: bool

    def due(self, cron: Cron, fired_until: datetime, now: datetime) -> tuple[datetime, list[datetime]] | None:
        """Up to which tick it is to be fired now, and the ticks that get a job; None if no tick has passed.

        Parameters
        ----------
        cron : Cron
            As the schedule's row has it.
        fired_until : datetime
            Of the row.
        now : datetime
            The database's.
        """
        ticks = cron.latest(fired_until, now, MOST_MISSED if self.missed == "all" else 1)
        if not ticks:
            return None
        if self.missed == "skip" and now - ticks[-1] > timedelta(seconds=ON_TIME_SEC):
            return ticks[-1], []
        return ticks[-1], ticks

    def job(self, cron: Cron, tick: datetime) -> tuple[dict[str, Any], str]:
        """Payload and idempotency key of the job for ``tick``."""
        payload = dict(self.payload)
        if self.tick_as is not None:
            payload[self.tick_as] = cron.local(tick)
        return payload, f"periodic:{self.name}:{cron.local(tick)}" if self.overlap else f"periodic:{self.name}"


@dataclass(frozen=True, slots=True)
class ScheduleStatus:
    """A schedule's row.

    Attributes
    ----------
    name, type, cron, timezone : str
        As the worker that started last declares it.
    fired_until : datetime
        All ticks until then have been fired, or missed as the schedule says.
    last_job_id : int or None
        The job of the last firing.
    next_at : datetime or None
        The next tick. None if this process cannot read the expression.
    """

    name: str
    type: str
    cron: str
    timezone: str
    fired_until: datetime
    last_job_id: int | None
    next_at: datetime | None
