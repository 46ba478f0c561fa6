"""What a handler may raise to say how its attempt is to end.

``raise Retry(after=30)``
    It failed, and is to be tried again in 30 seconds. Counts against ``max_retries`` like any failure.
``raise Snooze(seconds=600)``, ``raise Snooze(until=tomorrow)``
    Not now. Counts for nothing, so a job may be snoozed for ever; ``ctx.attempt`` tells how often it has run.
``raise Discard("the order is gone")``
    It makes no sense to try again: the job has failed for good, at once.

Anything else that is raised is a failure, and tried again after the handler's backoff.
"""

from __future__ import annotations

import datetime

from jobsync_orm.exceptions import InvalidJob
from jobsync_orm.queue.options import brief, seconds

__all__ = ["Discard", "Retry", "Snooze"]


class Retry(Exception):
    """Raised by a handler whose attempt failed, to say when to try again.

    Parameters
    ----------
    after : float, optional
        Seconds from now. None leaves it to the handler's backoff.
    reason : str, optional
        Kept as the error of the attempt. None takes the exception this one was raised from, if any.

    Raises
    ------
    InvalidJob
        ``after`` is no number of seconds.
    """

    def __init__(self, after: float | None = None, reason: str | None = None) -> None:
        super().__init__(after, reason)
        self.after = None if after is None else seconds("Retry.after", after)
        self.reason = reason

    def __str__(self) -> str:
        return self.reason or ("" if self.after is None else f"after {self.after:g} s")


class Snooze(Exception):
    """Raised by a handler that is to run later, without counting as a failure.

    Parameters
    ----------
    seconds : float, optional
        Seconds from now.
    until : datetime, optional
        The moment, with a time zone. It is compared with the database's clock.

    Raises
    ------
    InvalidJob
        Neither or both are given, ``until`` has no time zone, or a value is out of range.
    """

    def __init__(self, seconds: float | None = None, until: datetime.datetime | None = None) -> None:
        super().__init__(seconds, until)
        if (seconds is None) == (until is None):
            raise InvalidJob("Snooze needs either seconds=... or until=...")
        self.seconds = None if seconds is None else _seconds(seconds)
        if until is not None and (not isinstance(until, datetime.datetime) or until.utcoffset() is None):
            raise InvalidJob(f"Snooze.until={brief(until)} must be a datetime with a time zone")
        self.until = until

    def __str__(self) -> str:
        return f"for {self.seconds:g} s" if self.until is None else f"until {self.until.isoformat()}"


def _seconds(value: float) -> float:
    return seconds("Snooze.seconds", value)


class Discard(Exception):
    """Raised by a handler whose job will never succeed: it has failed for good, and is kept for inspection.

    Parameters
    ----------
    reason : str
        Kept as the job's error.
    """

    def __init__(self, reason: str = "") -> None:
        super().__init__(reason)
        self.reason = reason
