"""A worker and a loop of somebody's own on one queue, and jobs that are steered while a worker runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jobsync_orm import JobPriority, JobQueue, JobWorker
from jobsync_orm.models import JobState
from tests.integration.worker.conftest import Jobs

Start = Callable[..., JobWorker]


def test_of_a_key_the_worker_goes_on_where_a_loop_has_ended(queue: JobQueue, start_worker: Start, jobs: Jobs) -> None:
    order: list[int] = []
    queue.register("t", lambda ctx, **_: order.append(ctx.id))
    for _ in range(3):
        queue.submit("t", key="k")
    (mine,) = queue.dequeue("t", "my loop", 10)
    start_worker()
    queue.submit("t")
    jobs.wait(processing=1, pending=2, completed=1)
    queue.complete(mine)
    jobs.wait(completed=4)
    assert order[-2:] == sorted(order[-2:])
    assert {worker for (worker,) in jobs.sql("SELECT DISTINCT worker FROM sync_job_attempt")} > {"my loop"}


def test_steered_jobs_run_at_once(queue: JobQueue, start_worker: Start, jobs: Jobs) -> None:
    fine: list[int] = []

    def work(ctx: Any, **_: Any) -> None:
        if ctx.id not in fine:
            raise ValueError("not yet")

    queue.register("t", work, max_retries=0)
    start_worker()
    failed = queue.submit("t", key="k").id
    jobs.wait(failed=1)
    fine.append(failed)
    assert queue.retry(failed) is JobState.PENDING
    jobs.wait(completed=1)
    queue.pause("t")
    later = queue.submit("t", delay=3600).id
    fine.append(later)
    assert queue.reprioritise(later, JobPriority.HIGH) is JobState.SCHEDULED
    queue.cancel(later)
    queue.retry(later)  # without waiting for its time
    assert jobs.states() == {"completed": 1, "pending": 1}
    queue.resume("t")
    jobs.wait(completed=2)
    assert queue.stats("t").counts[JobState.COMPLETED] == 2
