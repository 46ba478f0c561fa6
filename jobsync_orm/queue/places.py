"""Where a call is to be made: in a session, on a connection, sync or async."""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, TypeVar

from sqlalchemy import Connection
from sqlalchemy.exc import UnboundExecutionError
from sqlalchemy.orm import Session, scoped_session

from jobsync_orm.exceptions import ConfigurationError

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession, async_scoped_session

    AnyPlace = Session | scoped_session[Any] | Connection
    AnyAsyncPlace = AsyncSession | async_scoped_session[Any] | AsyncConnection

__all__ = ["at", "connection_of", "no_place"]

T = TypeVar("T")


def at(where: Any, call: Callable[[Session | Connection], T]) -> T | Awaitable[T]:
    """What ``call`` returns, given the Session or Connection behind ``where``; for an async one an awaitable of it.

    Raises
    ------
    ConfigurationError
        ``where`` is something else.
    """
    if isinstance(where, Session | Connection):
        return call(where)
    if isinstance(where, scoped_session):
        return call(where())
    asyncio = sys.modules.get("sqlalchemy.ext.asyncio")
    if asyncio is not None:
        if isinstance(where, asyncio.async_scoped_session):
            where = where()
        if isinstance(where, asyncio.AsyncSession | asyncio.AsyncConnection):
            return where.run_sync(call)  # type: ignore[no-any-return]
    raise no_place(where)


def no_place(where: Any) -> ConfigurationError:
    """The error for a ``where`` that is none: a job type, say, with which the calls of other libraries begin."""
    what = repr(where)[:50] if isinstance(where, str) else type(where).__name__
    return ConfigurationError(
        f"where={what}: give the Session or Connection (sync or async) whose transaction the job is to be part of; "
        "without one use submit()"
    )


def connection_of(place: Session | Connection, mapper: Any) -> Connection:
    """The connection of a session's or its own present transaction. What the session has pending is flushed first.

    Parameters
    ----------
    place : Session or Connection
        Where.
    mapper : Mapper
        Of the table that is to be written: a session of several engines knows by it which one is meant.

    Raises
    ------
    ConfigurationError
        The session does not know which database is meant, or it is no PostgreSQL.
    """
    if isinstance(place, Session):
        # Within a flush, from an event, what is pending is being flushed.
        if not place._flushing:
            place.flush()
        try:
            connection = place.connection(bind_arguments={"mapper": mapper})
        except UnboundExecutionError as error:
            raise ConfigurationError(
                "the session has several engines and none for the queue's tables: bind queue.models.QueuedJob to one "
                "in binds=, or give session.connection(...) of the right one"
            ) from error
    else:
        connection = place
    if connection.dialect.name != "postgresql":
        raise ConfigurationError(
            f"the transaction is one of {connection.dialect.name}: the queue's tables are in PostgreSQL"
        )
    return connection
