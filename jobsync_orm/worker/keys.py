"""The keys that have work for this worker, in memory: keys, not jobs.

Jobs of one key run one at a time and in order. So what a worker has to remember of a key, however many jobs it has, is
that it has some, and whose turn it is: the database knows which job is the first in line. A key is

* *waiting* in the lane of its first job's type and priority, until there is room to ask for that job;
* *busy* while this worker has a job of it, with a note of what follows in line;
* *asleep* for a moment when a job of it runs elsewhere, which may end at any time without telling.

It is forgotten when it has nothing left; what is enqueued for it later is found by
:class:`~jobsync_orm.worker.key_search.KeySearch`, and so is a key whose first job backs off, at the moment it is ready
again. When a job of a key has ended and there are more, the key goes to the end of its lane: keys of one type and
priority take turns, so that one with a long line holds up nobody.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, deque
from collections.abc import Collection, Iterable, Mapping
from enum import Enum, auto
from itertools import count
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from jobsync_orm.models.states import JobState

if TYPE_CHECKING:
    from jobsync_orm.queue.jobs import ClaimedJob

__all__ = ["Keys", "Place"]

# Type, priority and ready_at of a key's first job.
Place = tuple[str, int, int]

# A key whose job runs elsewhere is looked at again after this time, doubled each time up to the second one.
ASLEEP_SEC, ASLEEP_MOST_SEC = 0.05, 1.0

# Keys asleep. Any more are forgotten; the search finds them when they are ready.
MOST_ASLEEP = 1000


class _State(Enum):
    WAITING = auto()
    BUSY = auto()
    ASLEEP = auto()


class _Key:
    __slots__ = ("asleep_sec", "follows", "name", "place", "state", "wake_at")

    def __init__(self, name: str, place: Place) -> None:
        self.name = name
        self.place = place
        self.state = _State.WAITING
        self.follows: Place | None = None
        self.asleep_sec = 0.0
        self.wake_at = 0.0


class Keys:
    """See above.

    Parameters
    ----------
    ageing_sec : float
        Seconds of waiting that weigh as much as one point of priority.
    """

    def __init__(self, ageing_sec: float) -> None:
        self._ageing = ageing_sec * 1e6
        self._known: dict[str, _Key] = {}
        self._lanes: dict[tuple[str, int], deque[_Key]] = {}
        self._waiting: Counter[int] = Counter()
        self._asleep: list[tuple[float, int, _Key]] = []
        self._number = count()

    def __len__(self) -> int:
        return len(self._known)

    def waiting(self, priority: int) -> int:
        """How many keys wait whose first job has this priority."""
        return self._waiting[priority]

    # -- what the search finds -----------------------------------------------------------------------------------

    def seen(self, name: str, place: Place) -> None:
        """This key has a job that is ready; the first in line may be another one."""
        key = self._known.get(name)
        if key is None:
            key = self._known[name] = _Key(name, place)
            self._append(key)
        elif key.state is _State.BUSY and key.follows is None:
            key.follows = place

    def ready(self, name: str, place: Place) -> None:
        """The first job of this key is ready, and none was under way."""
        key = self._known.get(name)
        if key is not None and key.state is _State.ASLEEP:
            key.place = place
            self._append(key)
        else:
            self.seen(name, place)

    def forget(self) -> None:
        """Other keys are this worker's now. Only the busy ones stay."""
        self._known = {name: key for name, key in self._known.items() if key.state is _State.BUSY}
        self._lanes.clear()
        self._waiting.clear()
        self._asleep.clear()

    # -- claiming ------------------------------------------------------------------------------------------------

    def urgency(self, types: Collection[str], now: float) -> float:
        """Of the most urgent lane of these types: the smaller, the sooner. Infinity if no key waits."""
        self._wake(now)
        return min((self._urgency(lane) for lane in self._lanes.items() if lane[0][0] in types), default=math.inf)

    def due_at(self, types: Collection[str], now: float) -> float:
        """When there is a key of these types to ask for; ``time.monotonic()``."""
        self._wake(now)
        if any(type in types for type, _ in self._lanes):
            return 0.0
        return self._asleep[0][0] if self._asleep else math.inf

    def plan(self, rooms: Mapping[str, int], now: float, before: float = math.inf) -> list[str]:
        """Keys to ask for now, the most urgent first.

        Parameters
        ----------
        rooms : mapping
            Type -> how many jobs of it there is room for.
        now : float
            ``time.monotonic()``.
        before : float
            Only of lanes that are as urgent as that; what is less so comes after something else.

        Returns
        -------
        list of str
            Busy from now on: an answer to :meth:`claimed` or :meth:`put_back` must follow.
        """
        self._wake(now)
        open_lanes = [(self._urgency(lane), lane) for lane in self._lanes.items() if lane[0][0] in rooms]
        lanes = [lane for urgency, lane in sorted(open_lanes, key=itemgetter(0)) if urgency <= before]
        most = max(rooms.values(), default=0)
        left = dict(rooms)
        asked: list[str] = []
        for (type, priority), queue in lanes:
            take = min(left[type], most - len(asked), len(queue))
            left[type] -= take
            for _ in range(take):
                key = queue.popleft()
                key.state = _State.BUSY
                key.follows = None
                asked.append(key.name)
            self._waiting[priority] -= take
            if not self._waiting[priority]:  # there may be as many priorities as there are jobs
                del self._waiting[priority]
            if not queue:
                del self._lanes[type, priority]
        return asked

    def put_back(self, asked: Iterable[str]) -> None:
        """There was no answer."""
        for name in reversed(list(asked)):
            self._append(self._known[name], first=True)

    def claimed(
        self,
        jobs: Iterable[ClaimedJob],
        left: Iterable[list[Any]],
        follows: Iterable[list[Any]],
        types: Collection[str],
        now: float,
    ) -> None:
        """Take in the answer of ``heads``.

        Parameters
        ----------
        jobs, left, follows
            See :attr:`QueueStatements.heads`.
        types : collection of str
            All that this worker may take, whether or not it has room for them at the moment.
        now : float
            ``time.monotonic()``.
        """
        for job in jobs:
            self._known[str(job.key)].asleep_sec = 0.0
        for name, type, priority, ready_at in follows:
            self._known[name].follows = type, priority, ready_at
        for name, why, _, type, priority, ready_at in left:
            key = self._known[name]
            if why in ("processing", "taken") and len(self._asleep) < MOST_ASLEEP:
                key.state = _State.ASLEEP
                key.asleep_sec = min(max(2 * key.asleep_sec, ASLEEP_SEC), ASLEEP_MOST_SEC)
                key.wake_at = now + key.asleep_sec
                heapq.heappush(self._asleep, (key.wake_at, next(self._number), key))
            elif why == "type" and type != key.place[0] and type in types:
                key.place = type, priority, ready_at
                self._append(key)
            else:
                del self._known[name]

    def settled(self, job: ClaimedJob, state: JobState, types: Collection[str]) -> None:
        """It is written down that ``job`` has ended, and in which state it is now; ``types`` as in :meth:`claimed`."""
        key = self._known.get(str(job.key))
        own = job.type, job.priority, job.ready_at
        if key is None or key.state is not _State.BUSY:
            # Claimed by a statement whose answer was lost.
            self.ready(str(job.key), own)
            return
        follows, key.follows = key.follows, None
        if state is JobState.PENDING:
            follows = own
        if follows is None or follows[0] not in types:
            del self._known[key.name]
        else:
            key.place = follows
            self._append(key)

    def _append(self, key: _Key, *, first: bool = False) -> None:
        type, priority, _ = key.place
        key.state = _State.WAITING
        queue = self._lanes.get((type, priority))
        if queue is None:
            queue = self._lanes[type, priority] = deque()
        if first:
            queue.appendleft(key)
        else:
            queue.append(key)
        self._waiting[priority] += 1

    def _urgency(self, lane: tuple[tuple[str, int], deque[_Key]]) -> float:
        (_, priority), queue = lane
        return queue[0].place[2] - priority * self._ageing

    def _wake(self, now: float) -> None:
        asleep = self._asleep
        while asleep and asleep[0][0] <= now:
            at, _, key = heapq.heappop(asleep)
            if key.state is _State.ASLEEP and key.wake_at == at:
                self._append(key)
