"""What :mod:`jobsync_orm.migrate` accepts as a database, and the one transaction its functions run in."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from sqlalchemy import URL, Connection, Engine, NullPool, TextClause, create_engine, text

from jobsync_orm.config import CoordinationConfig
from jobsync_orm.exceptions import ConfigurationError
from jobsync_orm.hashing import hasher
from jobsync_orm.naming import DEFAULT_APPNAME, Names

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncEngine

__all__ = [
    "DEFAULT_HASH_FUNCTION",
    "DEFAULT_TOTAL_TOKENS",
    "Bind",
    "Target",
    "autocommit",
    "raw",
    "target",
    "transaction",
]

DEFAULT_TOTAL_TOKENS = 10_000
DEFAULT_HASH_FUNCTION = "double_sha256"

Bind: TypeAlias = "Engine | Connection | AsyncEngine | CoordinationConfig"


@dataclass(frozen=True)
class Target:
    """The cluster that is meant. A setting that is None was not given: the cluster's own is taken."""

    names: Names
    total_tokens: int | None
    hash_function: str | None


def target(
    bind: Bind,
    appname: str | None = None,
    schema: str | None = None,
    total_tokens: int | None = None,
    hash_function: str | None = None,
) -> Target:
    """The cluster named by a configuration or by keywords.

    Raises
    ------
    ConfigurationError
        A keyword beside a configuration, or a value out of range.
    """
    given = {
        "appname": appname,
        "schema": schema,
        "total_tokens": total_tokens,
        "hash_function": hash_function,
    }
    if isinstance(bind, CoordinationConfig):
        for name, value in given.items():
            if value is not None:
                raise ConfigurationError(
                    f"{name}={value!r} beside a CoordinationConfig, which has {getattr(bind, name)!r}: set it there"
                )
        return Target(bind.names, bind.total_tokens, bind.hash_function)
    names = Names(DEFAULT_APPNAME if appname is None else appname, schema)
    hasher(  # checks both
        DEFAULT_TOTAL_TOKENS if total_tokens is None else total_tokens,
        DEFAULT_HASH_FUNCTION if hash_function is None else hash_function,
    )
    return Target(names, total_tokens, hash_function)


def raw(sql: str) -> TextClause:
    """SQL with quoted names in it and no parameters: a colon in a name is a colon."""
    return text(sql.replace(":", r"\:"))


@contextmanager
def transaction(bind: Bind) -> Iterator[Connection]:
    """One connection in one transaction: that of the caller, who then commits it, or one of our own."""
    if isinstance(bind, Connection):
        _require_postgresql(bind.engine)
        if getattr(bind.connection.dbapi_connection, "autocommit", False):
            raise ConfigurationError(
                "the connection is in AUTOCOMMIT, where several statements are no transaction: give its engine"
            )
        if bind.in_transaction():
            yield bind
        else:
            with bind.begin():
                yield bind
        return
    engine, ours = _engine(bind)
    _require_postgresql(engine)
    try:
        # Whoever waited for the lock must see what its holder did, whatever the engine's default is.
        with engine.connect() as connection:
            connection.execution_options(isolation_level="READ COMMITTED")
            with connection.begin():
                yield connection
    finally:
        if ours:
            engine.dispose()


@contextmanager
def autocommit(bind: Bind) -> Iterator[Connection]:
    """A connection of its own on which each statement is a transaction.

    Raises
    ------
    ConfigurationError
        ``bind`` is a Connection, whose transactions are its owner's.
    """
    if isinstance(bind, Connection):
        raise ConfigurationError(
            "each step is a transaction of its own, so a Connection will not do: give its engine, or use the operation "
            "in a migration (op.add_token_column)"
        )
    engine, ours = _engine(bind)
    _require_postgresql(engine)
    try:
        with engine.connect() as connection:
            yield connection.execution_options(isolation_level="AUTOCOMMIT")
    finally:
        if ours:
            engine.dispose()


def _engine(bind: Any) -> tuple[Engine, bool]:
    """A synchronous engine for ``bind``, and whether it was made here."""
    if isinstance(bind, Engine):
        return bind, False
    if isinstance(bind, CoordinationConfig):
        if isinstance(bind.engine, Engine):
            return bind.engine, False
        return _new_engine(bind.sqlalchemy_url()), True
    if isinstance(getattr(bind, "sync_engine", None), Engine):
        # Not by isinstance: importing sqlalchemy.ext.asyncio takes time that synchronous programs need not
        # spend.
        return _new_engine(CoordinationConfig(engine=bind).sqlalchemy_url()), True
    raise ConfigurationError(
        # Not shown: it may well be a URL with a password.
        f"cannot migrate with a {type(bind).__name__}: give an Engine, a Connection, an AsyncEngine or a "
        "CoordinationConfig (an AsyncConnection by `await connection.run_sync(migrate.upgrade)`)"
    )


def _new_engine(url: URL) -> Engine:
    return create_engine(url, poolclass=NullPool)


def _require_postgresql(engine: Engine) -> None:
    if engine.dialect.name != "postgresql":
        raise ConfigurationError(f"{engine.dialect.name!r} is not PostgreSQL: the library's tables need one")
