"""PgQueuer, on asyncpg, the driver its documentation begins with."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from typing import Any

import asyncpg
from pgqueuer import PgQueuer
from pgqueuer.db import AsyncpgDriver
from pgqueuer.queries import Queries
from psycopg import Connection

from benchmarks.queue.arena import payload
from benchmarks.queue.sink import hit

PACKAGE = "pgqueuer"
CONFIGS: dict[str, dict[str, Any]] = {
    "default": {"batch_size": 10},
    "batch 1000, pool of 4": {"batch_size": 1000, "connections": 4},
}
WAITING = "SELECT EXISTS (SELECT 1 FROM pgqueuer WHERE execute_after < now())"


def prepare(dsn: str) -> None:
    async def install() -> None:
        connection = await asyncpg.connect(dsn)
        await Queries(AsyncpgDriver(connection)).install()
        await connection.close()

    asyncio.run(install())


class Producer:
    """Enqueues on one connection, without a transaction around it: what costs least."""

    def __init__(self, dsn: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._connection = self._loop.run_until_complete(asyncpg.connect(dsn))
        self._queries = Queries(AsyncpgDriver(self._connection))

    async def _enqueue(self, numbers: Iterable[int], seconds: float = 0) -> None:
        for number in numbers:
            await self._queries.enqueue("noop", json.dumps(payload(number, seconds)).encode())

    def one(self, number: int, seconds: float = 0) -> None:
        self._loop.run_until_complete(self._enqueue([number], seconds))

    def many(self, numbers: Iterable[int]) -> None:
        self._loop.run_until_complete(self._enqueue(numbers))

    def bulk(self, numbers: Iterable[int]) -> None:
        texts = [json.dumps(payload(number)).encode() for number in numbers]
        self._loop.run_until_complete(self._queries.enqueue(["noop"] * len(texts), texts, [0] * len(texts)))

    def close(self) -> None:
        self._loop.run_until_complete(self._connection.close())
        self._loop.close()


def work(dsn: str, settings: dict[str, Any]) -> None:
    settings = dict(settings)
    connections = settings.pop("connections", 0)

    async def run() -> None:
        if connections:
            pool = await asyncpg.create_pool(dsn, min_size=connections, max_size=connections)
            queue = PgQueuer.from_asyncpg_pool(pool)
        else:
            queue = PgQueuer.from_asyncpg_connection(await asyncpg.connect(dsn))

        @queue.entrypoint("noop")
        async def noop(job: Any) -> None:
            given = json.loads(job.payload)
            if given["s"]:
                await asyncio.to_thread(hit, given["i"], given["s"])
            else:
                hit(given["i"])

        await queue.run(**settings)

    asyncio.run(run())


def fill(connection: Connection[Any], rows: int, kind: str) -> None:
    if kind == "future":
        connection.execute(
            "INSERT INTO pgqueuer (priority, created, updated, execute_after, status, entrypoint, payload)"
            " SELECT 0, now(), now(), now() + interval '1 year', 'queued', 'noop', convert_to(%s, 'utf8')"
            " FROM generate_series(1, %s)",
            [json.dumps(payload(-1)), rows],
        )
    else:
        connection.execute(
            "INSERT INTO pgqueuer_log (created, job_id, status, priority, entrypoint, aggregated)"
            " SELECT now(), -n, 'successful', 0, 'noop', true FROM generate_series(1, %s) n",
            [rows],
        )
