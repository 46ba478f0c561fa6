"""What may be said of a job or a handler: one check for each option, wherever it is given."""

from __future__ import annotations

import math
import reprlib
from typing import Any

from jobsync_orm.exceptions import InvalidJob

__all__ = ["LONGEST_SEC", "LONGEST_TYPE", "MOST_RETRIES", "brief", "job_type", "retries", "seconds"]

# A hundred years. What is added to a timestamp must stay one that PostgreSQL and Python know.
LONGEST_SEC = 100 * 366 * 86_400.0

LONGEST_TYPE = 200

# So that the count of failures, one more, is an integer of PostgreSQL's.
MOST_RETRIES = 2**31 - 2


def brief(value: object) -> str:
    """``repr(value)``, cut so that it fits into a message."""
    return reprlib.repr(value)[:100]


def job_type(value: Any) -> str:
    """``value``, if it can name a kind of jobs.

    Raises
    ------
    InvalidJob
        It is no text of 1 to 200 characters that PostgreSQL can store.
    """
    if not isinstance(value, str):
        raise InvalidJob(f"type={brief(value)} must be text: the name under which jobs are enqueued")
    if not 1 <= len(value) <= LONGEST_TYPE:
        raise InvalidJob(f"type={brief(value)} has {len(value)} characters: 1 to {LONGEST_TYPE} are allowed")
    if "\0" in value or any("\ud800" <= character <= "\udfff" for character in value):
        raise InvalidJob(f"type={brief(value)} has a character that PostgreSQL cannot store (NUL, a lone surrogate)")
    return str.__str__(value)


def retries(value: Any) -> int:
    """``value``, if it can be a ``max_retries``.

    Raises
    ------
    InvalidJob
        It is no whole number from 0 to 2,147,483,646.
    """
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= MOST_RETRIES:
        raise InvalidJob(
            f"max_retries={brief(value)} must be a whole number from 0 (never tried again) to {MOST_RETRIES}"
        )
    return int(value)


def seconds(name: str, value: Any, *, above: float | None = None) -> float:
    """``value``, if it can be a number of seconds, named ``name`` in the message.

    Parameters
    ----------
    name : str
        The option.
    value : object
        What was given for it.
    above : float, optional
        It must be more than this. None allows 0 and more.

    Raises
    ------
    InvalidJob
        It is no number, negative, not finite, or more than a hundred years.
    """
    if isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(value):
        fits = value >= 0 if above is None else value > above
        if fits and value <= LONGEST_SEC:
            return float(value)
    least = "at least 0" if above is None else f"more than {above:g}"
    raise InvalidJob(f"{name}={brief(value)} must be a number of seconds, {least} and at most {LONGEST_SEC:.0f}")
