"""Where ready jobs without a key are: lanes, the order in which they are served, and how far each has been taken.

A lane is a job type and a priority. Its jobs lie in an index by the moment they became ready, and are taken from its
beginning. Its *mark* is the last one taken: what lies before it has been taken already, by this worker or another, and
although the index may still hold those entries (a vacuum cannot remove what an open snapshot can see) they are not
stepped over again. A straggler may yet appear before the mark: a job whose transaction was slow to commit, or that a
worker has given back. So a lane is also walked from its very beginning, when its end has been reached and otherwise now
and then, so rarely that it takes a tenth of the time.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from operator import attrgetter

from jobsync_orm.queue.jobs import ClaimedJob

__all__ = ["Lane", "Lanes", "Walk"]

# A walk from the very beginning is repeated after this many times its duration, and no sooner than after:
WALK_SHARE, WALK_SEC = 10, 0.05

# Lanes of one claim. Those left out are less urgent, and come next.
MOST_LANES = 64

# Lanes known; with more, those with nothing in them are forgotten, and with them their marks.
MOST_KNOWN = 1000


class Lane:
    """Jobs of one type and priority.

    Attributes
    ----------
    head_at : int
        When the first of its jobs became ready, as far as is known; microseconds since 1970 by the database's clock.
    mark : tuple of int
        ``(ready_at, id)`` of the last job taken.
    ahead, behind : bool
        Whether there may be jobs after the mark, and before it.
    walk_at : float
        When it may be walked from the beginning; ``time.monotonic()``.
    """

    __slots__ = ("ahead", "behind", "head_at", "mark", "priority", "type", "urgency", "walk_at")

    def __init__(self, type: str, priority: int) -> None:
        self.type = type
        self.priority = priority
        self.head_at = 0
        self.mark = (0, 0)
        self.ahead = self.behind = False
        self.walk_at = 0.0
        self.urgency = 0.0


class Walk:
    """One lane's part in a claim: from where, and how many at most."""

    __slots__ = ("lane", "mark", "most")

    def __init__(self, lane: Lane, mark: tuple[int, int], most: int) -> None:
        self.lane = lane
        self.mark = mark
        self.most = most


_urgency = attrgetter("urgency")


class Lanes:
    """The lanes a worker knows.

    Parameters
    ----------
    ageing_sec : float
        Seconds of waiting that weigh as much as one point of priority.
    """

    def __init__(self, ageing_sec: float) -> None:
        self._ageing = ageing_sec * 1e6
        self._known: dict[tuple[str, int], Lane] = {}

    def look_again(self, type: str, priority: int, head_at: int) -> None:
        """There may be jobs anywhere in this lane; the first one is as old as ``head_at`` if it seemed to be empty."""
        lane = self._known.get((type, priority))
        if lane is None:
            lane = self._known[type, priority] = Lane(type, priority)
        if not lane.ahead and not lane.behind:
            lane.head_at = head_at
        lane.ahead = lane.behind = True

    def surveyed(self, found: Iterable[tuple[str, int, int]]) -> None:
        """The lanes that have jobs, and since when the first of them is ready."""
        for type, priority, head_at in found:
            lane = self._known.get((type, priority))
            if lane is None:
                lane = self._known[type, priority] = Lane(type, priority)
            lane.head_at = head_at
            if (head_at, 0) > lane.mark:
                lane.ahead = True
            else:
                lane.behind = True
        if len(self._known) > MOST_KNOWN:
            self._known = {name: lane for name, lane in self._known.items() if lane.ahead or lane.behind}

    def _open(self, types: Collection[str], now: float) -> list[Lane]:
        """Lanes of these types that are worth a walk now."""
        return [
            lane
            for lane in self._known.values()
            if (lane.ahead or (lane.behind and now >= lane.walk_at)) and lane.type in types
        ]

    def due_at(self, types: Collection[str]) -> float:
        """When the next walk is worth it; ``time.monotonic()``, infinity if nothing is known."""
        due = math.inf
        for lane in self._known.values():
            if lane.type in types:
                if lane.ahead:
                    return 0.0
                if lane.behind:
                    due = min(due, lane.walk_at)
        return due

    def urgency(self, types: Collection[str], now: float) -> float:
        """Of the most urgent lane that is worth a walk: the smaller, the sooner. Infinity if none is."""
        lanes = self._open(types, now)
        return min((lane.head_at - lane.priority * self._ageing for lane in lanes), default=math.inf)

    def plan(self, rooms: dict[str, int], now: float, before: float = math.inf) -> list[Walk]:
        """What to walk now, the most urgent lane first.

        Parameters
        ----------
        rooms : dict
            Type -> how many jobs of it there is room for.
        now : float
            ``time.monotonic()``.
        before : float
            Only lanes that are as urgent as that; what is less so comes after something else.
        """
        open_lanes = self._open(rooms, now)
        for lane in open_lanes:
            lane.urgency = lane.head_at - lane.priority * self._ageing
        open_lanes = [lane for lane in open_lanes if lane.urgency <= before]
        open_lanes.sort(key=_urgency)
        return [
            # Whoever walks from the beginning comes past the mark as well.
            Walk(lane, (0, 0) if now >= lane.walk_at else lane.mark, rooms[lane.type])
            for lane in open_lanes[:MOST_LANES]
        ]

    def claimed(self, walks: Sequence[Walk], jobs: Sequence[ClaimedJob], most: int, began: float, now: float) -> None:
        """Take in a claim's answer.

        Parameters
        ----------
        walks : sequence of Walk
            What was asked for.
        jobs : sequence of ClaimedJob
            What was claimed, each lane's in its order.
        most : int
            How many were asked for at most.
        began, now : float
            ``time.monotonic()`` before and after.
        """
        taken: dict[tuple[str, int], int] = {}
        last: dict[tuple[str, int], ClaimedJob] = {}
        for job in jobs:
            name = job.type, job.priority
            taken[name] = taken.get(name, 0) + 1
            last[name] = job
        full = len(jobs) >= most
        # If there were enough, the lanes after the last one that gave any have not been looked at.
        reached = (
            len(walks)
            if not full
            else 1
            + max((i for i, walk in enumerate(walks) if (walk.lane.type, walk.lane.priority) in taken), default=-1)
        )
        walk_at = now + max(WALK_SEC, WALK_SHARE * (now - began))
        for i, walk in enumerate(walks[:reached]):
            lane = walk.lane
            name = lane.type, lane.priority
            count = taken.get(name, 0)
            to_the_end = count < walk.most and not (full and i == reached - 1)
            from_the_start = walk.mark == (0, 0)
            if count:
                job = last[name]
                lane.mark = job.ready_at, job.id
                lane.head_at = job.ready_at
            lane.ahead = not to_the_end
            lane.behind = not from_the_start
            if from_the_start:
                lane.walk_at = walk_at
