"""Workers lose connections, server, network, processor or life; no job is lost or done twice.

``effect`` jobs insert a row in the transaction of their completion: there must be exactly one per job, whatever
happened on the way, and for each attempt that was begun exactly one row that says how it ended.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest
from sqlalchemy import URL, create_engine

from jobsync_orm import migrate
from tests.conftest import dsn
from tests.integration.cluster import QUICK, wait_for
from tests.integration.postgres import Postgres, identity, open_folder, programs
from tests.integration.relay import Relay
from tests.integration.worker.conftest import Jobs
from tests.integration.worker.processes import Process

Start = Callable[..., Process]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts processes; all are ended when the test is over."""
    started: list[Process] = []

    def start(url: URL, node: str | None = None, config: dict[str, Any] | None = None, **options: Any) -> Process:
        process = Process(url, node, QUICK if config is None else config, **options)
        started.append(process)
        wait_for(lambda: process.seen("health", ok=True), "the worker runs", 60)
        return process

    yield start
    for process in started:
        process.end()


def is_green(worker: Process) -> bool:
    health = worker.seen("health")
    return health is not None and health["ok"]


def prepare(jobs: Jobs) -> None:
    jobs.sql("CREATE TABLE effect (job bigint, attempt int)")


def check(jobs: Jobs, many: int, timeout: float = 60) -> None:
    """All is done, each once, and written down."""
    jobs.wait(timeout, completed=many)
    assert jobs.sql("SELECT count(*), count(DISTINCT job) FROM effect") == [(many, many)]
    assert (
        jobs.sql(
            "SELECT j.id, j.attempt, a.count FROM sync_job j, LATERAL (SELECT count(*), max(attempt),"
            " count(*) FILTER (WHERE outcome = 'completed') AS completed FROM sync_job_attempt WHERE job_id = j.id) a"
            " WHERE (j.attempt, j.attempt, 1) IS DISTINCT FROM (a.count, a.max, a.completed)"
        )
        == []
    )
    # The attempt whose effect is there is the one that completed.
    assert (
        jobs.sql(
            "SELECT e.job FROM effect e JOIN sync_job_attempt a ON a.job_id = e.job AND a.attempt = e.attempt"
            " WHERE a.outcome <> 'completed'"
        )
        == []
    )


def terminate(jobs: Jobs) -> None:
    jobs.sql(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
        " WHERE datname = current_database() AND pid <> pg_backend_pid()"
    )


def backends_ended_while_jobs_flow(database: URL, jobs: Jobs, start: Start, seconds: float, every: float) -> None:
    prepare(jobs)
    workers = [start(database, node) for node in ("w1", "w2")]
    many, until = 0, time.monotonic() + seconds
    while time.monotonic() < until:
        terminate(jobs)
        pause = time.monotonic() + every
        while time.monotonic() < pause:
            # A retry is a minute away by default; what has failed for a lost connection is run again at once here.
            many += len(jobs.add("effect", 20, max_retries=1000))
            jobs.sql("UPDATE sync_job SET run_at = now() WHERE state = 'retrying'")
            time.sleep(0.05)

    def hurry() -> bool:
        jobs.sql("UPDATE sync_job SET run_at = now() WHERE state = 'retrying' AND run_at > now()")
        return jobs.states() == {"completed": many}

    wait_for(hurry, "all jobs are done", 60)
    check(jobs, many)
    for worker in workers:
        wait_for(lambda worker=worker: is_green(worker), "it is green again")  # type: ignore[misc]
        worker.signal(signal.SIGTERM)
        wait_for(lambda worker=worker: not worker.alive, "it ends")  # type: ignore[misc]
        assert worker.process.returncode == 0


@pytest.mark.slow
def test_backends_are_ended_while_jobs_flow(database: URL, jobs: Jobs, start: Start) -> None:
    backends_ended_while_jobs_flow(database, jobs, start, seconds=2.5, every=0.5)


@pytest.mark.load
def test_backends_are_ended_every_second(database: URL, jobs: Jobs, start: Start) -> None:
    backends_ended_while_jobs_flow(database, jobs, start, seconds=10, every=1)


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["leader", pytest.param("follower", marks=pytest.mark.load)])
def test_a_killed_workers_job_runs_elsewhere(database: URL, jobs: Jobs, start: Start, victim: str) -> None:
    """With the settings that a user gets."""
    nodes = {}
    for node in ("w1", "w2"):  # the first one leads
        nodes[node] = start(database, node, {}, concurrency=1)
        if (node == "w1") == (victim == "leader"):
            (job,) = jobs.add("slow")
            wait_for(lambda node=node: nodes[node].seen("start"), "the job runs")  # type: ignore[misc]
        else:
            (filler,) = jobs.add("slow")
            wait_for(lambda node=node: nodes[node].seen("start"), "the other worker is busy")  # type: ignore[misc]
    dead, other = ("w1", "w2") if victim == "leader" else ("w2", "w1")
    start(database, "w3", {}, concurrency=1)
    nodes[dead].kill()
    wait_for(
        lambda: jobs.sql("SELECT worker FROM sync_job WHERE id = %s AND attempt = 2", job) == [("w3",)], "elsewhere"
    )
    assert jobs.sql("SELECT job_id, outcome, error FROM sync_job_attempt") == [(job, "died", f"worker {dead} died")]
    assert jobs.sql("SELECT worker, attempt FROM sync_job WHERE id = %s", filler) == [(other, 1)]


@pytest.mark.parametrize("type", ["forks", "spawns"])
def test_a_child_of_a_handlers_that_outlives_its_worker_keeps_nobody_waiting(
    database: URL, jobs: Jobs, start: Start, type: str
) -> None:
    """The end of its session is noticed although it lives on; its heartbeat is good for five minutes."""
    config = {"heartbeat_timeout_sec": 300}
    one = start(database, "w1", config)
    jobs.add(type)
    began = wait_for(lambda: one.seen("start", attempt=1), "the job runs")
    try:
        two = start(database, "w2", config)
        wait_for(lambda: is_green(one), "it still is")
        one.kill()
        again = wait_for(lambda: two.seen("start", attempt=2), "the job runs elsewhere")
        os.kill(again["child"], signal.SIGKILL)
        os.kill(began["child"], 0)
    finally:
        os.kill(began["child"], signal.SIGKILL)


def test_the_only_worker_is_killed_and_started_again(database: URL, jobs: Jobs, start: Start) -> None:
    one = start(database, config={})
    jobs.add("slow")
    wait_for(lambda: one.seen("start", attempt=1), "the job runs")
    one.kill()
    two = start(database, config={})
    wait_for(lambda: two.seen("start", attempt=2), "the job runs again")


def test_the_only_worker_is_killed_and_replaced_by_one_of_another_name(database: URL, jobs: Jobs, start: Start) -> None:
    """Which nobody has seen alive; its heartbeat alone would make it dead in five minutes."""
    config = {"heartbeat_timeout_sec": 300}
    one = start(database, "w1", config)
    (job,) = jobs.add("slow")
    wait_for(lambda: one.seen("start", attempt=1), "the job runs")
    one.kill()
    two = start(database, "w2", config)
    wait_for(lambda: two.seen("start", attempt=2), "the job runs again")
    assert jobs.sql("SELECT job_id, outcome, error FROM sync_job_attempt") == [(job, "died", "worker w1 died")]


@pytest.mark.slow
def test_a_worker_that_was_stopped_changes_nothing_when_it_goes_on(database: URL, jobs: Jobs, start: Start) -> None:
    workers = [start(database, node, concurrency=1) for node in ("w1", "w2")]
    ((job,),) = jobs.sql("INSERT INTO sync_job (type, payload) VALUES ('slow', '{\"seconds\": 2}') RETURNING id")
    wait_for(lambda: any(worker.seen("start") for worker in workers), "the job runs")
    one, two = sorted(workers, key=lambda worker: worker.seen("start") is None)
    one.signal(signal.SIGSTOP)
    wait_for(lambda: two.seen("start", job=job, attempt=2), "the job runs elsewhere", 60)
    jobs.wait(60, completed=1)
    written = jobs.sql("SELECT xmin::text, attempt, result FROM sync_job")
    one.signal(signal.SIGCONT)
    wait_for(lambda: one.seen("end", job=job, attempt=1), "the first attempt ends as well")
    wait_for(lambda: is_green(one), "it is green again", 60)
    assert jobs.sql("SELECT xmin::text, attempt, result FROM sync_job") == written
    assert jobs.outcomes() == {"died": 1, "completed": 1}
    two.kill()
    jobs.add("nothing", 3)
    jobs.wait(completed=4)


class TestBrokenNetwork:
    @pytest.fixture
    def relay(self, database: URL) -> Iterator[Relay]:
        relay = Relay(database)
        yield relay
        relay.close()

    def lost(self, jobs: Jobs, start: Start, relay: Relay, seconds: float) -> None:
        prepare(jobs)
        worker = start(relay.url, "w1")
        jobs.add("effect", 20)
        relay.drop()
        jobs.add("effect", 20)
        wait_for(lambda: worker.seen("health", ok=False), "it is red", 60)
        time.sleep(seconds)
        relay.heal()
        check(jobs, 40)
        wait_for(lambda worker=worker: is_green(worker), "it is green again", 60)  # type: ignore[misc]
        # It listens again, and does not just look now and then.
        jobs.add("effect", 1)
        check(jobs, 41)

    def test_packets_are_lost(self, jobs: Jobs, start: Start, relay: Relay) -> None:
        self.lost(jobs, start, relay, 1)

    @pytest.mark.load
    def test_packets_are_lost_for_long(self, jobs: Jobs, start: Start, relay: Relay) -> None:
        self.lost(jobs, start, relay, 25)


def test_sigterm_while_the_table_is_locked(database: URL, jobs: Jobs, start: Start) -> None:
    worker = start(database, "w1", grace_sec=0.5)
    jobs.add("slow")
    wait_for(lambda: worker.seen("start"), "the job runs")
    with psycopg.connect(dsn(database)) as other:
        other.execute("LOCK TABLE sync_job IN ACCESS EXCLUSIVE MODE")
        worker.signal(signal.SIGTERM)
        wait_for(lambda: not worker.alive, "it ends", 60)
    assert worker.process.returncode == 0


@pytest.mark.load
@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_the_server_starts_again(start: Start, how: str) -> None:
    with open_folder(identity()) as folder:
        server = Postgres(folder, "data", programs())
        try:
            server.create()
            server.start()
            engine = create_engine(server.url)
            migrate.upgrade(engine)
            engine.dispose()
            jobs = Jobs(server.url)
            prepare(jobs)
            workers = [start(server.url, node) for node in ("w1", "w2")]
            jobs.add("effect", 200)
            jobs.wait(60, completed=200)
            jobs.add("effect", 200)
            with contextlib.suppress(psycopg.Error):
                jobs.close()
            server.kill() if how == "killed" else server.stop()
            for worker in workers:
                wait_for(lambda worker=worker: worker.seen("health", ok=False), "it is red")  # type: ignore[misc]
            wait_for(lambda: _starts(server), "the server is back", 60)
            jobs = Jobs(server.url)

            def hurry(many: int) -> bool:
                jobs.sql("UPDATE sync_job SET run_at = now() WHERE state = 'retrying' AND run_at > now()")
                return jobs.states() == {"completed": many}

            wait_for(lambda: hurry(400), "all jobs are done", 60)
            jobs.add("effect", 10)
            check(jobs, 410)
            for worker in workers:
                wait_for(lambda worker=worker: is_green(worker), "it is green again")  # type: ignore[misc]
            jobs.close()
        finally:
            for worker in workers:
                worker.end()
            server.stop()


def _starts(server: Postgres) -> bool:
    try:
        server.start()
        server.execute("SELECT 1")
    except Exception:  # its former processes have not gone yet
        return False
    return True
