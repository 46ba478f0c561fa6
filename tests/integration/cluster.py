"""Real worker processes, watched: what each says yes to, and when."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sqlalchemy import URL

ROOT = Path(__file__).parents[2]

# Quick enough for tests, slow enough for a busy machine of two cores.
QUICK = {
    "heartbeat_interval_sec": 0.5,
    "heartbeat_timeout_sec": 4,
    "connection_grace_sec": 0.3,
    "lock_watch_interval_sec": 0.3,
    "drain_timeout_sec": 3,
    "certainty_wait_sec": 2,
    "callback_timeout_sec": 2,
}


def wait_for(condition: Callable[[], Any], what: str, timeout: float = 60) -> Any:
    """The first true value of ``condition``; fails, saying ``what`` was waited for, when ``timeout`` has passed."""
    deadline = time.monotonic() + timeout
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise AssertionError(f"{what}: not within {timeout} s")
        time.sleep(0.02)
    return value


class Worker:
    """One worker process."""

    def __init__(self, url: URL, node: str, *, tasks: int, config: dict[str, Any], **environment: str) -> None:
        self.node = node
        self.tasks = tasks
        self.events: list[dict[str, Any]] = []
        self.killed_at: float | None = None
        self.process = subprocess.Popen(
            [sys.executable, "-W", "error", "-m", "tests.integration.node"],
            cwd=ROOT,
            env={
                **os.environ,
                "URL": url.render_as_string(hide_password=False),
                "NODE": node,
                "TASKS": str(tasks),
                "CONFIG": json.dumps({**QUICK, **config}),
                **environment,
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.log: list[str] = []
        self._readers = [threading.Thread(target=f, daemon=True) for f in (self._read, self._read_log)]
        for reader in self._readers:
            reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.events.append(json.loads(line))

    def _read_log(self) -> None:
        assert self.process.stderr is not None
        self.log.extend(self.process.stderr)

    def seen(self, event: str) -> dict[str, Any] | None:
        """The latest event of this kind."""
        return next((e for e in reversed(self.events) if e["event"] == event), None)

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def signal(self, number: int) -> None:
        if number == signal.SIGKILL:
            self.killed_at = time.monotonic()
        self.process.send_signal(number)

    def held(self) -> set[int]:
        """Tasks it said yes to when it was last asked."""
        held: set[int] = set()
        for event in list(self.events):
            if event["event"] == "claims":
                held.update(event["gain"])
                held.difference_update(event["lose"])
            elif event["event"] in ("stopping", "stopped", "error"):
                held.clear()
        return held

    def yes(self, until: float) -> dict[int, list[tuple[float, float]]]:
        """For each task the spans between the first and the last yes that were seen, ended at ``until``."""
        begun: dict[int, float] = {}
        spans: dict[int, list[tuple[float, float]]] = {}

        def close(task: int, last: float) -> None:
            start = begun.pop(task, None)
            if start is not None and last >= start:
                spans.setdefault(task, []).append((start, max(last, start + 0.001)))

        for event in list(self.events):
            if event["event"] == "claims":
                for task in event["lose"]:
                    close(task, event["last"])
                for task in event["gain"]:
                    begun[task] = event["began"]
            elif event["event"] == "pause":
                for task in list(begun):
                    close(task, event["last"])
                    begun[task] = event["resumed"]
            elif event["event"] == "stopping":
                for task in list(begun):
                    close(task, event["last"])
        for task in list(begun):
            close(task, self.killed_at or until)
        return spans

    def end(self) -> None:
        if self.alive:
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
        self.process.wait()
        for reader in self._readers:
            reader.join()
        for stream in (self.process.stdout, self.process.stderr):
            assert stream is not None
            stream.close()


class Cluster:
    """Workers on one database."""

    def __init__(self, url: URL, *, tasks: int = 400, **config: Any) -> None:
        self.url = url
        self.tasks = tasks
        self.config = config
        self.workers: dict[str, Worker] = {}

    def add(self, node: str, *, url: URL | None = None, **environment: str) -> Worker:
        worker = Worker(url or self.url, node, tasks=self.tasks, config=self.config, **environment)
        self.workers[node] = worker
        return worker

    def start(self, *nodes: str) -> None:
        """Start workers, the first one first, and wait until they share all tasks."""
        for node in nodes:
            self.add(node)
            if node == nodes[0]:
                wait_for(lambda: self.workers[nodes[0]].seen("ready"), f"{node} is ready")
        self.wait_shared(*nodes)

    def shared(self, *nodes: str) -> bool:
        """Whether exactly these workers say yes, to all tasks, each to one of them."""
        held = [self.workers[node].held() for node in nodes]
        return all(held) and sum(map(len, held)) == self.tasks == len(set().union(*held))

    def wait_shared(self, *nodes: str, timeout: float = 60) -> None:
        wait_for(lambda: self.shared(*nodes), f"{', '.join(nodes)} share all tasks", timeout)

    def overlaps(self) -> dict[int, float]:
        """Task -> seconds during which two workers were both seen saying yes. Empty is what must be."""
        until = time.monotonic()
        spans: dict[int, list[tuple[float, float, str]]] = {}
        for worker in self.workers.values():
            for task, mine in worker.yes(until).items():
                spans.setdefault(task, []).extend((*span, worker.node) for span in mine)
        found: dict[int, float] = {}
        for task, many in spans.items():
            many.sort()
            end, who = float("-inf"), ""
            for start, stop, node in many:
                if node != who and start < end:
                    found[task] = found.get(task, 0) + min(end, stop) - start
                if stop > end:
                    end, who = stop, node
        return found

    def close(self) -> None:
        for worker in self.workers.values():
            worker.end()
