"""``TokenOwned`` models on SQLite, for an application's unit tests without a server.

::

    engine = enable_sqlite(create_engine("sqlite://"))
    Base.metadata.create_all(engine)

SQLite computes ``token_id`` by the same function, so a row gets the token it would get on PostgreSQL. There
is no cluster on SQLite: use a standalone job, for which ``owned_by`` matches every row.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import Engine, event

from jobsync_orm.exceptions import ConfigurationError
from jobsync_orm.hashing import hasher, register_sqlite
from jobsync_orm.naming import DEFAULT_APPNAME, Names

__all__ = ["enable_sqlite"]


def enable_sqlite(
    engine: Engine,
    appname: str = DEFAULT_APPNAME,
    total_tokens: int = 10_000,
    hash_function: str = "double_sha256",
) -> Engine:
    """Give each new connection of a SQLite engine the token function.

    Parameters
    ----------
    engine : Engine
        A SQLite engine that has not connected yet. Of an async engine pass ``engine.sync_engine``.
    appname : str
        The models' ``__token_appname__``.
    total_tokens, hash_function : int, str
        As in :class:`~jobsync_orm.CoordinationConfig`.

    Returns
    -------
    Engine
        The same engine.

    Raises
    ------
    ConfigurationError
        Not a SQLite engine, or a setting out of range.
    """
    if not isinstance(engine, Engine) or engine.dialect.name != "sqlite":
        raise ConfigurationError(
            f"{engine!r} is no SQLite engine: on PostgreSQL jobsync_orm.migrate.upgrade(engine) makes the "
            "function; of an async engine pass engine.sync_engine"
        )
    function = Names(appname).token_function
    hasher(total_tokens, hash_function)

    @event.listens_for(engine, "connect")
    def register(dbapi_connection: Any, _record: Any) -> None:
        register_sqlite(dbapi_connection, function, total_tokens, hash_function)

    return engine
