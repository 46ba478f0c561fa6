"""How commands answer: tables on a terminal, aligned text in a pipe, one JSON document with ``--json``.

Answers go to stdout; errors, questions and progress to stderr. With ``--json`` stdout has exactly one document, also
where the answer is no, and an error is ``{"error": {"type": ..., "message": ...}}`` on stderr.

Exit codes, for scripts: :data:`OK` 0; :data:`NO` 1, the answer is no (unhealthy, not found, problems, or a person
declined); :data:`FAILED` 2, the question could not be asked or nothing was done (usage, connection, a value that cannot
be, a confirmation that nobody could give); :data:`INTERRUPTED` 130.
"""

from __future__ import annotations

import getpass
import socket
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

import typer
from sqlalchemy.exc import DBAPIError

from jobsync_orm.exceptions import JobsyncError
from jobsync_orm.operate import as_json
from jobsync_orm.terminal import json_line, one_line, several_lines

# rich is imported where it is used: that takes longer than most commands.
if TYPE_CHECKING:
    from rich.progress import Progress
    from rich.table import Table

__all__ = ["FAILED", "INTERRUPTED", "NO", "OK", "Bar", "Block", "Grid", "Marked", "Output", "Part", "age", "whoever"]

OK, NO, FAILED, INTERRUPTED = 0, 1, 2, 130


@dataclass(frozen=True, slots=True)
class Grid:
    """A table. A column whose title begins with ``>`` is of numbers: it is aligned to the right.

    Parameters
    ----------
    columns : sequence of str
    rows : iterable of sequence
        One value for each column; None is shown as ``-``.
    empty : str
        What is said if there are no rows.
    styles : dict of int to str
        A rich style for the row of this number, on a terminal.
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]
    empty: str = "none"
    styles: dict[int, str] = field(default_factory=dict)

    def cells(self) -> list[list[str]]:
        """The rows as text of one line each."""
        return [["-" if value is None else one_line(value) for value in row] for row in self.rows]


@dataclass(frozen=True, slots=True)
class Block:
    """Text that may have several lines: an error, a traceback."""

    text: str


@dataclass(frozen=True, slots=True)
class Marked:
    """A line that begins with a word in a colour."""

    word: str
    colour: str
    rest: str


Part = Grid | Block | Marked | str


class Bar:
    """A progress that a command moves on."""

    def __init__(self, progress: Progress | None, total: int, title: str) -> None:
        self._progress = progress
        self._task = None if progress is None else progress.add_task(one_line(title), total=total)

    def at(self, done: int, title: str | None = None, total: int | None = None) -> None:
        """So much of the total is done; title and total may change on the way."""
        if self._progress is not None and self._task is not None:
            shown = None if title is None else one_line(title)
            self._progress.update(self._task, completed=done, description=shown, total=total)


class Output:
    """Where one command's answer goes.

    Parameters
    ----------
    json : bool
        Whether it is to be a JSON document.
    """

    def __init__(self, *, json: bool = False) -> None:
        self.json = json

    def show(self, answer: Any, *parts: Part) -> None:
        """Print the answer: ``answer`` itself by :func:`~jobsync_orm.operate.as_json`, or ``parts`` for people.

        Text is a line; whatever in it could steer the terminal is replaced.
        """
        if self.json:
            typer.echo(json_line(as_json(answer)))
            return
        for part in parts:
            if isinstance(part, str):
                typer.echo(one_line(part))
            elif isinstance(part, Block):
                typer.echo(several_lines(part.text))
            elif isinstance(part, Marked):
                typer.echo(typer.style(one_line(part.word), fg=part.colour, bold=True) + one_line(part.rest))
            elif not part.rows:
                typer.echo(part.empty)
            elif sys.stdout.isatty():
                from rich.console import Console

                Console().print(_table(part))
            else:
                for line in _aligned(part):
                    typer.echo(line)

    def note(self, text: str) -> None:
        """Tell a person something on the way, on stderr; with ``--json`` nobody."""
        if not self.json:
            typer.echo(one_line(text), err=True)

    def fail(self, message: str, kind: str = "Refused", code: int = FAILED) -> NoReturn:
        """End with an error."""
        if self.json:
            typer.echo(json_line({"error": {"type": kind, "message": message}}), err=True)
        else:
            typer.echo(several_lines(f"error: {message}"), err=True)
        raise typer.Exit(code)

    @contextmanager
    def errors(self) -> Iterator[None]:
        """An error about the input or from the server becomes one line and exit code 2."""
        try:
            yield
        except JobsyncError as error:
            self.fail(str(error), type(error).__name__)
        except DBAPIError as error:
            self.fail(str(error.orig).strip(), type(error.orig).__name__)
        except KeyboardInterrupt:
            self.fail("interrupted", "KeyboardInterrupt", INTERRUPTED)

    def confirm(self, question: str, yes: bool) -> None:
        """Ask, unless ``yes``; a person who declines ends the command with 1.

        Without a terminal nobody can be asked, nor can they with ``--json``: the command ends with 2, and its message
        names ``--yes``.
        """
        if yes:
            return
        if self.json or not sys.stdin.isatty():
            self.fail(f"{question} Nobody is there to ask: give --yes to do it. Nothing was changed", "NotConfirmed")
        if not typer.confirm(one_line(question), err=True):
            self.note("nothing was changed")
            raise typer.Exit(NO)

    @contextmanager
    def progress(self, total: int, title: str) -> Iterator[Bar]:
        """A progress bar on stderr, if that is a terminal and the answer is for a person."""
        if self.json or not sys.stderr.isatty():
            yield Bar(None, total, title)
            return
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=Console(stderr=True)) as progress:
            yield Bar(progress, total, title)


def whoever() -> str:
    """Who runs this command, for what is stored: ``USER@HOST``."""
    return f"{getpass.getuser()}@{socket.gethostname()}"


def age(seconds: float | None) -> str:
    """A duration for a person: ``0.4 s``, ``42 s``, ``3 min 5 s``, ``2 h 10 min``, ``5 d 3 h``."""
    if seconds is None:
        return "-"
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 120:
        return f"{whole} s"
    for unit, size, lesser, part in (("min", 60, "s", 1), ("h", 3600, "min", 60), ("d", 86_400, "h", 3600)):
        if whole < size * {"min": 60, "h": 48, "d": 10**6}[unit]:
            return f"{whole // size} {unit} {whole % size // part} {lesser}"
    return f"{whole} s"


def _table(grid: Grid) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(show_edge=False, pad_edge=False)
    for title in grid.columns:
        numbers = title.startswith(">")
        table.add_column(title.removeprefix(">"), justify="right" if numbers else "left", overflow="fold")
    for place, row in enumerate(grid.cells()):
        table.add_row(*map(Text, row), style=grid.styles.get(place))
    return table


def _aligned(grid: Grid) -> Iterable[str]:
    titles = [title.removeprefix(">") for title in grid.columns]
    lines = [titles, *grid.cells()]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        cells = [
            cell.rjust(width) if title.startswith(">") else cell.ljust(width)
            for cell, width, title in zip(line, widths, grid.columns, strict=True)
        ]
        yield "  ".join(cells).rstrip()
