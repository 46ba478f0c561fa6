"""Figures of the queue, of its workers, and the status of one job."""

from __future__ import annotations

import asyncio
import datetime
from typing import Any

import pytest
from sqlalchemy import Engine, text

from jobsync_orm.exceptions import InvalidJob, UnknownJob
from jobsync_orm.models import AttemptOutcome, JobState
from jobsync_orm.queue import JobQueue, figures
from jobsync_orm.queue.figures import Percentiles, QueueStats, Rates
from tests.integration.queue.rows import SQL, depend, put, tried

MINUTE_AGO = SQL("now() - interval '1 minute'")
HOUR_AGO = SQL("now() - interval '1 hour'")


def run(store: Engine, *statements: str) -> None:
    with store.begin() as connection:
        for statement in statements:
            connection.execute(text(statement))


def test_an_empty_queue(queue: JobQueue, store: Engine) -> None:
    run(store, "TRUNCATE sync_job, sync_job_attempt")
    stats = queue.stats()
    assert stats == QueueStats(None)
    assert stats.counts == dict.fromkeys(JobState, 0)
    assert stats.last_minute == Rates(60, 0, 0)
    assert queue.stats("none") == QueueStats("none")
    assert queue.worker_stats() == []
    with pytest.raises(InvalidJob, match="type="):
        queue.stats("")


def test_jobs_are_counted_by_state_and_type(queue: JobQueue, store: Engine) -> None:
    for number, state in enumerate(JobState, 1):
        put(store, state, count=number, type="mail")
    put(store, count=2, type="image", key="k")
    stats = queue.stats()
    mail = {state: number for number, state in enumerate(JobState, 1)}
    assert stats.by_type["mail"].counts == mail
    assert stats.by_type["image"].counts == {**dict.fromkeys(JobState, 0), JobState.PENDING: 2}
    assert stats.counts == {**mail, JobState.PENDING: 3}
    assert stats.estimated == frozenset()
    assert queue.stats("mail").counts == mail
    assert queue.stats("mail").type == "mail"


def test_the_oldest_that_is_ready(queue: JobQueue, store: Engine) -> None:
    put(store, "scheduled", type="later", ready_at=SQL("now() - interval '9 hours'"))
    put(store, type="mail", priority=10)
    put(store, type="mail", priority=-10, ready_at=HOUR_AGO)
    put(store, type="image", key="k", priority=3, ready_at=MINUTE_AGO)
    put(store, type="image", key="k")
    stats = queue.stats()
    assert stats.oldest_pending_sec == pytest.approx(3600, abs=60)
    assert stats.by_type["mail"].oldest_pending_sec == stats.oldest_pending_sec
    assert stats.by_type["image"].oldest_pending_sec == pytest.approx(60, abs=50)
    assert stats.by_type["later"].oldest_pending_sec is None


def test_a_large_table_is_counted_where_that_is_cheap_and_estimated_elsewhere(
    queue: JobQueue, store: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(store, "TRUNCATE sync_job")
    monkeypatch.setattr(figures, "COUNTED_UP_TO", 50)
    monkeypatch.setattr(figures, "SAMPLED_PAGES", 20)
    put(store, "completed", count=2000)
    put(store, "pending", count=200, type="many", ready_at=MINUTE_AGO)
    put(store, "pending", type="many", priority=-5, ready_at=HOUR_AGO)
    put(store, "retrying", count=30)
    put(store, "scheduled", count=10, type="u")
    stats = queue.stats()
    assert stats.estimated == {JobState.COMPLETED, JobState.FAILED, JobState.CANCELLED, JobState.PENDING}
    assert (stats.counts[JobState.RETRYING], stats.counts[JobState.SCHEDULED]) == (30, 10)
    assert stats.counts[JobState.PENDING] >= 50
    assert 500 < stats.counts[JobState.COMPLETED] < 5000
    assert stats.oldest_pending_sec == pytest.approx(3600, abs=60)  # exact all the same
    monkeypatch.setattr(figures, "SAMPLED_PAGES", 10_000)
    stats = queue.stats()
    assert stats.estimated == frozenset()
    assert (stats.counts[JobState.PENDING], stats.counts[JobState.COMPLETED]) == (201, 2000)


def test_rates_and_times(queue: JobQueue, store: Engine) -> None:
    ready = SQL("now() - interval '100 seconds'")
    jobs = put(store, "completed", count=60, type="mail", ready_at=ready)
    bad = put(store, "failed", count=6, type="image", attempt=1, ready_at=ready)
    for number, job in enumerate(jobs):
        # Each waited 10 s and ran for 1 to 60 s; 30 ended within the last minute.
        tried(store, job, began=90, ended=90 - (number + 1))
    for job, outcome in zip(bad, ("failed", "timeout", "died", "discarded", "snoozed", "released"), strict=True):
        tried(store, job, outcome, began=10, ended=5)
    (old,) = put(store, "completed", type="old", ready_at=HOUR_AGO)
    tried(store, old, began=3000, ended=2000)
    stats = queue.stats()
    assert stats.last_5_minutes == Rates(300, 60 / 300, 4 / 300)
    assert stats.last_minute.completed_per_sec == pytest.approx(31 / 60, abs=2 / 60)
    assert stats.last_minute.failed_per_sec == 4 / 60
    mail = stats.by_type["mail"]
    assert (mail.last_5_minutes, mail.last_minute.failed_per_sec) == (Rates(300, 60 / 300, 0), 0)
    assert mail.run_sec == Percentiles(pytest.approx(30), pytest.approx(57), pytest.approx(60))
    assert mail.wait_sec == Percentiles(*[pytest.approx(10, abs=9)] * 3)
    assert stats.by_type["old"].run_sec is None


def test_the_wait_is_that_of_the_last_attempt(queue: JobQueue, store: Engine) -> None:
    (job,) = put(store, "completed", attempt=2, ready_at=SQL("now() - interval '200 seconds'"))
    tried(store, job, "failed", began=100, ended=90)
    tried(store, job, began=15, ended=10, attempt=2)
    stats = queue.stats()
    assert stats.wait_sec == Percentiles(*[pytest.approx(185, abs=15)] * 3)
    assert stats.run_sec == Percentiles(pytest.approx(5), pytest.approx(10), pytest.approx(10))


def test_of_a_busy_queue_the_figures_are_of_a_shorter_time(
    queue: JobQueue, store: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(figures, "COUNTED_UP_TO", 20)
    for job in put(store, "completed", count=19):
        tried(store, job, began=40, ended=30)
    for job in put(store, "completed", count=10):
        tried(store, job, began=140, ended=130)
    stats = queue.stats()
    assert stats.last_5_minutes == stats.last_minute == Rates(60, 19 / 60, 0)
    for job in put(store, "completed", count=10):
        tried(store, job, began=40, ended=30)
    assert queue.stats().last_5_minutes == Rates(10, 0, 0)


def test_workers_and_whether_they_live(queue: JobQueue, store: Engine) -> None:
    run(
        store,
        "INSERT INTO sync_node (name, incarnation, state) SELECT n, gen_random_uuid(), s"
        " FROM (VALUES ('a', 'active'), ('b', 'away'), ('c', 'active')) AS v (n, s)",
        "INSERT INTO sync_job_worker (node, incarnation, types, concurrency, running, completed, failed)"
        " SELECT name, CASE name WHEN 'c' THEN gen_random_uuid() ELSE incarnation END, '{t,u}', 8, 3, 100, 2"
        " FROM sync_node",
    )
    a, b, c = queue.worker_stats()
    assert [a["node"], b["node"], c["node"]] == ["a", "b", "c"]
    assert [a["alive"], b["alive"], c["alive"]] == [True, False, False]
    assert (a["types"], a["concurrency"], a["running"], a["completed"], a["failed"]) == (["t", "u"], 8, 3, 100, 2)
    assert isinstance(a["last_heartbeat"], datetime.datetime)
    assert c["last_heartbeat"] is None


def test_the_status_of_a_job(queue: JobQueue, store: Engine) -> None:
    (job,) = put(
        store, "retrying", type="mail", priority=5, key="k", idempotency_key="i", attempt=2, failures=1, worker="w2",
        payload='{"a": [1, null]}', result='"r"',
    )  # fmt: skip
    tried(store, job, "failed", began=10, ended=5, attempt=2, error="ValueError: no", traceback="here")
    tried(store, job, "snoozed", began=30, ended=20)
    status = queue.status(job)
    assert (status.id, status.type, status.state, status.priority) == (job, "mail", JobState.RETRYING, 5)
    assert (status.key, status.idempotency_key, status.worker) == ("k", "i", "w2")
    assert (status.payload, status.result) == ({"a": [1, None]}, "r")
    assert (status.attempt, status.failures, status.max_retries) == (2, 1, 3)
    assert (status.waits_for, status.ahead, status.cancel_requested) == ((), None, False)
    assert status.run_at is not None
    assert status.finished_at is None
    first, second = status.attempts
    assert (first.attempt, first.outcome, first.error) == (1, AttemptOutcome.SNOOZED, None)
    assert (second.attempt, second.outcome, second.worker) == (2, AttemptOutcome.FAILED, "w1")
    assert (second.error, second.traceback) == ("ValueError: no", "here")
    assert second.ended_at - second.started_at == datetime.timedelta(seconds=5)
    with pytest.raises(UnknownJob, match="no job 1000000000000000"):
        queue.status(10**15)


def test_what_goes_before_a_job(queue: JobQueue, store: Engine) -> None:
    before = put(store, count=3, ready_at=MINUTE_AGO)
    put(store, type="other", count=2, ready_at=HOUR_AGO)
    put(store, priority=1, count=2, ready_at=HOUR_AGO)
    (job,) = put(store)
    assert [queue.status(id).ahead for id in (*before, job)] == [0, 1, 2, 3]


def test_what_goes_before_a_job_of_a_key(queue: JobQueue, store: Engine) -> None:
    for state in ("processing", "completed", "scheduled", "retrying"):
        put(store, state, key="k")
    put(store, "retrying", key="k", retry_blocks_key=False)
    put(store, key="other")
    (job,) = put(store, key="k", priority=10)
    assert queue.status(job).ahead == 2


def test_what_a_job_waits_for(queue: JobQueue, store: Engine) -> None:
    (done,), (waits,), (bad,) = put(store, "completed"), put(store), put(store, "failed")
    (job,) = put(store, "blocked")
    depend(store, job, done, waits, bad)
    assert queue.status(job).waits_for == (waits, bad)
    assert queue.status(job).ahead is None


def test_an_application_reads_the_attempts_of_a_job(queue: JobQueue, store: Engine) -> None:
    from sqlalchemy.orm import Session

    (job,) = put(store, "failed")
    tried(store, job, "failed", began=10, ended=5, attempt=2)
    tried(store, job, "failed", began=30, ended=20)
    with Session(store) as session:
        found: Any = session.get_one(queue.models.QueuedJob, job)
        assert [attempt.attempt for attempt in found.attempts] == [1, 2]


def test_without_blocking_an_event_loop(queue: JobQueue, store: Engine) -> None:
    (job,) = put(store)

    async def read() -> None:
        assert (await queue.stats_async("t")).counts[JobState.PENDING] == 1
        assert await queue.worker_stats_async() == []
        assert (await queue.status_async(job)).id == job

    asyncio.run(read())
