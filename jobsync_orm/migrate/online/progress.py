"""How far a long piece of work has got: a bar on a terminal, log lines everywhere else.

The bar is rich's, which the extra ``cli`` brings. Without it, and where standard error is no terminal (a deployment, a
container), a line every ten seconds goes to the logger ``jobsync_orm.migrate`` at level INFO.
"""

from __future__ import annotations

import logging
import sys
import time
from types import TracebackType
from typing import Any, Self

from jobsync_orm.terminal import one_line

__all__ = ["Progress"]

log = logging.getLogger("jobsync_orm.migrate")

_INTERVAL = 10.0


class Progress:
    """Progress of one piece of work, as a context manager.

    Parameters
    ----------
    what : str
        What is being worked on.
    total : int
        About how many rows there are; 0 if that is not known.
    """

    def __init__(self, what: str, total: int) -> None:
        self.what, self.total, self.done = what, total, 0
        self._begun = self._told = time.monotonic()
        self._bar: Any = _bar() if sys.stderr.isatty() else None
        self._task: Any = None

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
            self._task = self._bar.add_task(one_line(self.what), total=self.total or None)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.stop()
        took = time.monotonic() - self._begun
        end = "done" if kind is None else "interrupted"
        log.info("%s: %s after %d rows, %.1f s", self.what, end, self.done, took)

    def advance(self, rows: int) -> None:
        """``rows`` more have been dealt with."""
        self.done += rows
        if self._bar is not None:
            # The estimate may be too low: a bar that stands at its end would look as if it hung.
            self._bar.update(self._task, completed=self.done, total=max(self.total, self.done) or None)
        elif time.monotonic() - self._told >= _INTERVAL:
            self._told = time.monotonic()
            log.info("%s: %s", self.what, self._line())

    def _line(self) -> str:
        if self.total <= self.done:
            return f"{self.done} rows"
        took = time.monotonic() - self._begun
        left = took * (self.total - self.done) / max(self.done, 1)
        return f"{self.done} of about {self.total} rows ({self.done / self.total:.0%}), about {left:.0f} s left"


def _bar() -> Any:
    try:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar
    except ImportError:
        return None
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Bar(*columns, console=Console(stderr=True))
