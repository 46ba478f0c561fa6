"""A plain job in one message: the INSERT, with the BEGIN in front of it where the transaction has not begun.

psycopg sends BEGIN as a message of its own, and SQLAlchemy prepares for results of any kind: for the smallest of
statements both cost more than the statement. So on a synchronous psycopg connection that nobody listens to, a job
without conditions is written with values in its text, as psycopg's own client-side cursors do. Everywhere else, and for
every other job, :mod:`~jobsync_orm.queue.insertion` goes the usual way.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from psycopg.pq import Escaping, TransactionStatus
from sqlalchemy import Connection

from jobsync_orm.message import begin, may_send, send
from jobsync_orm.naming import Names

__all__ = ["NOT_GIVEN", "TYPES", "insert", "is_plain", "is_transaction"]

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
    "trace": "text",
}

# Where the call did not say them, the worker's handler decides.
NOT_GIVEN = {"max_retries_given": "false", "timeout_given": "false"}


def is_plain(connection: Connection, columns: Mapping[str, str]) -> bool:
    """Whether :func:`insert` may be used for such a job, as part of the transaction of this connection."""
    # A Connection begins by itself, but only with what it sends itself.
    return _is_plain(connection, columns) and connection.in_transaction()


def is_transaction(connection: Connection, columns: Mapping[str, str]) -> bool:
    """Whether :func:`insert` without BEGIN is a transaction of its own: committed when it returns."""
    if not _is_plain(connection, columns) or connection.in_transaction():
        return False
    psycopg: Any = connection.connection.dbapi_connection
    # A hook of the application's pool may have begun one.
    return bool(psycopg.pgconn.transaction_status == TransactionStatus.IDLE)


def _is_plain(connection: Connection, columns: Mapping[str, str]) -> bool:
    # Somebody logs, counts or changes the statements of this engine: they must see this one too.
    heard = connection._has_events or connection.engine._has_events or connection._echo
    return not heard and columns.keys() <= TYPES.keys() and may_send(connection)


def insert(connection: Connection, names: Names, columns: Mapping[str, str], *, alone: bool = False) -> int:
    """Put one job in; returns its id. ``columns`` are the values as text. ``alone``: without a BEGIN in any case.

    Raises
    ------
    sqlalchemy.exc.DBAPIError
        As from any statement of the connection.
    """
    psycopg: Any = connection.connection.dbapi_connection
    pg, encoding = psycopg.pgconn, psycopg.info.encoding
    escape = Escaping(pg).escape_literal
    given = {name: bytes(escape(value.encode(encoding))).decode(encoding) for name, value in columns.items()}
    values = NOT_GIVEN | given
    if "key" in values:
        values["token_id"] = f"{names.sql('token_of')}({values['key']})"
    # Each is a constant without a type, and becomes its column's.
    sql = f"INSERT INTO {names.sql('job')} ({', '.join(values)}) VALUES ({', '.join(values.values())}) RETURNING id"
    if not alone and not psycopg.autocommit and pg.transaction_status == TransactionStatus.IDLE:
        sql = f"{begin(psycopg)}; {sql}"
    try:
        results = send(psycopg, sql)
    except connection.dialect.loaded_dbapi.Error as error:
        # What SQLAlchemy does with an error of a statement that it has sent.
        connection._handle_dbapi_exception(error, None, None, None, None)
    return int(results[-1].get_value(0, 0) or 0)
