"""How many jobs to take: what there are slots for, and what the slots will finish within a quarter of a second.

A worker that takes no more than it has slots for waits for the database after every job; one that takes what it can get
keeps jobs from the others while its slots are busy. Short jobs are taken in advance, long ones are not.
"""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["PREFETCH_SEC", "Room"]

# Work taken in advance.
PREFETCH_SEC = 0.25

# The weight of the latest durations in the mean.
LATEST = 0.3

# The first few jobs may have been quick for a reason of their own: what is taken in advance begins with this many jobs
# at most, and grows so many times at most each time that something is learnt.
FIRST, GROWTH = 32, 4


class Room:
    """Learns how long the jobs of each type run.

    Parameters
    ----------
    batch : int
        Most jobs of one claim, and most that are taken in advance.
    """

    def __init__(self, batch: int) -> None:
        self._batch = batch
        self._mean: dict[str, float] = {}
        self._most: dict[str, int] = {}

    def learn(self, ended: Iterable[tuple[str, float]]) -> None:
        """Types and durations in seconds of attempts that have ended."""
        total: dict[str, list[float]] = {}
        for type, seconds in ended:
            entry = total.get(type)
            if entry is None:
                total[type] = [1, seconds]
            else:
                entry[0] += 1
                entry[1] += seconds
        for type, (count, seconds) in total.items():
            latest = seconds / count
            mean = self._mean.get(type)
            self._mean[type] = latest if mean is None else mean + LATEST * (latest - mean)
            self._most[type] = min(self._batch, GROWTH * self._most[type]) if type in self._most else FIRST

    def stalled(self, type: str, seconds: float) -> None:
        """Jobs of this type taken in advance have waited that long: do not believe the mean."""
        self._mean[type] = max(self._mean.get(type, 0.0), seconds)
        self._most.pop(type, None)

    def ahead(self, type: str, slots: int) -> int:
        """How many jobs of this type to take in advance for so many slots."""
        mean = self._mean.get(type)
        if mean is None:
            return 0
        if mean > PREFETCH_SEC:  # its slots are busy anyway
            return 0
        return int(min(slots * PREFETCH_SEC / max(mean, 1e-6), self._most.get(type, FIRST), self._batch))
