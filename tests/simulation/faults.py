"""What goes wrong in a run, and when: drawn from the seed, so that it can be drawn again, or a part of it."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["WEIGHTS", "Fault", "draw"]

WEIGHTS = {
    "join": 6,
    "leave": 5,
    "kill": 5,
    "restart": 5,
    "twin": 2,
    "pause": 7,
    "stall": 7,
    "starve": 3,
    "reset": 6,
    "terminate": 3,
    "packets lost": 5,
    "server restart": 2,
    "promotion": 2,
    "pin": 4,
    "unpin": 3,
    "drain": 2,
    "undrain": 2,
    "expel": 2,
}


@dataclass(frozen=True, slots=True)
class Fault:
    """One event.

    Attributes
    ----------
    at : float
        Seconds.
    kind : str
        One of ``WEIGHTS``.
    whom : int
        Which of the processes that live then, counted around.
    seconds : float
        How long it lasts, or how late the second half of it comes.
    number : int
        A number more, for those that need one.
    """

    at: float
    kind: str
    whom: int
    seconds: float
    number: int


def draw(rng: random.Random, until: float, mix: Mapping[str, int]) -> list[Fault]:
    """The faults of one run, in order of time; ``mix`` says how often each kind."""
    kinds, weights = list(mix), list(mix.values())
    # Some alone, some close together.
    times = [0.5 + (until - 0.5) * rng.random() for _ in range(rng.randint(1, 7))]
    for _ in range(rng.randint(0, 3)):
        start = 0.5 + (until - 3) * rng.random()
        times += [start + 2.5 * rng.random() for _ in range(rng.randint(2, 5))]
    faults = []
    for at in sorted(times):
        (kind,) = rng.choices(kinds, weights)
        short = rng.random() < 0.5
        seconds = rng.random() * (1.0 if short else 9.0)
        faults.append(Fault(round(at, 3), kind, rng.randrange(12), round(seconds, 3), rng.randrange(40)))
    return faults
