"""`jobsync-orm top`: one frame, and live in a terminal while a worker is killed."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from sqlalchemy import URL, Engine, create_engine

from jobsync_orm import Job
from jobsync_orm.naming import Names
from jobsync_orm.operate.watching import Ended, Watch
from tests.conftest import Server, dsn
from tests.integration.cli.commands import run
from tests.integration.cluster import ROOT, Cluster, wait_for
from tests.integration.queue.rows import SQL, put, tried

CODES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Terminal:
    """A program in a terminal of 80 by 24, and what it has drawn last."""

    def __init__(self, arguments: list[str], environment: dict[str, str]) -> None:
        self._ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        self.process = subprocess.Popen(
            arguments, cwd=ROOT, env=environment, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True
        )
        os.close(theirs)
        self._written = ""
        self._hung_up = False
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        while not self._hung_up:
            try:
                ready, _, _ = select.select([self._ours], [], [], 0.2)
                if ready:
                    self._written += os.read(self._ours, 65536).decode(errors="replace")
                elif self.process.poll() is not None:
                    return
            except OSError:  # the other side is closed
                return

    def screen(self) -> str:
        """The last frame that is complete."""
        frames = [CODES.sub("", frame).replace("\r", "") for frame in self._written.split("\x1b[H")[-2:]]
        return next((frame for frame in reversed(frames) if "q quit" in frame), "")

    def press(self, key: str) -> None:
        os.write(self._ours, key.encode())

    def hang_up(self) -> None:
        """The window is closed, of which no signal tells."""
        self._hung_up = True
        self._reader.join()
        os.close(self._ours)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        if not self._hung_up:
            self.hang_up()


@contextmanager
def top(database: URL) -> Iterator[Terminal]:
    command = [
        sys.executable,
        "-W",
        "error",
        "-c",
        "from jobsync_orm.cli import main; main()",
        "top",
        "--interval",
        "0.2",
    ]
    terminal = Terminal(command, {**os.environ, "JOBSYNC_DATABASE_URL": dsn(database), "TERM": "xterm-256color"})
    try:
        yield terminal
    finally:
        terminal.close()


def line_of(screen: str, node: str) -> list[str]:
    """The words of the line of a node, without the leader's star."""
    words = next((line.split() for line in screen.splitlines() if line.startswith(f"{node} ")), [])
    return [word for word in words if word != "*"]


def test_a_worker_is_killed_before_the_eyes_of_who_watches(database: URL, make_cluster: Callable[..., Cluster]) -> None:
    cluster = make_cluster(tasks=40)
    cluster.start("w1", "w2")
    with top(database) as terminal:
        wait_for(lambda: "5000" in line_of(terminal.screen(), "w2"), "w2 is seen with its tokens", 30)
        cluster.workers["w2"].signal(signal.SIGKILL)
        wait_for(lambda: line_of(terminal.screen(), "w2")[1:3] == ["cut", "off"], "w2 is seen to be cut off", 30)
        wait_for(lambda: "10000" in line_of(terminal.screen(), "w1"), "w1 is seen with all tokens", 30)
        wait_for(lambda: "w2's tokens have live owners again" in terminal.screen(), "the recovery is told of", 30)
        assert line_of(terminal.screen(), "w2")[1] == "dead"

        terminal.press("p")
        wait_for(lambda: "PAUSED" in terminal.screen().splitlines()[0], "the picture stands", 30)
        terminal.press("p")
        wait_for(lambda: "PAUSED" not in terminal.screen().splitlines()[0], "the picture goes on", 30)
        terminal.press("-")
        wait_for(lambda: "every 0.4 s" in terminal.screen(), "it is slower", 30)
        terminal.press("q")
        assert terminal.process.wait(30) == 0


def test_a_database_that_is_gone_is_said_and_the_keys_work(server: Server, database: URL, job: Job) -> None:
    with top(database) as terminal:
        wait_for(lambda: line_of(terminal.screen(), "w1"), "w1 is seen", 30)
        job.stop()
        with server.connect() as connection:
            connection.execute(f"ALTER DATABASE {database.database} ALLOW_CONNECTIONS false")
            connection.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s", (database.database,)
            )
        said = wait_for(lambda: (s := terminal.screen()) and "no answer for" in s and s, "that nobody answers", 30)
        assert "is not currently" in said
        with server.connect() as connection:
            connection.execute(f"ALTER DATABASE {database.database} ALLOW_CONNECTIONS true")
        wait_for(lambda: "no answer for" not in terminal.screen(), "it goes on", 30)
        terminal.press("q")
        assert terminal.process.wait(30) == 0


@pytest.mark.parametrize(("width", "height"), [(80, 24), (160, 50)])
def test_one_frame(database: URL, engine: Engine, job: Job, width: int, height: int) -> None:
    put(engine, count=3)
    done = run("top", "--once", "--width", str(width), "--height", str(height), url=database)
    assert done.exit_code == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) <= height
    assert all(len(line) <= width for line in lines)
    assert line_of(done.stdout, "w1")[:2] == ["w1", "live"]
    assert "pending 3" in done.stdout
    found = json.loads(run("top", "--once", "--json", url=database).stdout)
    assert found["cluster"]["leader"] == "w1"
    assert found["queue"]["counts"]["pending"] == 3


def test_it_needs_a_terminal_and_tables(database: URL, empty_database: URL) -> None:
    none = run("top", url=database)
    assert (none.exit_code, none.stderr) == (
        2,
        "error: top needs a terminal; --once prints one frame, --once --json its figures\n",
    )
    assert "jobsync-orm db upgrade" in run("top", "--once", url=empty_database).stderr


def test_what_has_ended_is_counted_by_seconds_and_told_again_while_it_may_change(database: URL, engine: Engine) -> None:
    kept = create_engine(database, pool_size=1)
    watch = Watch(kept, Names())
    (first, second) = put(engine, "completed", count=2)
    tried(engine, first, began=31, ended=30)
    tried(engine, second, "timeout", began=31, ended=30, attempt=1)
    tried(engine, second, "snoozed", began=31, ended=30, attempt=2)
    tried(engine, second, began=500, ended=400, attempt=3)
    ended = watch.look().ended
    assert [(one.completed, one.failed) for one in ended] in ([(1, 1)], [(1, 0), (0, 1)])
    tried(engine, second, began=9, ended=8, attempt=4)
    (late,) = put(engine, "completed", started_at=SQL("now()"))
    tried(engine, late, began=1, ended=0)
    again = watch.look()
    assert sum(one.completed for one in again.ended) == 1
    assert isinstance(again.ended[0], Ended)
    kept.dispose()


def test_it_ends_with_its_terminal(database: URL) -> None:
    with top(database) as terminal:
        wait_for(lambda: terminal.screen(), "there is a frame", 30)
        terminal.hang_up()
        assert terminal.process.wait(30) == 0
