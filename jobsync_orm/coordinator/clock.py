"""The clock of this process, and waiting by it.

The loop never reads a clock or waits by other means than a :class:`Clock` it was given, so that a test can run several
nodes in one thread on time of its own making. Only :class:`~jobsync_orm.coordinator.session.Session` and the
application's threads, which always run on a real machine, use ``now`` and ``CLOCK`` directly.
"""

from __future__ import annotations

import threading
import time
from typing import Final

__all__ = ["CLOCK", "SYSTEM", "Clock", "now"]

# Of a machine's clocks, one that no one sets and that, on Linux, keeps running while the machine is suspended.
CLOCK: Final[int] = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def now() -> float:
    """Seconds on ``CLOCK``."""
    return time.clock_gettime(CLOCK)


class Clock:
    """Time and waiting as the machine has them."""

    def now(self) -> float:
        """Seconds on a clock that nobody sets and that runs in suspend."""
        return now()

    def wait(self, event: threading.Event, seconds: float) -> bool:
        """Wait until ``event`` is set, at most ``seconds``. Returns whether it is."""
        return event.wait(seconds)

    def sleep(self, seconds: float) -> None:
        """Do nothing for ``seconds``."""
        time.sleep(seconds)


SYSTEM: Final = Clock()
