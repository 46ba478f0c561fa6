"""This library."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from typing import Any

from psycopg import Connection
from sqlalchemy import create_engine, text
from sqlalchemy.orm import sessionmaker

from benchmarks.queue.arena import payload
from benchmarks.queue.sink import hit
from jobsync_orm import CoordinationConfig, JobQueue, JobWorker, migrate

PACKAGE = "jobsync-orm"
CONFIGS: dict[str, dict[str, Any]] = {"default": {}, "one thread": {"concurrency": 1}}
WAITING = "SELECT EXISTS (SELECT 1 FROM sync_job WHERE state IN ('pending', 'processing', 'retrying'))"
BARE = text("INSERT INTO sync_job (type, payload) VALUES (:type, CAST(:payload AS jsonb)) RETURNING id")


def _url(dsn: str) -> str:
    return dsn.replace("postgresql://", "postgresql+psycopg://")


def prepare(dsn: str) -> None:
    migrate.upgrade(CoordinationConfig(url=_url(dsn)))


class Producer:
    """Enqueues through a Session of the application's, as an application would."""

    def __init__(self, dsn: str, wake: bool = True) -> None:
        self._engine = create_engine(_url(dsn))
        self._queue = JobQueue(CoordinationConfig(engine=self._engine), wake=wake)
        self._session = sessionmaker(self._engine)
        self.ways = {
            "enqueue, one per transaction, each in a new Session": self._in_sessions,
            "enqueue, one per transaction, on a Connection": self._on_connections,
            "enqueue, one per submit()": self._submit,
            "one bare INSERT per Session, without this library": self._bare,
        }

    def one(self, number: int, seconds: float = 0) -> None:
        with self._session.begin() as session:
            self._queue.enqueue(session, "noop", payload(number, seconds))

    def many(self, numbers: Iterable[int]) -> None:
        """One transaction after another of one Session, as the others use one connection."""
        with self._session() as session:
            for number in numbers:
                with session.begin():
                    self._queue.enqueue(session, "noop", payload(number))

    def _in_sessions(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            self.one(number)

    def _on_connections(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            with self._engine.begin() as connection:
                self._queue.enqueue(connection, "noop", payload(number))

    def _submit(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            self._queue.submit("noop", payload(number))

    def _bare(self, numbers: Iterable[int]) -> None:
        """What a transaction of SQLAlchemy's costs in which a row is written and its id is known."""
        for number in numbers:
            with self._session.begin() as session:
                session.execute(BARE, {"type": "noop", "payload": json.dumps(payload(number))}).scalar_one()

    def bulk(self, numbers: Iterable[int]) -> None:
        with self._session.begin() as session:
            self._queue.enqueue_many(session, "noop", [payload(number) for number in numbers])

    def close(self) -> None:
        self._queue.dispose()
        self._engine.dispose()


def work(dsn: str, settings: dict[str, Any]) -> None:
    queue = JobQueue(CoordinationConfig(url=_url(dsn)))
    queue.register("noop", lambda ctx, i, pad, s: hit(i, s))
    JobWorker(queue, **settings).run()


def figures(dsn: str, times: int) -> list[float]:
    """How long ``stats()`` takes, in ms, so many times; once before, for the connection."""
    engine = create_engine(_url(dsn))
    queue = JobQueue(engine=engine)
    queue.stats()
    took = []
    for _ in range(times):
        begun = time.perf_counter()
        queue.stats()
        took.append((time.perf_counter() - begun) * 1000)
    queue.dispose()
    engine.dispose()
    return took


def fill(connection: Connection[Any], rows: int, kind: str) -> None:
    state, moment = ("scheduled", "run_at") if kind == "future" else ("completed", "finished_at")
    shift = "+ interval '1 year'" if kind == "future" else ""
    connection.execute(
        f"INSERT INTO sync_job (type, payload, state, {moment}) SELECT 'noop', CAST(%s AS jsonb), '{state}',"
        f" clock_timestamp() {shift} FROM generate_series(1, %s)",
        [json.dumps(payload(-1)), rows],
    )
    if kind == "finished":
        connection.execute(
            "INSERT INTO sync_job_attempt (job_id, attempt, worker, started_at, outcome)"
            " SELECT id, 1, 'w', clock_timestamp(), 'completed' FROM sync_job"
        )
