"""A worker runs what is there, what comes, and nothing twice."""

from __future__ import annotations

import collections
import socket
import threading
from collections.abc import Callable

import pytest

from jobsync_orm import ConfigurationError, Job, JobContext, JobQueue, JobWorker, NotRunning
from jobsync_orm.exceptions import UnknownJobType
from tests.integration.cluster import wait_for
from tests.integration.worker.conftest import Jobs

Start = Callable[..., JobWorker]


def test_all_jobs_run_once(queue: JobQueue, jobs: Jobs, start_worker: Start) -> None:
    ran: collections.Counter[int] = collections.Counter()

    @queue.handler("count")
    def count(ctx: JobContext, i: int) -> None:
        ran[ctx.id] += 1

    ids = jobs.add("count", 3000)
    workers = [start_worker(batch=100) for _ in range(2)]
    more = jobs.add("count", 500)
    jobs.wait(completed=3500)
    assert ran == dict.fromkeys(ids + more, 1)
    assert jobs.outcomes() == {"completed": 3500}
    # A worker knows of it a moment after the database does.
    wait_for(lambda: sum(worker.health().completed for worker in workers) == 3500, "the workers know")
    assert jobs.sql("SELECT count(*) FROM sync_job WHERE incarnation IS NOT NULL OR deadline IS NOT NULL") == [(0,)]


def test_a_worker_takes_no_more_than_it_has_slots_for(queue: JobQueue, jobs: Jobs, start_worker: Start) -> None:
    go = threading.Event()

    @queue.handler("slow")
    def slow(ctx: JobContext, i: int) -> None:
        go.wait(60)

    jobs.add("slow", 50)
    worker = start_worker(concurrency=8)
    jobs.wait(processing=8, pending=42)
    assert worker._pump is not None
    turn = worker._pump.turned_at
    wait_for(lambda: worker._pump and worker._pump.turned_at > turn + 1, "it has looked again")
    assert jobs.states() == {"processing": 8, "pending": 42}
    go.set()
    jobs.wait(completed=50)


def test_names_of_workers_are_the_first_that_are_free(queue: JobQueue, start_worker: Start) -> None:
    queue.register("nothing", lambda ctx: None)
    host = socket.gethostname()
    first, second = start_worker(), start_worker()
    assert (first.node_name, second.node_name) == (f"{host}-1", f"{host}-2")
    first.stop()
    assert start_worker().node_name == f"{host}-1"


def test_a_worker_may_be_a_node_of_the_applications(queue: JobQueue, jobs: Jobs, job: Job, start_worker: Start) -> None:
    queue.register("nothing", lambda ctx, i: None)
    worker = start_worker(job=job)
    assert worker.job is job
    with pytest.raises(ConfigurationError, match="has a JobWorker already"):
        start_worker(job=job)
    jobs.add("nothing")
    jobs.wait(completed=1)
    worker.stop()
    assert job.is_running
    assert jobs.sql("SELECT worker FROM sync_job") == [("w1",)]


def test_what_a_worker_refuses(queue: JobQueue) -> None:
    with pytest.raises(ConfigurationError, match="no handlers"):
        JobWorker(queue).start()
    with pytest.raises(UnknownJobType, match="'absent'"):
        JobWorker(queue, types=["absent"])
    with pytest.raises(ConfigurationError, match="concurrency=0"):
        JobWorker(queue, 0)
    with pytest.raises(ConfigurationError, match="must be a list of types"):
        JobWorker(queue, types="absent")
    with pytest.raises(ConfigurationError, match="grace_sec=-1"):
        JobWorker(queue, grace_sec=-1)
    queue.register("nothing", lambda ctx: None)
    with pytest.raises(NotRunning):
        JobWorker(queue, job=Job("w1", queue.config)).start()
