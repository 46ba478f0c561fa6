"""SIGTERM and SIGINT, while a worker runs in the main thread.

The first one stops the worker gracefully: it claims nothing more, what runs may end within the grace, and what is left
then is given back. The second one does not wait. The third does what it would do without the worker: it ends the
process, whatever state it is in; the worker's jobs are then rescued by the other workers.

The handlers themselves only pass the signal on to a thread: they are called in the middle of whatever the main thread
does, which may hold any lock, the application's event loop included.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable
from queue import SimpleQueue
from types import FrameType
from typing import Any, Final, Self

from jobsync_orm.logs import fields

__all__ = ["StopSignals"]

logger = logging.getLogger("jobsync_orm")

NUMBERS: Final = (signal.SIGTERM, signal.SIGINT)


class StopSignals:
    """Context manager that takes both signals over, and gives them back. Outside of the main thread, which alone gets
    signals, it does nothing.

    Parameters
    ----------
    stop : callable
        Called at the first signal.
    hurry : callable
        Called at the second.
    """

    def __init__(self, stop: Callable[[], object], hurry: Callable[[], object]) -> None:
        self._stop = stop
        self._hurry = hurry
        self._seen = 0
        self._came: SimpleQueue[int] = SimpleQueue()
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            threading.Thread(target=self._pass_on, name="jobsync-signals", daemon=True).start()
            for number in NUMBERS:
                self._before[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        if not self._before:
            return
        while self._before:
            number, handler = self._before.popitem()
            # None: one that was not installed by Python, and cannot be put back by it.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._came.put(0)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._seen += 1
        if self._seen <= 2:
            self._came.put(number)  # which may be called in the middle of itself
            return
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    def _pass_on(self) -> None:
        if number := self._came.get():
            logger.info(
                "%s: finishing what runs; once more gives it back",
                signal.Signals(number).name,
                extra=fields("stopping"),
            )
            self._stop()
            if number := self._came.get():
                logger.warning(
                    "%s again: giving back what runs; once more ends the process",
                    signal.Signals(number).name,
                    extra=fields("stopping"),
                )
                self._hurry()
