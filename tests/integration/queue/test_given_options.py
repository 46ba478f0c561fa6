"""What the handler says of a job's retries and timeout, and what the call that enqueues it says, whoever knows what."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from sqlalchemy import Engine

from jobsync_orm import NewJob
from jobsync_orm.models import JobState
from jobsync_orm.queue import JobQueue
from jobsync_orm.testing import drain
from tests.integration.queue.rows import put
from tests.integration.queue.stored import jobs, run

COLUMNS = "max_retries, timeout, retry_blocks_key, max_retries_given, timeout_given"

# (what is given, what holds when it has been claimed by a process whose handler says 7, 20 s, and not to block)
CASES: list[tuple[dict[str, Any], tuple[int, float]]] = [
    ({}, (7, 20.0)),
    ({"max_retries": 2}, (2, 20.0)),
    ({"max_retries": 3}, (3, 20.0)),  # the column's default, but given
    ({"max_retries": 0, "timeout": 3600}, (0, 3600.0)),
    ({"timeout": 5}, (7, 5.0)),
]


def nothing(ctx: Any, **_: Any) -> None: ...


@pytest.fixture
def worker(store: Engine) -> Iterator[JobQueue]:
    """The queue as a process sees it that has the handlers; ``queue`` has none."""
    made = JobQueue(engine=store)
    made.register("t", nothing, max_retries=7, timeout=20, retry_blocks_key=False)
    yield made
    made.dispose()


@pytest.mark.parametrize(("options", "held"), CASES, ids=range(len(CASES)))
@pytest.mark.parametrize("key", [None, "k"])
@pytest.mark.parametrize("producer", ["queue", "worker"])
def test_what_is_given_wins_over_the_handler_where_the_job_runs(
    request: pytest.FixtureRequest,
    store: Engine,
    worker: JobQueue,
    options: dict[str, Any],
    held: tuple[int, float],
    key: str | None,
    producer: str,
) -> None:
    web: JobQueue = request.getfixturevalue(producer)
    web.submit("t", key=key, **options)
    with store.begin() as connection:
        web.enqueue(connection, "t", {}, key=f"{key}2", idempotency_key="i", **options)
        web.enqueue_many(connection, "t", [{}], key=f"{key}3", **options)
        web.enqueue_many(connection, [NewJob("t", key=f"{key}4", **options)])
    found = worker.dequeue("t", "loop", 10)
    assert [(job.max_retries, job.timeout) for job in found] == [held] * 4
    given = "max_retries" in options, "timeout" in options
    assert jobs(store, COLUMNS) == [(*held, False, *given)] * 4
    assert jobs(store, "deadline - started_at < make_interval(secs => timeout + 31)") == [True] * 4
    assert jobs(store, "deadline - started_at > make_interval(secs => timeout + 29)") == [True] * 4


def test_each_claim_goes_by_the_handler_of_its_own_process(queue: JobQueue, store: Engine, worker: JobQueue) -> None:
    queue.submit("t")
    (job,) = worker.dequeue("t", "loop")
    worker.release(job)
    worker.handlers.clear()
    worker.register("t", nothing, max_retries=9, timeout=30)
    (job,) = worker.dequeue("t", "loop")
    assert (job.max_retries, job.timeout) == (9, 30.0)
    worker.release(job)
    # Who knows no handler leaves what there is.
    (job,) = queue.dequeue("t", "other")
    assert (job.max_retries, job.timeout) == (9, 30.0)
    assert jobs(store, COLUMNS) == [(9, 30.0, True, False, False)]


def test_who_frees_a_job_needs_no_handler(queue: JobQueue, store: Engine, worker: JobQueue) -> None:
    """It goes by what the process went by that had the job."""
    worker.handlers.clear()
    worker.register("t", nothing, max_retries=0)
    queue.submit("t")
    queue.submit("t", max_retries=1)
    assert len(worker.dequeue("t", "gone", 10)) == 2
    run(store, "UPDATE sync_job SET deadline = now() - interval '1 hour'")
    assert queue.cleanup_stale() == 2
    assert jobs(store, "state, failures") == [("failed", 1), ("pending", 1)]


def test_rows_of_a_version_before_keep_what_they_say(queue: JobQueue, store: Engine, worker: JobQueue) -> None:
    """It knows no such columns, and what it wrote was meant."""
    put(store, max_retries=0, timeout=60)
    (job,) = worker.dequeue("t", "loop")
    assert (job.max_retries, job.timeout) == (0, 60.0)


def test_a_drain_goes_by_the_handler_too(queue: JobQueue, worker: JobQueue) -> None:
    tries: list[int] = []

    def fail(ctx: Any) -> None:
        tries.append(ctx.max_retries)
        raise ValueError("no")

    worker.handlers.clear()
    worker.register("t", fail, max_retries=1, backoff=lambda failures, error: 0)
    job = queue.submit("t")
    drain(worker, run_due=True, check=False)
    assert tries == [1, 1]
    assert queue.status(job.id).state is JobState.FAILED
