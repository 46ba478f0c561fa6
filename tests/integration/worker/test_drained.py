"""A worker whose node is drained ends what it runs, and takes nothing new until it is undrained."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import psycopg
import pytest
from sqlalchemy import URL, Engine

from jobsync_orm import CoordinationConfig, JobContext, JobQueue, JobWorker
from jobsync_orm.coordinator.session import Session
from jobsync_orm.integrations.hosted import Host
from jobsync_orm.naming import Names
from jobsync_orm.operate import drain, undrain
from jobsync_orm.worker import maintenance
from tests.conftest import dsn
from tests.integration.cluster import QUICK, wait_for
from tests.integration.worker.conftest import Jobs

Start = Callable[..., JobWorker]
NAMES = Names()


@pytest.fixture
def held(queue: JobQueue) -> threading.Event:
    """Lets the handler of ``slow`` return."""
    go = threading.Event()

    def slow(ctx: JobContext, **_: Any) -> None:
        assert go.wait(60)

    queue.register("slow", slow)
    queue.register("quick", lambda ctx, **_: None)
    return go


def types(jobs: Jobs) -> list[str] | None:
    rows = jobs.sql("SELECT types FROM sync_job_worker WHERE node = 'w1'")
    return rows[0][0] if rows else None


def test_what_runs_ends_and_nothing_else_begins(
    engine: Engine, queue: JobQueue, jobs: Jobs, start_worker: Start, held: threading.Event
) -> None:
    worker = start_worker(node_name="w1", concurrency=1)
    jobs.add("slow", 4)  # more than there are slots: some are taken in advance
    wait_for(lambda: worker.health().running == 1, "one runs")
    assert drain(engine, NAMES, "w1", by="me", last_too=True)
    wait_for(lambda: worker.health().drained, "the worker has heard of it")
    jobs.wait(processing=1, pending=3)  # what waited for a slot has gone back
    held.set()
    jobs.wait(completed=1, pending=3)
    queue.submit("quick", {})
    queue.submit("quick", {}, key="k")
    # Others see that it takes nothing, and take the jobs of its keys.
    wait_for(lambda: types(jobs) == [], "its row says so")
    jobs.wait(completed=1, pending=5)
    health = worker.health()
    assert (health.ok, health.problems, health.state) == (True, (), "running")

    assert undrain(engine, NAMES, "w1")
    jobs.wait(completed=6)
    wait_for(lambda: types(jobs) == ["quick", "slow"], "its row says that it takes jobs")
    assert not worker.health().drained


def test_another_worker_takes_the_jobs(
    engine: Engine, queue: JobQueue, jobs: Jobs, start_worker: Start, held: threading.Event
) -> None:
    drained, other = start_worker(node_name="w1"), start_worker(node_name="w2")
    assert drain(engine, NAMES, "w1", by="me")
    wait_for(lambda: drained.health().drained, "the worker has heard of it")
    jobs.add("quick", 50)
    for n in range(10):
        queue.submit("quick", {}, key=f"k{n}")
    jobs.wait(completed=60)
    assert jobs.sql("SELECT DISTINCT worker FROM sync_job_attempt") == [("w2",)]
    assert not other.health().drained


def test_one_that_starts_drained_takes_nothing_at_all(
    engine: Engine, jobs: Jobs, start_worker: Start, held: threading.Event
) -> None:
    jobs.add("quick", 5)
    jobs.sql("UPDATE sync_cluster SET drained = '{\"w1\": {}}'")
    start_worker(node_name="w2", types=["slow"])
    worker = start_worker(node_name="w1", types=["quick"])
    wait_for(lambda: types(jobs) == [], "its row says that it takes nothing")
    assert (worker.health().claimed, jobs.states()) == (0, {"pending": 5})


def test_it_looks_for_no_work_and_rests(
    engine: Engine,
    queue: JobQueue,
    jobs: Jobs,
    start_worker: Start,
    held: threading.Event,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever waits: neither the database nor a processor is kept busy by who may not take it."""
    sent: list[str] = []
    prepared = Session.prepared

    def noted(self: Session, sql: str, *parameters: Any, **options: Any) -> Any:
        sent.append(sql)
        return prepared(self, sql, *parameters, **options)

    worker = start_worker(node_name="w1", poll_sec=0.05)
    assert drain(engine, NAMES, "w1", by="me", last_too=True)
    wait_for(lambda: types(jobs) == [], "it has heard of it")
    jobs.add("quick", 5)
    for n in range(5):
        queue.submit("quick", {}, key=f"k{n}")
    monkeypatch.setattr(Session, "prepared", noted)
    (loop,) = (thread for thread in threading.enumerate() if thread.name == "jobsync-pump-w1")
    clock = time.pthread_getcpuclockid(loop.ident or 0)
    began = time.clock_gettime(clock)
    time.sleep(1)
    used = time.clock_gettime(clock) - began
    sql = queue.statements
    assert sql.survey in sent, "it goes on, as it says in its health"
    assert not {sql.claim, sql.heads, sql.discover, sql.lines} & set(sent)
    assert used < 0.3, "of a second in which there is nothing to do"
    assert (worker.health().claimed, jobs.states()) == (0, {"pending": 10})


def test_by_notification_it_hears_at_once_and_takes_up_what_has_come_meanwhile(
    engine: Engine,
    queue: JobQueue,
    jobs: Jobs,
    start_worker: Start,
    held: threading.Event,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for looks in ("ORDERS_SEC", "PRESENCE_SEC"):  # none by itself as long as this takes
        monkeypatch.setattr(maintenance, looks, 600)
    worker = start_worker(node_name="w1", poll_sec=600)
    wait_for(lambda: types(jobs), "its row is there")
    assert drain(engine, NAMES, "w1", by="me", last_too=True)
    wait_for(lambda: worker.health().drained and types(jobs) == [], "the worker and its row", 20)
    jobs.add("quick", 3)  # nobody tells of these
    assert undrain(engine, NAMES, "w1")
    jobs.wait(completed=3, timeout=20)
    wait_for(lambda: types(jobs) == ["quick", "slow"], "its row says that it takes jobs", 20)


def test_without_notifications_it_hears_within_a_second(
    database: URL, jobs: Jobs, start_worker: Start, held: threading.Event
) -> None:
    worker = start_worker(node_name="w1")
    with psycopg.connect(dsn(database), autocommit=True) as somebody:
        somebody.execute("UPDATE sync_cluster SET drained = '{\"w1\": {}}'")
        wait_for(lambda: worker.health().drained, "the worker has read it")
        somebody.execute("UPDATE sync_cluster SET drained = '{}'")
        wait_for(lambda: not worker.health().drained, "and that it is over")


@pytest.mark.parametrize("with_worker", [False, True])
def test_its_process_is_alive_and_not_ready(
    database: URL, engine: Engine, queue: JobQueue, held: threading.Event, with_worker: bool
) -> None:
    config = CoordinationConfig(url=database, **QUICK)
    host = Host(config, {}, "web 1", worker=(lambda job: JobWorker(queue, job=job)) if with_worker else None)
    try:
        host.start_job()
        host.start_worker()
        wait_for(lambda: host.ready().ok, "it is ready")
        assert drain(engine, NAMES, "web 1", by="me", last_too=True)
        wait_for(lambda: not host.ready().ok, "it is not ready")
        assert host.ready().problems == (
            "the node is drained and takes nothing new until it is undrained (jobsync-orm undrain 'web 1')",
        )
        assert host.live().ok
        wait_for(host.job.am_i_drained, "the job knows")
        assert undrain(engine, NAMES, "web 1")
        wait_for(lambda: host.ready().ok, "it is ready again")
    finally:
        host.stop_worker()
        host.stop_job()
