"""Periodic jobs with real workers, and what the database knows of them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import URL, Engine, text

from jobsync_orm import CoordinationConfig, JobQueue, JobWorker
from tests.conftest import dsn
from tests.integration.cluster import QUICK, wait_for

ROOT = Path(__file__).parents[3]

APPLICATION = """
import os
from jobsync_orm import CoordinationConfig, JobQueue

queue = JobQueue(CoordinationConfig(url=os.environ["URL"], **{QUICK}))

@queue.periodic("* * * * * *", missed="all", tick_as="scheduled_for")
@queue.handler("tick")
def tick(ctx, scheduled_for):
    return scheduled_for
"""


@pytest.fixture
def queue(database: URL) -> Iterator[JobQueue]:
    queue = JobQueue(CoordinationConfig(url=database, **QUICK))  # type: ignore[arg-type]
    yield queue
    queue.dispose()


def report(ctx: Any, scheduled_for: str = "") -> str:
    return scheduled_for


def ticks(engine: Engine) -> list[str]:
    with engine.connect() as connection:
        statement = text("SELECT payload ->> 'scheduled_for' FROM sync_job WHERE state = 'completed' ORDER BY id")
        return list(connection.scalars(statement))


def fired(engine: Engine) -> int:
    with engine.connect() as connection:
        return connection.scalar(text("SELECT count(*) FROM sync_job")) or 0


def test_a_worker_fires_at_each_tick_and_runs_the_job_at_once(queue: JobQueue, engine: Engine) -> None:
    queue.register("report", report)
    queue.add_periodic("* * * * * *", "report", tick_as="scheduled_for", timezone="Asia/Kathmandu")

    with JobWorker(queue):
        wait_for(lambda: len(ticks(engine)) >= 3, "three ticks")

    found = ticks(engine)
    assert len(found) == len(set(found))
    assert all(tick.endswith("+05:45") for tick in found)
    with engine.connect() as connection:
        late = connection.scalar(
            text("SELECT min(started_at - CAST(payload ->> 'scheduled_for' AS timestamptz)) FROM sync_job")
        )
    assert late is not None
    assert late >= timedelta(0)


def test_one_declared_while_the_worker_runs_begins_then(queue: JobQueue, engine: Engine) -> None:
    queue.register("report", report)
    with JobWorker(queue):
        queue.add_periodic("* * * * * *", "report", tick_as="scheduled_for")

        wait_for(lambda: ticks(engine), "a tick")


@pytest.fixture
def start(tmp_path: Path, database: URL) -> Iterator[Callable[[], subprocess.Popen[bytes]]]:
    (tmp_path / "shop.py").write_text(APPLICATION.replace("{QUICK}", repr(QUICK)))
    started: list[subprocess.Popen[bytes]] = []

    def start() -> subprocess.Popen[bytes]:
        command = "from jobsync_orm.cli import main; main()"
        process = subprocess.Popen(
            [sys.executable, "-c", command, "worker", "shop:queue", "--app-dir", str(tmp_path)],
            env={**os.environ, "URL": dsn(database), "PYTHONPATH": str(ROOT)},
            stderr=subprocess.DEVNULL,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()


def test_whatever_happens_to_the_workers_each_tick_is_fired_once(
    start: Callable[[], subprocess.Popen[bytes]], engine: Engine
) -> None:
    first, second = start(), start()
    workers = text("SELECT count(*) FROM sync_job_worker")

    def both_run() -> bool:
        with engine.connect() as connection:
            return connection.scalar(workers) == 2

    def goes_on(who: str) -> None:
        seen = fired(engine)
        wait_for(lambda: fired(engine) >= seen + 2, f"{who} goes on")

    wait_for(both_run, "both run")
    first.send_signal(signal.SIGSTOP)
    goes_on("the second one")
    first.send_signal(signal.SIGCONT)
    second.kill()
    goes_on("the first one")
    first.terminate()
    assert first.wait(timeout=60) == 0

    with engine.connect() as connection:
        rows = connection.scalars(text("SELECT payload ->> 'scheduled_for' FROM sync_job ORDER BY id"))
        moments = [datetime.fromisoformat(row) for row in rows]
    assert moments == [moments[0] + timedelta(seconds=n) for n in range(len(moments))]


def test_what_the_database_knows(queue: JobQueue, engine: Engine) -> None:
    queue.register("report", report)
    queue.add_periodic("0 0 29 2 *", "report", timezone="Europe/Berlin", name="leap day")
    assert queue.schedules() == []
    with JobWorker(queue):
        wait_for(queue.schedules, "the schedule is known")

    [status] = queue.schedules()
    assert (status.name, status.type, status.cron, status.timezone) == (
        "leap day",
        "report",
        "0 0 29 2 *",
        "Europe/Berlin",
    )
    assert abs(status.fired_until - datetime.now(UTC)) < timedelta(minutes=5)
    assert status.next_at is not None
    assert (status.next_at + timedelta(hours=1)).strftime("%m-%d %H:%M") == "02-29 00:00"
    assert status.last_job_id is None

    with engine.begin() as connection:
        connection.execute(text("UPDATE sync_job_schedule SET timezone = 'Mars'"))
    [status] = queue.schedules()
    assert status.next_at is None

    assert queue.forget_schedule("leap day")
    assert not queue.forget_schedule("leap day")
    assert queue.schedules() == []
