"""One message to the server, on a connection of psycopg's, and all of its answer.

psycopg sends BEGIN and COMMIT as messages of their own. Several statements without parameters may travel as one: they
cost one round trip, and a process that is paused is paused before all of them or after them. A statement that fails
keeps the server from those behind it.

The message may be larger than what the socket takes at once, and the server may end the connection with an answer that
says why; both are seen to here.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any

from psycopg import IsolationLevel, OperationalError
from psycopg.errors import error_from_result
from psycopg.pq import ExecStatus, PipelineStatus
from psycopg.pq.abc import PGresult
from psycopg.waiting import Ready, Wait
from sqlalchemy import Connection

__all__ = ["begin", "keep", "level_name", "may_send", "send", "send_kept"]


def may_send(connection: Connection) -> bool:
    """Whether :func:`send` is possible on the driver's connection of ``connection``: psycopg's, synchronous, and not
    in pipeline mode."""
    dialect = connection.dialect
    if dialect.driver != "psycopg" or dialect.is_async:
        return False
    psycopg: Any = connection.connection.dbapi_connection
    return bool(psycopg.pgconn.pipeline_status == PipelineStatus.OFF)


def send(psycopg: Any, message: str) -> list[PGresult]:
    """Send statements as one message and wait for its end.

    Parameters
    ----------
    psycopg : psycopg.Connection
        Where :func:`may_send`.
    message : str
        Statements without parameters, with semicolons between them.

    Returns
    -------
    list of PGresult
        One for each statement, in their order.

    Raises
    ------
    psycopg.Error
        The first that failed, or the connection has ended.
    """
    encoded = message.encode(psycopg.info.encoding)
    return _answer(psycopg, lambda pg: pg.send_query(encoded))


def keep(psycopg: Any, name: bytes, statement: str) -> None:
    """Have the server keep a statement, with its plan, as ``name``; as :func:`send` otherwise."""
    encoded = statement.encode(psycopg.info.encoding)
    _answer(psycopg, lambda pg: pg.send_prepare(name, encoded))


def send_kept(psycopg: Any, name: bytes, values: Sequence[str]) -> PGresult:
    """Send the statement that is kept as ``name`` with these values of its parameters, as text; as :func:`send`
    otherwise. On a connection without a transaction it is one, which has been committed when this returns."""
    encoding = psycopg.info.encoding
    encoded = [value.encode(encoding) for value in values]
    return _answer(psycopg, lambda pg: pg.send_query_prepared(name, encoded))[-1]


def _answer(psycopg: Any, start: Callable[[Any], None]) -> list[PGresult]:
    with psycopg.lock:
        results: list[PGresult] = psycopg.wait(_exchange(psycopg.pgconn, start))
    for result in results:
        if result.status == ExecStatus.FATAL_ERROR:
            error = error_from_result(result, psycopg.info.encoding)
            # libpq says by itself that the connection has ended; an error of the server's has a code.
            raise error if error.sqlstate else OperationalError(str(error))
    return results


def begin(psycopg: Any) -> str:
    """The statement with which a transaction of this connection begins, as psycopg would send it."""
    words = ["BEGIN"]
    if psycopg.isolation_level is not None:
        words += ["ISOLATION LEVEL", level_name(psycopg.isolation_level)]
    if psycopg.read_only is not None:
        words.append("READ ONLY" if psycopg.read_only else "READ WRITE")
    if psycopg.deferrable is not None:
        words.append("DEFERRABLE" if psycopg.deferrable else "NOT DEFERRABLE")
    return " ".join(words)


def level_name(level: int) -> str:
    """An isolation level of psycopg's as SQL, and SQLAlchemy, call it."""
    return IsolationLevel(level).name.replace("_", " ")


def _exchange(pg: Any, start: Callable[[Any], None]) -> Generator[Wait, Ready, list[PGresult]]:
    """What psycopg does for each of its own messages, but for the answer of a server that ends the connection."""
    start(pg)
    while pg.flush():
        # The server may send while it takes, and take no more until that has been read.
        if (yield Wait.RW) & Ready.R:
            pg.consume_input()
    results: list[PGresult] = []
    while True:
        while pg.is_busy():
            yield Wait.R
            try:
                pg.consume_input()
            except OperationalError:
                # The connection has ended, maybe with an answer: why the server has ended it.
                if pg.is_busy():
                    raise
        result = pg.get_result()
        if result is None:
            return results
        results.append(result)
