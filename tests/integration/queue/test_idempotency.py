"""One live job per type and idempotency key, whoever enqueues it when."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import Engine, event, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from jobsync_orm.exceptions import JobConflict
from jobsync_orm.models.states import JobState
from jobsync_orm.queue import Enqueued, JobQueue, NewJob, insertion
from jobsync_orm.sqlstates import SERIALIZATION_FAILURE, sqlstate
from tests.integration.cluster import wait_for
from tests.integration.queue.stored import finish, jobs, run


def in_thread(call: Callable[[], Any]) -> Callable[[], Any]:
    """Begin ``call``; the function returned waits for what it returns."""
    answer: list[Any] = []
    thread = threading.Thread(target=lambda: answer.append(call()))
    thread.start()

    def wait() -> Any:
        thread.join(60)
        return answer[0]

    return wait


def somebody_waits(store: Engine) -> bool:
    query = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
    with store.connect() as connection:
        return bool(connection.execute(text(query)).scalar_one())


def test_the_live_job_is_returned(queue: JobQueue, store: Engine) -> None:
    with Session(store) as session:
        first = queue.enqueue(session, "a", {"n": 1}, idempotency_key="i")
        again = queue.enqueue(session, "a", {"n": 2}, idempotency_key="i")
        other = queue.enqueue(session, "b", {"n": 3}, idempotency_key="i")
        session.commit()
    assert again == Enqueued(first.id, False, JobState.PENDING)
    assert other.created
    assert jobs(store, "payload") == [{"n": 1}, {"n": 3}]


@pytest.mark.parametrize("state", ["completed", "failed", "cancelled"])
def test_a_finished_job_frees_its_key(queue: JobQueue, store: Engine, state: str) -> None:
    first = queue.submit("a", idempotency_key="i")
    finish(store, first.id, state)
    assert queue.submit("a", idempotency_key="i").created


def test_every_state_of_a_live_job_holds_its_key(queue: JobQueue, store: Engine) -> None:
    first = queue.submit("a", idempotency_key="i")
    steps = [
        ("processing", "attempt = 1, deadline = now()"),
        ("retrying", "failures = 1, run_at = now(), deadline = NULL"),
        ("pending", "ready_at = now()"),
        ("scheduled", "run_at = now()"),
        ("blocked", "run_at = now()"),
    ]
    for state, change in steps:
        run(store, f"UPDATE sync_job SET state = '{state}', {change} WHERE id = :id", id=first.id)
        assert queue.submit("a", idempotency_key="i") == Enqueued(first.id, False, JobState(state))


@pytest.mark.parametrize("many", [False, True])
def test_a_transaction_waits_for_one_that_commits(queue: JobQueue, store: Engine, many: bool) -> None:
    def second() -> list[int]:
        with Session(store) as session:
            new = [NewJob("a", idempotency_key="i"), NewJob("b")]
            ids = queue.enqueue_many(session, new) if many else [queue.enqueue(session, "a", idempotency_key="i").id]
            session.commit()
            return ids

    with Session(store) as session:
        first = queue.enqueue(session, "a", idempotency_key="i")
        answer = in_thread(second)
        wait_for(lambda: somebody_waits(store), "the second transaction waits")
        session.commit()
    assert answer()[0] == first.id
    assert jobs(store, "type") == (["a", "b"] if many else ["a"])


@pytest.mark.parametrize("savepoint", [False, True])
def test_a_transaction_waits_for_one_that_rolls_back(queue: JobQueue, store: Engine, savepoint: bool) -> None:
    with Session(store) as session:
        if savepoint:
            inner = session.begin_nested()
        queue.enqueue(session, "a", {"n": 1}, idempotency_key="i")
        answer = in_thread(lambda: queue.submit("a", {"n": 2}, idempotency_key="i"))
        wait_for(lambda: somebody_waits(store), "the second transaction waits")
        if savepoint:
            inner.rollback()
        else:
            session.rollback()
        assert answer().created
        if savepoint:
            session.commit()
    assert jobs(store, "payload") == [{"n": 2}]


def test_the_transaction_stays_usable(queue: JobQueue, store: Engine) -> None:
    first = queue.submit("a", idempotency_key="i")
    with Session(store) as session:
        queue.enqueue(session, "b")
        with session.begin_nested():
            assert queue.enqueue(session, "a", idempotency_key="i").id == first.id
        queue.enqueue(session, "c")
        session.commit()
    assert jobs(store, "type") == ["a", "b", "c"]


@pytest.mark.parametrize("level", ["REPEATABLE READ", "SERIALIZABLE"])
def test_what_the_snapshot_does_not_see_is_a_serialization_failure(queue: JobQueue, store: Engine, level: str) -> None:
    def enqueue(meanwhile: Callable[[], Any]) -> Enqueued:
        with Session(store.execution_options(isolation_level=level)) as session:
            session.execute(text("SELECT count(*) FROM sync_job"))
            meanwhile()
            job = queue.enqueue(session, "a", idempotency_key="i")
            session.commit()
            return job

    with pytest.raises(DBAPIError) as refused:
        enqueue(lambda: queue.submit("a", idempotency_key="i"))
    assert sqlstate(refused.value.orig) == SERIALIZATION_FAILURE
    (id,) = jobs(store)
    assert enqueue(lambda: None) == Enqueued(id, False, JobState.PENDING)
    # It has finished, but not in this snapshot: its key is free all the same.
    again = enqueue(lambda: finish(store, id))
    assert again.created


def test_one_that_finishes_before_it_is_looked_at(
    queue: JobQueue, store: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = queue.submit("a", idempotency_key="i")

    def finish_it(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        if statement.startswith("SELECT id, state"):
            finish(store, first.id)

    event.listen(store, "before_cursor_execute", finish_it)
    try:
        assert queue.submit("a", idempotency_key="i").created
    finally:
        event.remove(store, "before_cursor_execute", finish_it)
    monkeypatch.setattr(insertion, "TRIES", 0)
    with pytest.raises(JobConflict, match="'a' jobs with idempotency_key='i'"):
        queue.submit("a", idempotency_key="i")


def test_of_many_at_once_one_is_new(queue: JobQueue, store: Engine) -> None:
    def enqueue() -> list[Enqueued]:
        found = []
        for n in range(10):
            with Session(store) as session:
                found.append(queue.enqueue(session, "a", idempotency_key=n))
                session.commit()
        return found

    answers = [in_thread(enqueue) for _ in range(6)]
    found = [answer() for answer in answers]
    for n in range(10):
        assert sum(mine[n].created for mine in found) == 1
        assert len({mine[n].id for mine in found}) == 1
    assert len(jobs(store)) == 10
