"""Connections that break, answers that are lost, servers that go away: no job is lost, and none runs twice for it."""

from __future__ import annotations

import collections
import contextlib
import logging
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import URL, create_engine

from jobsync_orm import CoordinationConfig, JobContext, JobQueue, JobWorker, migrate
from jobsync_orm.coordinator.session import SessionLost
from jobsync_orm.worker import adopting, claiming, reports
from tests.integration.cluster import QUICK, wait_for
from tests.integration.postgres import Postgres, identity, open_folder, programs
from tests.integration.relay import Relay
from tests.integration.worker.conftest import Jobs

Start = Callable[..., JobWorker]


@pytest.fixture
def ran(queue: JobQueue) -> collections.Counter[int]:
    """How often each job of type ``count`` has run."""
    ran: collections.Counter[int] = collections.Counter()

    @queue.handler("count")
    def count(ctx: JobContext, i: int) -> None:
        ran[ctx.id] += 1

    return ran


def lose_answers(worker: JobWorker, sql: str, times: int) -> list[str]:
    """The next answers to ``sql`` do not arrive: it has been executed, and the connection is gone."""
    assert worker._pump is not None
    session = worker._pump.line.session
    prepared = session.prepared
    lost: list[str] = []

    def lossy(text: str, *values: Any, timeout: float) -> Any:
        rows = prepared(text, *values, timeout=timeout)
        if text == sql and len(lost) < times and rows[0][0] != "[]":
            lost.append(rows[0][0] or "")
            session.close()
            raise SessionLost("the answer is lost")
        return rows

    session.prepared = lossy  # type: ignore[method-assign]
    return lost


def test_backends_that_are_ended_again_and_again(
    queue: JobQueue, jobs: Jobs, start_worker: Start, ran: collections.Counter[int]
) -> None:
    ids = jobs.add("count", 2000)
    worker = start_worker(batch=50)
    assert worker._pump is not None
    ended = 0
    while jobs.states().get("completed") != 2000 and ended < 15:
        ended += len(jobs.sql("SELECT pg_terminate_backend(%s)", worker._pump.line.session.pid))
        time.sleep(0.02)
    jobs.wait(completed=2000)
    assert ran == dict.fromkeys(ids, 1)
    assert worker._pump.counters.reconnects > 1


def test_claims_whose_answer_is_lost_are_run_by_the_same_worker(
    queue: JobQueue, jobs: Jobs, start_worker: Start, ran: collections.Counter[int]
) -> None:
    worker = start_worker()
    lost = lose_answers(worker, queue.statements.claim, 3)
    ids = jobs.add("count", 100)
    jobs.wait(completed=100)
    assert lost  # as many as there were claims: two may take them all
    assert ran == dict.fromkeys(ids, 1)
    assert jobs.sql("SELECT DISTINCT attempt, failures FROM sync_job") == [(1, 0)]


def test_endings_whose_answer_is_lost_are_written_once_and_are_not_called_late(
    queue: JobQueue,
    jobs: Jobs,
    start_worker: Start,
    ran: collections.Counter[int],
    caplog: pytest.LogCaptureFixture,
) -> None:
    worker = start_worker()
    lost = lose_answers(worker, queue.statements.settle, 3)
    jobs.add("count", 100)
    jobs.wait(completed=100)
    assert worker._pump is not None
    wait_for(lambda: worker._pump and not worker._pump.under_way, "all is acknowledged")
    assert len(lost) == 3
    assert jobs.outcomes() == {"completed": 100}
    assert (worker._pump.counters.completed, worker._pump.lost) == (100, 0)
    assert "comes too late" not in caplog.text


def test_an_ending_that_comes_too_late_changes_nothing(
    queue: JobQueue, jobs: Jobs, start_worker: Start, caplog: pytest.LogCaptureFixture
) -> None:
    began, go = threading.Event(), threading.Event()

    @queue.handler("slow")
    def slow(ctx: JobContext, i: int) -> dict[str, int]:
        began.set()
        go.wait(60)
        return {"attempt": ctx.attempt}

    (id,) = jobs.add("slow")
    worker = start_worker(concurrency=1)
    assert began.wait(60)
    # As if it had been rescued, run elsewhere and completed.
    jobs.sql(
        "UPDATE sync_job SET attempt = 2, state = 'completed', result = '{\"attempt\": 2}', deadline = NULL,"
        " incarnation = NULL WHERE id = %s",
        id,
    )
    go.set()
    wait_for(lambda: worker._pump and not worker._pump.under_way, "the worker has let go of it")
    assert jobs.sql("SELECT state, attempt, result FROM sync_job") == [("completed", 2, {"attempt": 2})]
    assert jobs.outcomes() == {}


def test_an_ending_waits_for_a_row_that_somebody_holds(
    queue: JobQueue, jobs: Jobs, start_worker: Start, ran: collections.Counter[int]
) -> None:
    began, go = threading.Event(), threading.Event()

    @queue.handler("slow")
    def slow(ctx: JobContext, i: int) -> None:
        began.set()
        go.wait(60)

    (id,) = jobs.add("slow")
    worker = start_worker()
    assert began.wait(60)
    with jobs.transaction() as other:
        other.execute("SELECT FROM sync_job WHERE id = %s FOR UPDATE", [id])
        go.set()
        jobs.add("count", 10)  # which go on meanwhile
        wait_for(lambda: jobs.states() == {"processing": 1, "completed": 10}, "the others are done")
        assert worker._pump is not None
        wait_for(lambda: worker._pump and worker._pump.reports.unwritten, "its end is kept")
    jobs.wait(completed=11)
    assert worker._pump.lost == 0


def test_what_the_database_refuses_ends_that_job_and_no_other(
    queue: JobQueue, jobs: Jobs, start_worker: Start, caplog: pytest.LogCaptureFixture
) -> None:
    jobs.sql(
        "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN IF NEW.state = 'completed' AND"
        " NEW.payload->>'i' = '7' THEN RAISE 'not this one'; END IF; RETURN NEW; END $$"
    )
    jobs.sql("CREATE TRIGGER refuse BEFORE UPDATE ON sync_job FOR EACH ROW EXECUTE FUNCTION refuse()")
    queue.register("nothing", lambda ctx, i: None)
    jobs.add("nothing", 60)
    start_worker()
    jobs.wait(completed=59, failed=1)
    ((payload, error),) = jobs.sql("SELECT payload, error FROM sync_job WHERE state = 'failed'")
    assert payload == {"i": 7}
    assert "not this one" in error


def test_attempts_of_a_node_that_was_taken_for_dead_end_once(queue: JobQueue, jobs: Jobs, start_worker: Start) -> None:
    go = threading.Event()
    told: list[tuple[int, str | None]] = []

    @queue.handler("slow")
    def slow(ctx: JobContext, i: int) -> None:
        go.wait(60)
        told.append((ctx.attempt, ctx.cancelled.reason))

    jobs.add("slow", 3)
    worker = start_worker(concurrency=8)
    jobs.wait(processing=3)
    before = worker.job.incarnation
    jobs.sql("DELETE FROM sync_node")
    wait_for(lambda: worker.job.incarnation not in ("", before), "it has joined anew")
    # Either they go on, or they were rescued first and run again, after the first ones have been told.
    mine = "SELECT count(*) FROM sync_job WHERE state = 'processing' AND incarnation::text = %s"
    wait_for(lambda: jobs.sql(mine, worker.job.incarnation) == [(3,)], "its jobs bear its new name")
    go.set()
    jobs.wait(completed=3)
    again = jobs.sql("SELECT count(*) FROM sync_job WHERE attempt = 2")[0][0]
    wait_for(lambda: len(told) == 3 + again, "all attempts are over")
    assert sorted(told).count((1, "lost")) == again
    assert jobs.outcomes() == {"completed": 3, **({"died": again} if again else {})}


def test_a_network_that_swallows_everything_for_a_while(
    database: URL, jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    for part in (adopting, claiming, reports):
        monkeypatch.setattr(part, "ANSWER_SEC", 1.5)
    relay = Relay(database)
    queue = JobQueue(CoordinationConfig(url=relay.url, **QUICK))
    ran: collections.Counter[int] = collections.Counter()

    @queue.handler("short")
    def short(ctx: JobContext, i: int) -> None:
        ran[ctx.id] += 1
        time.sleep(0.005)

    ids = jobs.add("short", 2000)
    worker = JobWorker(queue, node_name="w1").start()
    try:
        wait_for(lambda: jobs.states().get("completed", 0) > 200, "it runs")
        relay.drop()
        wait_for(lambda: worker._pump and not worker._pump.is_connected, "the worker has noticed")
        relay.heal()
        jobs.wait(60, completed=2000)
        assert ran == dict.fromkeys(ids, 1)
        assert jobs.outcomes() == {"completed": 2000}
    finally:
        worker.stop(0)
        queue.dispose()
        relay.close()


def is_started(server: Postgres) -> bool:
    try:
        server.start()
    except subprocess.CalledProcessError:
        return False
    return True


def test_a_server_that_is_killed_and_started_again(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, "sqlalchemy.pool")
    with open_folder(identity()) as folder:
        server = Postgres(Path(folder), "data", programs())
        server.create()
        server.start()
        try:
            engine = create_engine(server.url)
            migrate.upgrade(engine)
            engine.dispose()
            queue = JobQueue(CoordinationConfig(url=server.url, **QUICK))
            go = threading.Event()
            queue.register("slow", lambda ctx: go.wait(60) and None)
            worker = JobWorker(queue, 2, node_name="w1").start()
            with contextlib.closing(Jobs(server.url)) as jobs:
                jobs.sql("INSERT INTO sync_job (type) SELECT 'slow' FROM generate_series(1, 20)")
                jobs.wait(processing=2, pending=18)
            server.kill()
            go.set()  # they end while there is no server
            wait_for(lambda: worker._pump and not worker._pump.is_connected, "the worker has noticed")
            wait_for(lambda: is_started(server), "the children of the killed one are gone")
            with contextlib.closing(Jobs(server.url)) as jobs:
                jobs.wait(60, completed=20)
            worker.stop()
            queue.dispose()
        finally:
            server.stop()
