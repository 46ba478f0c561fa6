"""What is enqueued is run in the test's own thread, until nothing is left."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from typing import Any
from unittest.mock import patch

import pytest
from sqlalchemy import Engine, create_engine, select, text
from sqlalchemy.orm import Session, sessionmaker

from jobsync_orm import Backoff, Discard, JobContext, JobQueue, JobState, Retry, Snooze
from jobsync_orm.exceptions import InvalidJob, UnknownJobType
from jobsync_orm.testing import HandlerFailed, drain, drain_async
from jobsync_orm.testing.place import Place
from tests.conftest import Server
from tests.integration.cluster import wait_for


@pytest.fixture(scope="module")
def emptied(server: Server, template: str) -> Iterator[Engine]:
    """One database for all of these tests."""
    url = server.create_database(template)
    engine = create_engine(url)
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE note (id int PRIMARY KEY)"))
    yield engine
    engine.dispose()
    server.drop_database(url)


@pytest.fixture
def engine(emptied: Engine) -> Engine:
    with emptied.begin() as connection:
        connection.execute(text("TRUNCATE sync_job, sync_job_attempt, sync_job_dependency, sync_job_pause, note"))
    return emptied


@pytest.fixture
def queue(engine: Engine) -> JobQueue:
    queue = JobQueue(engine=engine, wake=False)
    queue.register("echo", lambda ctx, **payload: payload)
    return queue


def submit(queue: JobQueue, type: str, payload: Any = None, **options: Any) -> int:
    return queue.submit(type, payload, **options).id


def states(queue: JobQueue) -> dict[int, str]:
    with queue.engine.connect() as connection:
        rows = connection.execute(text("SELECT id, state FROM sync_job ORDER BY id"))
        return {row.id: row.state for row in rows}


def test_results_come_back_and_are_stored(queue: JobQueue) -> None:
    first, second = submit(queue, "echo", {"a": 1}), submit(queue, "echo", {"a": [2]})
    here = threading.get_ident()
    queue.register("where", lambda ctx: threading.get_ident() == here)
    third = submit(queue, "where")

    runs = drain(queue)

    assert [(run.id, run.type, run.attempt, run.result) for run in runs] == [
        (first, "echo", 1, {"a": 1}),
        (second, "echo", 1, {"a": [2]}),
        (third, "where", 1, True),
    ]
    with Session(queue.engine) as session:
        job = session.get(queue.models.QueuedJob, second)
        assert (job.state, job.result, job.worker) == ("completed", {"a": [2]}, "drain")
        attempts = session.scalars(select(queue.models.JobAttempt.outcome)).all()
    assert attempts == ["completed"] * 3
    assert drain(queue) == []


def test_the_most_urgent_goes_first_and_those_of_a_key_in_order(queue: JobQueue) -> None:
    low = submit(queue, "echo", priority=-10)
    normal = submit(queue, "echo")
    first = submit(queue, "echo", key="k")
    second = submit(queue, "echo", key="k", priority=50)
    high = submit(queue, "echo", priority=10)

    assert [run.id for run in drain(queue)] == [high, normal, first, second, low]


def test_follow_up_jobs_and_chains_are_run(queue: JobQueue) -> None:
    def parent(ctx: JobContext) -> None:
        done = ctx.enqueue("echo", {"n": 1})
        ctx.enqueue("echo", {"n": 2}, after=[done.id])

    queue.register("parent", parent)
    last = submit(queue, "echo", {"n": 3}, after=submit(queue, "parent"))

    runs = drain(queue)

    assert [run.result for run in runs] == [None, {"n": 1}, {"n": 3}, {"n": 2}]
    assert states(queue)[last] == "completed"
    assert set(states(queue).values()) == {"completed"}


@pytest.mark.parametrize("freed", [True, False])
def test_a_job_that_somebody_else_is_just_freeing(queue: JobQueue, engine: Engine, freed: bool) -> None:
    """As the thread that tells workers of new jobs does. It is waited for, but not for ever."""
    last = submit(queue, "echo", after=submit(queue, "echo"))
    looks: list[Any] = []
    execute = Place._execute

    def execute_and_note(place: Place, statement: Any, values: Any) -> Any:
        if statement is place._unblock:
            looks.append(values)
        return execute(place, statement, values)

    with engine.connect() as other, patch.object(Place, "_execute", execute_and_note), ThreadPoolExecutor(1) as pool:
        other.execute(text("SELECT 1 FROM sync_job WHERE id = :last FOR UPDATE"), {"last": last})
        running = pool.submit(drain, queue)
        wait_for(lambda: len(looks) > 1 or running.done(), "it looks again")
        if freed:
            sql = "UPDATE sync_job SET state = 'pending', ready_at = now() WHERE id = :last"
            other.execute(text(sql), {"last": last})
            other.commit()
        assert len(running.result(30)) == 1 + freed
        other.rollback()
    assert states(queue)[last] == ("completed" if freed else "blocked")


def test_a_failure_is_raised_when_all_others_have_run(queue: JobQueue) -> None:
    def fail(ctx: JobContext) -> None:
        raise ValueError("no stock")

    queue.register("fail", fail, max_retries=0)
    failed, fine = submit(queue, "fail"), submit(queue, "echo")

    with pytest.raises(HandlerFailed, match=r"(?s)job \d+ \(fail\) is failed after attempt 1: ValueError: no stock.*"):
        drain(queue)
    assert states(queue) == {failed: "failed", fine: "completed"}


def test_a_failure_can_be_what_the_test_is_about(queue: JobQueue) -> None:
    def fail(ctx: JobContext) -> None:
        raise ValueError("no stock")

    queue.register("fail", fail, max_retries=1)
    submit(queue, "fail")

    [run] = drain(queue, check=False)

    assert (run.state, run.error, run.result) == (JobState.RETRYING, "ValueError: no stock", None)
    assert "raise ValueError" in (run.traceback or "")
    with pytest.raises(HandlerFailed, match="is failed after attempt 2") as caught:
        drain(queue, run_due=True)
    assert [run.attempt for run in caught.value.runs] == [2]


def test_what_was_discarded_has_not_failed(queue: JobQueue) -> None:
    def discard(ctx: JobContext) -> None:
        raise Discard("not wanted any more")

    queue.register("discard", discard)
    job = submit(queue, "discard")

    assert [run.state for run in drain(queue)] == [JobState.FAILED]
    assert states(queue) == {job: "failed"}


def test_what_is_due_later_runs_only_when_asked_and_the_earliest_first(queue: JobQueue) -> None:
    seen: list[str] = []

    def third_time(ctx: JobContext) -> None:
        seen.append(f"try {ctx.attempt}")
        if ctx.failures < 2:
            raise Retry(after=100)

    def snooze(ctx: JobContext) -> None:
        seen.append(f"snooze {ctx.attempt}")
        if ctx.attempt == 1:
            raise Snooze(seconds=50)

    queue.register("third_time", third_time, backoff=Backoff(base=3600))
    queue.register("snooze", snooze)
    queue.register("later", lambda ctx: seen.append("later"))
    submit(queue, "later", run_at=datetime.now(UTC) + timedelta(seconds=150))
    submit(queue, "third_time")
    submit(queue, "snooze")

    with pytest.raises(HandlerFailed, match="run_due=True"):
        drain(queue)
    assert seen == ["try 1", "snooze 1"]

    drain(queue, run_due=True)
    assert seen[2:4] == ["snooze 2", "try 2"]
    assert sorted(seen[4:]) == ["later", "try 3"]
    assert set(states(queue).values()) == {"completed"}


def test_what_has_become_due_runs_without_being_asked_for(queue: JobQueue) -> None:
    job = submit(queue, "echo", delay=3600)
    assert drain(queue) == []
    with queue.engine.begin() as connection:
        connection.execute(text("UPDATE sync_job SET run_at = now() - interval '1 second'"))

    assert [run.id for run in drain(queue)] == [job]


def test_types_and_limit(queue: JobQueue) -> None:
    queue.register("other", lambda ctx: None)
    other, first, second = submit(queue, "other"), submit(queue, "echo"), submit(queue, "echo")
    unknown = submit(queue, "nobody")

    assert [run.id for run in drain(queue, types=["echo"], limit=1)] == [first]
    assert [run.id for run in drain(queue, types=["echo"])] == [second]
    assert [run.id for run in drain(queue)] == [other]
    assert states(queue)[unknown] == "pending"
    with pytest.raises(UnknownJobType, match="'ehco'"):
        drain(queue, types=["ehco"])
    with pytest.raises(InvalidJob, match="types='echo'"):
        drain(queue, types="echo")
    with pytest.raises(InvalidJob, match="limit=0"):
        drain(queue, limit=0)


def test_one_that_does_not_end_is_noticed(queue: JobQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jobsync_orm.testing.draining.ENDLESS", 5)

    def again(ctx: JobContext) -> None:
        raise Snooze(seconds=1)

    queue.register("again", again)
    submit(queue, "again")

    with pytest.raises(InvalidJob, match="5 attempts have been run"):
        drain(queue, run_due=True)


def test_paused_types_are_left_alone(queue: JobQueue) -> None:
    submit(queue, "echo")
    queue.pause("echo")
    assert drain(queue) == []
    queue.resume("echo")
    assert len(drain(queue)) == 1


def test_coroutine_functions_and_those_for_processes_are_run(queue: JobQueue) -> None:
    async def later(ctx: JobContext) -> str:
        session = await ctx.async_session()
        await session.execute(text("INSERT INTO note VALUES (1)"))
        await ctx.enqueue("echo", {"n": 1})
        return "done"

    queue.register("later", later)
    queue.register("process", in_a_process, kind="process")
    submit(queue, "later")
    submit(queue, "process")

    async def within() -> list[Any]:
        return [run.result for run in drain(queue)]

    assert asyncio.run(within()) == ["done", "processed", {"n": 1}]


def in_a_process(ctx: JobContext) -> str:
    return "processed"


def test_what_a_handler_does_in_its_session_is_committed_or_not(queue: JobQueue) -> None:
    def note(ctx: JobContext, id: int, fail: bool = False) -> None:
        ctx.session.execute(text("INSERT INTO note VALUES (:id)"), {"id": id})
        if fail:
            raise ValueError

    queue.register("note", note)
    submit(queue, "note", {"id": 1})
    submit(queue, "note", {"id": 2, "fail": True})
    drain(queue, check=False)

    with queue.engine.connect() as connection:
        assert connection.scalars(text("SELECT id FROM note")).all() == [1]


@pytest.mark.parametrize("with_factory", [True, False])
def test_everything_can_stay_in_one_transaction_that_is_rolled_back(queue: JobQueue, with_factory: bool) -> None:
    class Mine(Session):
        pass

    classes: list[type] = []

    def note(ctx: JobContext, id: int) -> int:
        classes.append(type(ctx.session))
        ctx.session.execute(text("INSERT INTO note VALUES (:id)"), {"id": id})
        if id < 3:
            ctx.enqueue("note", {"id": id + 1})
        if ctx.attempt == 1 and id == 2:
            raise ValueError("the first time")
        return id

    queue.register("note", note)
    queue.session_factory = before = sessionmaker(queue.engine, class_=Mine) if with_factory else None
    with queue.engine.connect() as connection:
        transaction = connection.begin()
        session = Session(connection, join_transaction_mode="create_savepoint")
        queue.enqueue(session, "note", {"id": 1})
        session.commit()

        runs = drain(queue, connection=connection, run_due=True)

        assert [run.result for run in runs] == [1, None, 2, 3]
        assert session.scalars(text("SELECT id FROM note ORDER BY id")).all() == [1, 2, 3]
        assert session.scalars(select(queue.models.QueuedJob.state)).all() == ["completed"] * 3
        session.close()
        transaction.rollback()

    assert states(queue) == {}
    assert queue.session_factory is before
    assert all(issubclass(one, Mine if with_factory else Session) for one in classes)


def test_an_unknown_queue_is_left_as_it_was_when_a_handler_interrupts(queue: JobQueue) -> None:
    def interrupt(ctx: JobContext) -> None:
        raise KeyboardInterrupt

    queue.register("interrupt", interrupt)
    with queue.engine.connect() as connection, connection.begin():
        queue.enqueue(connection, "interrupt")
        with pytest.raises(KeyboardInterrupt):
            drain(queue, connection=connection)
    assert queue.session_factory is None


async def steps_of(queue: JobQueue) -> tuple[list[Any], list[Any]]:
    loop, ran = asyncio.get_running_loop(), []

    async def coroutine(ctx: JobContext) -> None:
        session = await ctx.async_session()
        await session.execute(text("INSERT INTO note (id) VALUES (7)"))
        await ctx.enqueue("plain")
        ran.append(asyncio.get_running_loop() is loop)

    queue.register("coroutine", coroutine)
    queue.register("plain", lambda ctx: ran.append(threading.current_thread() is not threading.main_thread()))
    await queue.submit_async("coroutine")
    runs = await drain_async(queue)
    return [(run.type, run.state) for run in runs], ran


def test_coroutines_run_in_the_event_loop_of_who_waits(queue: JobQueue, engine: Engine) -> None:
    runs, ran = asyncio.run(steps_of(queue))
    assert runs == [("coroutine", "completed"), ("plain", "completed")]
    assert ran == [True, True]
    with engine.connect() as connection:
        assert connection.scalar(text("SELECT id FROM note")) == 7


def test_a_failure_is_raised_there_too(queue: JobQueue) -> None:
    queue.register("bad", lambda ctx: 1 / 0)
    submit(queue, "bad")
    with pytest.raises(HandlerFailed, match="ZeroDivisionError"):
        asyncio.run(drain_async(queue))
    with pytest.raises(InvalidJob, match="limit=0"):
        asyncio.run(drain_async(queue, limit=0))
