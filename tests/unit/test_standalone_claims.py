"""Claims and checkpoints without a database, as an application's unit tests use them."""

from __future__ import annotations

import asyncio

import pytest
from sqlalchemy.orm import Session

from jobsync_orm import ClaimEnded, ClaimRefused, ConfigurationError, InvalidPosition, Job, Task


@pytest.fixture
def job() -> Job:
    return Job("alone")


def test_a_claim_is_exclusive_in_the_process_and_its_number_grows(job: Job) -> None:
    with job.claim_task(Task("t")) as first:
        assert (first.task_id, first.token, first.epoch) == ("t", job.task_to_token("t"), 0)
        with pytest.raises(ClaimRefused) as info:
            job.claim_task("t")
        assert (info.value.reason, info.value.holder) == ("claimed here", "alone")
    with pytest.raises(ClaimEnded):
        first.complete()
    assert first.release() is False
    with pytest.raises(ZeroDivisionError), job.claim_task("t") as second:
        raise ZeroDivisionError
    assert second.fence > first.fence
    third = job.claim_task("t")
    assert third.fence > second.fence
    third.complete(Session())
    assert job.get_audit() == []


def test_the_numbers_go_on_when_the_job_is_stopped_and_used_again(job: Job) -> None:
    with job:
        first = job.claim_task("t")
    assert first.release()
    with job:
        assert job.claim_task("t").fence > first.fence


def test_many(job: Job) -> None:
    claims = job.claim_tasks([3, 1, Task(2), "1"])
    assert [claim.task_id for claim in claims] == [3, 1, 2]
    assert job.claim_tasks([3, 4]) != []
    job.complete_claims(claims)
    assert len(job.claim_tasks([1, 2, 3])) == 3
    assert job.add_tasks([1]) == []


def test_checkpoints(job: Job) -> None:
    with job:
        job.checkpoint("t", {"page": (1, 2)}, Session())
        with pytest.raises(InvalidPosition):
            job.checkpoint("t", float("nan"))
        with pytest.raises(ConfigurationError):
            job.checkpoint("t", 1, "session")  # type: ignore[arg-type]
    assert job.last_checkpoint(Task("t"), Session()) == {"page": [1, 2]}
    assert job.last_checkpoint("u") is None
    assert job.clear_checkpoint("t") is True
    assert job.clear_checkpoint("t") is False


def test_async(job: Job) -> None:
    async def main() -> None:
        async with await job.claim_task_async("t") as claim:
            with pytest.raises(ClaimRefused):
                await job.claim_task_async("t")
        with pytest.raises(ClaimEnded):
            await claim.complete_async()
        await job.complete_claims_async(await job.claim_tasks_async(["t", "u"]))
        await job.checkpoint_async("t", 1)
        assert await job.last_checkpoint_async("t") == 1
        assert await job.clear_checkpoint_async("t") is True

    asyncio.run(main())
