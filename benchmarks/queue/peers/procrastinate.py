"""Procrastinate, on psycopg."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from typing import Any

import procrastinate
from psycopg import Connection

from benchmarks.queue.arena import payload
from benchmarks.queue.sink import hit

PACKAGE = "procrastinate"
CONFIGS: dict[str, dict[str, Any]] = {"default": {}, "concurrency 10": {"concurrency": 10}}
WAITING = "SELECT EXISTS (SELECT 1 FROM procrastinate_jobs WHERE status IN ('todo', 'doing') AND scheduled_at IS NULL)"


def _declare(app: procrastinate.App) -> Any:
    @app.task(name="noop", queue="noop")
    async def noop(i: int, pad: str, s: float) -> None:
        if s:
            await asyncio.to_thread(hit, i, s)
        else:
            hit(i)

    return noop


def prepare(dsn: str) -> None:
    app = procrastinate.App(connector=procrastinate.SyncPsycopgConnector(conninfo=dsn))
    with app.open():
        app.schema_manager.apply_schema()


class Producer:
    def __init__(self, dsn: str) -> None:
        connector = procrastinate.SyncPsycopgConnector(conninfo=dsn, min_size=1, max_size=1)
        self._app = procrastinate.App(connector=connector)
        self._task = _declare(self._app)
        self._app.open()

    def one(self, number: int, seconds: float = 0) -> None:
        self._task.defer(**payload(number, seconds))

    def many(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            self.one(number)

    def bulk(self, numbers: Iterable[int]) -> None:
        self._task.batch_defer(*(payload(number) for number in numbers))

    def close(self) -> None:
        self._app.close()


def work(dsn: str, settings: dict[str, Any]) -> None:
    connections = settings.get("concurrency", 0)
    sizes = {"min_size": connections, "max_size": connections} if connections else {}
    app = procrastinate.App(connector=procrastinate.PsycopgConnector(conninfo=dsn, **sizes))
    _declare(app)

    async def run() -> None:
        async with app.open_async():
            await app.run_worker_async(**settings)

    asyncio.run(run())


def fill(connection: Connection[Any], rows: int, kind: str) -> None:
    status, moment = ("todo", "now() + interval '1 year'") if kind == "future" else ("succeeded", "NULL")
    connection.execute("SET session_replication_role = replica")  # its triggers would write a million events
    connection.execute(
        "INSERT INTO procrastinate_jobs (queue_name, task_name, args, status, scheduled_at)"
        f" SELECT 'noop', 'noop', CAST(%s AS jsonb), '{status}', {moment} FROM generate_series(1, %s)",
        [json.dumps(payload(-1)), rows],
    )
    connection.execute("SET session_replication_role = DEFAULT")
