from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest
from sqlalchemy import URL

from jobsync_orm import CoordinationConfig, JobQueue, JobWorker
from tests.conftest import dsn
from tests.integration.cluster import QUICK, wait_for


class Jobs:
    """A queue's table, seen and written by SQL of the test's own."""

    def __init__(self, url: URL) -> None:
        self._dsn = dsn(url)
        self._connection = psycopg.connect(self._dsn, autocommit=True)

    def add(self, type: str, many: int = 1, **columns: object) -> list[int]:
        names = "".join(f", {name}" for name in columns)
        values = "".join(f", %({name})s" for name in columns)
        rows = self._connection.execute(
            f"INSERT INTO sync_job (type, payload{names})"
            f" SELECT %(type)s, jsonb_build_object('i', i){values} FROM generate_series(1, %(many)s) i RETURNING id",
            {"type": type, "many": many, **columns},
        )
        return [id for (id,) in rows.fetchall()]

    def sql(self, text: str, *values: object) -> list[tuple[Any, ...]]:
        cursor = self._connection.execute(text, values or None)
        return [] if cursor.description is None else cursor.fetchall()

    @contextlib.contextmanager
    def transaction(self) -> Iterator[psycopg.Connection]:
        """Somebody else's."""
        with psycopg.connect(self._dsn) as other:
            yield other

    def states(self) -> dict[str, int]:
        return dict(self.sql("SELECT state, count(*) FROM sync_job GROUP BY 1"))

    def outcomes(self) -> dict[str, int]:
        return dict(self.sql("SELECT outcome, count(*) FROM sync_job_attempt GROUP BY 1"))

    def wait(self, timeout: float = 60, **states: int) -> None:
        wait_for(lambda: self.states() == states, f"jobs are {states}", timeout)

    def close(self) -> None:
        self._connection.close()


@pytest.fixture
def jobs(database: URL) -> Iterator[Jobs]:
    jobs = Jobs(database)
    yield jobs
    jobs.close()


@pytest.fixture
def queue(database: URL) -> Iterator[JobQueue]:
    queue = JobQueue(CoordinationConfig(url=database, **QUICK))
    yield queue
    queue.dispose()


@pytest.fixture
def start_worker(queue: JobQueue) -> Iterator[Callable[..., JobWorker]]:
    """Starts a worker; all are stopped when the test is over."""
    started: list[JobWorker] = []

    def start(**options: Any) -> JobWorker:
        worker = JobWorker(queue, **options)
        started.append(worker)
        return worker.start()

    yield start
    for worker in started:
        worker.stop(0)
