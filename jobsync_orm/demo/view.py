"""What is seen of the demo: a live table in a terminal, plain lines elsewhere."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self

from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.progress_bar import ProgressBar
from rich.table import Table

from jobsync_orm.demo.cluster import Snapshot
from jobsync_orm.demo.fleet import Member

__all__ = ["PlainView", "TerminalView", "View", "make_view"]


class View(Protocol):
    """Shows the demo."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def say(self, text: str) -> None:
        """Something has happened."""

    def show(self, snapshot: Snapshot, members: Iterable[Member]) -> None:
        """How things are now."""

    def close(self) -> None:
        """Nothing more to show; only to say."""


@dataclass(frozen=True)
class _Line:
    """One worker."""

    name: str
    pid: int
    state: str
    tokens: int
    files: int


def _lines(snapshot: Snapshot, members: Iterable[Member]) -> list[_Line]:
    tokens, oldest = snapshot.tokens, next(iter(snapshot.registered), None)
    lines = []
    for member in members:
        state = member.state
        if state == "working":
            state = "starting" if member.name not in snapshot.registered else state
            state = "working, leads" if member.name == oldest else state
        lines.append(
            _Line(member.name, member.process.pid, state, tokens[member.name], snapshot.done.get(member.name, 0))
        )
    return lines


def _percent(snapshot: Snapshot) -> int:
    return 100 * snapshot.files_done // max(1, snapshot.files)


class PlainView:
    """A line for each event and for each tenth of the work."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._tenth = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def say(self, text: str) -> None:
        """Print it."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def show(self, snapshot: Snapshot, members: Iterable[Member]) -> None:
        """Print a line if another tenth has been done."""
        if _percent(snapshot) // 10 <= self._tenth:
            return
        self._tenth = _percent(snapshot) // 10
        workers = "; ".join(
            f"{line.name} {line.tokens} tokens, {line.files} files"
            for line in _lines(snapshot, members)
            if line.state.startswith("working")
        )
        self.say(f"{_percent(snapshot):4} %  {snapshot.files_done} of {snapshot.files} files done; {workers}")

    def close(self) -> None:
        """Nothing to do."""


class TerminalView:
    """Events scroll by above a table of the workers and a bar."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(console=console, auto_refresh=False)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def say(self, text: str) -> None:
        """Print it above the table."""
        self._console.print(escape(text), highlight=False)

    def show(self, snapshot: Snapshot, members: Iterable[Member]) -> None:
        """Draw the table anew."""
        table = Table(expand=False)
        for heading in ("worker", "pid", "state"):
            table.add_column(heading)
        for heading in ("tokens", "files done"):
            table.add_column(heading, justify="right", min_width=10)
        for line in _lines(snapshot, members):
            colour = {"killed": "red", "paused": "yellow"}.get(line.state, "dim")
            style = "green" if line.state.startswith("working") else colour
            cells = (line.name, str(line.pid), line.state, f"{line.tokens:,}", f"{line.files:,}")
            table.add_row(*cells, style=style)
        bar = ProgressBar(total=max(1, snapshot.files), completed=snapshot.files_done, width=60)
        text = f"{snapshot.files_done:,} of {snapshot.files:,} files done, {_percent(snapshot)} %"
        below = Table.grid()
        below.add_row(bar)
        below.add_row(text)
        self._live.update(Group(table, below), refresh=True)

    def close(self) -> None:
        """Leave the last table where it is."""
        self._live.stop()


def make_view() -> View:
    """The view that fits where stdout goes."""
    console = Console()
    return TerminalView(console) if console.is_terminal else PlainView(console)
