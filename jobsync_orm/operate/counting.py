"""What somebody who looks at a cluster again and again knows of its token table, so as to count little of it anew.

Tokens change in two ways. A plan, a registration, a cluster formed anew, another number of tokens: these raise the
epoch in the same transaction. And an owner's release, which does not, of tokens that are marked. So a stretch of the
table in which nothing was marked stays as it is while the epoch stays. Of the others some are counted with each look,
first those that have waited longest. The numbers of a stretch are always those of one moment, and what is told is the
sum of all stretches: it adds up, and it is exact, unless more stretches wait than are counted with one look.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

__all__ = ["AT_ONCE", "STRETCH", "Group", "TokenTally"]

# Tokens of one stretch, and the stretches that are counted with one look: so many take the server about 25 ms.
STRETCH = 10_000
AT_ONCE = 10

# Seconds that a stretch waits at most, if somebody looks: then all are counted at once.
WAIT_SEC = 3.0

# Seconds after which some are counted although nothing can have changed: what somebody has written to the table by hand
# is seen in the end.
CHECK_SEC = 10.0


class Group(NamedTuple):
    """Tokens of one owner and with one mark; how many of them should have been handed over by now."""

    node: str | None
    next_node: str | None
    tokens: int
    overdue: int


class _Stretch(NamedTuple):
    groups: tuple[Group, ...]
    version: object
    counted_at: float
    # Until when it is known to have been so.
    until: float

    def stays(self, version: object) -> bool:
        """Whether it is still so while the cluster is of this version."""
        return self.version == version and all(group.next_node is None for group in self.groups)


class TokenTally:
    """How many tokens of whom there are, as far as has been counted. Of one thread at a time, and of one cluster.

    Attributes
    ----------
    unowned : int
        How many nobody had at the last look.

    Parameters
    ----------
    clock : callable
        Seconds, from any beginning.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._version: object = None
        self._total, self._looked_at = 0, 0.0
        self._stretches: dict[int, _Stretch] = {}
        self.unowned = 0

    def due(self) -> tuple[int, ...] | None:
        """The numbers of the stretches to count with the next look. None: all there are."""
        now, known = self._clock(), self._stretches
        if not known or len(known) < self._of(self._total):
            return None
        waiting = [number for number, stretch in known.items() if not stretch.stays(self._version)]
        if len(waiting) > AT_ONCE and now - min(known[number].until for number in waiting) > WAIT_SEC:
            return None
        if not waiting and now - max(stretch.counted_at for stretch in known.values()) >= CHECK_SEC:
            waiting = list(known)
        return tuple(sorted(waiting, key=lambda number: known[number].counted_at)[:AT_ONCE])

    def learn(
        self, version: object, total: int, counted: Sequence[int] | None, rows: Iterable[Sequence[object]]
    ) -> bool:
        """Take in a look: the numbers counted, and rows of number, owner, mark, tokens, overdue.

        Parameters
        ----------
        version : object
            What is another one after every change but a release: of the same moment as the rows.
        total : int
            Tokens of the cluster.
        counted : sequence of int or None
            What :meth:`due` gave.

        Returns
        -------
        bool
            Whether what was due was all that had to be counted. If not, the version is new: look again.
        """
        now, known = self._clock(), self._stretches
        expected = counted is None or (version, total) == (self._version, self._total)
        if total != self._total:
            known = {}
        self._version, self._total, self._looked_at = version, total, now
        numbers = range(self._of(total)) if counted is None else [n for n in counted if n < self._of(total)]
        groups: dict[int, list[Group]] = {number: [] for number in numbers}
        for number, *group in rows:
            groups[number].append(Group(*group))  # type: ignore[index, arg-type]
        self._stretches = {n: one._replace(until=now) if one.stays(version) else one for n, one in known.items()}
        self._stretches |= {n: _Stretch(tuple(found), version, now, now) for n, found in groups.items()}
        return expected

    def groups(self) -> tuple[Group, ...]:
        """All tokens that are known."""
        sums: dict[tuple[str | None, str | None], tuple[int, int]] = {}
        for stretch in self._stretches.values():
            for node, aim, tokens, overdue in stretch.groups:
                before = sums.get((node, aim), (0, 0))
                sums[node, aim] = before[0] + tokens, before[1] + overdue
        return tuple(Group(node, aim, *both) for (node, aim), both in sums.items())

    @property
    def age_sec(self) -> float:
        """How old the oldest of the numbers was at the last look: 0 if all were of that moment."""
        return self._looked_at - min(stretch.until for stretch in self._stretches.values())

    @staticmethod
    def _of(total: int) -> int:
        return -(-total // STRETCH)
