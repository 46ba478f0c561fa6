"""How long a job that failed waits until it is tried again.

::

    @queue.handler("charge", max_retries=5, backoff=Backoff(base=10, factor=3, maximum=600))
    def charge(ctx, order_id): ...

waits 10, 30, 90, 270 and 600 seconds, each up to a tenth shorter, so that jobs which failed together do not come back
together. A function does as well: it gets the number of failures before this one and the error, and returns seconds::

    @queue.handler("charge", backoff=lambda failures, error: 5 if isinstance(error, Busy) else 60 * 2**failures)

A handler that knows better raises :class:`~jobsync_orm.Retry`.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jobsync_orm.exceptions import InvalidJob
from jobsync_orm.queue.options import brief, seconds

__all__ = ["Backoff", "BackoffFunction", "checked_backoff"]

BackoffFunction = Callable[[int, BaseException], float]


@dataclass(frozen=True, slots=True)
class Backoff:
    """Exponential: ``min(base * factor ** n, maximum)`` seconds after a failure that ``n`` others came before.

    Parameters
    ----------
    base : float
        Seconds after the first failure.
    factor : float
        By how much each further one makes it longer; 1 keeps it.
    maximum : float
        It never gets longer than this, in seconds.
    jitter : float
        Which part of it, from 0 to 1, is left to chance: 0.1 makes 60 seconds anything from 54 to 60.

    Raises
    ------
    InvalidJob
        A value out of range.
    """

    base: float = 60
    factor: float = 2
    maximum: float = 3600
    jitter: float = 0.1

    def __post_init__(self) -> None:
        seconds("Backoff.base", self.base)
        seconds("Backoff.maximum", self.maximum)
        for name, low, high in (("factor", 1, 1_000_000), ("jitter", 0, 1)):
            value: Any = getattr(self, name)
            if not isinstance(value, int | float) or isinstance(value, bool) or not low <= value <= high:
                raise InvalidJob(f"Backoff.{name}={brief(value)} must be a number from {low} to {high}")

    def __call__(self, failures: int, error: BaseException | None = None) -> float:
        """Seconds to wait after a failure that ``failures`` others came before."""
        try:
            delay = min(self.base * float(self.factor) ** failures, self.maximum)
        except OverflowError:
            delay = self.maximum
        return delay * (1 - self.jitter * random.random())


def checked_backoff(value: Any) -> BackoffFunction:
    """``value``, if it can tell how long to wait.

    Raises
    ------
    InvalidJob
        It is neither a :class:`Backoff` nor a function.
    """
    if isinstance(value, type) or not callable(value):
        raise InvalidJob(
            f"backoff={brief(value)} must be a Backoff(...), or a function (failures, error) that returns seconds"
        )
    function: BackoffFunction = value
    return function
