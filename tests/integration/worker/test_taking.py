"""Which jobs a worker takes, how soon, and what it gives back."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from jobsync_orm import JobContext, JobQueue, JobWorker
from tests.integration.cluster import wait_for
from tests.integration.worker.conftest import Jobs

Start = Callable[..., JobWorker]


def test_the_order_is_by_priority_and_a_minute_of_waiting_weighs_as_much_as_a_point(
    queue: JobQueue, jobs: Jobs, start_worker: Start
) -> None:
    order: list[int] = []
    queue.register("note", lambda ctx, i: order.append(ctx.job.priority))
    for priority in (-10, 10, 0, 3):
        jobs.add("note", 2, priority=priority)
    jobs.sql("UPDATE sync_job SET ready_at = ready_at - interval '21 minutes' WHERE priority = -10")
    start_worker(concurrency=1, batch=1)
    jobs.wait(completed=8)
    assert order == [-10, -10, 10, 10, 3, 3, 0, 0]


def test_a_notification_wakes_a_worker_that_polls_once_an_hour(
    queue: JobQueue, jobs: Jobs, start_worker: Start
) -> None:
    came = threading.Event()
    queue.register("note", lambda ctx: came.set())
    queue.register("other", lambda ctx: None)
    worker = start_worker(poll_sec=3600)
    assert worker._pump is not None
    wait_for(lambda: worker._pump and worker._pump.counters.reconnects, "it listens")
    time.sleep(0.5)
    queue.submit("note", {})
    assert came.wait(60)
    came.clear()
    jobs.sql("INSERT INTO sync_job (type) VALUES ('note')")
    jobs.sql(f"NOTIFY \"{queue.names.queue_channel}\", ''")
    assert came.wait(60), "an empty message means anywhere"
    came.clear()
    jobs.sql("INSERT INTO sync_job (type) VALUES ('note')")
    jobs.sql(f"NOTIFY \"{queue.names.queue_channel}\", 'no json'")
    assert came.wait(60), "and so does one that nobody understands"


def test_jobs_that_nobody_told_of_are_found(queue: JobQueue, jobs: Jobs, start_worker: Start) -> None:
    queue.register("note", lambda ctx, i: None)
    start_worker(poll_sec=0.1)
    jobs.add("note")
    jobs.wait(completed=1)
    jobs.sql("INSERT INTO sync_job (type, payload, ready_at) VALUES ('note', '{\"i\": 1}', now() - interval '1 day')")
    jobs.wait(completed=2)


def test_jobs_taken_in_advance_go_back_when_their_slots_stay_busy(
    queue: JobQueue, jobs: Jobs, start_worker: Start
) -> None:
    go = threading.Event()

    @queue.handler("mixed")
    def mixed(ctx: JobContext, i: int) -> None:
        if i > 200:
            go.wait(60)

    jobs.add("mixed", 400)  # the first half takes no time
    worker = start_worker(concurrency=2)
    jobs.wait(completed=200, processing=2, pending=198)
    released = jobs.outcomes()["released"]
    assert 1 <= released <= 198
    assert jobs.sql(
        "SELECT max(failures), count(*) FILTER (WHERE attempt > 0) FROM sync_job WHERE state = 'pending'"
    ) == [(0, released)]
    pump = worker._pump
    assert pump is not None
    wait_for(lambda: pump.counters.released == released, "the worker counts what it has given back")  # after the answer
    go.set()
    jobs.wait(completed=400)


def test_stopping_waits_for_what_runs_and_gives_back_the_rest(queue: JobQueue, jobs: Jobs, start_worker: Start) -> None:
    go, left, began = threading.Event(), threading.Event(), threading.Barrier(4)
    reasons: list[str | None] = []

    @queue.handler("short")
    def short(ctx: JobContext, i: int) -> None:
        began.wait(60)
        go.wait(60)

    @queue.handler("long")
    def long(ctx: JobContext, i: int) -> None:
        began.wait(60)
        ctx.cancelled.wait(60)
        reasons.append(ctx.cancelled.reason)
        left.wait(60)  # one that returned at once might still have completed

    jobs.add("short", 2)
    jobs.add("long", 1)
    worker = start_worker(concurrency=3)
    began.wait(60)
    jobs.add("short", 5)
    stopping = threading.Thread(target=worker.stop, args=(1.5,))
    stopping.start()
    go.set()
    stopping.join(60)
    assert jobs.states() == {"completed": 2, "pending": 6}
    assert jobs.outcomes() == {"completed": 2, "released": 1}
    assert jobs.sql("SELECT attempt, failures, error FROM sync_job WHERE type = 'long'") == [(1, 0, None)]
    wait_for(lambda: reasons == ["stopping"], "the long one has been told")
    left.set()
    assert jobs.sql("SELECT count(*) FROM sync_node") == [(0,)]


def test_very_long_payloads_are_claimed_a_few_at_a_time(queue: JobQueue, jobs: Jobs, start_worker: Start) -> None:
    queue.register("long", lambda ctx, text: None)
    jobs.sql(
        "INSERT INTO sync_job (type, payload) SELECT 'long', jsonb_build_object('text', repeat('x', 300000))"
        " FROM generate_series(1, 40)"
    )
    worker = start_worker(concurrency=32)
    jobs.wait(completed=40)
    assert worker._pump is not None
    assert worker._pump.claiming._claim_most < 1000
