"""Health is red while a worker is of no use, whatever the reason, and green again by itself."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import psycopg
import pytest
from sqlalchemy import URL

from jobsync_orm import JobContext, JobQueue, JobWorker
from jobsync_orm.coordinator.session import Session, StatementFailed
from jobsync_orm.worker import health
from tests.conftest import dsn
from tests.integration.cluster import wait_for
from tests.integration.worker.conftest import Jobs

Start = Callable[..., JobWorker]


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "STALLED_SEC", 1.5)
    monkeypatch.setattr(health, "STALLED_POLLS", 1)


def problems(worker: JobWorker) -> str:
    found = worker.health()
    assert found.ok == (not found.problems)
    return "; ".join(found.problems)


def test_of_a_worker_that_runs(queue: JobQueue, start_worker: Start, jobs: Jobs) -> None:
    begun, end = threading.Event(), threading.Event()

    def wait(ctx: JobContext, **_: Any) -> None:
        begun.set()
        end.wait(60)

    queue.register("t", wait)
    queue.register("u", lambda ctx, **_: None)
    worker = JobWorker(queue)
    assert (worker.health().state, worker.health().ok) == ("new", False)
    worker = start_worker(node_name="w1")
    wait_for(lambda: worker.health().ok, "it is healthy")
    jobs.add("t")
    jobs.add("u", 4)
    assert begun.wait(60)
    wait_for(lambda: worker.health().completed == 4, "the jobs are counted")
    found = worker.health()
    assert (found.state, found.node, found.ok, found.problems) == ("running", "w1", True, ())
    assert (found.running, found.claimed, found.failed, found.abandoned, found.reconnects) == (1, 5, 0, 0, 0)
    assert None not in (found.turn_sec, found.claim_sec, found.heartbeat_sec)
    stopping = threading.Thread(target=worker.stop)
    stopping.start()
    wait_for(lambda: worker.health().state == "stopping", "it is stopping")
    end.set()
    stopping.join()
    found = worker.health()
    assert (found.state, found.ok) == ("stopped", False)


def test_the_loop_is_stuck_while_heartbeats_go_on(
    queue: JobQueue, start_worker: Start, jobs: Jobs, database: URL
) -> None:
    queue.register("t", lambda ctx, **_: None)
    worker = start_worker(poll_sec=0.2)
    wait_for(lambda: worker.health().ok, "it is healthy")
    with psycopg.connect(dsn(database)) as other:
        other.execute("LOCK TABLE sync_job IN ACCESS EXCLUSIVE MODE")
        wait_for(lambda: "not completed a turn" in problems(worker), "it is red")
        assert worker.job.am_i_healthy()
        waiting = "SELECT count(*) FROM pg_locks WHERE NOT granted AND relation = 'sync_job'::regclass"
        assert jobs.sql(waiting) <= [(1,)]
        # The server gives up before the worker does, so that nothing stays behind there.
        wait_for(lambda: "lock timeout" in problems(worker), "it says why")
        assert worker.health().reconnects == 0
    jobs.add("t")
    jobs.wait(completed=1)
    wait_for(lambda: worker.health().ok, "it is green again")


def test_something_beside_claiming_fails(queue: JobQueue, start_worker: Start, jobs: Jobs) -> None:
    queue.register("t", lambda ctx, **_: None)
    worker = start_worker()
    jobs.sql("ALTER TABLE sync_job_pause RENAME TO pause")
    wait_for(lambda: "Orders has failed" in problems(worker), "it is red")
    jobs.add("t")  # the rest works
    jobs.wait(completed=1)
    jobs.sql("ALTER TABLE pause RENAME TO sync_job_pause")
    wait_for(lambda: worker.health().ok, "it is green again")


def test_claims_fail(queue: JobQueue, start_worker: Start, jobs: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    queue.register("t", lambda ctx, **_: None)
    worker = start_worker()
    wait_for(lambda: worker.health().ok, "it is healthy")
    prepared = Session.prepared

    def refuse(self: Session, sql: str, *params: Any, timeout: float) -> Any:
        if sql == queue.statements.claim:
            raise StatementFailed("permission denied", "42501")
        return prepared(self, sql, *params, timeout=timeout)

    with monkeypatch.context() as patch:
        patch.setattr(Session, "prepared", refuse)
        jobs.add("t")
        wait_for(lambda: "permission denied" in problems(worker), "it is red")
    jobs.wait(completed=1)
    wait_for(lambda: worker.health().ok, "it is green again")


def test_the_coordinator_is_unhealthy(queue: JobQueue, start_worker: Start, jobs: Jobs, database: URL) -> None:
    queue.register("t", lambda ctx, **_: None)
    worker = start_worker(node_name="w1")
    wait_for(lambda: worker.health().ok, "it is healthy")
    with psycopg.connect(dsn(database)) as other:
        other.execute("SELECT 1 FROM sync_node FOR UPDATE")  # no heartbeat gets through
        wait_for(lambda: "heartbeats fail" in problems(worker), "it is red", 60)
        assert "turn" not in problems(worker)
    wait_for(lambda: worker.health().ok, "it is green again")


def test_too_many_threads_are_left_behind(queue: JobQueue, start_worker: Start, jobs: Jobs) -> None:
    end = threading.Event()

    def hang(ctx: JobContext, **_: Any) -> None:
        end.wait(60)

    queue.register("t", hang)
    worker = start_worker(concurrency=1)
    try:
        for _ in range(10):
            jobs.add("t", timeout=0.2, max_retries=0)
        wait_for(lambda: "whose jobs have timed out" in problems(worker), "it is red")
        assert worker.health().abandoned >= 1
    finally:
        end.set()
    wait_for(lambda: worker.health().ok, "it is green again")


def test_asking_never_raises(queue: JobQueue, start_worker: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    queue.register("t", lambda ctx, **_: None)
    worker = start_worker()
    with monkeypatch.context() as patch:
        patch.setattr(type(worker.job), "am_i_healthy", lambda self: 1 / 0)
        assert "cannot be told" in problems(worker)
    ended = threading.Thread(target=worker.stop)
    ended.start()
    while ended.is_alive():
        worker.health()
        time.sleep(0)
    ended.join()
