"""A plain job in one message: the same row, the same transaction, the same errors as the usual way."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import psycopg
import pytest
from opentelemetry.sdk.trace import TracerProvider
from psycopg.pq import TransactionStatus
from sqlalchemy import URL, Engine, create_engine, event, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from jobsync_orm.exceptions import SchemaNotReady
from jobsync_orm.integrations import opentelemetry
from jobsync_orm.queue import JobQueue
from jobsync_orm.queue.one_message import PlainInsert
from tests.integration.queue.stored import jobs

COLUMNS = "type, state, payload, priority, key, token_id, max_retries, timeout, retry_blocks_key"
ODD = {"text": 'it\'s \\ "quoted" %s %(a)s :b $1 ; ü 🙂\n', "null": None, "numbers": [1, 2.5, -(2**60)]}


@pytest.fixture
def sent() -> Iterator[list[int]]:
    """Ids of the jobs that were put in by one message."""
    ids: list[int] = []
    put = PlainInsert.put

    def put_and_note(*arguments: Any, **options: Any) -> list[int]:
        found = put(*arguments, **options)
        ids.extend(found)
        return found

    with patch.object(PlainInsert, "put", put_and_note):
        yield ids


def test_the_row_is_that_of_the_usual_way(queue: JobQueue, store: Engine, sent: list[int]) -> None:
    options = {"priority": -3, "key": "a'b\\c", "max_retries": 7, "timeout": 1.5}
    with Session(store) as session, session.begin():
        one = queue.enqueue(session, "it's", ODD, **options)
    listening = create_engine(store.url)
    event.listen(listening, "before_cursor_execute", lambda *_: None)
    with Session(listening) as session, session.begin():
        usual = queue.enqueue(session, "it's", ODD, **options)
    listening.dispose()
    assert sent == [one.id]
    first, second = jobs(store, COLUMNS)
    assert first == second
    assert first[2] == ODD
    assert one.created
    assert one.state == usual.state == "pending"


def test_a_trace_goes_along(queue: JobQueue, store: Engine, sent: list[int]) -> None:
    registration = opentelemetry.instrument(queue, tracer_provider=TracerProvider())
    queue.submit("a")
    with store.begin() as connection:
        queue.enqueue(connection, "b", key="k")
        queue.enqueue(connection, "c", delay=60)
    for type in ("d", "e"):
        with Session(store) as session, session.begin():
            queue.enqueue(session, type)
    registration.unregister()
    assert len(sent) == 4
    assert jobs(store, "trace ~ '^00-[0-9a-f]{32}-[0-9a-f]{16}-0[0-3]$'") == [True] * 5


def test_the_transaction_begins_with_it(queue: JobQueue, store: Engine, sent: list[int]) -> None:
    with Session(store) as session:
        queue.enqueue(session, "a")
        pg = session.connection().connection.driver_connection.pgconn  # type: ignore[union-attr]
        assert pg.transaction_status == TransactionStatus.INTRANS
        assert jobs(store) == []
        session.rollback()
        assert pg.transaction_status == TransactionStatus.IDLE
    assert len(sent) == 1
    assert jobs(store) == []


def test_what_was_begun_before_goes_with_it(queue: JobQueue, store: Engine, sent: list[int]) -> None:
    with Session(store) as session:
        session.execute(text("CREATE TEMPORARY TABLE mine (n int) ON COMMIT DROP"))
        with session.begin_nested() as savepoint:
            queue.enqueue(session, "taken back")
            savepoint.rollback()
        queue.enqueue(session, "stays")
        assert session.scalar(text("SELECT count(*) FROM mine")) == 0
        session.commit()
    assert len(sent) == 2
    assert jobs(store, "type") == ["stays"]


@pytest.mark.parametrize("level", ["READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"])
def test_an_isolation_level_of_its_own_is_kept(queue: JobQueue, store: Engine, sent: list[int], level: str) -> None:
    with Session(store) as session:
        session.connection(execution_options={"isolation_level": level})
        queue.enqueue(session, "a")
        assert session.scalar(text("SHOW transaction_isolation")) == level.lower()
        session.commit()
    assert len(sent) == 1
    assert jobs(store, "type") == ["a"]


def test_autocommit(queue: JobQueue, store: Engine) -> None:
    with Session(store.execution_options(isolation_level="AUTOCOMMIT")) as session:
        queue.enqueue(session, "a")
        assert jobs(store, "type") == ["a"]


def test_a_connection_that_has_not_begun_begins(queue: JobQueue, store: Engine, sent: list[int]) -> None:
    with store.connect() as connection:
        queue.enqueue(connection, "taken back")
        connection.rollback()
        with connection.begin():
            queue.enqueue(connection, "a")
    assert jobs(store, "type") == ["a"]


def test_submit_is_one_message_and_committed(queue: JobQueue, store: Engine, sent: list[int]) -> None:
    one = queue.submit("a", ODD, key="k")
    assert sent == [one.id]
    assert jobs(store, "type, payload, key") == [("a", ODD, "k")]
    with queue.engine.connect() as connection:
        driver = connection.connection.driver_connection
        assert driver.info.transaction_status == TransactionStatus.IDLE  # type: ignore[union-attr]
    with Session(queue.engine) as session, session.begin():
        queue.enqueue(session, "b")
    assert len(sent) == 2


def test_submit_where_the_pool_hands_out_a_transaction(sent: list[int], store: Engine) -> None:
    engine = create_engine(store.url)
    event.listen(engine, "checkout", lambda connection, *_: connection.execute("SELECT 1"))
    queue = JobQueue(engine=engine, wake=False)
    with pytest.raises(psycopg.ProgrammingError, match="in transaction"):  # as AUTOCOMMIT always, on this engine
        queue.submit("a")
    assert sent == []
    assert jobs(store) == []
    queue.dispose()
    engine.dispose()


def test_submit_with_an_error(empty_database: URL, sent: list[int]) -> None:
    engine = create_engine(empty_database)
    queue = JobQueue(engine=engine, wake=False)
    with pytest.raises(SchemaNotReady, match="upgrade"):
        queue.submit("a")
    with engine.connect() as connection:
        assert connection.scalar(text("SELECT 1")) == 1
    queue.dispose()
    engine.dispose()


def test_an_error_is_sqlalchemys_and_the_session_goes_on_after_a_rollback(
    empty_database: URL, store: Engine, sent: list[int]
) -> None:
    engine = create_engine(empty_database)
    queue = JobQueue(engine=engine, wake=False)
    with Session(engine) as session:
        with pytest.raises(SchemaNotReady, match="upgrade"):
            queue.enqueue(session, "a")
        session.rollback()
        assert session.scalar(text("SELECT 1")) == 1
    queue.dispose()
    engine.dispose()


def test_a_connection_that_has_ended_is_thrown_away(queue: JobQueue, store: Engine, sent: list[int]) -> None:
    with Session(store) as session:
        pid = session.scalar(text("SELECT pg_backend_pid()"))
        with store.connect() as other:
            other.execute(text("SELECT pg_terminate_backend(:pid, 5000)"), {"pid": pid})
        with pytest.raises(DBAPIError) as raised:
            queue.enqueue(session, "a")
        assert raised.value.connection_invalidated
        session.rollback()
        queue.enqueue(session, "b")
        session.commit()
    assert jobs(store, "type") == ["b"]
