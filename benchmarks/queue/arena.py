"""Where a measurement takes place: a new database, worker processes, and what they tell."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import psycopg

from benchmarks.queue.sink import Reader

__all__ = ["Arena", "Worker", "payload"]

ROOT = Path(__file__).resolve().parents[2]
PAD = "x" * 80


def payload(number: int, seconds: float = 0) -> dict[str, Any]:
    """About 100 bytes of JSON."""
    return {"i": number, "pad": PAD, "s": seconds}


class Worker:
    """One worker process."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process

    def stop(self, seconds: float = 10) -> None:
        """Ask it to end, and wait; one that does not is killed."""
        self.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(seconds)
        self.kill()

    def kill(self) -> None:
        """SIGKILL it, with what it has started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)  # its own session, see Arena.start
        self.process.wait()

    def rss_mb(self) -> float:
        """Resident memory now."""
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


class Arena:
    """A database of one peer, made anew, and the workers on it.

    Parameters
    ----------
    peer : str
        Module in ``peers``.
    config : str
        Name of the worker's settings.
    beside : str
        Part of the database's name, for several at a time.
    """

    def __init__(self, peer: str, config: str = "default", beside: str = "") -> None:
        self.peer, self.config = peer, config
        self.module: ModuleType = importlib.import_module(f"benchmarks.queue.peers.{peer}")
        self.database = f"bench_queue_{peer}{beside}"
        admin = os.environ["BENCH_DSN"]
        self.dsn = re.sub(r"/[^/?]*(\?.*)?$", f"/{self.database}", admin)
        with psycopg.connect(admin, autocommit=True) as connection:
            connection.execute(f"DROP DATABASE IF EXISTS {self.database} WITH (FORCE)")
            connection.execute(f"CREATE DATABASE {self.database}")
        self.module.prepare(self.dsn)
        self._folder = tempfile.TemporaryDirectory(prefix="bench-queue-")
        self.told = Reader(Path(self._folder.name))
        self.workers: list[Worker] = []

    def __enter__(self) -> Arena:
        return self

    def __exit__(self, *exc: object) -> None:
        for worker in self.workers:
            worker.kill()
        with psycopg.connect(os.environ["BENCH_DSN"], autocommit=True) as connection:
            connection.execute(f"DROP DATABASE IF EXISTS {self.database} WITH (FORCE)")
        self._folder.cleanup()

    def connect(self) -> psycopg.Connection[Any]:
        return psycopg.connect(self.dsn, autocommit=True)

    @contextlib.contextmanager
    def producer(self, **options: Any) -> Iterator[Any]:
        producer = self.module.Producer(self.dsn, **options)
        try:
            yield producer
        finally:
            producer.close()

    def fill(self, rows: int, kind: str) -> None:
        """Put ``rows`` rows that are ``finished``, or ``future`` ones, beside the jobs."""
        with self.connect() as connection:
            self.module.fill(connection, rows, kind)

    def load(self, jobs: int, settle: bool = True) -> None:
        """Enqueue ``jobs`` jobs, then let the server settle."""
        with self.producer() as producer:
            for first in range(0, jobs, 1000):
                producer.bulk(range(first, min(first + 1000, jobs)))
        if settle:
            self.settle()

    def settle(self) -> None:
        """What a server has done by itself after a while, done now, so that it does not come in between."""
        with self.connect() as connection:
            connection.execute("VACUUM ANALYZE")
            connection.execute("CHECKPOINT")

    def start(self, numbers: int = 0) -> Worker:
        """Start a worker. ``numbers``: how many numbered jobs tell when they begin."""
        settings = json.dumps(self.module.CONFIGS[self.config])
        with (Path(self._folder.name) / "errors").open("ab") as errors:
            process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.queue.worker", self.peer, self.dsn, settings],
                cwd=ROOT,
                env={**os.environ, "BENCH_SINK": self._folder.name, "BENCH_NUMBERS": str(numbers)},
                stdout=errors,
                stderr=errors,
                start_new_session=True,
            )
        self.workers.append(Worker(process))
        return self.workers[-1]

    def clear(self) -> None:
        """End the workers, and forget what they have told."""
        while self.workers:
            self.workers.pop().stop()
        self.told.forget()

    def wait_for(self, jobs: int, seconds: float = 300) -> None:
        """Until ``jobs`` jobs have run and the database says that none is left."""
        deadline = time.monotonic() + seconds
        self.wait_for_runs(jobs, seconds)
        with self.connect() as connection:
            while connection.execute(self.module.WAITING).fetchone() != (False,):
                self._check(deadline, jobs)

    def wait_for_runs(self, jobs: int, seconds: float = 300) -> None:
        """Until ``jobs`` jobs have run."""
        deadline = time.monotonic() + seconds
        while self.told.totals()[0] < jobs:
            self._check(deadline, jobs)

    def _check(self, deadline: float, jobs: int) -> None:
        if time.monotonic() > deadline or all(worker.process.poll() is not None for worker in self.workers):
            errors = (Path(self._folder.name) / "errors").read_text()[-2000:]
            raise RuntimeError(f"{self.peer} ran {self.told.totals()[0]} of {jobs} jobs\n{errors}")
        time.sleep(0.02)
