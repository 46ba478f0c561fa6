"""Waiting for a job, and naming it by what enqueueing returned."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
from sqlalchemy import Engine

from jobsync_orm import NewJob
from jobsync_orm.exceptions import InvalidJob, NotFinished, UnknownJob
from jobsync_orm.models import JobPriority, JobState
from jobsync_orm.queue import JobQueue
from tests.integration.queue.rows import put
from tests.integration.queue.stored import finish


@pytest.mark.parametrize("state", ["completed", "failed", "cancelled"])
def test_a_job_that_has_finished_is_not_waited_for(queue: JobQueue, store: Engine, state: str) -> None:
    (id,) = put(store, state)
    assert queue.wait(id, 0).state == state
    assert asyncio.run(queue.wait_async(id, 0)).state == state


def test_it_is_waited_for(queue: JobQueue, store: Engine) -> None:
    job = queue.submit("t")
    timer = threading.Timer(0.1, finish, (store, job.id))
    timer.start()
    assert queue.wait(job).state is JobState.COMPLETED
    timer.join()

    async def both() -> JobState:
        other = await queue.submit_async("t")
        status, _ = await asyncio.gather(queue.wait_async(other, 20), asyncio.to_thread(finish, store, other.id))
        return status.state

    assert asyncio.run(both()) is JobState.COMPLETED


def test_one_that_does_not_finish_says_in_which_state_it_is(queue: JobQueue) -> None:
    job = queue.submit("t", delay=60)
    with pytest.raises(TimeoutError, match=rf"job {job.id} \(t\) is scheduled after 0.03 s") as error:
        queue.wait(job, timeout=0.03)
    assert isinstance(error.value, NotFinished)
    assert error.value.status.state is JobState.SCHEDULED
    with pytest.raises(NotFinished):
        asyncio.run(queue.wait_async(job, 0))
    with pytest.raises(UnknownJob, match="there is no job 999"):
        queue.wait(999)
    with pytest.raises(InvalidJob, match="timeout=-1"):
        queue.wait(job, -1)


def test_what_enqueueing_returned_names_the_job(queue: JobQueue) -> None:
    job = queue.submit("t")
    assert queue.reprioritise(job, JobPriority.HIGH) is JobState.PENDING
    assert queue.cancel(job) is JobState.CANCELLED
    assert queue.retry(job) is JobState.PENDING
    assert queue.status(job).priority == 10
    assert asyncio.run(queue.cancel_async(job)) is JobState.CANCELLED


@pytest.mark.parametrize("wrong", ["7", 7.0, None, True, 2**63, [7]], ids=range(6))
def test_what_names_no_job_is_refused(queue: JobQueue, wrong: Any) -> None:
    for call in (queue.status, queue.cancel, queue.retry, queue.wait, lambda id: queue.reprioritise(id, 1)):
        with pytest.raises(InvalidJob, match="must be the id of a job, a whole number, or what enqueueing it returned"):
            call(wrong)


def test_a_priority_out_of_range_names_the_range(queue: JobQueue) -> None:
    job = queue.submit("t", priority=-(2**31))
    for call in (lambda: queue.reprioritise(job, 2**31), lambda: queue.submit("t", priority=2**31)):
        with pytest.raises(InvalidJob, match=r"priority=2147483648 .* from -2147483648 to 2147483647"):
            call()


def test_what_is_to_run_after_a_job_that_has_failed_says_so(
    queue: JobQueue, store: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    (failed,) = put(store, "failed")
    (cancelled,) = put(store, "cancelled")
    (done,) = put(store, "completed")
    job = queue.submit("t", after=[cancelled, failed, done])
    assert (job.state, job.stuck_behind) == (JobState.BLOCKED, (failed, cancelled))
    assert f"job {job.id} is to run after {failed}, {cancelled}, which failed or was cancelled" in caplog.text
    assert queue.submit("t", after=job).stuck_behind == ()
    caplog.clear()
    with store.begin() as connection:
        first, last = queue.enqueue_many(connection, "t", [{}, {}], after=failed)
        assert f"jobs {first} to {last} are to run after {failed}" in caplog.text
        (one, _) = queue.enqueue_many(connection, [NewJob("t", after=cancelled), NewJob("t", after=done)])
    assert f"job {one} is to run after {cancelled}" in caplog.text
