"""What a look at the dashboard costs the database: time within the server for each refresh, with a full cluster.

    BENCH_DSN=postgresql://postgres@127.0.0.1:5432/postgres python -m benchmarks.dashboard --tokens 1000000

Makes a database of its own on that server (whose role must be a superuser, and where pg_stat_statements must be
preloaded), fills it, asks the application as a browser would, prints, and drops the database. With ``--browser`` a
Chromium without a screen opens the pages as well: when it paints first, and when figures are on the screen.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import socket
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx2 as httpx
import uvicorn
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


async def moved(engine: Engine) -> list[float]:
    """Milliseconds in the server for each refresh of the cluster after a plan, until all tokens are counted anew."""
    spent = []
    transport = httpx.ASGITransport(app=dashboard(engine))
    async with httpx.AsyncClient(transport=transport, base_url="http://bench", timeout=60) as client:
        await client.get("api/cluster")
        with engine.begin() as connection:
            connection.execute(text("UPDATE sync_cluster SET epoch = epoch + 1"))
        while True:
            with engine.connect() as connection:
                before, _ = connection.execute(SPENT).one()
                answer = (await client.get("api/cluster")).json()
                after, _ = connection.execute(SPENT).one()
            status = answer["value"]["status"]
            if after > before:
                spent.append(after - before)
            if spent and status["tokens"]["at"] == status["at"]:
                return spent
            await asyncio.sleep(answer["next_sec"] + 0.02)


PAGES = (("cluster", ""), ("queue", "#/queue"))

# Notes when the first table is there.
NOTE = """new MutationObserver((_, seen) => {
  if (document.querySelector("main table")) { window.figuresAt = performance.now(); seen.disconnect(); }
}).observe(document, { childList: true, subtree: true });"""
NOTED = """const [paint] = performance.getEntriesByName("first-contentful-paint");
return [paint?.startTime ?? null, window.figuresAt ?? null];"""


def painted(engine: Engine, trials: int = 5) -> list[tuple[str, float, float]]:
    """For each page, of an application that nobody has asked before: first paint and figures, milliseconds at worst."""
    from selenium import webdriver

    # Named, so that selenium looks for them nowhere else.
    driver, program = shutil.which("chromedriver"), shutil.which("chromium") or shutil.which("google-chrome")
    if driver is None or program is None:
        raise SystemExit("--browser needs Chromium and its driver")
    options = webdriver.ChromeOptions()
    options.binary_location = program
    for flag in ("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-dev-shm-usage"):
        options.add_argument(flag)
    found = []
    with webdriver.Chrome(options=options, service=webdriver.ChromeService(driver)) as browser:
        browser.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": NOTE})
        for name, page in PAGES:
            first, figures = [], []
            for _ in range(trials):
                with served(dashboard(engine)) as address:
                    browser.get("about:blank")
                    browser.get(address + page)
                    until = time.monotonic() + 30
                    while None in (noted := browser.execute_script(NOTED)):
                        if time.monotonic() > until:
                            raise SystemExit(f"the page {name} shows no figures")
                        time.sleep(0.05)
                first.append(noted[0])
                figures.append(noted[1])
            found.append((name, max(first), max(figures)))
    return found


@contextmanager
def served(app: Any) -> Iterator[str]:
    """The address at which ``app`` answers."""
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, access_log=False, lifespan="off"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/"
    finally:
        server.should_exit = server.force_exit = True
        thread.join()
        listener.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=1_000_000)
    parser.add_argument("--tokens", type=int, default=10_000)
    parser.add_argument("--nodes", type=int, default=50)
    parser.add_argument("--browser", action="store_true")
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
        refreshes = asyncio.run(moved(engine))
        print(f"after a plan: {len(refreshes)} refreshes of {max(refreshes):.1f} at most until all tokens are counted")
        if given.browser:
            for name, first, figures in painted(engine):
                print(f"{name} in a browser: first paint {first:.0f}, figures {figures:.0f} at worst")
    finally:
        engine.dispose()
        with server.connect() as connection:
            connection.exec_driver_sql(f"DROP DATABASE IF EXISTS {DATABASE} WITH (FORCE)")
        server.dispose()


if __name__ == "__main__":
    main()
