"""Telling the workers that there are jobs, once the transactions that enqueued them have been committed.

A NOTIFY inside a transaction would make its COMMIT wait for those of all others that notify: PostgreSQL lets them
through one at a time. So it is sent afterwards, by one thread of this process on one connection of its own: at once
when it has been quiet, and then at most once per ``INTERVAL_SEC`` for all that was committed meanwhile. Each costs a
busy machine about as much as a producer's commit, so where the answer takes longer than it has taken at best, which is
where the machine has no time to spare, the interval grows with that delay, up to ``LONGEST_SEC``: the senders take a
share of a loaded machine that does not depend on how many they are. Workers look by themselves every second or so; a
notification that is lost costs that, and one too many costs nothing.

Nothing here ever raises into the application or makes it wait: it adds to a set. A server that does not answer holds up
the thread, not its callers. A forked child has a thread and a connection of its own.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import threading
from collections.abc import Iterable
from time import monotonic
from typing import TYPE_CHECKING, Any, Final, Protocol
from weakref import WeakSet, finalize

from jobsync_orm.coordinator.session import Session, SessionLost, StatementFailed, array
from jobsync_orm.logs import fields
from jobsync_orm.queue.statements import MOST_BYTES, QueueStatements

if TYPE_CHECKING:
    from jobsync_orm.config import CoordinationConfig

__all__ = ["Lane", "Pace", "QueueWaker", "lanes_of", "lanes_text"]

logger = logging.getLogger(__name__)

Lane = tuple[str, int, bool]
"""Type and priority of a job that is ready, and whether it has a key."""

# At most one notification per process in this time, but for the first.
INTERVAL_SEC: Final = 0.01

# A sender is delayed by a busy machine for at most one part in so many of its time, until the interval is the longest.
PARTS: Final = 40
LONGEST_SEC: Final = 0.5

# For so long the shortest answer is remembered: the way to the server may become a longer one.
REMEMBERED_SEC: Final = 60.0

# With more lanes than this workers are told to look at everything.
MOST_LANES: Final = 100

ANSWER_SEC: Final = 5.0
RETRY_SEC: Final = (0.2, 5.0)

# How long a COMMIT is looked at that has been sent: first every millisecond, then more and more rarely.
COMMIT_SEC: Final = 60.0

# How long leaving waits for what is still to be sent.
LEAVE_SEC: Final = 1.0

# The notification itself is nothing that must outlast a crash of the server.
SETUP: Final = "SET synchronous_commit = off; SET application_name = 'jobsync_orm wake-ups'"


class Transaction(Protocol):
    """What is known of a transaction of the application's."""

    @property
    def is_active(self) -> bool:
        """False when it has ended."""


def lanes_text(lanes: Iterable[Lane]) -> str:
    """Payload of a notification: ``[[type, priority, keyed], ...]`` as JSON, or empty for: look at everything."""
    text = json.dumps(sorted(lanes), ensure_ascii=False, separators=(",", ":"))
    return text if len(text.encode()) <= MOST_BYTES else ""


def lanes_of(payload: str) -> list[Lane] | None:
    """The lanes that a notification names; None for: look at everything.

    Whoever may connect to the database may notify: what is not as :func:`lanes_text` writes it names nothing.
    """
    try:
        found = json.loads(payload)
    except (ValueError, RecursionError):
        return None
    return [(type, priority, keyed) for type, priority, keyed in found] if _are_lanes(found) else None


def _are_lanes(found: Any) -> bool:
    return isinstance(found, list) and all(
        isinstance(lane, list)
        and list(map(type, lane)) == [str, int, bool]
        and "\0" not in lane[0]
        and -(2**31) <= lane[1] < 2**31
        for lane in found
    )


class Pace:
    """How long to wait after a notification, by how long the answers to the last ones took.

    A long way to the server is in each of them, and says nothing about how busy it is: what counts is how much longer
    than the shortest they take, as a mean in which the last answer weighs a quarter.
    """

    def __init__(self) -> None:
        self.interval = INTERVAL_SEC
        self._best = self._mean = 0.0

    def answered(self, seconds: float) -> None:
        """An answer took so many seconds."""
        if not self._best:
            self._best = self._mean = seconds
        self._best = min(self._best, seconds)
        self._mean += (seconds - self._mean) / 4
        self.interval = min(max(INTERVAL_SEC, PARTS * (self._mean - self._best)), LONGEST_SEC)


class QueueWaker:
    """What a queue of this process has to tell the workers.

    Parameters
    ----------
    config : CoordinationConfig
        Where they listen.
    statements : QueueStatements
        Those of the queue.
    """

    def __init__(self, config: CoordinationConfig, statements: QueueStatements) -> None:
        self._config = config
        self._statements = statements
        self._sender: _Sender | None = None
        self._guard = threading.RLock()
        _wakers.add(self)

    def prepare(self) -> None:
        """There will be something to be told: connect meanwhile."""
        if self._sender is None:
            self._running()

    def wake(self, lanes: Iterable[Lane], blocked: Iterable[int] = ()) -> None:
        """Jobs have been committed: some of these ``lanes``, and ``blocked`` ones that wait for others."""
        self._running().add(set(lanes), set(blocked))

    def wake_after(self, transaction: Transaction, lanes: Iterable[Lane], blocked: Iterable[int] = ()) -> None:
        """The same for a transaction whose COMMIT is about to be sent."""
        self._running().add_later(transaction, set(lanes), set(blocked))

    def close(self, seconds: float = LEAVE_SEC) -> None:
        """Send what is to be sent, for at most so many seconds, and end the thread. It starts again when needed."""
        with self._guard:
            sender, self._sender = self._sender, None
        if sender is not None:
            sender.close(seconds)

    def _running(self) -> _Sender:
        sender = self._sender
        # A server that forks without telling Python leaves the child with a thread that is not there.
        if sender is not None and sender.process == os.getpid() and sender.is_alive():
            return sender
        with self._guard:
            sender = self._sender
            if sender is None or sender.process != os.getpid() or not sender.is_alive():
                if sender is not None:
                    _inherited.append(sender)
                sender = self._sender = _Sender(self._config, self._statements)
                finalize(self, sender.leave)
            return sender

    def _forked(self) -> None:
        """This is a child: another thread may have held the lock, and the connection is the parent's."""
        self._guard = threading.RLock()
        sender, self._sender = self._sender, None
        if sender is not None:
            _inherited.append(sender)


class _Sender:
    """The thread of one process."""

    def __init__(self, config: CoordinationConfig, statements: QueueStatements) -> None:
        self.process = os.getpid()
        self._channel = config.names.queue_channel
        self._unblock = statements.unblock
        self._config = config
        self._session: Session | None = None
        self._changed = threading.Condition()  # its lock is one that a signal handler may take again
        self._lanes: set[Lane] = set()
        self._everything = False
        self._blocked: set[int] = set()
        self._later: list[tuple[Transaction, set[Lane], set[int], float]] = []
        self._resting = False
        self._leaving_at: float | None = None
        self._pace = Pace()
        self._pace_since = float("-inf")
        self._sent_at = 0.0
        self._thread = threading.Thread(target=self._run, name="jobsync-wake-ups", daemon=True)
        _senders.add(self)
        self._thread.start()

    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def add(self, lanes: set[Lane], blocked: set[int]) -> None:
        if not blocked and lanes <= self._lanes:
            return  # what is there is sent after this, and this thread need not wait for the other
        with self._changed:
            self._merge(lanes, blocked)
            self._look_up()

    def add_later(self, transaction: Transaction, lanes: set[Lane], blocked: set[int]) -> None:
        with self._changed:
            self._later.append((transaction, lanes, blocked, monotonic()))
            self._look_up()

    def leave(self, seconds: float = LEAVE_SEC) -> None:
        """End after what there is to be sent, without waiting for it."""
        if self.process == os.getpid():
            with self._changed:
                if self._leaving_at is None:
                    self._leaving_at = monotonic() + seconds
                self._changed.notify_all()

    def close(self, seconds: float) -> None:
        """The same, and wait for it."""
        self.leave(seconds)
        if self.process == os.getpid():
            self._thread.join(seconds)

    def _look_up(self) -> None:
        if self._resting:
            self._resting = False
            self._changed.notify()

    def _merge(self, lanes: set[Lane], blocked: set[int]) -> None:
        self._lanes |= lanes
        self._blocked |= blocked
        if len(self._lanes) > MOST_LANES:
            self._everything = True
            self._lanes.clear()
        if len(self._blocked) > MOST_LANES * 10:  # a sweep of the workers finds them
            self._blocked.clear()

    def _run(self) -> None:
        pause = RETRY_SEC[0]
        try:
            with contextlib.suppress(Exception):  # it is tried again when there is something to be told
                self._connect()
            while self._wait():
                with self._changed:
                    taken = self._lanes, self._everything, self._blocked
                    self._lanes, self._everything, self._blocked = set(), False, set()
                try:
                    self._send(*taken)
                    pause = RETRY_SEC[0]
                except Exception as error:  # noqa: BLE001  # the application goes on, and so does this
                    logger.warning(
                        "workers are not told of new jobs, and find them by themselves: %s",
                        error,
                        extra=fields("wake_ups_failed"),
                    )
                    with self._changed:
                        self._merge(taken[0], taken[2])
                        self._everything = self._everything or taken[1]
                        if self._leaving_at is not None:
                            return
                        self._changed.wait(pause)
                    pause = min(pause * 2, RETRY_SEC[1])
        finally:
            if self._session is not None:
                self._session.close()
            _senders.discard(self)

    def _wait(self) -> bool:
        """Wait until there is something to be sent and the last was long enough ago. False to end."""
        with self._changed:
            while True:
                now = monotonic()
                self._look_at_commits(now)
                leaving = self._leaving_at is not None
                # While it lasts nobody wakes this thread for a commit: each would cost the committing one some time.
                left = self._sent_at + self._pace.interval - now
                if left > 0 and not leaving:
                    self._changed.wait(left)
                elif self._lanes or self._everything or self._blocked:
                    self._sent_at = now
                    return True
                elif self._later:
                    if self._leaving_at is not None and now > self._leaving_at:
                        return False
                    # Of a COMMIT that takes a tenth of a second the end is seen some milliseconds late.
                    self._changed.wait(max(0.001, (now - self._later[-1][3]) / 16))
                elif leaving:
                    return False
                else:
                    self._resting = True
                    self._changed.wait()

    def _look_at_commits(self, now: float) -> None:
        if not self._later:
            return
        waiting = []
        for entry in self._later:
            transaction, lanes, blocked, since = entry
            if transaction.is_active and now - since < COMMIT_SEC:
                waiting.append(entry)
            else:
                self._merge(lanes, blocked)
        self._later = waiting

    def _send(self, lanes: set[Lane], everything: bool, blocked: set[int]) -> None:
        try:
            self._tell(lanes, everything, blocked)
        except SessionLost:  # it may have been dead for long: nobody looked at it
            self._tell(lanes, everything, blocked)

    def _tell(self, lanes: set[Lane], everything: bool, blocked: set[int]) -> None:
        session = self._connect()
        if blocked:
            # What they wait for may have completed before the workers could see that they do.
            ((freed,),) = session.execute(self._unblock, array(blocked), timeout=ANSWER_SEC)
            lanes = lanes | {(type, priority, keyed) for type, priority, keyed in json.loads(freed or "[]")}
        if everything or lanes:
            text = "" if everything else lanes_text(lanes)
            with contextlib.suppress(StatementFailed):  # the queue of notifications is full: workers are far behind
                begun = monotonic()
                if begun - self._pace_since > REMEMBERED_SEC:
                    self._pace, self._pace_since = Pace(), begun
                session.execute("SELECT pg_notify($1, $2)", self._channel, text, timeout=ANSWER_SEC)
                self._pace.answered(monotonic() - begun)

    def _connect(self) -> Session:
        if self._session is None:
            self._session = Session(self._config.connection_pool(), -1, _look, ANSWER_SEC, SETUP)
        if not self._session.is_open:
            self._pace_since = float("-inf")  # the server may be another one
            self._session.open()
        return self._session


def _look(_at: float) -> None:
    """Nobody needs to know that this session is awake."""


_wakers: WeakSet[QueueWaker] = WeakSet()

# Those whose thread runs, be their queue gone or not.
_senders: set[_Sender] = set()

# Of the parent process. Kept, because to drop a connection would be to end it for the parent too.
_inherited: list[Any] = []


def _forked() -> None:
    _inherited.extend(_senders)
    _senders.clear()
    for waker in list(_wakers):
        waker._forked()


def _leave() -> None:
    for sender in list(_senders):
        sender.close(LEAVE_SEC)


os.register_at_fork(after_in_child=_forked)
atexit.register(_leave)
