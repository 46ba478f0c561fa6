"""Jobs as part of the caller's transaction."""

from __future__ import annotations

import asyncio
import dataclasses
import datetime
import json
import re
import uuid
from collections.abc import Iterator
from datetime import UTC, timedelta
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import Engine, String, create_engine, event, text
from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session, async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, scoped_session, sessionmaker

from jobsync_orm import ConfigurationError, CoordinationConfig, migrate
from jobsync_orm.exceptions import InvalidPayload, UnknownJob, UnknownJobType
from jobsync_orm.hashing import task_to_token
from jobsync_orm.models.states import JobPriority, JobState
from jobsync_orm.queue import Enqueued, JobQueue
from tests.integration.claiming import counted
from tests.integration.queue.stored import finish, jobs


class Base(DeclarativeBase):
    pass


class Order(Base):
    __tablename__ = "orders"
    id: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(String(20))


@pytest.fixture
def orders(store: Engine) -> Iterator[Engine]:
    Base.metadata.create_all(store)
    yield store
    Base.metadata.drop_all(store)


def test_a_job_is_there_when_the_transaction_is_committed(queue: JobQueue, store: Engine) -> None:
    with Session(store) as session:
        job = queue.enqueue(session, "pay", {"order_id": 7})
        assert jobs(store) == []
        session.commit()
    assert job == Enqueued(job.id, True, JobState.PENDING)
    columns = "id, type, state, payload, priority, key, token_id, idempotency_key, run_at, max_retries, timeout"
    assert jobs(store, columns) == [(job.id, "pay", "pending", {"order_id": 7}, 0, None, None, None, None, 3, 3600.0)]


def test_a_rollback_removes_it(queue: JobQueue, store: Engine) -> None:
    with Session(store) as session:
        kept = queue.enqueue(session, "a")
        with session.begin_nested() as savepoint:
            queue.enqueue(session, "b")
            savepoint.rollback()
        with session.begin_nested():
            too = queue.enqueue(session, "c")
        session.commit()
        queue.enqueue(session, "d")
        session.rollback()
    assert jobs(store) == [kept.id, too.id]


def test_it_costs_one_statement(queue: JobQueue, store: Engine) -> None:
    with Session(store) as session, counted(store) as sent:
        queue.enqueue(session, "a", {"x": 1}, key="k", idempotency_key="i", delay=5, priority=3)
    assert len(sent) == 1


def test_what_is_pending_is_flushed_first(queue: JobQueue, orders: Engine) -> None:
    with Session(orders, autoflush=False) as session, counted(orders) as sent:
        session.add(Order(id=1, name="x"))
        queue.enqueue(session, "a")
        assert ["orders" in statement for statement in sent] == [True, False]


def test_within_a_flush(queue: JobQueue, orders: Engine) -> None:
    with Session(orders) as session:

        @event.listens_for(session, "after_flush")
        def enqueue(session: Session, _context: Any) -> None:
            for one in session.new:
                queue.enqueue(session, "a", {"order_id": one.id})

        session.add(Order(id=4, name="x"))
        session.commit()
    assert jobs(orders, "payload") == [{"order_id": 4}]


def test_all_options(queue: JobQueue, store: Engine) -> None:
    key = uuid.uuid4()
    at = datetime.datetime(2300, 1, 1, 0, 0, 0, 123, tzinfo=datetime.timezone(timedelta(hours=2)))
    with store.begin() as connection:
        queue.enqueue(
            connection,
            "a",
            None,
            priority=JobPriority.HIGH,
            key=key,
            idempotency_key=9,
            run_at=at,
            max_retries=0,
            timeout=timedelta(minutes=1),
        )
    columns = "state, payload, priority, key, token_id, idempotency_key, run_at, max_retries, timeout"
    token = task_to_token(key, 10_000)
    assert jobs(store, columns) == [("scheduled", {}, 10, str(key), token, "9", at, 0, 60.0)]


def test_when(queue: JobQueue, store: Engine) -> None:
    for when, state, seconds in (
        ({"delay": 60}, "scheduled", 60),
        ({"delay": timedelta(hours=1)}, "scheduled", 3600),
        ({"delay": 0}, "pending", None),
        ({"run_at": datetime.datetime(2020, 1, 1, tzinfo=UTC)}, "pending", None),
        ({"run_at": datetime.datetime(2300, 1, 1, tzinfo=UTC)}, "scheduled", None),
    ):
        job = queue.submit("a", **when)
        assert job.state == state
        after = jobs(store, "extract(epoch FROM run_at - created_at)::float8")[-1]
        assert "run_at" in when or after == (seconds and pytest.approx(seconds, abs=0.5))


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.datetimes(datetime.datetime(1900, 1, 1), datetime.datetime(2250, 1, 1), timezones=st.timezones()))
def test_run_at_is_exact(queue: JobQueue, store: Engine, at: datetime.datetime) -> None:
    with store.connect() as connection:
        connection.execute(text("SET LOCAL timezone = 'America/Lima'"))
        id = queue.enqueue(connection, "a", run_at=at).id
        stored = connection.execute(text("SELECT run_at FROM sync_job WHERE id = :id"), {"id": id}).scalar_one()
    assert stored.astimezone(UTC) == at.astimezone(UTC)


def test_the_longest_keys_and_type_fit(queue: JobQueue, store: Engine) -> None:
    # Of random text, which PostgreSQL cannot compress.
    key = "".join(chr(0x4E00 + n * 7919 % 20000) for n in range(333))
    type = "".join(chr(0x1F300 + n * 31 % 700) for n in range(200))
    queue.submit(type, key=key, idempotency_key=key)
    assert jobs(store, "type, key, idempotency_key") == [(type, key, key)]


TEXT = st.text(st.characters(blacklist_categories=("Cs",), blacklist_characters="\0"), max_size=10)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=10,
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.dictionaries(TEXT, JSON, max_size=4))
def test_a_payload_comes_back_equal_and_of_the_same_type(queue: JobQueue, store: Engine, payload: Any) -> None:
    with store.connect() as connection:
        id = queue.enqueue(connection, "a", payload).id
        query = text("SELECT payload::text FROM sync_job WHERE id = :id")
        back = json.loads(connection.execute(query, {"id": id}).scalar_one())
    assert json.dumps(back, sort_keys=True) == re.sub(r"-0\.0\b", "0.0", json.dumps(payload, sort_keys=True))


@dataclasses.dataclass
class Mail:
    to: str
    copies: int = 1


def test_a_handler_known_here_gives_defaults_and_checks(queue: JobQueue, store: Engine) -> None:
    @queue.handler("resize", max_retries=7, timeout=20, retry_blocks_key=False)
    def resize(ctx: Any, image_id: int, width: int = 800) -> None: ...

    @queue.handler("mail", payload=Mail)
    def mail(ctx: Any, mail: Mail) -> None: ...

    queue.submit("resize", {"image_id": 1})
    queue.submit("resize", {"image_id": 1}, max_retries=2, timeout=5)
    queue.submit("mail", Mail("a@b"))
    queue.submit("mail", {"to": "c@d", "copies": 2})
    with pytest.raises(InvalidPayload, match="'image_id' is missing"):
        queue.submit("resize", {"width": 3})
    with pytest.raises(InvalidPayload, match="Mail: 'to' is missing"):
        queue.submit("mail", {"copies": 2})
    assert jobs(store, "payload, max_retries, timeout, retry_blocks_key") == [
        ({"image_id": 1}, 7, 20.0, False),
        ({"image_id": 1}, 2, 5.0, False),
        ({"to": "a@b", "copies": 1}, 3, 3600.0, True),
        ({"to": "c@d", "copies": 2}, 3, 3600.0, True),
    ]


def test_types_are_checked_if_asked_for(queue: JobQueue, store: Engine) -> None:
    queue.register("known", lambda ctx: None)
    queue.submit("known", check=True)
    with pytest.raises(UnknownJobType, match=r"'other'.*'known'"):
        queue.submit("other", check=True)
    strict = JobQueue(engine=store, check_types=True)
    with pytest.raises(UnknownJobType):
        strict.submit("other")
    strict.submit("other", check=False)
    strict.dispose()
    assert jobs(store, "type") == ["known", "other"]


class TestAfter:
    def test_waits_for_those_not_completed(self, queue: JobQueue, store: Engine) -> None:
        with Session(store) as session:
            first = queue.enqueue(session, "a")
            second = queue.enqueue(session, "b", after=first)
            third = queue.enqueue(session, "c", after=[second, first.id, first])
            session.commit()
        assert (second.state, third.state) == (JobState.BLOCKED, JobState.BLOCKED)
        assert jobs(store, "state") == ["pending", "blocked", "blocked"]
        with store.connect() as connection:
            rows = connection.execute(text("SELECT job_id, after_id FROM sync_job_dependency ORDER BY 1, 2")).all()
        assert [tuple(row) for row in rows] == [
            (second.id, first.id),
            (third.id, first.id),
            (third.id, second.id),
        ]

    def test_is_ready_if_all_have_completed(self, queue: JobQueue, store: Engine) -> None:
        first, second = queue.submit("a"), queue.submit("a")
        finish(store, first.id)
        finish(store, second.id, "failed")
        assert queue.submit("b", after=[first]).state == JobState.PENDING
        assert queue.submit("b", after=[first], delay=60).state == JobState.SCHEDULED
        assert queue.submit("b", after=[first, second]).state == JobState.BLOCKED
        assert queue.submit("b", after=[]).state == JobState.PENDING

    def test_an_unknown_one_is_refused_and_the_transaction_goes_on(self, queue: JobQueue, store: Engine) -> None:
        with Session(store) as session:
            first = queue.enqueue(session, "a")
            with pytest.raises(UnknownJob, match=f"no job {first.id + 1000}, {first.id + 1001} "):
                queue.enqueue(session, "b", after=[first, first.id + 1001, first.id + 1000])
            session.commit()
        assert jobs(store, "type") == ["a"]


class TestWhere:
    def test_connection(self, queue: JobQueue, store: Engine) -> None:
        with store.connect() as connection:
            queue.enqueue(connection, "a")
            connection.rollback()
            kept = queue.enqueue(connection, "a")
            connection.commit()
        assert jobs(store) == [kept.id]

    def test_autocommit(self, queue: JobQueue, store: Engine) -> None:
        with store.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            first = queue.enqueue(connection, "a", idempotency_key="i")
            assert jobs(store) == [first.id]
            queue.enqueue(connection, "b", after=first)
            with pytest.raises(UnknownJob):
                queue.enqueue(connection, "c", after=99)
        assert jobs(store, "type") == ["a", "b"]

    def test_scoped_session(self, queue: JobQueue, store: Engine) -> None:
        sessions = scoped_session(sessionmaker(store))
        job = queue.enqueue(sessions, "a")
        sessions.commit()
        sessions.remove()
        assert jobs(store) == [job.id]

    def test_a_session_that_has_joined_a_transaction(self, queue: JobQueue, store: Engine) -> None:
        with store.connect() as connection:
            transaction = connection.begin()
            with Session(connection, join_transaction_mode="create_savepoint") as session:
                queue.enqueue(session, "a")
                session.commit()
            assert jobs(store) == []
            transaction.commit()
        assert len(jobs(store)) == 1

    def test_two_phases(self, queue: JobQueue, store: Engine) -> None:
        with store.connect() as connection:
            if connection.execute(text("SHOW max_prepared_transactions")).scalar_one() == "0":
                pytest.skip("the server has no prepared transactions")
        with Session(store, twophase=True) as session:
            queue.enqueue(session, "a")
            session.commit()
        assert len(jobs(store)) == 1

    def test_a_session_of_several_engines(self, queue: JobQueue, store: Engine) -> None:
        other = create_engine("sqlite://")
        with Session(binds={Order: other, queue.models.QueuedJob: store}) as session:
            queue.enqueue(session, "a")
            session.commit()
        assert len(jobs(store)) == 1
        with (
            Session(binds={Order: other}) as session,
            pytest.raises(ConfigurationError, match=r"bind queue\.models\.QueuedJob"),
        ):
            queue.enqueue(session, "a")
        with Session(other) as session, pytest.raises(ConfigurationError, match="sqlite"):
            queue.enqueue(session, "a")
        other.dispose()

    @pytest.mark.asyncio
    async def test_async(self, queue: JobQueue, store: Engine) -> None:
        asynchronous = create_async_engine(store.url)
        async with AsyncSession(asynchronous) as session, session.begin():
            first = await queue.enqueue(session, "a", idempotency_key="i")
        sessions = async_scoped_session(async_sessionmaker(asynchronous), asyncio.current_task)
        again = await queue.enqueue(sessions, "a", idempotency_key="i")
        await sessions.commit()
        await sessions.remove()
        async with asynchronous.begin() as connection:
            second = await queue.enqueue(connection, "b", after=again)
        third = await queue.submit_async("c", {"x": 1}, priority=4)
        await asynchronous.dispose()
        assert again == Enqueued(first.id, False, JobState.PENDING)
        assert second.state == JobState.BLOCKED
        assert jobs(store, "id, priority") == [(first.id, 0), (second.id, 0), (third.id, 4)]


@pytest.fixture
def elsewhere(empty_database: Any) -> Iterator[tuple[Engine, CoordinationConfig]]:
    """Names that must be quoted."""
    engine = create_engine(empty_database)
    config = CoordinationConfig(engine=engine, appname="shop_", schema='a "b":c %d', total_tokens=7)
    with engine.begin() as connection:
        connection.execute(text('CREATE SCHEMA "a ""b""\\:c %d"'))
    migrate.upgrade(engine, appname=config.appname, schema=config.schema, total_tokens=7)
    yield engine, config
    engine.dispose()


def test_names_that_must_be_quoted(elsewhere: tuple[Engine, CoordinationConfig]) -> None:
    engine, config = elsewhere
    queue = JobQueue(config)
    first = queue.submit("a", key="k")
    queue.submit("b", idempotency_key="i", delay=5)
    assert queue.submit("b", idempotency_key="i", after=first).created is False
    with Session(engine) as session:
        tokens = [job.token_id for job in session.query(queue.models.QueuedJob).order_by(queue.models.QueuedJob.id)]
    assert tokens == [task_to_token("k", 7), None]
    queue.dispose()
