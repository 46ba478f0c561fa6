"""Plain jobs in one message: their INSERTs, with the BEGIN in front of them where the transaction has not begun.

psycopg sends BEGIN as a message of its own, and SQLAlchemy prepares for results of any kind: for the smallest of
statements both cost more than the statement. So on a synchronous psycopg connection that nobody listens to, a job
without conditions is written with values in its text, as psycopg's own client-side cursors do. Everywhere else, and for
every other job, :mod:`~jobsync_orm.queue.insertion` goes the usual way.

One job that is a transaction of its own is sent as a statement that the server keeps with its plan, once the connection
has sent it as often as psycopg itself waits for (``prepare_threshold``).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

from psycopg.errors import DuplicatePreparedStatement, FeatureNotSupported, InvalidSqlStatementName
from psycopg.pq import Escaping, TransactionStatus
from sqlalchemy import Connection, Engine

from jobsync_orm.message import begin, keep, level_name, may_send, send, send_kept
from jobsync_orm.naming import Names

__all__ = ["NOT_GIVEN", "TYPES", "PlainInsert", "begins_as_usual", "is_heard", "is_plain", "is_transaction"]

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

# How many statements a connection has the server keep, and where its ``info`` says how each was used.
MOST_KEPT: Final = 16
_USES: Final = "jobsync_orm_uses"

# So often in a row the server may not have one, before it is sent as text for good.
MOST_MISSES: Final = 3


def is_plain(connection: Connection, columns: Mapping[str, str]) -> bool:
    """Whether :class:`PlainInsert` may be used for such a job, as part of the transaction of this connection."""
    # A Connection begins by itself, but only with what it sends itself.
    return _is_plain(connection, columns) and connection.in_transaction()


def is_transaction(connection: Connection, columns: Mapping[str, str]) -> bool:
    """Whether an INSERT without BEGIN is a transaction of its own: committed when it returns."""
    if not _is_plain(connection, columns) or connection.in_transaction():
        return False
    psycopg: Any = connection.connection.dbapi_connection
    # A hook of the application's pool may have begun one.
    return bool(psycopg.pgconn.transaction_status == TransactionStatus.IDLE)


def begins_as_usual(connection: Connection) -> bool:
    """Whether its transactions begin with a plain BEGIN, so that one that begins without is the same."""
    psycopg: Any = connection.connection.dbapi_connection
    level, dialect = psycopg.isolation_level, connection.dialect
    # A connection that has been in AUTOCOMMIT is put back into what was read when the engine first connected: the
    # server's default, if the engine was not given another.
    given = dialect._on_connect_isolation_level is not None
    usual = level is None or (not given and level_name(level) == dialect.default_isolation_level)
    return usual and psycopg.read_only is psycopg.deferrable is None


def is_heard(engine: Engine) -> bool:
    """Whether somebody logs, counts or changes the statements of this engine: they must see these too."""
    return bool(engine._has_events) or engine._should_log_info()


def _is_plain(connection: Connection, columns: Mapping[str, str]) -> bool:
    heard = connection._has_events or connection.engine._has_events or connection._echo
    return not heard and columns.keys() <= TYPES.keys() and may_send(connection)


class _Uses:
    """Of one statement on one connection."""

    __slots__ = ("kept", "misses", "times")

    def __init__(self) -> None:
        self.times = 0  # as text
        self.kept = False
        self.misses = 0


class PlainInsert:
    """The INSERTs of one cluster's plain jobs.

    Parameters
    ----------
    names : Names
        Names of the cluster.
    """

    def __init__(self, names: Names) -> None:
        self._names = names
        self._kept: dict[tuple[str, ...], tuple[str, bytes]] = {}

    def put(self, connection: Connection, jobs: Sequence[Mapping[str, str]], *, alone: bool = False) -> list[int]:
        """Put jobs in; returns their ids, in the same order. Each is its columns' values as text.

        ``alone``: without a BEGIN in any case.

        Raises
        ------
        sqlalchemy.exc.DBAPIError
            As from any statement of the connection.
        """
        psycopg: Any = connection.connection.dbapi_connection
        try:
            if alone and len(jobs) == 1:
                id = self._put_kept(connection, psycopg, jobs[0])
                if id is not None:
                    return [id]
            statements = [self._as_text(psycopg, job) for job in jobs]
            if not alone and not psycopg.autocommit and psycopg.pgconn.transaction_status == TransactionStatus.IDLE:
                statements.insert(0, begin(psycopg))
            results = send(psycopg, "; ".join(statements))
        except connection.dialect.loaded_dbapi.Error as error:
            # What SQLAlchemy does with an error of a statement that it has sent.
            connection._handle_dbapi_exception(error, None, None, None, None)
        return [int(result.get_value(0, 0) or 0) for result in results[-len(jobs) :]]

    def _as_text(self, psycopg: Any, job: Mapping[str, str]) -> str:
        escape, encoding = Escaping(psycopg.pgconn).escape_literal, psycopg.info.encoding
        # Each is a constant without a type, and becomes its column's.
        return self._sql({name: bytes(escape(value.encode(encoding))).decode(encoding) for name, value in job.items()})

    def _sql(self, given: dict[str, str]) -> str:
        names, values = self._names, NOT_GIVEN | given
        if "key" in values:
            values["token_id"] = f"{names.sql('token_of')}({values['key']})"
        return (
            f"INSERT INTO {names.sql('job')} ({', '.join(values)}) VALUES ({', '.join(values.values())}) RETURNING id"
        )

    def _put_kept(self, connection: Connection, psycopg: Any, job: Mapping[str, str]) -> int | None:
        """The same by a statement that the server keeps; None if it is not to keep this one."""
        threshold = psycopg.prepare_threshold
        if threshold is None:
            return None
        columns = tuple(job)
        kept = self._kept.get(columns)
        if kept is None:
            kept = self._kept[columns] = self._parametrised(columns)
        statement, name = kept
        uses: dict[bytes, _Uses] = connection.connection.info.setdefault(_USES, {})
        use = uses.get(name)
        if use is None:
            if len(uses) >= MOST_KEPT:
                return None
            use = uses[name] = _Uses()
        if use.times < threshold or use.misses >= MOST_MISSES:
            use.times += 1
            return None
        try:
            if not use.kept:
                with suppress(DuplicatePreparedStatement):  # behind a pooler it may be there already
                    keep(psycopg, name, statement)
                use.kept = True
            id = int(send_kept(psycopg, name, list(job.values())).get_value(0, 0) or 0)
        except (InvalidSqlStatementName, FeatureNotSupported):
            # Nothing has been done. The server has been told to forget, as psycopg does after a ROLLBACK; or a pooler
            # sends each transaction elsewhere; or the type of the id has changed.
            use.kept = False
            use.misses += 1
            return None
        use.misses = 0
        return id

    def _parametrised(self, columns: tuple[str, ...]) -> tuple[str, bytes]:
        """The statement for these columns, and its name: whoever else uses the name means the same statement."""
        statement = self._sql({name: f"CAST(${place} AS {TYPES[name]})" for place, name in enumerate(columns, 1)})
        return statement, f"jobsync_{hashlib.sha256(statement.encode()).hexdigest()[:24]}".encode()
