"""A plain job in one message: the INSERT, with the BEGIN in front of it where the transaction has not begun.

psycopg sends BEGIN as a message of its own, and SQLAlchemy prepares for results of any kind: for the smallest of
statements both cost more than the statement. So on a synchronous psycopg connection that nobody listens to, a job
without conditions is written with values in its text, as psycopg's own client-side cursors do. Everywhere else, and for
every other job, :mod:`~jobsync_orm.queue.insertion` goes the usual way.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from psycopg.errors import error_from_result
from psycopg.generators import execute
from psycopg.pq import Escaping, ExecStatus, PipelineStatus, TransactionStatus
from sqlalchemy import Connection

from jobsync_orm.naming import Names

__all__ = ["NOT_GIVEN", "TYPES", "insert", "is_plain"]

# Columns that are stored as they are given. One more, and the job is not a plain one.
TYPES = {
    "type": "text",
    "payload": "jsonb",
    "priority": "int",
    "max_retries": "int",
    "timeout": "float8",
    "retry_blocks_key": "bool",
    "key": "text",
    "max_retries_given": "bool",
    "timeout_given": "bool",
}

# Where the call did not say them, the worker's handler decides.
NOT_GIVEN = {"max_retries_given": "false", "timeout_given": "false"}


def is_plain(connection: Connection, columns: Mapping[str, str]) -> bool:
    """Whether :func:`insert` may be used for such a job on this connection."""
    dialect = connection.dialect
    if dialect.driver != "psycopg" or dialect.is_async or not columns.keys() <= TYPES.keys():
        return False
    if not connection.in_transaction():  # a Connection begins by itself, but only with what it sends itself
        return False
    # Somebody logs, counts or changes the statements of this engine: they must see this one too.
    if connection._has_events or connection.engine._has_events or connection._echo:
        return False
    psycopg: Any = connection.connection.driver_connection
    if psycopg.pgconn.pipeline_status != PipelineStatus.OFF:
        return False
    begun = psycopg.autocommit or psycopg.pgconn.transaction_status == TransactionStatus.INTRANS
    return bool(begun or (psycopg.isolation_level, psycopg.read_only, psycopg.deferrable) == (None, None, None))


def insert(connection: Connection, names: Names, columns: Mapping[str, str]) -> int:
    """Put one job in; returns its id. ``columns`` are the values as text.

    Raises
    ------
    sqlalchemy.exc.DBAPIError
        As from any statement of the connection.
    """
    psycopg: Any = connection.connection.driver_connection
    pg, encoding = psycopg.pgconn, psycopg.info.encoding
    escape = Escaping(pg).escape_literal
    values = dict(NOT_GIVEN)
    for name, value in columns.items():
        literal = bytes(escape(value.encode(encoding))).decode(encoding)
        values[name] = f"CAST({literal} AS {TYPES[name]})"
        if name == "key":
            values["token_id"] = f"{names.sql('token_of')}({literal})"
    begin = "" if psycopg.autocommit or pg.transaction_status != TransactionStatus.IDLE else "BEGIN; "
    into = f"{names.sql('job')} ({', '.join(values)})"
    sql = f"{begin}INSERT INTO {into} VALUES ({', '.join(values.values())}) RETURNING id"
    try:
        return _send(psycopg, sql.encode(encoding))
    except connection.dialect.loaded_dbapi.Error as error:
        # What SQLAlchemy does with an error of a statement that it has sent.
        connection._handle_dbapi_exception(error, None, None, None, None)


def _send(psycopg: Any, message: bytes) -> int:
    """Send one message and wait for its end, as psycopg does; the last statement returns a number."""
    with psycopg.lock:
        psycopg.pgconn.send_query(message)
        results = psycopg.wait(execute(psycopg.pgconn))
    for result in results:
        if result.status == ExecStatus.FATAL_ERROR:
            raise error_from_result(result, psycopg.info.encoding)
    return int(results[-1].get_value(0, 0))
