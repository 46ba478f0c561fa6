"""Jobs run as soon as they are committed."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from sqlalchemy import Engine, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from jobsync_orm import JobContext, JobQueue
from jobsync_orm.testing import HandlerFailed, run_inline


@pytest.fixture
def queue(engine: Engine) -> JobQueue:
    queue = JobQueue(engine=engine)
    queue.register("echo", lambda ctx, **payload: payload)
    return queue


def test_a_job_has_run_when_commit_returns(queue: JobQueue) -> None:
    with run_inline(queue) as runs, Session(queue.engine) as session:
        queue.enqueue(session, "echo", {"n": 1})
        queue.enqueue(session, "echo", {"n": 2}, key="k")
        session.flush()
        assert runs == []
        session.commit()
        assert [run.result for run in runs] == [{"n": 1}, {"n": 2}]

        queue.enqueue(session, "echo", {"n": 3})
        session.rollback()
        assert len(runs) == 2

        queue.submit("echo", {"n": 4})
        assert runs[-1].result == {"n": 4}


def test_follow_up_jobs_run_too_and_the_session_can_be_used_on(queue: JobQueue) -> None:
    def parent(ctx: JobContext) -> str:
        ctx.enqueue("echo", {"n": 1})
        queue.submit("echo", {"n": 2})
        return "parent"

    queue.register("parent", parent)
    with run_inline(queue) as runs, Session(queue.engine) as session:
        with session.begin():
            queue.enqueue(session, "parent")
        assert [run.type for run in runs] == ["parent", "echo", "echo"]
        assert session.scalar(text("SELECT count(*) FROM sync_job WHERE state = 'completed'")) == 3


def test_those_of_a_connection_run_at_the_end_of_the_block(queue: JobQueue) -> None:
    with run_inline(queue) as runs:
        with queue.engine.begin() as connection:
            queue.enqueue(connection, "echo", {"n": 1})
        queue.submit("echo", {"n": 2}, delay=3600)
    assert [run.result for run in runs] == [{"n": 1}]


def test_an_asynchronous_session(queue: JobQueue) -> None:
    async def later(ctx: JobContext) -> str:
        return "later"

    queue.register("later", later)

    async def main() -> list[Any]:
        engine = create_async_engine(queue.engine.url)
        with run_inline(queue) as runs:
            async with AsyncSession(engine) as session:
                await queue.enqueue(session, "later")
                await session.commit()
                seen = [run.result for run in runs]
        await engine.dispose()
        return seen

    assert asyncio.run(main()) == ["later"]


def test_a_failure_is_raised_at_the_end_of_the_block(queue: JobQueue) -> None:
    def fail(ctx: JobContext) -> None:
        raise ValueError("no stock")

    queue.register("fail", fail)
    block = run_inline(queue)
    block.__enter__()
    queue.submit("fail")
    with pytest.raises(HandlerFailed, match="no stock"):
        block.__exit__(None, None, None)

    with run_inline(queue, check=False) as runs:
        queue.submit("fail")
    assert [run.error for run in runs] == ["ValueError: no stock"]


def test_an_error_in_the_block_is_the_one_that_comes_out(queue: JobQueue) -> None:
    def fail(ctx: JobContext) -> None:
        raise ValueError("no stock")

    queue.register("fail", fail)

    def test() -> None:
        with run_inline(queue):
            queue.submit("fail")
            raise KeyError

    with pytest.raises(KeyError):
        test()


def test_what_goes_wrong_while_running_is_not_swallowed(queue: JobQueue) -> None:
    with queue.engine.begin() as connection:
        connection.execute(text("DROP TABLE sync_job_pause"))
    block = run_inline(queue)
    block.__enter__()
    queue.submit("echo")
    with pytest.raises(DBAPIError, match="sync_job_pause"):
        block.__exit__(None, None, None)


def test_afterwards_jobs_wait_for_a_worker_again(queue: JobQueue) -> None:
    queue.wakes = False
    with run_inline(queue) as runs:
        queue.submit("echo")
    queue.submit("echo")

    assert len(runs) == 1
    assert queue.wakes is False
    assert "_waker" not in queue.__dict__
