"""The one connection of a worker's pump.

A server that does not answer holds up the connecting, and not whoever waits for it.

A driver that connects can be neither interrupted nor told that there is less time than it was given: libpq's own limit
is two seconds at least. So each connection is made in a thread of its own, which is left behind where the time is up,
and closes what it may still get.
"""

from __future__ import annotations

import threading
import time

from jobsync_orm.config import CoordinationConfig
from jobsync_orm.coordinator.clock import now
from jobsync_orm.coordinator.session import Session, SessionLost
from jobsync_orm.coordinator.waker import Waker
from jobsync_orm.queue.statements import SESSION

__all__ = ["Line"]

# The server gives up earlier by itself: else it would go on with what nobody waits for, and each new try would add to
# those that wait for a lock.
LIMITS = "SET lock_timeout = '5s'; SET statement_timeout = '9s'"

# Between looks at the connection while waiting.
TICK_SEC = 1.0

# How often it is looked whether the time is up, which may become less meanwhile.
LOOK_SEC = 0.05


class Line:
    """A session, whatever becomes of its connections, and what wakes whoever waits on it.

    Parameters
    ----------
    config : CoordinationConfig
        Where the database is.
    channel : str
        What it listens to.
    """

    def __init__(self, config: CoordinationConfig, channel: str) -> None:
        self._waker = Waker()
        setup = f'{SESSION}; {LIMITS}; LISTEN "{channel}"'
        self.session = Session(config.connection_pool(), self._waker.descriptor, _no_look, TICK_SEC, setup)
        self.is_given_up = False
        """Whether a connection was not to be had in time. The session is another thread's then."""

    @property
    def is_open(self) -> bool:
        """Whether there is a connection that has shown no sign of a break."""
        return self.session.is_open

    def open(self) -> bool:
        """Connect. False if there was no time left for that; there is none for another try.

        Raises
        ------
        SessionLost
            There is no connection to be had.
        """
        self.is_given_up = not _open_in_time(self.session)
        return not self.is_given_up

    def hang_until(self, at: float) -> None:
        """Nothing is waited for beyond this moment of ``time.monotonic()``. Any thread may call this."""
        # The session's clock also counts the time for which the machine was asleep.
        self.session.until = now() + at - time.monotonic()

    def wake(self) -> None:
        """Make whoever waits look up. Any thread may call this."""
        self._waker.wake()

    def close(self) -> None:
        """Close the connection, for good."""
        if not self.is_given_up:
            self.session.close()
        self._waker.close()


def _no_look(at: float) -> None:
    """A queue's connection proves nothing about ownership."""


def _open_in_time(session: Session) -> bool:
    """Open ``session``, as long as it is not past its ``until``, which another thread may set meanwhile.

    Returns
    -------
    bool
        False if the time was up. The session must not be used any more then: it is another thread's.

    Raises
    ------
    SessionLost
        There is no connection to be had.
    """
    opening = _Opening(session)
    while not opening.ended.wait(LOOK_SEC):
        if now() >= session.until and opening.abandon():
            return False
    if opening.failure is not None:
        raise opening.failure
    return True


class _Opening:
    def __init__(self, session: Session) -> None:
        self.ended = threading.Event()
        self.failure: BaseException | None = None
        self._session = session
        self._abandoned = False
        self._guard = threading.Lock()
        try:
            threading.Thread(target=self._open, name="jobsync-connecting", daemon=True).start()
        except RuntimeError as error:  # the system has no more threads, for now
            raise SessionLost(f"cannot connect: {error}") from error

    def _open(self) -> None:
        try:
            self._session.open()
        except BaseException as error:  # noqa: BLE001  # whoever waits for it raises it
            self.failure = error
        with self._guard:
            if self._abandoned:
                self._session.close()
            self.ended.set()

    def abandon(self) -> bool:
        """False if it has ended just now."""
        with self._guard:
            self._abandoned = not self.ended.is_set()
            return self._abandoned
