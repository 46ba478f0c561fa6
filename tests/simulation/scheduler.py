"""Simulated time: a queue of what happens when, one thing at a time, the same for the same seed."""

from __future__ import annotations

import heapq
from collections.abc import Callable

__all__ = ["Scheduler"]


class Scheduler:
    """Events in order of their time, then of their making. ``time`` is the true time, in seconds."""

    def __init__(self) -> None:
        self.time = 0.0
        self._queue: list[tuple[float, int, Callable[..., object], tuple[object, ...]]] = []
        self._made = 0

    def at(self, time: float, action: Callable[..., object], *arguments: object) -> None:
        """Let ``action`` happen at ``time``, or now if that is past."""
        self._made += 1
        heapq.heappush(self._queue, (max(time, self.time), self._made, action, arguments))

    def after(self, seconds: float, action: Callable[..., object], *arguments: object) -> None:
        """Let ``action`` happen ``seconds`` from now."""
        self.at(self.time + seconds, action, *arguments)

    def next_by(self, time: float) -> bool:
        """Whether anything is to happen before ``time``; if not, it is ``time`` now."""
        if self._queue and self._queue[0][0] < time:
            return True
        self.time = max(self.time, time)
        return False

    def step(self) -> None:
        """Let the next event happen."""
        self.time, _, action, arguments = heapq.heappop(self._queue)
        action(*arguments)
