"""Worker processes on a database of their own, watched from outside."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit, urlunsplit

import psycopg

__all__ = ["ROOT", "Cluster", "Worker", "admin_dsn", "connect", "database_dsn", "rebalances"]

ROOT = Path(__file__).resolve().parents[2]

Intervals = dict[int, list[tuple[float, float]]]


def admin_dsn() -> str:
    """The maintenance database, from ``BENCH_DSN``; scratch databases are made beside it."""
    try:
        return os.environ["BENCH_DSN"]
    except KeyError:
        raise SystemExit("BENCH_DSN is not set: run `make bench`, or name a server's maintenance database") from None


def database_dsn(database: str) -> str:
    return urlunsplit(urlsplit(admin_dsn())._replace(path="/" + database))


def connect(database: str | None = None) -> psycopg.Connection[Any]:
    """Open a connection in autocommit mode, whose own statements are not counted."""
    connection = psycopg.connect(database_dsn(database) if database else admin_dsn(), autocommit=True)
    connection.execute("select set_config('pg_stat_statements.track', 'none', false)")
    return connection


class Worker:
    """One process, and what it has said of itself."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.node: str = options["node"]
        self.events: list[dict[str, Any]] = []
        self.killed_at: float | None = None
        errors = open(os.environ.get("BENCH_LOG", os.devnull), "a")  # noqa: SIM115
        self.spawned = time.time()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.coordination.worker", json.dumps(options)],
            cwd=ROOT,
            text=True,
            stdout=subprocess.PIPE,
            stderr=errors,
        )
        errors.close()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):
                self.events.append(json.loads(line))

    def last(self, event: str) -> dict[str, Any] | None:
        return next((e for e in reversed(self.events) if e["ev"] == event), None)

    def first(self, event: str) -> dict[str, Any] | None:
        return next((e for e in self.events if e["ev"] == event), None)

    @property
    def leads(self) -> bool:
        return bool((self.last("tokens") or {}).get("leader"))

    @property
    def condition(self) -> str | None:
        return (self.last("tokens") or {}).get("condition")

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def kill(self) -> None:
        self.killed_at = time.time()
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def held(self) -> set[int]:
        """Tasks to which it said yes in its last sweep."""
        tasks: set[int] = set()
        for event in list(self.events):
            if event["ev"] == "claims":
                tasks.update(event["gain"])
                tasks.difference_update(event["lose"])
            elif event["ev"] in ("stopping", "stopped", "error"):
                tasks.clear()
        return tasks

    def intervals(self, tasks: int, until: float) -> Intervals:
        """For each task the times (first yes, last yes) between which it was seen to say yes."""
        since: dict[int, float] = {}
        done: Intervals = {task: [] for task in range(tasks)}
        for event in list(self.events):
            if event["ev"] == "claims":
                since.update(dict.fromkeys(event["gain"], event["t"]))
                for task in event["lose"]:
                    start = since.pop(task, None)
                    if start is not None and event["t_last"] >= start:  # one yes counts as a millisecond
                        done[task].append((start, max(event["t_last"], start + 0.001)))
            elif event["ev"] == "stall":
                for task, start in since.items():
                    done[task].append((start, event["t_last"]))
                since = dict.fromkeys(since, event["t0"])
            elif event["ev"] in ("stopping", "stopped", "error"):
                for task, start in since.items():
                    done[task].append((start, event["t"]))
                since = {}
        end = self.killed_at or until
        for task, start in since.items():
            done[task].append((start, end))
        return {task: [(a, b) for a, b in parts if b > a] for task, parts in done.items()}


class Cluster:
    """Workers of one library on one new database.

    Parameters
    ----------
    adapter : module
        The library.
    tokens : int
        Tokens of the cluster.
    prepare : bool
        Make the tables first. False: the workers find an empty database.
    **options
        Options of every worker; see ``worker.py``.
    """

    def __init__(self, adapter: Any, tokens: int = 10_000, *, prepare: bool = True, **options: Any) -> None:
        self.adapter = adapter
        self.tokens = tokens
        self.database = "bench_" + uuid.uuid4().hex[:10]
        self.dsn = database_dsn(self.database)
        self.options = {
            "library": adapter.__name__.rpartition(".")[2],
            "dsn": self.dsn,
            "settings": adapter.settings(tokens=tokens),
            "tasks": 0,
            "sweep": 0.1,
            "count": True,
            "trace": 0,
            **options,
        }
        self.workers: dict[str, Worker] = {}
        with connect() as connection:
            connection.execute(f"create database {self.database} template template0")
        self.connection = connect(self.database)
        self.cursor = self.connection.cursor()
        if prepare:
            adapter.prepare(self.dsn, tokens)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self.workers.values():
            if worker.alive:
                worker.process.send_signal(signal.SIGCONT)
                worker.process.kill()
        for worker in self.workers.values():
            worker.process.wait()
        self.connection.close()
        with connect() as connection:
            connection.execute(f"drop database {self.database} with (force)")

    def reconnect(self) -> None:
        """After the server has been away."""
        self.connection.close()
        self.connection = connect(self.database)
        self.cursor = self.connection.cursor()

    def add(self, node: str, **options: Any) -> Worker:
        worker = Worker({**self.options, **options, "node": node})
        self.workers[node] = worker
        return worker

    @property
    def live(self) -> list[Worker]:
        return [worker for worker in self.workers.values() if worker.alive]

    @property
    def leader(self) -> Worker | None:
        return next((worker for worker in self.live if worker.leads), None)

    @property
    def tasks(self) -> int:
        return int(self.options["tasks"])

    def covered(self, workers: Iterable[Worker] | None = None) -> bool:
        """Whether each task is claimable by exactly one of ``workers`` (all live ones), and each has some."""
        held = [worker.held() for worker in (self.live if workers is None else workers)]
        return all(held) and sum(map(len, held)) == self.tasks == len(set().union(*held))

    def balanced(self, nodes: Iterable[str] | None = None) -> bool:
        """Whether in the database ``nodes`` (all live workers) share all tokens evenly, and nobody else has any."""
        owners = self.adapter.owners(self.cursor)
        wanted = {worker.node for worker in self.live} if nodes is None else set(nodes)
        return (
            set(owners) == wanted
            and sum(owners.values()) == self.tokens
            and max(owners.values()) - min(owners.values()) <= 1
        )

    def formed(self) -> bool:
        """Balanced in the database and, if there are tasks, in the workers' own view, under a leader."""
        return self.balanced() and self.leader is not None and (not self.tasks or self.covered())

    def wait(self, condition: Callable[[], Any], timeout: float) -> float | None:
        """Seconds until ``condition()`` holds; None after ``timeout``."""
        start = time.time()
        # Looking at a million tokens all the time would take one of two cores from what is measured.
        every = 0.05 if self.tokens <= 100_000 else 2.0
        while time.time() - start < timeout:
            if condition():
                return time.time() - start
            time.sleep(every)
        return None

    def require(self, condition: Callable[[], Any], timeout: float, what: str) -> float:
        """As ``wait``, but ends the scenario where the condition does not come about."""
        seconds = self.wait(condition, timeout)
        if seconds is None:
            errors = [worker.last("error") for worker in self.workers.values()]
            owners = self.adapter.owners(self.cursor)
            raise SystemExit(f"{what} within {timeout} s; owners {owners}; errors {errors}")
        return seconds


def rebalances(cursor: Any) -> list[dict[str, Any]]:
    """The audit of redistributions, which both libraries keep alike, oldest first."""
    cursor.execute(
        "select extract(epoch from triggered_at)::float8, trigger_reason, leader_node, nodes_before, nodes_after,"
        " tokens_moved, duration_ms from sync_rebalance order by id"
    )
    keys = ("t", "reason", "leader", "before", "after", "moved", "ms")
    return [dict(zip(keys, row, strict=True)) for row in cursor.fetchall()]
