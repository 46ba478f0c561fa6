"""Cron expressions: at which moments a periodic job is due. Needs the extra ``cron``.

An expression has five fields (minute, hour, day of month, month, day of week), or six with the second before them. It
is read in a time zone, and on the two nights a year when clocks change it does what Debian's cron does: a job of a
certain hour that falls into the hour left out runs once, right after it; one that falls into the hour that comes twice
runs once, in the first of the two; one with ``*`` in its hour or minute goes by elapsed time and runs in both.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from itertools import takewhile
from typing import TYPE_CHECKING, Any
from zoneinfo import ZoneInfo

from jobsync_orm.exceptions import ConfigurationError, InvalidJob

if TYPE_CHECKING:
    from datetime import tzinfo

__all__ = ["Cron"]


class Cron:
    """A cron expression in a time zone.

    Parameters
    ----------
    expression : str
        ``"0 3 * * *"``, say.
    timezone : str
        A name of the time zone database: ``"Europe/Berlin"``.

    Raises
    ------
    InvalidJob
        No such expression or time zone, or a moment that never comes.
    ConfigurationError
        The extra ``cron`` is not installed.
    """

    def __init__(self, expression: str, timezone: str) -> None:
        if not isinstance(expression, str):
            raise InvalidJob(f"cron expression {expression!r} must be text, such as '0 3 * * *'")
        self.expression = " ".join(expression.split())
        self.timezone = timezone
        self._zone = zone(timezone)
        self._simulate = simulator()
        try:
            comes = self.next(datetime.now(UTC)) is not None
        # Of an expression it does not understand at all the library also raises what it did not mean to.
        except Exception as error:
            raise InvalidJob(
                f"cron expression {expression!r} cannot be read ({error or type(error).__name__}): it needs five "
                "fields, minute, hour, day of month, month and day of week, or six with the second before them"
            ) from error
        if not comes:
            raise InvalidJob(f"cron expression {expression!r} names a moment that does not come within 50 years")

    def next(self, after: datetime) -> datetime | None:
        """The first tick later than ``after``, in UTC; None if there is none within 50 years."""
        return next(self._ticks(after), None)

    def latest(self, after: datetime, until: datetime, at_most: int) -> list[datetime]:
        """The last ``at_most`` ticks later than ``after`` and not later than ``until``, ascending.

        What it costs depends on ``at_most`` and not on how long ago ``after`` was.
        """
        look_back = timedelta(minutes=1)
        while True:
            start = max(after, until - look_back)
            found = list(takewhile(lambda tick: tick <= until, self._ticks(start)))
            if start == after or len(found) >= at_most:
                return found[-at_most:]
            look_back *= 4

    def local(self, tick: datetime) -> str:
        """``tick`` as ISO 8601 text with the offset its time zone has then."""
        return tick.astimezone(self._zone).isoformat()

    def _ticks(self, after: datetime) -> Iterator[datetime]:
        for tick in self._simulate(self.expression, after.astimezone(self._zone)):
            # In UTC: two times of one zone are compared by the clock on the wall, which shows an hour twice. A job of
            # a certain hour, looked for from the second of two, is found in the first, which has passed.
            if (moment := tick.astimezone(UTC)) > after:
                yield moment


def simulator() -> Any:
    """The class that iterates over the ticks of an expression."""
    try:
        from cronsim import CronSim
    except ImportError as error:
        raise ConfigurationError(
            "periodic jobs need the extra 'cron', which reads cron expressions: pip install 'jobsync-orm[cron]'"
        ) from error
    return CronSim


def zone(name: str) -> tzinfo:
    """The time zone of this name."""
    if name == "UTC":
        return UTC
    try:
        return ZoneInfo(name)
    except (KeyError, ValueError, TypeError, OSError) as error:
        raise InvalidJob(
            f"time zone {name!r} is not known here: it must be a name such as 'Europe/Berlin', and the system needs "
            "the time zone database (pip install tzdata, where it has none)"
        ) from error
