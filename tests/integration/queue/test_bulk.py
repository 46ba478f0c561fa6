"""Many jobs with one statement."""

from __future__ import annotations

import datetime
from datetime import UTC, timedelta
from typing import Any

import pytest
from sqlalchemy import Engine, text
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from jobsync_orm.exceptions import InvalidJob, InvalidPayload, UnknownJob, UnknownJobType
from jobsync_orm.hashing import task_to_token
from jobsync_orm.queue import JobQueue, NewJob
from tests.integration.claiming import counted
from tests.integration.cluster import wait_for
from tests.integration.queue.rows import Listener
from tests.integration.queue.stored import finish, jobs


def dependencies(store: Engine) -> list[tuple[int, int]]:
    with store.connect() as connection:
        rows = connection.execute(text("SELECT job_id, after_id FROM sync_job_dependency ORDER BY 1, 2"))
        return [tuple(row) for row in rows]


def test_ids_come_in_the_order_given(queue: JobQueue, store: Engine) -> None:
    payloads = [{"n": n * 7919 % 1000, "é": 'a"\\b'} for n in range(1000)]
    with Session(store) as session, counted(store) as sent:
        ids = queue.enqueue_many(session, "a", payloads)
        assert len(sent) == 1
        session.commit()
    assert jobs(store, "id, payload") == list(zip(ids, payloads, strict=True))
    assert set(jobs(store, "type, state, priority, max_retries, key")) == {("a", "pending", 0, 3, None)}


def test_options_of_all(queue: JobQueue, store: Engine, listener: Listener) -> None:
    first = queue.submit("first", delay=60)
    with store.begin() as connection:
        queue.enqueue_many(connection, "a", [{}], priority=4, key="k", max_retries=1, timeout=timedelta(seconds=9))
        queue.enqueue_many(connection, "b", ({} for _ in range(2)), delay=60)
        ids = queue.enqueue_many(connection, "c", [{}, {}], after=first)
    columns = "type, state, priority, key, token_id, max_retries, timeout"
    assert jobs(store, columns)[1:] == [
        ("a", "pending", 4, "k", task_to_token("k", 10_000), 1, 9.0),
        *[("b", "scheduled", 0, None, None, 3, 3600.0)] * 2,
        *[("c", "blocked", 0, None, None, 3, 3600.0)] * 2,
    ]
    assert dependencies(store) == [(id, first.id) for id in ids]
    assert wait_for(listener.heard, "a notification") == [[["a", 4, True]]]


def test_all_or_nothing(queue: JobQueue, store: Engine) -> None:
    queue.register("mail", lambda ctx, to: None)
    with Session(store) as session:
        with pytest.raises(InvalidPayload, match=r"payloads\[1\]: payload\['x'\] is nan"):
            queue.enqueue_many(session, "a", [{}, {"x": float("nan")}])
        with pytest.raises(InvalidPayload, match=r"payloads\[1\]: .*'to' is missing"):
            queue.enqueue_many(session, "mail", [{"to": "a"}, {}])
        with pytest.raises(UnknownJobType):
            queue.enqueue_many(session, "a", [{}], check=True)
        with pytest.raises(InvalidJob, match="priority='x'"):
            queue.enqueue_many(session, "a", [{}], priority="x")  # type: ignore[call-overload]
        with pytest.raises(InvalidJob, match="must be several payloads"):
            queue.enqueue_many(session, "a", {"x": 1})
        with pytest.raises(InvalidJob, match=r"jobs\[1\] is \{\}"):
            queue.enqueue_many(session, [NewJob("a"), {}])  # type: ignore[list-item]
        with pytest.raises(InvalidJob, match=r"jobs\[1\]: delay=-1"):
            queue.enqueue_many(session, [NewJob("a"), NewJob("b", delay=-1)])
        with pytest.raises(InvalidJob, match="leave the others out"):
            queue.enqueue_many(session, [NewJob("a")], priority=3)
        assert not session.in_transaction()
        with pytest.raises(UnknownJob, match="no job 999"):
            queue.enqueue_many(session, "a", [{}, {}], after=999)
        with pytest.raises(UnknownJob, match="no job 999"):
            queue.enqueue_many(session, [NewJob("a"), NewJob("b", after=999)])
        assert queue.enqueue_many(session, "a", []) == []
        assert queue.enqueue_many(session, []) == []
        session.commit()
    assert jobs(store) == []


def test_jobs_with_options_of_their_own(queue: JobQueue, store: Engine, listener: Listener) -> None:
    queue.register("known", lambda ctx, **_: None, max_retries=8, timeout=7, retry_blocks_key=False)
    done, waiting = queue.submit("first", delay=60), queue.submit("first", delay=60)
    finish(store, done.id)
    at = datetime.datetime(2300, 1, 1, 0, 0, 0, 123, tzinfo=UTC)
    new = [
        NewJob("a", {"x": [1, "é"]}, priority=-3, key=7),
        NewJob("b", delay=60),
        NewJob("c", run_at=at),
        NewJob("d", after=[done, waiting]),
        NewJob("e", after=done),
        NewJob("known", {"y": 1}, timeout=2.5),
    ]
    with Session(store) as session, counted(store) as sent:
        ids = queue.enqueue_many(session, new)
        assert len(sent) == 1
        session.commit()
    columns = "id, type, state, payload, priority, key, max_retries, timeout, retry_blocks_key"
    assert jobs(store, columns)[2:] == [
        (ids[0], "a", "pending", {"x": [1, "é"]}, -3, "7", 3, 3600.0, True),
        (ids[1], "b", "scheduled", {}, 0, None, 3, 3600.0, True),
        (ids[2], "c", "scheduled", {}, 0, None, 3, 3600.0, True),
        (ids[3], "d", "blocked", {}, 0, None, 3, 3600.0, True),
        (ids[4], "e", "pending", {}, 0, None, 3, 3600.0, True),
        (ids[5], "known", "pending", {"y": 1}, 0, None, 8, 2.5, False),
    ]
    assert jobs(store, "run_at")[4] == at
    assert jobs(store, "token_id")[2] == task_to_token(7, 10_000)
    assert dependencies(store) == sorted([(ids[3], done.id), (ids[3], waiting.id), (ids[4], done.id)])
    assert wait_for(listener.heard, "a notification") == [[["a", -3, True], ["e", 0, False], ["known", 0, False]]]


def test_idempotency_keys_in_bulk(queue: JobQueue, store: Engine) -> None:
    there = queue.submit("a", idempotency_key=1)
    queue.submit("b", idempotency_key=2)
    new = [
        NewJob("a", {"n": 0}),
        NewJob("a", {"n": 1}, idempotency_key=1),
        NewJob("a", {"n": 2}, idempotency_key=2),
        NewJob("a", {"n": 3}, idempotency_key=2),
        NewJob("a", {"n": 4}),
    ]
    with Session(store) as session:
        ids = queue.enqueue_many(session, new)
        assert queue.enqueue_many(session, new[1:4]) == ids[1:4]
        session.commit()
    assert ids[1] == there.id
    assert ids[2] == ids[3]
    assert jobs(store, "id, payload")[2:] == [(ids[0], {"n": 0}), (ids[2], {"n": 2}), (ids[4], {"n": 4})]


def test_autocommit(queue: JobQueue, store: Engine) -> None:
    with store.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        ids = queue.enqueue_many(connection, "a", [{}, {}])
        with pytest.raises(UnknownJob):
            queue.enqueue_many(connection, [NewJob("a"), NewJob("a", after=999)])
    assert jobs(store) == ids


@pytest.mark.asyncio
async def test_async(queue: JobQueue, store: Engine) -> None:
    asynchronous = create_async_engine(store.url)
    async with AsyncSession(asynchronous) as session, session.begin():
        ids: list[Any] = await queue.enqueue_many(session, "a", [{}, {}])
        ids += await queue.enqueue_many(session, [NewJob("b")])
    await asynchronous.dispose()
    assert jobs(store) == ids
