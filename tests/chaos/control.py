"""What the nemesis does to a worker from inside: sets its wall clock, stops it at a chosen point of a transaction."""

from __future__ import annotations

import mmap
import struct
from enum import IntEnum
from pathlib import Path

__all__ = ["Control", "Point"]

_LAYOUT = struct.Struct("<di")


class Point(IntEnum):
    """Where in a transaction a worker stops itself."""

    NOWHERE = 0
    READ = 1  # it has read its rows and has written nothing
    WRITTEN = 2  # its writes are sent, the commit has not begun
    FENCED = 3  # the fence has been passed; where that is a message of its own, COMMIT has not been sent


class Control:
    """A few bytes shared by the nemesis and one worker process."""

    def __init__(self, path: Path) -> None:
        if not path.exists():
            path.write_bytes(_LAYOUT.pack(0.0, Point.NOWHERE))
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), _LAYOUT.size)

    @property
    def clock_ahead(self) -> float:
        """Seconds by which the worker's wall clock is ahead of the machine's."""
        return _LAYOUT.unpack_from(self._memory)[0]

    @clock_ahead.setter
    def clock_ahead(self, seconds: float) -> None:
        struct.pack_into("<d", self._memory, 0, seconds)

    @property
    def stop_at(self) -> Point:
        """Where the worker is to stop itself next."""
        return Point(_LAYOUT.unpack_from(self._memory)[1])

    @stop_at.setter
    def stop_at(self, point: Point) -> None:
        struct.pack_into("<i", self._memory, 8, point)
