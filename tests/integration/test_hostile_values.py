"""Texts that are something else to SQL, to LIKE, to SQLAlchemy or to a driver, wherever an application may give a text.

Each must come back as it was given, and the tables must be there afterwards. (Names of schemas and nodes:
``test_names.py``, ``queue/test_names.py``; of roles: ``test_roles.py``.)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import Engine, select, text
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from jobsync_orm import CoordinationConfig, Job, JobContext, JobQueue, JobState, JobWorker, NewJob, TokenOwned, migrate
from jobsync_orm.exceptions import JobsyncError
from jobsync_orm.hashing import task_to_token
from tests.integration.cluster import QUICK, wait_for

TEXTS = [
    "'; DROP TABLE sync_job; --",
    '"x" "" \'\' `y`',
    "100% %s %(x)s %%",
    ":x ::text \\:y $1 ${z}",
    "_ __ \\_ \\% \\\\ \\",
    "$$ $body$ E'\\047' U&'\\0061'",
    "line\nbreak\r\ttab \x01 \x7f",
    "é ß 漢字 😀 \u202e \ufeff \u0301",
    " {} {0} {x!r} <script> /* */ -- #",
    "null",
    " ",
]
REFUSED = ["a\0b", "lone \ud800 surrogate"]


class Base(DeclarativeBase):
    pass


class Item(TokenOwned, Base):
    __tablename__ = "item"
    __token_key__ = "sku"
    id: Mapped[int] = mapped_column(primary_key=True)
    sku: Mapped[str]


@pytest.fixture
def tables(engine: Engine) -> Any:
    yield engine
    assert migrate.check(engine) == []


def test_tasks_pins_and_checkpoints(tables: Engine) -> None:
    with Job("w1", CoordinationConfig(engine=tables, labels={value: value for value in TEXTS}, **QUICK)) as job:  # type: ignore[arg-type]
        for value in TEXTS:
            assert job.can_claim_task(value)
            with job.claim_task(value) as claim:
                assert claim is not None
            job.checkpoint(value, {value: [value]})
            assert job.last_checkpoint(value) == {value: [value]}
            job.clear_checkpoint(value)
            job.add_task(value)
        job.write_audit()
        assert {row["task_id"] for row in job.get_audit()} >= set(TEXTS)
        for value in TEXTS:
            job.register_lock(value, ["w1", "%"], reason=value)
        assert {(lock["task_id"], lock["reason"]) for lock in job.list_locks()} == {(value, value) for value in TEXTS}
        for value in TEXTS:
            job.clear_lock(value)
        assert job.list_locks() == []


def test_patterns_are_read_as_postgresql_reads_them(tables: Engine) -> None:
    patterns = [value for value in TEXTS if not value.endswith("\\")]
    with Job("w1", CoordinationConfig(engine=tables, **QUICK)) as job:  # type: ignore[arg-type]
        job.register_locks_bulk([(f"task {place}", pattern, None) for place, pattern in enumerate(patterns)])
        stored = {lock["task_id"]: lock["node_patterns"] for lock in job.list_locks()}
        assert stored == {f"task {place}": [pattern] for place, pattern in enumerate(patterns)}
        with pytest.raises(JobsyncError):
            job.register_lock("t", TEXTS[4])  # ends in the escape character


def test_rows(tables: Engine) -> None:
    Base.metadata.create_all(tables)
    with Job("w1", CoordinationConfig(engine=tables, **QUICK)) as job, Session(tables) as session:  # type: ignore[arg-type]
        job.bind(session)
        session.add_all(Item(sku=value) for value in TEXTS)
        session.commit()
        found = session.scalars(select(Item).where(Item.owned_by(job))).all()
        assert {item.sku: item.token_id for item in found} == {value: task_to_token(value, 10_000) for value in TEXTS}


def test_jobs(tables: Engine) -> None:
    queue = JobQueue(CoordinationConfig(engine=tables, **QUICK))  # type: ignore[arg-type]
    seen: dict[str, Any] = {}

    def handler(ctx: JobContext, **payload: Any) -> Any:
        seen[ctx.type] = payload
        return payload

    for value in TEXTS:
        queue.handler(value)(handler)
    with tables.begin() as connection:
        one = [queue.enqueue(connection, value, {value: [value]}, key=value, idempotency_key=value) for value in TEXTS]
        again = [queue.enqueue(connection, value, {}, idempotency_key=value) for value in TEXTS]
        queue.enqueue_many(connection, [NewJob(value, {value: 1}, key=value, idempotency_key="b") for value in TEXTS])
    assert [enqueued.id for enqueued in again] == [enqueued.id for enqueued in one]
    for value in TEXTS:
        queue.pause(value, reason=value)
        assert queue.resume(value)
        assert queue.stats(value).counts[JobState.PENDING] == 2
    with JobWorker(queue, concurrency=2):
        done = {JobState.COMPLETED: 2 * len(TEXTS)}
        wait_for(lambda: queue.stats().counts[JobState.COMPLETED] == done[JobState.COMPLETED], "all are done")
    for enqueued, value in zip(one, TEXTS, strict=True):
        status = queue.status(enqueued.id)
        assert (status.type, status.key, status.result) == (value, value, {value: [value]})
    assert seen == {value: {value: 1} for value in TEXTS}
    queue.dispose()


def taken(call: Callable[[], object]) -> bool:
    try:
        call()
    except JobsyncError:
        return False
    return True


@pytest.mark.parametrize("value", REFUSED, ids=ascii)
def test_what_postgresql_cannot_store_is_refused_before_it_is_sent(tables: Engine, value: str) -> None:
    config = CoordinationConfig(engine=tables, **QUICK)  # type: ignore[arg-type]
    queue = JobQueue(config)
    with Job("w1", config) as job, tables.connect() as connection:
        refused: list[Any] = [
            lambda: job.can_claim_task(value),
            lambda: job.register_lock(value, "w1"),
            lambda: job.register_lock("t", value),
            lambda: job.register_lock("t", "w1", reason=value),
            lambda: job.checkpoint("t", {"a": value}),
            lambda: job.add_task(value),
            lambda: queue.enqueue(connection, value),
            lambda: queue.enqueue(connection, "t", {"a": value}),
            lambda: queue.enqueue(connection, "t", {value: 1}),
            lambda: queue.enqueue(connection, "t", key=value),
            lambda: queue.enqueue(connection, "t", idempotency_key=value),
            lambda: queue.enqueue_many(connection, "t", [{"a": value}]),
            lambda: queue.pause(value),
            lambda: queue.pause("t", reason=value),
            lambda: Job(value, config),
            lambda: CoordinationConfig(engine=tables, schema=value),
            lambda: CoordinationConfig(engine=tables, appname=value),
        ]
        assert [place for place, call in enumerate(refused) if taken(call)] == []
        assert connection.scalar(text("SELECT count(*) FROM sync_job")) == 0
        assert job.list_locks() == []
    queue.dispose()
