"""Which tasks this process works on."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable

__all__ = ["OpenTasks"]


class OpenTasks:
    """What the threads of this process exclude each other from.

    A task has one open claim, or any number of ``add_task`` that wait for ``write_audit``.
    """

    def __init__(self) -> None:
        self._guard = threading.RLock()  # a signal handler may come in the middle of a call
        self._claims: dict[str, object] = {}
        self._added: Counter[str] = Counter()

    def open(self, keys: Iterable[str], holder: object) -> list[str]:
        """Reserve tasks for claims of ``holder``. Returns those that were free, in their order."""
        with self._guard:
            free = [key for key in dict.fromkeys(keys) if key not in self._claims and key not in self._added]
            self._claims.update(dict.fromkeys(free, holder))
            return free

    def hand_over(self, claims: Iterable[tuple[str, object]], holder: object) -> None:
        """Each of these tasks, reserved by ``holder``, has a holder of its own now."""
        with self._guard:
            for key, claim in claims:
                if self._claims.get(key) is holder:
                    self._claims[key] = claim

    def close(self, keys: Iterable[str], holder: object) -> None:
        """These claims have ended. One that has been made since, by another holder, stays."""
        with self._guard:
            for key in keys:
                if self._claims.get(key) is holder:
                    del self._claims[key]

    def drop(self, keys: Iterable[str]) -> None:
        """These claims have been ended over the heads of their holders."""
        with self._guard:
            for key in keys:
                self._claims.pop(key, None)

    def add(self, keys: Iterable[str]) -> list[str]:
        """Reserve tasks to be put down for the audit. Returns those without an open claim, in their order."""
        with self._guard:
            free = [key for key in dict.fromkeys(keys) if key not in self._claims]
            self._added.update(free)
            return free

    def remove(self, keys: Iterable[str]) -> None:
        """These tasks are written, or have not been put down after all."""
        with self._guard:
            for key in keys:
                self._added[key] -= 1
                if self._added[key] <= 0:
                    del self._added[key]

    def has(self, key: str) -> bool:
        """Whether this process works on the task."""
        with self._guard:
            return key in self._claims or key in self._added

    def holder(self, key: str) -> object | None:
        """The holder of the open claim on the task."""
        with self._guard:
            return self._claims.get(key)
