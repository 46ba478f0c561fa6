"""Within a worker process: its wall clock, its log, and the points where it stops itself.

To be imported before anything that may keep a reference to the real clock.
"""

from __future__ import annotations

import datetime
import json
import os
import signal
import threading
import time
from pathlib import Path

from tests.chaos.control import Control, Point

__all__ = ["LIFE", "NODE", "reach", "stopping", "tell"]

NODE, LIFE = os.environ["NODE"], int(os.environ["LIFE"])

stopping = threading.Event()

_control = Control(Path(os.environ["CONTROL"]))
_log = os.open(os.environ["LOG"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
_real_time, _real_datetime = time.time, datetime.datetime


class _SteppedDatetime(_real_datetime):
    """A wall clock that somebody sets."""

    @classmethod
    def now(cls, tz: datetime.tzinfo | None = None) -> datetime.datetime:  # type: ignore[override]
        return _real_datetime.now(tz) + datetime.timedelta(seconds=_control.clock_ahead)

    @classmethod
    def utcnow(cls) -> datetime.datetime:  # type: ignore[override]
        return _real_datetime.now(datetime.UTC).replace(tzinfo=None) + datetime.timedelta(seconds=_control.clock_ahead)


datetime.datetime = _SteppedDatetime  # type: ignore[misc]
time.time = lambda: _real_time() + _control.clock_ahead
time.time_ns = lambda: int(time.time() * 1e9)


def tell(event: str, **more: object) -> None:
    """One line, in one write: a kill loses nothing that was said before."""
    os.write(_log, (json.dumps({"e": event, "t": time.monotonic(), **more}) + "\n").encode())


def reach(point: Point) -> bool:
    """Stop here, if the nemesis asked for it, and say so."""
    if _control.stop_at != point:
        return False
    _control.stop_at = Point.NOWHERE
    tell("stop", point=point.name)
    os.kill(os.getpid(), signal.SIGSTOP)
    return True
