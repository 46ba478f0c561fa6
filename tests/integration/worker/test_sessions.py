"""Handlers that work in ``ctx.session``, or ask for more time, in a worker."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import event, text

from jobsync_orm import JobQueue, JobWorker
from jobsync_orm.queue import JobContext
from tests.integration.worker import handlers
from tests.integration.worker.conftest import Jobs

Start = Callable[..., JobWorker]


async def note(ctx: JobContext, text_: str) -> dict[str, int]:
    session = await ctx.async_session()
    await session.execute(text("INSERT INTO note VALUES (:text)"), {"text": text_})
    return {"next": (await ctx.enqueue("next")).id}


@pytest.mark.parametrize("kind", ["thread", "process", "async"])
def test_work_in_the_session_of_each_kind(queue: JobQueue, jobs: Jobs, start_worker: Start, kind: Any) -> None:
    jobs.sql("CREATE TABLE note (text text)")
    queue.register("note", note if kind == "async" else handlers.note, kind=kind)
    queue.register("next", lambda ctx: None)
    start_worker(concurrency=2, processes=1)
    first = queue.submit("note", {"text_": "a"})
    queue.submit("next", after=[first.id])
    jobs.wait(completed=3)
    assert jobs.sql("SELECT text FROM note") == [("a",)]
    assert jobs.sql("SELECT result ->> 'next' FROM sync_job WHERE id = %s", first.id)[0][0] is not None
    assert jobs.outcomes() == {"completed": 3}


@pytest.mark.parametrize("kind", ["thread", "process"])
def test_handler_that_asks_for_more_time_gets_it(queue: JobQueue, jobs: Jobs, start_worker: Start, kind: Any) -> None:
    queue.register("longer", handlers.take_longer, kind=kind)
    start_worker(concurrency=2, processes=1)
    # It has to begin, and to ask, within the timeout.
    queue.submit("longer", {"seconds": 4}, timeout=3, max_retries=0)
    jobs.wait(completed=1)
    assert jobs.outcomes() == {"completed": 1}


def test_commit_whose_answer_is_lost_counts_as_done(
    queue: JobQueue, jobs: Jobs, start_worker: Start, caplog: pytest.LogCaptureFixture
) -> None:
    jobs.sql("CREATE TABLE note (text text)")
    at_work: list[int] = []

    @queue.handler("note")
    def note(ctx: JobContext) -> None:
        ctx.session.execute(text("INSERT INTO note VALUES ('a')"))
        at_work.append(threading.get_ident())

    def lose(connection: Any) -> None:
        """The COMMIT is done, and its answer never arrives."""
        if at_work == [threading.get_ident()]:
            raw = connection.connection.dbapi_connection
            raw.execute("COMMIT")
            raw.close()

    event.listen(queue.engine, "commit", lose)
    worker = start_worker(concurrency=1)
    queue.submit("note")
    jobs.wait(completed=1)
    worker.stop(10)
    assert jobs.sql("SELECT text FROM note") == [("a",)]
    assert jobs.sql("SELECT state, failures, attempt FROM sync_job") == [("completed", 0, 1)]
    assert jobs.outcomes() == {"completed": 1}
    assert "comes too late" not in caplog.text
