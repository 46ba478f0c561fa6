"""``jobsync-orm top``: a cluster and its queue, live.

A thread looks at the database; this one draws and reads the keys. So the keys work, and the picture says how old it is,
also while the database does not answer.
"""

from __future__ import annotations

import errno
import os
import select
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Annotated

import typer
from sqlalchemy.exc import DBAPIError

from jobsync_orm.cli.connection import Cluster, lasting, on_cluster
from jobsync_orm.exceptions import JobsyncError
from jobsync_orm.operate.happenings import Happenings
from jobsync_orm.operate.watching import Look, Watch

# rich is imported where it is used: that takes longer than most commands.
if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

__all__ = ["top"]

# A look may take one part in so many of the time.
SHARE = 4

# Seconds without an answer from which it is said.
SILENT_SEC = 2.0

# Seconds between two looks while nodes are dead or tokens on their way: that takes about two seconds.
MOVING_SEC = 0.1

# How often the keys, and what is new, are looked at.
TICK_SEC = 0.05

FASTEST_SEC, SLOWEST_SEC = 0.1, 10.0


@on_cluster
def top(
    cluster: Cluster,
    interval: Annotated[float, typer.Option(min=FASTEST_SEC, max=SLOWEST_SEC, help="Seconds between two looks.")] = 0.5,
    once: Annotated[bool, typer.Option("--once", help="Print one frame and end.")] = False,
    width: Annotated[int | None, typer.Option(min=40, help="Of the frame of --once, in characters.")] = None,
    height: Annotated[int | None, typer.Option(min=10, help="Of the frame of --once, in lines.")] = None,
) -> None:
    """Watch nodes, tokens, rebalances and the queue live. Keys: q quits, p stops the picture, + and - set the pace."""
    with lasting(cluster.engine) as engine:
        watch = Watch(engine, cluster.names)
        if once or cluster.output.json:
            _once(cluster, watch.look(), width, height)
        elif not (sys.stdin.isatty() and sys.stdout.isatty()):
            cluster.output.fail("top needs a terminal; --once prints one frame, --once --json its figures", "Usage")
        else:
            # The first look is made here, so that what is wrong from the start is an error as of any command.
            _live(_Looker(watch, watch.look(), interval))


def _once(cluster: Cluster, look: Look, width: int | None, height: int | None) -> None:
    from rich.console import Console

    from jobsync_orm.cli.top_frame import Frame, lines

    if cluster.output.json:
        cluster.output.show(look)
        return
    happenings = Happenings()
    happenings.see(look)
    console = Console(highlight=False, width=width, height=height)
    for line in lines(Frame(look, happenings), console.width, console.height):
        console.print(line, soft_wrap=True)


class _Looker:
    """Looks at the cluster by a thread of its own.

    Parameters
    ----------
    watch : Watch
    first : Look
        What has been seen already.
    interval : float
        Seconds between two looks.
    """

    def __init__(self, watch: Watch, first: Look, interval: float) -> None:
        self._watch = watch
        self._stop = threading.Event()
        self.interval = interval
        self.happenings = Happenings()
        self.happenings.see(first)
        self.look = first
        self.seen_at = time.monotonic()
        self.error: str | None = None
        self.number = 0
        self.guard = threading.Lock()
        """Held while what was seen is changed or drawn."""
        self._thread = threading.Thread(target=self._run, name="jobsync-top", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Look no more. A look that waits for the database is left alone."""
        self._stop.set()
        self._thread.join(0.5)

    def _pace(self) -> float:
        """Seconds between two looks."""
        cluster, dead = self.look.cluster, ("cut off", "silent")
        moving = cluster.tokens.draining or cluster.tokens.unowned > cluster.tokens.parked
        if cluster.nodes and (moving or any(node.condition in dead for node in cluster.nodes)) and self.error is None:
            return min(self.interval, MOVING_SEC)
        return self.interval

    def _run(self) -> None:
        took = 0.0
        while not self._stop.wait(max(self._pace() - took, took * (SHARE - 1))):
            began = time.monotonic()
            try:
                look = self._watch.look()
            except (DBAPIError, JobsyncError) as error:
                told = error.orig if isinstance(error, DBAPIError) else error
                with self.guard:
                    # Of a connection that was refused libpq says first where to; there is room for one line.
                    self.error = str(told).strip().split("\n", 1)[0].rsplit("FATAL:", 1)[-1].strip()
                    self.number += 1
                took = 0.0
                continue
            took = time.monotonic() - began
            with self.guard:
                self.look, self.error, self.seen_at = look, None, time.monotonic()
                self.happenings.see(look)
                self.number += 1


def _live(looker: _Looker) -> None:
    """Draw until the reader has seen enough."""
    from rich.console import Console
    from rich.live import Live

    console = Console(highlight=False)
    picture = _Picture(looker, console)
    looker.start()
    try:
        with _keys() as key, Live(console=console, screen=True, auto_refresh=False) as live:
            while True:
                live.update(picture.draw(), refresh=True)
                # A second without anything new is drawn as well: the picture says how old it is.
                until = time.monotonic() + 1
                drawn, size = looker.number, console.size
                while looker.number == drawn and console.size == size and time.monotonic() < until:
                    pressed = key(TICK_SEC)
                    if pressed in ("q", "Q", "\x03"):
                        return
                    if pressed and picture.take(pressed):
                        break
    except (KeyboardInterrupt, _TerminalGone):
        return
    except OSError as error:
        if error.errno != errno.EIO:  # drawing finds out first that there is no terminal any more
            raise
    finally:
        looker.stop()


class _TerminalGone(Exception):
    """Nobody watches any more."""


class _Picture:
    """What is drawn of what the looker has seen."""

    def __init__(self, looker: _Looker, console: Console) -> None:
        self._looker = looker
        self._console = console
        self._held: Text | None = None

    def take(self, key: str) -> bool:
        """A key was pressed; whether that changes the picture."""
        looker = self._looker
        if key in "pP ":
            self._held = None if self._held is not None else self._frame(paused=True)
        elif key == "+":
            looker.interval = max(FASTEST_SEC, looker.interval / 2)
        elif key == "-":
            looker.interval = min(SLOWEST_SEC, looker.interval * 2)
        else:
            return False
        return True

    def draw(self) -> Text:
        """The frame of now, or the one that is held."""
        return self._held if self._held is not None else self._frame()

    def _frame(self, paused: bool = False) -> Text:
        from rich.text import Text

        from jobsync_orm.cli.top_frame import Frame, lines

        looker, size = self._looker, self._console.size
        keys = f"q quit  p {'go on' if paused else 'pause'}  +/- every {looker.interval:g} s"
        with looker.guard:
            stale = time.monotonic() - looker.seen_at
            error = looker.error or ("the database takes long" if stale > SILENT_SEC + looker.interval else None)
            frame = Frame(looker.look, looker.happenings, stale, error, paused, keys)
            return Text("\n").join(lines(frame, size.width, size.height))


@contextmanager
def _keys() -> Iterator[Callable[[float], str]]:
    """A function that waits so many seconds for a key; empty if there was none. It leaves the terminal as it was."""
    import termios
    import tty

    terminal = sys.stdin.fileno()
    before = termios.tcgetattr(terminal)

    def key(seconds: float) -> str:
        ready, _, _ = select.select([terminal], [], [], seconds)
        if not ready:
            return ""
        # A window that is closed does not always end what runs in it: without a look at this it would go on for ever.
        pressed = os.read(terminal, 1)
        if not pressed:
            raise _TerminalGone
        return pressed.decode(errors="replace")

    try:
        tty.setcbreak(terminal)
        yield key
    finally:
        with suppress(termios.error):  # it may be gone
            termios.tcsetattr(terminal, termios.TCSADRAIN, before)
