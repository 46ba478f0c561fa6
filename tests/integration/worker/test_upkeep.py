"""The duties in workers that run: what is asked of the queue happens, and soon."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from jobsync_orm import JobContext, JobQueue, JobWorker, Retry
from jobsync_orm.coordinator import clock, session
from jobsync_orm.worker import connecting, pump
from tests.integration.cluster import wait_for
from tests.integration.worker.conftest import Jobs

Start = Callable[..., JobWorker]


def test_scheduled_jobs_run_at_their_moment(queue: JobQueue, start_worker: Start, jobs: Jobs) -> None:
    ran: list[float] = []
    queue.register("t", lambda ctx, **_: ran.append(time.time()))
    jobs.sql("INSERT INTO sync_job (type, state, run_at) VALUES ('t', 'scheduled', now() + interval '2 s')")
    start_worker(poll_sec=60)
    jobs.wait(completed=1)
    ((due,),) = jobs.sql("SELECT extract(epoch FROM run_at)::float8 FROM sync_job")
    assert due <= ran[0]


def test_a_backed_off_job_is_tried_again_when_it_is_due(queue: JobQueue, start_worker: Start, jobs: Jobs) -> None:
    def once(ctx: JobContext, **_: Any) -> None:
        if ctx.attempt == 1:
            raise Retry(after=0.2)

    queue.register("t", once)
    jobs.add("t")
    start_worker(poll_sec=60)
    jobs.wait(completed=1)
    assert jobs.sql("SELECT attempt, failures FROM sync_job") == [(2, 1)]


def test_dependants_run_after_the_last_one_has_completed(queue: JobQueue, start_worker: Start, jobs: Jobs) -> None:
    order: list[int] = []
    queue.register("t", lambda ctx, **_: order.append(ctx.id))
    first, second, third = jobs.add("t", 3)
    jobs.sql("UPDATE sync_job SET state = 'blocked' WHERE id <> %s", first)
    jobs.sql("INSERT INTO sync_job_dependency VALUES (%s, %s), (%s, %s)", first, second, second, third)
    start_worker()
    jobs.wait(completed=3)
    assert order == [first, second, third]


def test_paused_types_are_not_claimed_until_they_are_resumed(queue: JobQueue, start_worker: Start, jobs: Jobs) -> None:
    queue.register("a", lambda ctx, **_: None)
    queue.register("b", lambda ctx, **_: None)
    queue.pause("a")
    worker = start_worker()
    jobs.add("a")
    jobs.add("b")
    jobs.wait(pending=1, completed=1)
    queue.resume("a")
    jobs.wait(completed=2)
    queue.pause()
    wait_for(lambda: worker._pump is not None and worker._pump.paused == {""}, "the worker has heard of it")
    jobs.add("b")
    jobs.sql(f"NOTIFY {queue.names.queue_channel}")
    time.sleep(0.3)
    assert jobs.states() == {"completed": 2, "pending": 1}
    queue.resume()
    jobs.wait(completed=3)


def test_a_running_job_is_cancelled(queue: JobQueue, start_worker: Start, jobs: Jobs) -> None:
    begun = threading.Event()

    def wait(ctx: JobContext, **_: Any) -> None:
        begun.set()
        ctx.cancelled.wait(60)
        ctx.check()

    queue.register("t", wait)
    start_worker()
    (job,) = jobs.add("t")
    assert begun.wait(60)
    queue.cancel(job)
    jobs.wait(cancelled=1)


def test_a_job_that_was_given_to_others_is_given_up(queue: JobQueue, start_worker: Start, jobs: Jobs) -> None:
    begun, told = threading.Event(), threading.Event()

    def wait(ctx: JobContext, **_: Any) -> None:
        if ctx.attempt == 1:
            begun.set()
            ctx.cancelled.wait(60)
            told.set()

    queue.register("t", wait)
    worker = start_worker()
    jobs.add("t")
    assert begun.wait(60)
    jobs.sql("UPDATE sync_job SET deadline = now() - interval '1 s'")
    assert worker._upkeep is not None
    worker._upkeep.rescue._overdue.at = 0  # at once, not within five seconds
    jobs.wait(completed=1)
    assert told.wait(60)
    assert jobs.sql("SELECT attempt, failures FROM sync_job") == [(2, 1)]
    assert jobs.outcomes() == {"died": 1, "completed": 1}


def test_the_workers_row(queue: JobQueue, start_worker: Start, jobs: Jobs) -> None:
    begun, end = threading.Event(), threading.Event()

    def wait(ctx: JobContext, **_: Any) -> None:
        begun.set()
        end.wait(60)

    queue.register("t", wait)
    queue.register("u", lambda ctx, **_: None)
    worker = start_worker(node_name="w1", concurrency=3)
    jobs.add("t")
    jobs.add("u", 5)
    assert begun.wait(60)
    figures = "SELECT node, types, concurrency, running, completed, failed FROM sync_job_worker"
    wait_for(lambda: jobs.sql(figures) == [("w1", ["t", "u"], 3, 1, 5, 0)], "the row says what it does")
    end.set()
    worker.stop()
    assert jobs.sql(figures) == []


def test_stopping_after_the_machine_has_slept(
    queue: JobQueue, start_worker: Start, jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One clock of the machine counted that time, the other one did not: the end is written down all the same."""
    awake = clock.now
    for module in (clock, session, connecting):
        monkeypatch.setattr(module, "now", lambda: awake() + 1e6)
    begun, end = threading.Event(), threading.Event()

    def wait(ctx: JobContext, **_: Any) -> None:
        begun.set()
        end.wait(60)

    queue.register("t", wait)
    worker = start_worker()
    jobs.add("t")
    assert begun.wait(60)
    stopping = threading.Thread(target=worker.stop)
    stopping.start()
    wait_for(lambda: worker.health().state == "stopping", "it is stopping")
    end.set()
    stopping.join()
    assert jobs.states() == {"completed": 1}


class Insatiable:
    """A duty that always has more to do."""

    def due_at(self) -> float:
        return 0.0

    def run(self, session: session.Session) -> None:
        session.execute("SELECT 1", timeout=5)

    def woken(self, payloads: set[str]) -> None: ...


def test_a_duty_that_is_always_due_keeps_none_of_the_others_waiting(
    queue: JobQueue, start_worker: Start, jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue.register("t", lambda ctx, **_: None)
    start = pump.Pump.start

    def start_with_one_more(self: pump.Pump) -> None:
        self.duties.append(Insatiable())
        start(self)

    monkeypatch.setattr(pump.Pump, "start", start_with_one_more)
    start_worker()
    wait_for(lambda: jobs.sql("SELECT 1 FROM sync_job_worker"), "its row is there")
    jobs.sql("INSERT INTO sync_job (type, state, run_at) VALUES ('t', 'scheduled', now())")
    jobs.wait(completed=1)


def test_notifications_of_strangers_stop_nothing(
    queue: JobQueue, start_worker: Start, jobs: Jobs, caplog: pytest.LogCaptureFixture
) -> None:
    queue.register("t", lambda ctx, **_: None)
    start_worker()
    wait_for(lambda: jobs.sql("SELECT 1 FROM sync_job_worker"), "it listens")
    for payload in (
        '[["t", 4000000000, false]]',
        '[["t", "x", false]]',
        '[["t", 1.5, true]]',
        '[["t", true, true]]',
        '[["t", 0]]',
        "[[[], 0, false]]",
        "[7]",
        "7",
        "no JSON",
        "{}",
        "[" * 3000,
    ):
        jobs.sql("SELECT pg_notify(%s, %s)", queue.names.queue_channel, payload)
    jobs.add("t")
    jobs.wait(completed=1)
    assert not [record for record in caplog.records if "trying again" in record.getMessage()]


def test_rows_that_enqueue_would_refuse_hold_up_none_of_the_others(
    queue: JobQueue, start_worker: Start, jobs: Jobs
) -> None:
    given: list[Any] = []
    queue.register("t", lambda ctx, **payload: given.append(payload["i"]))
    jobs.add("t", 3)
    jobs.sql("INSERT INTO sync_job (type, payload) VALUES ('t', '{\"i\": 1e5000}')")
    jobs.sql("INSERT INTO sync_job (type, payload, key, token_id) VALUES ('t', '{\"i\": 1e5000}', 'k', 1)")
    for timeout in ("Infinity", "NaN", "1e300"):
        jobs.sql("INSERT INTO sync_job (type, payload, timeout) VALUES ('t', '{\"i\": 4}', %s)", timeout)
    jobs.add("t", 3)
    start_worker()
    jobs.wait(completed=11)
    assert sorted(given) == [1, 1, 2, 2, 3, 3, 4, 4, 4, 10**5000, 10**5000]
