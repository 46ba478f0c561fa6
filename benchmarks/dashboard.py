"""What a look at the dashboard costs the database: time within the server for each refresh, with a full cluster.

    BENCH_DSN=postgresql://postgres@127.0.0.1:5432/postgres python -m benchmarks.dashboard --tokens 1000000

Makes a database of its own on that server (whose role must be a superuser, and where pg_stat_statements must be
preloaded), fills it, asks the application as a browser would, prints, and drops the database.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import time
from typing import Any

import httpx2 as httpx
from sqlalchemy import Engine, create_engine, make_url, text

from jobsync_orm import migrate
from jobsync_orm.web import dashboard

DATABASE = "jobsync_bench_dashboard"

SPENT = text(
    "SELECT coalesce(sum(total_exec_time + total_plan_time), 0), coalesce(sum(calls), 0) FROM pg_stat_statements s"
    " JOIN pg_database d ON d.oid = s.dbid WHERE d.datname = current_database()"
    " AND query NOT LIKE '%pg_stat_statements%'"
)

# What a browser asks for, and how often it is asked here.
LOOKS = (
    ("cluster", "api/cluster", 20),
    ("pins", "api/pins", 3),
    ("queue", "api/queue", 20),
    ("newest jobs", "api/jobs", 10),
    ("failed jobs", "api/jobs?state=failed", 10),
    ("jobs by error, none fits", "api/jobs?error=nothing+like+it", 10),
    ("one job", "api/jobs/500", 10),
)


def fill(engine: Engine, jobs: int, tokens: int, nodes: int) -> None:
    with engine.begin() as connection:

        def run(sql: str) -> None:
            connection.execute(text(sql))

        run("CREATE EXTENSION IF NOT EXISTS pg_stat_statements")
        run(
            "INSERT INTO sync_node (name, incarnation, state, host, pid) SELECT 'worker-' || lpad(n::text, 2, '0'),"
            f" gen_random_uuid(), 'active', 'host-' || n % 10, n FROM generate_series(1, {nodes}) n"
        )
        run(f"UPDATE sync_cluster SET total_tokens = {tokens}, epoch = 100")
        run("TRUNCATE sync_token")
        run(
            "INSERT INTO sync_token (token_id, node, epoch) SELECT n, 'worker-' || lpad((n % "
            f"{nodes} + 1)::text, 2, '0'), 100 FROM generate_series(0, {tokens - 1}) n"
        )
        run(
            "INSERT INTO sync_rebalance (trigger_reason, leader_node, nodes_before, nodes_after, tokens_moved,"
            " duration_ms, epoch) SELECT 'join', 'worker-01', n, n + 1, 100 + n, 20, n FROM generate_series(1, 200) n"
        )
        run(
            "INSERT INTO sync_job_worker (node, incarnation, types, concurrency) SELECT name, incarnation,"
            " ARRAY['type-1', 'type-2', 'type-3', 'type-4', 'type-5'], 8 FROM sync_node"
        )
        run(
            "INSERT INTO sync_job (type, state, error, payload, created_at, started_at, finished_at, run_at, deadline)"
            " SELECT 'type-' || n % 5 + 1, s.state, CASE WHEN s.state = 'failed' THEN 'boom' END,"
            " jsonb_build_object('n', n, 'text', repeat('x', 100)), now() - n * interval '5 ms', now(), now(),"
            " CASE WHEN s.state = 'scheduled' THEN now() + interval '1 h' END,"
            " CASE WHEN s.state = 'processing' THEN now() + interval '1 h' END"
            f" FROM generate_series(1, {jobs}) n CROSS JOIN LATERAL (SELECT CASE WHEN n % 100 = 0 THEN 'failed'"
            " WHEN n % 50 = 1 THEN 'pending' WHEN n % 200 = 3 THEN 'scheduled' WHEN n % 2500 = 7 THEN 'processing'"
            " ELSE 'completed' END AS state) s"
        )
        run(
            "INSERT INTO sync_job_attempt (job_id, attempt, worker, started_at, ended_at, outcome) SELECT id, 1,"
            f" 'worker-01', now(), now() - ({jobs} - id) * interval '5 ms',"
            " CASE WHEN state = 'failed' THEN 'failed' ELSE 'completed' END"
            " FROM sync_job WHERE state IN ('completed', 'failed') ORDER BY id"
        )
    with engine.execution_options(isolation_level="AUTOCOMMIT").connect() as connection:
        connection.exec_driver_sql("VACUUM ANALYZE")


async def look(engine: Engine) -> list[tuple[str, float, float, float, int]]:
    """For each: its name, milliseconds in the server for each reading (median, most), as it is seen, statements."""
    found = []
    app = dashboard(engine)
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://bench", timeout=60) as client:
        for name, address, times in LOOKS:
            spent, seen, statements = [], [], 0
            first: dict[str, Any] = {}
            for number in range(times):
                with engine.connect() as connection:
                    before, calls = connection.execute(SPENT).one()
                    began = time.perf_counter()
                    answer = await client.get(address)
                    took = time.perf_counter() - began
                    after, calls_after = connection.execute(SPENT).one()
                answer.raise_for_status()
                if number == 0:
                    first = {"spent": after - before, "seen": took * 1000}
                else:
                    spent.append(after - before)
                    seen.append(took * 1000)
                    statements = max(statements, int(calls_after - calls))
                await asyncio.sleep(max(0.0, answer.json().get("next_sec", 0)) + 0.02)
            found.append((f"{name}, first", first["spent"], first["spent"], first["seen"], statements))
            found.append((name, statistics.median(spent), max(spent), statistics.median(seen), statements))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=1_000_000)
    parser.add_argument("--tokens", type=int, default=10_000)
    parser.add_argument("--nodes", type=int, default=50)
    given = parser.parse_args()
    url = make_url(os.environ["BENCH_DSN"]).set(drivername="postgresql+psycopg")
    server = create_engine(url, isolation_level="AUTOCOMMIT")
    engine = create_engine(url.set(database=DATABASE))
    try:
        with server.connect() as connection:
            connection.exec_driver_sql(f"DROP DATABASE IF EXISTS {DATABASE} WITH (FORCE)")
            connection.exec_driver_sql(f"CREATE DATABASE {DATABASE}")
        migrate.upgrade(engine)
        fill(engine, given.jobs, given.tokens, given.nodes)
        print(f"{given.jobs} jobs, {given.tokens} tokens, {given.nodes} nodes; milliseconds")
        print(f"{'':28} {'server':>8} {'most':>8} {'seen':>8} statements")
        for name, median, most, seen, statements in asyncio.run(look(engine)):
            print(f"{name:28} {median:8.1f} {most:8.1f} {seen:8.1f} {statements:10}")
    finally:
        engine.dispose()
        with server.connect() as connection:
            connection.exec_driver_sql(f"DROP DATABASE IF EXISTS {DATABASE} WITH (FORCE)")
        server.dispose()


if __name__ == "__main__":
    main()
