"""One message with several statements, and all of its answer."""

from __future__ import annotations

import selectors
from collections.abc import Iterator

import psycopg
import pytest
from psycopg import IsolationLevel
from psycopg.errors import (
    AdminShutdown,
    DivisionByZero,
    DuplicatePreparedStatement,
    InvalidSqlStatementName,
    UniqueViolation,
)
from psycopg.pq import TransactionStatus
from psycopg.waiting import Ready, Wait
from sqlalchemy import URL, create_engine
from sqlalchemy.ext.asyncio import create_async_engine

from jobsync_orm.message import _exchange, begin, keep, may_send, send, send_kept


@pytest.fixture
def connection(empty_database: URL) -> Iterator[psycopg.Connection]:
    url = empty_database.set(drivername="postgresql").render_as_string(hide_password=False)
    with psycopg.connect(url) as connection:
        yield connection


def test_a_result_for_each_statement(connection: psycopg.Connection) -> None:
    results = send(connection, "BEGIN; SELECT 7; SELECT 'ü'; COMMIT")
    assert [result.command_status for result in results] == [b"BEGIN", b"SELECT 1", b"SELECT 1", b"COMMIT"]
    assert results[1].get_value(0, 0) == b"7"
    assert results[2].get_value(0, 0) == "ü".encode()
    assert connection.info.transaction_status == TransactionStatus.IDLE


def test_larger_than_what_a_socket_takes_at_once(connection: psycopg.Connection) -> None:
    size = 30_000_000
    results = send(connection, f"SELECT length('{'x' * size}'); SELECT 'after'")
    assert [result.get_value(0, 0) for result in results] == [str(size).encode(), b"after"]


def test_it_waits_for_the_socket_to_take_more_where_it_is_full(connection: psycopg.Connection) -> None:
    """psycopg looks ten times a second at what it waits for: a message might get through in pieces, by its looking."""
    size = 30_000_000
    message = f"SELECT length('{'x' * size}')".encode()
    exchange = _exchange(connection.pgconn, lambda pg: pg.send_query(message))
    asked = []
    ready = None
    with selectors.DefaultSelector() as selector:
        selector.register(connection.pgconn.socket, selectors.EVENT_READ)
        try:
            while True:
                asked.append(wait := next(exchange) if ready is None else exchange.send(ready))
                selector.modify(connection.pgconn.socket, wait)
                ((_, events),) = selector.select(60)  # only what was asked for, and no sooner
                ready = Ready(events)
        except StopIteration as end:
            (result,) = end.value
    assert result.get_value(0, 0) == str(size).encode()
    assert Wait.RW in asked


def test_a_statement_that_is_kept(connection: psycopg.Connection) -> None:
    connection.autocommit = True
    keep(connection, b"doubled", "SELECT CAST($1 AS text) || $2, pg_current_xact_id()")
    first, second = (send_kept(connection, b"doubled", ["ü's ", value]) for value in ("1", "2"))
    assert (first.get_value(0, 0), second.get_value(0, 0)) == ("ü's 1".encode(), "ü's 2".encode())
    assert first.get_value(0, 1) != second.get_value(0, 1)
    with pytest.raises(InvalidSqlStatementName):
        send_kept(connection, b"not kept", [])
    with pytest.raises(DuplicatePreparedStatement):
        keep(connection, b"doubled", "SELECT 1")
    assert connection.info.transaction_status == TransactionStatus.IDLE


def test_what_is_refused_when_it_is_committed_is_an_error(connection: psycopg.Connection) -> None:
    """It comes behind the row."""
    send(connection, "CREATE TABLE late (n int UNIQUE DEFERRABLE INITIALLY DEFERRED); INSERT INTO late VALUES (1)")
    keep(connection, b"late", "INSERT INTO late VALUES ($1) RETURNING n")
    with pytest.raises(UniqueViolation):
        send_kept(connection, b"late", ["1"])


def test_the_first_failure_is_raised_and_nothing_behind_it_is_done(connection: psycopg.Connection) -> None:
    with pytest.raises(DivisionByZero):
        send(connection, "BEGIN; SELECT 1/0; SELECT no_such_function(); COMMIT")
    assert connection.info.transaction_status == TransactionStatus.INERROR
    connection.rollback()
    assert connection.execute("SELECT 1").fetchone() == (1,)


def test_why_the_server_has_ended_the_connection(connection: psycopg.Connection) -> None:
    with pytest.raises(AdminShutdown, match="terminating connection due to administrator command"):
        send(connection, "SELECT pg_terminate_backend(pg_backend_pid(), 5000); SELECT pg_sleep(60)")
    assert connection.broken


def test_a_connection_that_had_ended_before(empty_database: URL, connection: psycopg.Connection) -> None:
    other = psycopg.connect(empty_database.set(drivername="postgresql").render_as_string(hide_password=False))
    with other:
        other.execute("SELECT pg_terminate_backend(%s, 5000)", [connection.info.backend_pid])
    with pytest.raises(psycopg.OperationalError):
        send(connection, "SELECT 1")
    assert connection.broken


@pytest.mark.parametrize("level", [None, *IsolationLevel])
@pytest.mark.parametrize("flag", [None, True, False])
def test_a_transaction_begins_as_psycopg_would_begin_it(
    connection: psycopg.Connection, level: IsolationLevel | None, flag: bool | None
) -> None:
    look = (
        "SELECT current_setting('transaction_isolation'), current_setting('transaction_read_only'),"
        " current_setting('transaction_deferrable')"
    )
    connection.isolation_level = level
    connection.read_only, connection.deferrable = flag, flag
    usual = connection.execute(look).fetchone()
    connection.rollback()
    (result,) = send(connection, f"{begin(connection)}; {look}")[1:]
    values = [result.get_value(0, column) for column in range(3)]
    assert usual == tuple(value.decode() for value in values if value is not None)


@pytest.mark.asyncio
async def test_only_on_psycopgs_synchronous_connection_outside_a_pipeline(empty_database: URL) -> None:
    engine = create_engine(empty_database)
    with engine.connect() as connection:
        assert may_send(connection)
        driver = connection.connection.driver_connection
        assert isinstance(driver, psycopg.Connection)
        with driver.pipeline():
            assert not may_send(connection)
        assert may_send(connection)
    engine.dispose()
    asynchronous = create_async_engine(empty_database)
    async with asynchronous.connect() as other:
        assert not may_send(other.sync_connection)  # type: ignore[arg-type]
    await asynchronous.dispose()
    sqlite = create_engine("sqlite://")
    with sqlite.connect() as connection:
        assert not may_send(connection)
    sqlite.dispose()
