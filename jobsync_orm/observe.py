"""What the library tells of itself while it works: events, for metrics, traces and whatever else wants to know.

    job.audience.add(print)

Each :class:`~jobsync_orm.Job`, :class:`~jobsync_orm.JobQueue` and :class:`~jobsync_orm.JobWorker` has an
:class:`Audience`. Whoever is added to it is called with one event after another, in the order in which they happened,
by a thread of this module's own: never in a loop of the library nor in a transaction of the application. So an observer
may be slow, may raise, and may hang, and nothing but the other observers waits for it. Events that nobody comes to take
are kept up to ``MOST_WAITING``; what comes after is left out, and counted (:func:`dropped`).

Without observers telling costs one look at an attribute: ``if audience.active:``. The thread is started by the first
event that somebody is told of.

Events have no ids or keys of tasks and jobs: they are for figures. ``node`` is the name of the node, ``seconds`` are
seconds.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Final, Protocol

from jobsync_orm.logs import fields

__all__ = [
    "AttemptsEnded",
    "Audience",
    "EndedAttempt",
    "Event",
    "Evicted",
    "FailedOver",
    "FenceRejected",
    "Heartbeat",
    "JobsClaimed",
    "JobsEnqueued",
    "JobsRescued",
    "NodeStopped",
    "NodesTakenForDead",
    "Observer",
    "OwnershipChanged",
    "Rebalanced",
    "RowsClaimed",
    "SessionBroke",
    "TaskClaims",
    "TokensReleased",
    "WokenUp",
    "WorkerStopped",
    "dropped",
    "flush",
]

logger = logging.getLogger("jobsync_orm")

# Events that wait for a slow observer.
MOST_WAITING: Final = 100_000


# -- what happens to a node ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """A heartbeat has been answered, after ``seconds``."""

    node: str
    seconds: float


@dataclass(frozen=True, slots=True)
class SessionBroke:
    """The coordination connection broke."""

    node: str


@dataclass(frozen=True, slots=True)
class Evicted:
    """This node was taken for dead, or the cluster was formed anew: its tokens are gone, and it joins anew."""

    node: str


@dataclass(frozen=True, slots=True)
class NodesTakenForDead:
    """``node`` has taken ``many`` others out of the cluster."""

    node: str
    many: int


@dataclass(frozen=True, slots=True)
class Rebalanced:
    """``node``, the leader, has published a plan, or a batch of a large one, that moves ``moved`` tokens.

    ``reason`` is one of a few words; ``seconds`` is how long reading, planning and publishing took.
    """

    node: str
    epoch: int
    reason: str
    moved: int
    seconds: float
    at: float = field(default_factory=time.time)


@dataclass(frozen=True, slots=True)
class FailedOver:
    """The tokens of a dead node are others', ``seconds`` after it was last known to live.

    That is its last heartbeat, or the moment its lock was first seen free.
    """

    node: str
    seconds: float
    at: float = field(default_factory=time.time)


@dataclass(frozen=True, slots=True)
class OwnershipChanged:
    """``node`` has learned that tokens have become its own, or are no longer."""

    node: str
    epoch: int
    gained: int
    lost: int


@dataclass(frozen=True, slots=True)
class TokensReleased:
    """``node`` has handed over ``tokens`` tokens, ``seconds`` after it saw that it was asked to."""

    node: str
    epoch: int
    tokens: int
    seconds: float
    at: float = field(default_factory=time.time)


@dataclass(frozen=True, slots=True)
class NodeStopped:
    """The job has stopped. The last event of a job."""

    node: str


# -- what the application does with its tokens -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FenceRejected:
    """Something was refused because tokens were not this node's any more.

    ``where`` is ``commit``, ``write`` (before the commit), ``trigger``, ``claim`` or ``checkpoint``.
    """

    node: str
    where: str


@dataclass(frozen=True, slots=True)
class TaskClaims:
    """Claims on tasks: ``result`` is ``taken``, ``refused``, ``completed``, ``released`` or ``lost``."""

    node: str
    result: str
    many: int


@dataclass(frozen=True, slots=True)
class RowsClaimed:
    """``job.claim`` has returned ``many`` rows."""

    node: str
    many: int


# -- what happens in a queue -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class JobsEnqueued:
    """Jobs were written, in a transaction whose end is not known yet."""

    type: str
    many: int


@dataclass(frozen=True, slots=True)
class JobsClaimed:
    """A worker has claimed jobs: type -> how many."""

    node: str
    by_type: Mapping[str, int]


@dataclass(slots=True)
class EndedAttempt:
    """One attempt that has ended, and is written down.

    Attributes
    ----------
    type : str
        The job's.
    outcome : str
        As in the attempt's row, or ``lost``: somebody else had been given the job meanwhile.
    state : str
        Where the job went.
    waited : float or None
        Seconds from when the job was ready until the handler was called; None if it was not, or is not known.
    took : float or None
        Seconds from there to the end; None if it was not called.
    """

    # Not frozen: that would make it take three times as long to create, and there are thousands a second.
    type: str
    outcome: str
    state: str
    waited: float | None
    took: float | None


@dataclass(frozen=True, slots=True)
class AttemptsEnded:
    """Attempts of a worker have ended."""

    node: str
    attempts: tuple[EndedAttempt, ...]


@dataclass(frozen=True, slots=True)
class JobsRescued:
    """``node`` has taken jobs from workers that had died, or held them too long."""

    node: str
    many: int


@dataclass(frozen=True, slots=True)
class WokenUp:
    """A worker has heard ``many`` notifications of new jobs."""

    node: str
    many: int


@dataclass(frozen=True, slots=True)
class WorkerStopped:
    """The last event of a worker."""

    node: str


Event = (
    Heartbeat
    | SessionBroke
    | Evicted
    | NodesTakenForDead
    | Rebalanced
    | FailedOver
    | OwnershipChanged
    | TokensReleased
    | NodeStopped
    | FenceRejected
    | TaskClaims
    | RowsClaimed
    | JobsEnqueued
    | JobsClaimed
    | AttemptsEnded
    | JobsRescued
    | WokenUp
    | WorkerStopped
)


class Observer(Protocol):
    """Whoever is told. What it raises is logged, once, and it goes on being told."""

    def __call__(self, event: Event, /) -> object:
        """Take in one event."""


class Audience:
    """The observers of one job, queue or worker."""

    __slots__ = ("__weakref__", "_failed", "active", "observers")

    def __init__(self) -> None:
        self.observers: tuple[Observer, ...] = ()
        self.active = False
        """Whether anybody listens. To be asked before an event is made."""
        self._failed: set[int] = set()

    def add(self, observer: Observer) -> None:
        """Tell ``observer`` of everything from now on."""
        with _guard:
            self.observers = (*self.observers, observer)
            self.active = True

    def remove(self, observer: Observer) -> None:
        """Tell it nothing more. One that is not there is no error."""
        with _guard:
            self.observers = tuple(one for one in self.observers if one != observer)
            self.active = bool(self.observers)

    def tell(self, event: Event) -> None:
        """Have the observers told. Never raises, never waits."""
        if self.active:
            _delivery.put(self, event)

    def deliver(self, event: Event) -> None:
        """Call the observers; by the thread only."""
        for observer in self.observers:
            try:
                observer(event)
            except BaseException:  # SystemExit too: the thread has others to tell
                if id(observer) not in self._failed:
                    self._failed.add(id(observer))
                    logger.exception(
                        "an observer raised; it goes on being told, and this is not logged again",
                        extra=fields("observer_failed"),
                    )


class _Delivery:
    """The thread that tells, and what it has still to tell."""

    def __init__(self) -> None:
        self._waiting: SimpleQueue[tuple[Audience | None, Event | threading.Event]] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self.dropped = 0

    def put(self, audience: Audience, event: Event) -> None:
        if self._waiting.qsize() >= MOST_WAITING:
            self.dropped += 1
            return
        self._waiting.put((audience, event))
        if self._thread is None:
            self._start()

    def _start(self) -> None:
        with _guard:
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="jobsync-observers", daemon=True)
                # The system has no more of them now, or the interpreter ends: the next event tries again.
                with contextlib.suppress(RuntimeError):
                    thread.start()
                    self._thread = thread

    def flush(self, seconds: float) -> bool:
        if self._thread is None or self._thread is threading.current_thread():
            return self._thread is None
        told = threading.Event()
        self._waiting.put((None, told))
        return told.wait(seconds)

    def _run(self) -> None:
        while True:
            audience, event = self._waiting.get()
            if isinstance(event, threading.Event):
                event.set()
            elif audience is not None:
                audience.deliver(event)


def flush(seconds: float) -> bool:
    """Wait until all that has happened so far has been told, at most ``seconds``. Returns whether it has."""
    return _delivery.flush(seconds)


def dropped() -> int:
    """How many events were left out because observers were too slow, in this process."""
    return _delivery.dropped


def _forget_in_child() -> None:
    """A forked child has no thread, and may tell what it does itself; what was waiting is the parent's."""
    global _guard, _delivery
    _guard, _delivery = threading.RLock(), _Delivery()


_guard = threading.RLock()
_delivery = _Delivery()
os.register_at_fork(after_in_child=_forget_in_child)
