"""What a worker does for the queue as a whole, beside running jobs.

Each part is a *duty* of the pump, which runs those that are due between two turns, on its own connection:

=============  ============================================================================================
`Promotion`    scheduled and backed-off jobs become ready, at the moment they are due
`Rescue`       jobs of dead workers, and those held past their deadline, are given to others
`Unblocking`   jobs whose ``after=`` have all completed become ready
`Orders`       which types are paused; which of this worker's attempts are to be cancelled, or are its no more
`Presence`     this worker's row, for people who look, and the removal of rows of the dead
=============  ============================================================================================

Every worker has all of them, so none is needed for long: what a worker leaves undone when it dies, or when a statement
of its fails, another does at its next turn. What has to look through much (jobs past their deadline, all that are
blocked) is left to one worker, the first by name, and takes a bounded share of its time.

How soon the job of a killed worker runs again
----------------------------------------------
That is up to the coordinator: a job is taken from a node that is no member any more. With the default settings it is

* about two seconds if another worker runs;
* the same and the time that a process needs to start, if the only one is started again under its name, as it is on the
  same host where nobody has given it another one;
* also if the only one is replaced by one of another name, in a container with a new host name, say; but
  ``heartbeat_timeout_sec`` (15) if the server was started again in between.

A worker that hangs without having died (SIGSTOP, a lost network) is taken for dead after ``heartbeat_timeout_sec`` as
well. While the cluster rests after a failover of the database nothing is taken from anybody: all have to join anew, and
keep what they have.
"""

from __future__ import annotations

import heapq
import json
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from jobsync_orm.coordinator.session import Session, array
from jobsync_orm.logs import fields
from jobsync_orm.observe import Audience, JobsRescued
from jobsync_orm.queue.statements import QueueStatements
from jobsync_orm.worker.attempts import Why

__all__ = ["Figures", "Orders", "Place", "Presence", "Promotion", "Rescue", "Unblocking"]

logger = logging.getLogger("jobsync_orm")

# (type, priority, whether it has a key) of jobs that have become ready.
Place = tuple[str, int, bool]
Ready = Callable[[list[Place]], None]

# Seconds that a statement may take.
ANSWER_SEC = 10.0

# The same for the last one of a worker that stops: others remove its row if it does not come to that.
LEAVE_SEC = 2.0

# Jobs that one statement changes at most: more than that would hold up the claims.
BATCH = 1000

# What takes long is done so much less often: a duty gets at most a tenth of the pump's time.
REST = 9.0

# Seconds between two looks.
RESCUE_SEC = 1.0
OVERDUE_SEC = 5.0
SWEEP_SEC = 5.0
ORDERS_SEC = 1.0
PRESENCE_SEC = 2.0

# Between two promotions, however close together jobs become due.
PROMOTE_LEAST_SEC = 0.01

NEVER = float("inf")

NOTHING = array([])


class _Timer:
    """When something is due again: at an interval, but not so often that it takes more than its share."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._began = 0.0
        self.at = 0.0

    def begin(self) -> None:
        """It is done now; if that fails, it is due again as if it had been done."""
        self._began = time.monotonic()
        self.at = self._began + self._seconds

    def end(self) -> None:
        """It has been done."""
        now = time.monotonic()
        self.at = max(self._began + self._seconds, now + REST * (now - self._began))


def _places(answer: str | None) -> list[Place]:
    return [(type, priority, keyed) for type, priority, keyed in json.loads(answer or "[]")]


class Promotion:
    """Makes jobs ready when they are due.

    Parameters
    ----------
    statements : QueueStatements
        The SQL.
    ready : callable
        Gets the places of the jobs that became ready, or an empty list where another worker may have been faster.
    poll_sec : float
        Longest time between two looks: a job that another process enqueues for a moment before the next known one is
        found within this time.
    """

    def __init__(self, statements: QueueStatements, ready: Ready, poll_sec: float = 1.0) -> None:
        self._sql = statements.promote
        self._ready = ready
        self._poll_sec = poll_sec
        self._from_start = _Timer(poll_sec)
        self._mark = 0
        self._at = 0.0
        self._expected = False

    def due_at(self) -> float:
        """At the moment the next job is due, and at least every ``poll_sec``."""
        return self._at

    def expect(self, seconds: float) -> None:
        """A job has just been written that is due in so many seconds."""
        self._at = min(self._at, time.monotonic() + seconds)

    def woken(self, payloads: set[str]) -> None:
        """Nothing to hear: what is enqueued for later tells nobody."""

    def run(self, session: Session) -> None:
        """One batch; due again at once if it was full."""
        began = time.monotonic()
        self._at = began + self._poll_sec
        whole = began >= self._from_start.at
        if whole:
            self._from_start.begin()
        # What was committed late, or was locked by somebody at the time, lies before the mark.
        ((places, count, mark, until_next),) = session.prepared(
            self._sql, BATCH, 0 if whole else self._mark, timeout=ANSWER_SEC
        )
        now = time.monotonic()
        if int(count or 0) >= BATCH:
            self._mark, self._at = int(mark or 0), now
        else:
            self._mark = max(self._mark, int(mark or 0))
            if whole:
                self._from_start.end()
            soon = now + max(PROMOTE_LEAST_SEC, REST * (now - began))
            due = NEVER if until_next is None else now + float(until_next)
            self._at = min(max(due, soon), max(soon, began + self._poll_sec))
        found = _places(places)
        if found or self._expected:
            self._ready(found)
        self._expected = until_next is not None and self._at < began + self._poll_sec


class Rescue:
    """Gives the jobs of dead workers, and those held past their deadline, to others.

    Parameters
    ----------
    statements : QueueStatements
        The SQL.
    node : str
        This worker.
    ready : callable
        Gets the places of the jobs that became ready.
    audience : Audience, optional
        Who is told of rescued jobs.
    """

    def __init__(self, statements: QueueStatements, node: str, ready: Ready, audience: Audience | None = None) -> None:
        self._statements = statements
        self._node = node
        self._ready = ready
        self._audience = audience or Audience()
        self._dead = _Timer(RESCUE_SEC)
        self._overdue = _Timer(OVERDUE_SEC)
        self.rescued = 0

    def due_at(self) -> float:
        """Every second, and after :meth:`at_once`."""
        return min(self._dead.at, self._overdue.at)

    def at_once(self) -> None:
        """The cluster has changed. Any thread may call this; the pump has to be woken."""
        self._dead.at = 0.0

    def woken(self, payloads: set[str]) -> None:
        """Nothing to hear."""

    def run(self, session: Session) -> None:
        """One batch of each kind that is due."""
        for timer, parameters, sql in (
            (self._dead, (BATCH,), self._statements.rescue),
            (self._overdue, (BATCH, self._node), self._statements.overdue),
        ):
            if time.monotonic() < timer.at:
                continue
            timer.begin()
            ((jobs, places, _),) = session.prepared(sql, *parameters, timeout=ANSWER_SEC)
            rescued = json.loads(jobs or "[]")
            if len(rescued) >= BATCH:
                timer.at = 0.0
            elif timer.at:  # else at_once was called meanwhile
                timer.end()
            if rescued:
                self.rescued += len(rescued)
                self._audience.tell(JobsRescued(self._node, len(rescued)))
                _log_rescued(self._node, rescued)
            if found := _places(places):
                self._ready(found)


def _log_rescued(node: str, rescued: Sequence[tuple[int, str, str]]) -> None:
    for worker in sorted({worker or "?" for _, worker, _ in rescued}):
        states = {id: state for id, name, state in rescued if (name or "?") == worker}
        ended = [str(id) for id, state in states.items() if state != "pending"]
        logger.warning(
            "%d jobs of worker %s taken from it%s",
            len(states),
            worker,
            f"; for the last time: {', '.join(ended[:20])}" if ended else "",
            extra=fields("jobs_rescued", node),
        )


class Unblocking:
    """Makes jobs ready whose ``after=`` have all completed.

    Parameters
    ----------
    statements : QueueStatements
        The SQL.
    node : str
        This worker.
    waiting : set of int
        Jobs that waited for one that has completed, as the answer to :attr:`QueueStatements.settle` names them. What
        has been looked at is taken out.
    ready : callable
        Gets the places of the jobs that became ready.
    """

    def __init__(self, statements: QueueStatements, node: str, waiting: set[int], ready: Ready) -> None:
        self._statements = statements
        self._node = node
        self._waiting = waiting
        self._ready = ready
        self._sweep = _Timer(SWEEP_SEC)
        self._after = 0

    def due_at(self) -> float:
        """At once if jobs are waiting; a look at all that are blocked every five seconds."""
        return 0.0 if self._waiting else self._sweep.at

    def woken(self, payloads: set[str]) -> None:
        """Nothing to hear: what waits for a job is in the answer of who completes it."""

    def run(self, session: Session) -> None:
        """Some of those that were named, and a part of all that wait if that is due."""
        if self._waiting:
            # Thousands may wait for one job. The oldest first, as they would have been.
            named = heapq.nsmallest(BATCH, self._waiting)
            self._waiting.difference_update(named)  # even if this fails: the sweep finds them
            ((places,),) = session.prepared(self._statements.unblock, array(named), timeout=ANSWER_SEC)
            self._ready(_places(places))
        if time.monotonic() < self._sweep.at:
            return
        self._sweep.begin()
        began = time.monotonic()
        ((places, _, last),) = session.prepared(
            self._statements.sweep, BATCH, self._node, self._after, timeout=ANSWER_SEC
        )
        self._after = int(last or 0)
        self._sweep.end()
        if last is not None:  # there is more to look at: go on, with a rest
            now = time.monotonic()
            self._sweep.at = now + REST * (now - began)
        if found := _places(places):
            self._ready(found)


class Orders:
    """Reads what this worker is told to leave alone: paused types, attempts to give up, all new jobs if it is drained.

    Parameters
    ----------
    statements : QueueStatements
        The SQL.
    held : callable
        Job id and number of the attempts that have been in hand for a moment. Those that come and go between two looks
        need not be among them.
    pause : callable
        Gets the paused types whenever they have changed; the empty text stands for all.
    give_up : callable
        Gets id and number of an attempt of those, and why: ``"cancelled"``, or ``"lost"`` if somebody else has the job,
        or it is gone.
    drain : callable
        Gets whether this worker's node is drained, whenever that has changed.
    node : str
        This worker.
    """

    def __init__(
        self,
        statements: QueueStatements,
        held: Callable[[], Iterable[tuple[int, int]]],
        pause: Callable[[frozenset[str]], None],
        give_up: Callable[[int, int, Why], None],
        drain: Callable[[bool], None],
        node: str,
    ) -> None:
        self._sql = statements.orders
        self._held = held
        self._pause = pause
        self._give_up = give_up
        self._timer = _Timer(ORDERS_SEC)
        self._paused: frozenset[str] = frozenset()
        self._drain = drain
        self._drained = False
        self._node = node

    def due_at(self) -> float:
        """Every second, and at once after a control message."""
        return self._timer.at

    def woken(self, payloads: set[str]) -> None:
        """Look at once if somebody paused, resumed, cancelled, drained or undrained something."""
        if any("control" in payload for payload in payloads if payload.startswith("{")):
            self._timer.at = 0.0

    def run(self, session: Session) -> None:
        """One look."""
        self._timer.begin()
        held = list(self._held())
        ((paused, leave, drained),) = session.prepared(
            self._sql,
            array(id for id, _ in held),
            array(attempt for _, attempt in held),
            self._node,
            timeout=ANSWER_SEC,
        )
        self._timer.end()
        if (drained == "t") != self._drained:
            self._drained = not self._drained
            self._drain(self._drained)
        if (types := frozenset(json.loads(paused or "[]"))) != self._paused:
            self._paused = types
            self._pause(types)
        for id, attempt, cancel in json.loads(leave or "[]"):
            self._give_up(id, attempt, "cancelled" if cancel else "lost")


@dataclass(frozen=True, slots=True)
class Figures:
    """What a worker says of itself in its row. ``claimed_at`` is ``time.monotonic()``."""

    running: int
    completed: int
    failed: int
    claimed_at: float | None


class Presence:
    """This worker's row, written every two seconds; rows of the dead are removed by whoever sees them.

    Parameters
    ----------
    statements : QueueStatements
        The SQL.
    node : str
        This worker.
    incarnation : callable
        Its incarnation now; empty while it is no member.
    types : sequence of str
        What it runs.
    concurrency : int
        Its slots.
    figures : callable
        The numbers.
    vanished : callable
        Called when rows of dead workers were removed.
    stops : callable
        Whether it claims nothing now, and only finishes. Its row says so, by a list of types that is empty: others may
        take the jobs of its keys meanwhile.
    """

    def __init__(
        self,
        statements: QueueStatements,
        node: str,
        incarnation: Callable[[], str],
        types: Sequence[str],
        concurrency: int,
        figures: Callable[[], Figures],
        vanished: Callable[[], None],
        stops: Callable[[], bool] = lambda: False,
    ) -> None:
        self._statements = statements
        self._node = node
        self._incarnation = incarnation
        self._all_types = self._types = array(types)
        self._concurrency = concurrency
        self._figures = figures
        self._vanished = vanished
        self._timer = _Timer(PRESENCE_SEC)
        self._started_at = time.monotonic()
        self._stops = stops

    def due_at(self) -> float:
        """Every two seconds, and when the worker begins to stop, is drained or undrained."""
        return self._timer.at if self._types == self._takes() else 0.0

    def woken(self, payloads: set[str]) -> None:
        """Nothing to hear."""

    def run(self, session: Session) -> None:
        """Write the row."""
        self._timer.begin()
        incarnation = self._incarnation()
        if not incarnation:
            return
        self._types = self._takes()
        figures, now = self._figures(), time.monotonic()
        ((gone,),) = session.prepared(
            self._statements.presence,
            self._node,
            incarnation,
            self._types,
            self._concurrency,
            figures.running,
            figures.completed,
            figures.failed,
            now - self._started_at,
            None if figures.claimed_at is None else now - figures.claimed_at,
            timeout=ANSWER_SEC,
        )
        self._timer.end()
        if json.loads(gone or "[]"):
            self._vanished()

    def _takes(self) -> str:
        return NOTHING if self._stops() else self._all_types

    def leave(self, session: Session) -> None:
        """Remove the row, as the worker stops."""
        if incarnation := self._incarnation():
            session.execute(self._statements.absence, self._node, incarnation, timeout=LEAVE_SEC)
