"""Waking the loop from other threads."""

from __future__ import annotations

import contextlib
import os
import threading

__all__ = ["Waker"]


class Waker:
    """A pipe whose reading end becomes readable when somebody calls ``wake``."""

    def __init__(self) -> None:
        self.descriptor, self._write = os.pipe()
        os.set_blocking(self.descriptor, False)
        os.set_blocking(self._write, False)
        self._guard = threading.RLock()  # a signal handler may stop the job in the middle of a wake
        self._open = True

    def wake(self) -> None:
        """Make the loop look up; nothing after ``close``."""
        # The lock keeps a late caller from writing into whatever has been given the closed descriptor's number.
        with self._guard, contextlib.suppress(BlockingIOError):
            if self._open:
                os.write(self._write, b".")

    def close(self) -> None:
        """Give the descriptors back."""
        with self._guard:
            if self._open:
                self._open = False
                os.close(self.descriptor)
                os.close(self._write)
