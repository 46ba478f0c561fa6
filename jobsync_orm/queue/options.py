"""What may be said of a job or a handler: one check for each option, wherever it is given."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Iterable, Sequence
from typing import Any

from jobsync_orm.exceptions import InvalidJob
from jobsync_orm.models.states import JobState

__all__ = [
    "LONGEST_SEC",
    "LONGEST_TYPE",
    "MOST_RETRIES",
    "brief",
    "job_id",
    "job_type",
    "priority_number",
    "retries",
    "seconds",
    "states_among",
    "storable",
]

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
    return storable("type", value)


def storable(name: str, value: Any) -> str:
    """``value``, if it is text that PostgreSQL can store, named ``name`` in the message.

    Raises
    ------
    InvalidJob
        It is not.
    """
    if not isinstance(value, str):
        raise InvalidJob(f"{name}={brief(value)} must be text")
    if "\0" in value or any("\ud800" <= character <= "\udfff" for character in value):
        raise InvalidJob(f"{name}={brief(value)} has a character that PostgreSQL cannot store (NUL, a lone surrogate)")
    return str.__str__(value)


def job_id(value: Any) -> int:
    """``value``, if it can be the id of a job.

    Raises
    ------
    InvalidJob
        It is no 64-bit integer.
    """
    if not isinstance(value, int) or isinstance(value, bool) or not -(2**63) <= value < 2**63:
        raise InvalidJob(f"id={brief(value)} must be the id of a job, a whole number, or what enqueueing it returned")
    return int(value)


def priority_number(value: Any) -> int:
    """``value``, if it can be a priority.

    Raises
    ------
    InvalidJob
        It is no 32-bit integer.
    """
    if not isinstance(value, int) or isinstance(value, bool) or not -(2**31) <= value < 2**31:
        raise InvalidJob(
            f"priority={brief(value)} must be a JobPriority, or a whole number from {-(2**31)} to {2**31 - 1}; the "
            "larger goes first"
        )
    return int(value)


def states_among(allowed: Sequence[JobState], value: Any) -> tuple[JobState, ...]:
    """The states that ``value`` names, one or several, if all are ``allowed``; None names all of these.

    Raises
    ------
    InvalidJob
        There is another one, or none.
    """
    if value is None:
        return tuple(allowed)
    given = [value] if isinstance(value, str) or not isinstance(value, Iterable) else list(value)
    unknown = [state for state in given if state not in allowed]
    if unknown or not given:
        raise InvalidJob(f"state={brief(unknown[0] if unknown else value)} must be among {', '.join(allowed)}")
    return tuple(JobState(state) for state in given)


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
