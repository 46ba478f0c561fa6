"""What jobs tell the benchmark: one memory-mapped file per process, so that telling costs no system call."""

from __future__ import annotations

import mmap
import os
import struct
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Reader", "hit"]

# Count, first and last moment; then the start of each numbered job.
HEAD = struct.Struct("ddd")
MOMENT = struct.Struct("d")


class _Sink:
    def __init__(self, folder: str, numbers: int) -> None:
        path = Path(folder) / f"{os.getpid()}.new"
        size = HEAD.size + MOMENT.size * max(1, numbers)
        with path.open("w+b") as file:
            file.truncate(size)
            self._memory = mmap.mmap(file.fileno(), size)
        path.rename(path.with_suffix(".bin"))  # who reads finds it whole
        self._numbers = numbers
        self._count = 0
        self._first = 0.0
        self._guard = threading.Lock()
        self._log = Path(folder) / f"{os.getpid()}.log"

    def hit(self, number: int, seconds: float) -> None:
        now = time.monotonic()
        with self._guard:
            self._count += 1
            self._first = self._first or now
            HEAD.pack_into(self._memory, 0, self._count, self._first, now)
            if 0 <= number < self._numbers:
                MOMENT.pack_into(self._memory, HEAD.size + MOMENT.size * number, now)
        if seconds:
            self._tell("start", number)
            time.sleep(seconds)
            self._tell("end", number)

    def _tell(self, what: str, number: int) -> None:
        with self._guard, self._log.open("a") as log:
            log.write(f"{what} {number} {time.monotonic()}\n")


_sink: _Sink | None = None
_opening = threading.Lock()


def hit(number: int, seconds: float = 0) -> None:
    """Job ``number`` runs now, and for ``seconds``."""
    global _sink
    if _sink is None:
        with _opening:
            _sink = _sink or _Sink(os.environ["BENCH_SINK"], int(os.environ.get("BENCH_NUMBERS", "0")))
    _sink.hit(number, seconds)


@dataclass(frozen=True)
class Reader:
    """Reads what the processes that write to ``folder`` have told."""

    folder: Path

    def forget(self) -> None:
        """Delete what those have told that have ended."""
        for path in (*self.folder.glob("*.bin"), *self.folder.glob("*.log")):
            path.unlink()

    def totals(self) -> tuple[int, float, float]:
        """Jobs run, and the first and the last moment (0 if none)."""
        heads = [HEAD.unpack(path.read_bytes()[: HEAD.size]) for path in self.folder.glob("*.bin")]
        ran = [head for head in heads if head[0]]
        if not ran:
            return 0, 0.0, 0.0
        return int(sum(head[0] for head in ran)), min(head[1] for head in ran), max(head[2] for head in ran)

    def starts(self, numbers: int) -> Sequence[float]:
        """The moment each numbered job began, 0 if it has not."""
        starts = [0.0] * numbers
        for path in self.folder.glob("*.bin"):
            values = [moment for (moment,) in MOMENT.iter_unpack(path.read_bytes()[HEAD.size :])]
            starts = [mine or theirs for mine, theirs in zip(starts, values, strict=False)]
        return starts

    def events(self) -> list[tuple[str, float]]:
        """``("start" | "end", moment)`` of the jobs that take time, in order."""
        lines = [line.split() for path in self.folder.glob("*.log") for line in path.read_text().splitlines()]
        return sorted(((what, float(moment)) for what, _, moment in lines), key=lambda event: event[1])
