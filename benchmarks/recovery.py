"""How soon a killed worker's tokens have live owners again, where the time goes, and when it is seen.

    python -m benchmarks.recovery [--kill follower|leader] [--kills 15] [--unwatched]

Three workers with the default settings, `jobsync-orm top` in a terminal, and the dashboard, asked as its page asks. One
worker is killed at a random moment, and another one started when all is well again. For each kill the seconds from the
signal until

* its lock is free: a session of this script waits for it;
* a worker looks next, as its heartbeats show, and takes it for dead; tokens are published; survivors have them all;
* top and the dashboard show that it is cut off, and that its tokens have live owners again.

The server is one of this run's own, or the one that BENCH_DSN names.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import pty
import random
import re
import statistics
import struct
import subprocess
import sys
import termios
import threading
import time
import uuid
from collections.abc import Callable
from typing import Any

import httpx2 as httpx
import psycopg

from benchmarks.coordination.cluster import ROOT, connect, database_dsn
from benchmarks.server import Server
from jobsync_orm import CoordinationConfig, Job, migrate, observe
from jobsync_orm.coordinator.statements import lock_key
from jobsync_orm.naming import Names

COMMAND = [sys.executable, "-c", "from jobsync_orm.cli import main; main()"]
CODES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
TOKENS = 10_000
STAGES = (
    "its lock is free",
    "a worker looks next",
    "taken for dead",
    "published",
    "survivors have all tokens",
    "top: cut off",
    "top: tokens have owners",
    "dashboard: cut off",
    "dashboard: tokens have owners",
)


def say(what: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(what) + "\n")  # in one piece: two threads say something
    sys.stdout.flush()


def work(name: str, dsn: str) -> None:
    """A worker: says what its coordinator tells, one line of JSON each, until its standard input ends."""
    job = Job(name, CoordinationConfig(url=dsn), wait_on_enter=60)

    def tell(event: observe.Event) -> None:
        about = {field: getattr(event, field) for field in ("gained", "moved", "reason") if hasattr(event, field)}
        say({"at": time.time(), "event": type(event).__name__, **about})

    job.audience.add(tell)
    with job:
        say({"at": time.time(), "event": "entered"})
        sys.stdin.read()


class Worker:
    """One such process, and what it has said."""

    def __init__(self, name: str, dsn: str) -> None:
        self.name = name
        self.said: list[dict[str, Any]] = []
        self.process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.recovery", "--work", name, dsn],
            cwd=ROOT,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.said.append(json.loads(line))

    def after(self, moment: float, event: str) -> list[dict[str, Any]]:
        return [one for one in self.said if one["at"] > moment and one["event"] == event]

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


class Top:
    """`jobsync-orm top` in a terminal; what it draws, and when."""

    def __init__(self, dsn: str) -> None:
        self._ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 120, 0, 0))
        environment = {**os.environ, "JOBSYNC_DATABASE_URL": dsn, "TERM": "xterm-256color"}
        self.process = subprocess.Popen(
            [*COMMAND, "top"], cwd=ROOT, env=environment, stdin=theirs, stdout=theirs, stderr=theirs
        )
        os.close(theirs)
        self.drawn: list[tuple[float, str]] = []
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        with contextlib.suppress(OSError):
            tail = ""
            while True:
                text = os.read(self._ours, 65536).decode(errors="replace")
                # What is drawn comes in pieces.
                self.drawn.append((time.time(), CODES.sub("", tail + text)))
                tail = text[-200:]

    def shows(self, what: str, since: float) -> float | None:
        """When it was first drawn."""
        return next((at for at, text in list(self.drawn) if at > since and what in text), None)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._ours)


class Dashboard:
    """`jobsync-orm dashboard`, and a client that asks as the page does."""

    def __init__(self, dsn: str) -> None:
        environment = {**os.environ, "JOBSYNC_DATABASE_URL": dsn}
        self.process = subprocess.Popen(
            [*COMMAND, "dashboard", "--port", "0"],
            cwd=ROOT,
            env=environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        assert self.process.stdout is not None
        found = re.search(r"http://\S+", self.process.stdout.readline())
        assert found is not None
        self._url = found[0]
        self.seen: list[tuple[float, dict[str, Any]]] = []
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._ask, daemon=True)
        self._thread.start()

    def _ask(self) -> None:
        with httpx.Client(base_url=self._url, timeout=10) as client:
            while not self._end.is_set():
                answer = client.get("api/cluster").json()
                self.seen.append((time.time(), answer["value"]["status"]))
                time.sleep(max(0.1, answer["next_sec"] + 0.01))  # as in main.js

    def shows(self, what: Callable[[dict[str, Any]], bool], since: float) -> float | None:
        """When the page first had it."""
        return next((at for at, status in list(self.seen) if at > since and what(status)), None)

    def close(self) -> None:
        self._end.set()
        self._thread.join()
        self.process.kill()
        self.process.wait()


def owned(status: dict[str, Any], but: str) -> bool:
    """Whether live nodes, of which ``but`` is none, own all tokens."""
    nodes = [node for node in status["nodes"] if node["name"] != but]
    return sum(node["tokens"]["owned"] for node in nodes) == TOKENS


def lives(status: dict[str, Any], name: str) -> bool:
    return any(node["name"] == name and node["condition"] == "live" for node in status["nodes"])


def freed(dsn: str, name: str, at: list[float], ready: threading.Event) -> None:
    """Wait for the lock of a node."""
    key = lock_key(Names(), f"'{name}'")
    with psycopg.connect(dsn, autocommit=True) as connection:
        ready.set()
        connection.execute(f"SELECT pg_advisory_lock_shared({key})")
        at.append(time.time())


def wait_for(condition: Callable[[], Any], what: str, seconds: float = 60) -> Any:
    until = time.time() + seconds
    while not (found := condition()):
        if time.time() > until:
            raise SystemExit(f"{what}: not within {seconds} s")
        time.sleep(0.02)
    return found


class Trials:
    """Kills, one after the other."""

    def __init__(self, dsn: str, watched: bool) -> None:
        self._dsn = dsn
        self._number = 0
        self.workers: list[Worker] = []
        self._database = psycopg.connect(dsn, autocommit=True)
        for _ in range(3):
            self.add()
        self._top = Top(dsn) if watched else None
        self._dashboard = Dashboard(dsn) if watched else None

    def add(self) -> None:
        """Another worker, the youngest."""
        self._number += 1
        worker = Worker(f"w{self._number:02d}", self._dsn)
        self.workers.append(worker)
        wait_for(lambda: worker.after(0, "entered"), f"{worker.name} enters")

    def _settled(self) -> bool:
        rows = self._database.execute(
            "SELECT node, count(*), bool_or(next_node IS NOT NULL) FROM sync_token GROUP BY 1"
        ).fetchall()
        return {row[0] for row in rows} == {one.name for one in self.workers} and not any(row[2] for row in rows)

    def kill(self, whom: str, draw: random.Random) -> dict[str, float]:
        """One kill; seconds until each stage."""
        wait_for(self._settled, "all tokens have owners")
        time.sleep(1 + 2 * draw.random())
        index = 0 if whom == "leader" else draw.randrange(1, len(self.workers))
        victim = self.workers.pop(index)
        at: list[float] = []
        ready = threading.Event()
        waiting = threading.Thread(target=freed, args=(self._dsn, victim.name, at, ready), daemon=True)
        waiting.start()
        ready.wait()
        time.sleep(0.1)
        killed = time.time()
        victim.process.kill()
        victim.process.wait()
        waiting.join(60)
        stages = {"its lock is free": at[0]}
        rest = self.workers

        def first(event: str, **having: Any) -> float | None:
            found = [one["at"] for w in rest for one in w.after(killed, event) if having.items() <= one.items()]
            return min(found, default=None)

        def all_gained() -> float | None:
            # What the dead one had is what the others gain.
            gains = [(one["at"], one["gained"]) for w in rest for one in w.after(killed, "OwnershipChanged")]
            counts = self._database.execute("SELECT count(*) FROM sync_token WHERE node = %s", (victim.name,))
            left = counts.fetchone()
            return max((when for when, _ in gains), default=None) if left == (0,) and len(gains) >= len(rest) else None

        stages["taken for dead"] = wait_for(lambda: first("NodesTakenForDead"), "it is taken for dead")
        stages["published"] = wait_for(lambda: first("Rebalanced"), "a plan is published")
        stages["survivors have all tokens"] = wait_for(all_gained, "the survivors have its tokens")
        watcher = rest[0]  # the leader, or who comes after it
        beats = [one["at"] for one in watcher.after(at[0], "Heartbeat")]
        stages["a worker looks next"] = beats[0]
        if self._top is not None and self._dashboard is not None:
            top, dashboard, name = self._top, self._dashboard, victim.name
            stages["top: tokens have owners"] = wait_for(
                lambda: top.shows(f"{name}'s tokens have live owners again", killed), "top shows it"
            )
            stages["top: cut off"] = top.shows(f"{name} is cut off", killed) or killed
            stages["dashboard: tokens have owners"] = wait_for(
                lambda: dashboard.shows(lambda status: owned(status, name), killed), "the dashboard shows it"
            )
            stages["dashboard: cut off"] = dashboard.shows(lambda status: not lives(status, name), killed) or killed
        self.add()
        return {stage: when - killed for stage, when in stages.items()}

    def close(self) -> None:
        for one in (*self.workers, self._top, self._dashboard):
            if one is not None:
                one.close()
        self._database.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kill", choices=("follower", "leader"), default="follower")
    parser.add_argument("--kills", type=int, default=15)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--unwatched", action="store_true", help="neither top nor the dashboard")
    parser.add_argument("--work", nargs=2, metavar=("NAME", "DSN"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work(*options.work)
        return
    with contextlib.ExitStack() as stack:
        if "BENCH_DSN" not in os.environ:
            server = Server.create()
            stack.callback(server.remove)
            os.environ["BENCH_DSN"] = server.dsn
        database = f"bench_{uuid.uuid4().hex[:10]}"
        with connect() as connection:
            connection.execute(f"CREATE DATABASE {database} TEMPLATE template0")
        dsn = database_dsn(database)
        try:
            migrate.upgrade(CoordinationConfig(url=dsn))
            trials = Trials(dsn, not options.unwatched)
            try:
                draw = random.Random(options.seed)
                found = [trials.kill(options.kill, draw) for _ in range(options.kills)]
            finally:
                trials.close()
        finally:
            with connect() as connection:
                connection.execute(f"DROP DATABASE {database} WITH (FORCE)")
    print(f"{options.kills} kills of a {options.kill}; seconds after the signal")
    print(f"{'':30} {'median':>7} {'p95':>7} {'least':>7} {'most':>7}")
    for stage in STAGES:
        times = sorted(one[stage] for one in found if stage in one)
        if times:
            p95 = times[min(len(times) - 1, round(0.95 * len(times)))]
            print(f"{stage:30} {statistics.median(times):7.2f} {p95:7.2f} {times[0]:7.2f} {times[-1]:7.2f}")


if __name__ == "__main__":
    main()
