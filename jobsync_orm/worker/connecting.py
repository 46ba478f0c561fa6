"""Connecting in time: a server that does not answer holds up the connecting, and not whoever waits for it.

A driver that connects can be neither interrupted nor told that there is less time than it was given: libpq's own limit
is two seconds at least. So each connection is made in a thread of its own, which is left behind where the time is up,
and closes what it may still get.
"""

from __future__ import annotations

import threading

from jobsync_orm.coordinator.clock import now
from jobsync_orm.coordinator.session import Session, SessionLost

__all__ = ["open_in_time"]

# How often it is looked whether the time is up, which may become less meanwhile.
LOOK_SEC = 0.05


def open_in_time(session: Session) -> bool:
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
