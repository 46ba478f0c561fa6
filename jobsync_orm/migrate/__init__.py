"""Create, upgrade, inspect and remove the library's tables, with Alembic.

::

    from jobsync_orm import migrate

    migrate.upgrade(engine)                                        # the default prefix, 10,000 tokens
    migrate.upgrade(engine, appname="billing_", schema="jobs", total_tokens=1_000)
    problems = migrate.check(engine)                               # [] if a worker could start

The same from a shell: ``jobsync-orm db upgrade --url postgresql://...``; in a checkout of the library also
``alembic upgrade head``, and ``alembic upgrade head --sql`` for a script that somebody else is to run.

Which database
--------------
Each function takes an ``Engine``, a ``Connection``, an ``AsyncEngine`` or a
:class:`~jobsync_orm.config.CoordinationConfig`; the configuration brings ``appname``, ``schema``,
``total_tokens`` and ``hash_function`` with it. One connection is used. On a connection that is in a
transaction, that transaction is used, and committing it is up to the caller. Of an ``AsyncEngine`` only the
URL is used, with psycopg. From a coroutine, call these functions in a thread, or with ``await
connection.run_sync(migrate.upgrade)``.

Several at once
---------------
Any number of processes and threads may call :func:`upgrade` at the same time: an advisory lock lets one of
them work, and the others find it done. When there is nothing to do, nothing is written and no right to create
is needed, so every worker may call it at its start.

Rights
------
``upgrade`` needs CREATE on the schema (on the database, if the schema is to be made). A worker's role needs less;
:mod:`jobsync_orm.migrate.roles` writes the script that grants it, and :func:`check` says what of it is missing.

Beside the application's migrations
-----------------------------------
The version stands in a table of its own (``sync_alembic_version``), so the application's Alembic and this one
do not meet, except in autogenerate, which would drop tables it does not know. :func:`hooks` prevents that.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from sqlalchemy import Connection, text
from sqlalchemy.exc import DBAPIError

from jobsync_orm.exceptions import ClusterMismatch, ConfigurationError, LockNotAcquired, SchemaNotReady
from jobsync_orm.migrate.autogenerate import Hooks, hooks, include_name, include_object
from jobsync_orm.migrate.binding import (
    DEFAULT_HASH_FUNCTION,
    DEFAULT_TOTAL_TOKENS,
    Bind,
    Target,
    target,
    transaction,
)
from jobsync_orm.migrate.inspection import cluster_settings, current_revision, problems
from jobsync_orm.sqlstates import sqlstate

if TYPE_CHECKING:
    from alembic.config import Config

__all__ = [
    "Hooks",
    "check",
    "current",
    "downgrade",
    "head",
    "hooks",
    "include_name",
    "include_object",
    "migrations_path",
    "upgrade",
]

# The newest revision, known without Alembic, whose import takes longer than the rest of a start.
HEAD = "0006"

# Longest that others may have to wait behind an upgrade that waits for a table; how long they are left in peace then;
# and how long it goes on like that, all in seconds. Lock not available, and a deadlock: a heartbeat takes the tables in
# another order.
LOCK_SEC, PAUSE_SEC, PATIENCE_SEC = 1, 2.0, 60
IN_USE = ("55P03", "40P01")

# Alembic's commands work through module-level proxies. Taken after the advisory lock, never before it: a
# thread that waits for the database must not keep other threads from theirs.
_alembic = threading.RLock()


def upgrade(
    bind: Bind,
    *,
    appname: str | None = None,
    schema: str | None = None,
    total_tokens: int | None = None,
    hash_function: str | None = None,
    revision: str = "head",
) -> None:
    """Create the tables, or bring them to a newer revision.

    Tables that are there are altered while workers use them: a lock that others do not let go of within ``LOCK_SEC``
    (a dump that reads the tables, say) is given up, so that heartbeats do not queue up behind it, and tried again.

    Parameters
    ----------
    bind : Engine, Connection, AsyncEngine or CoordinationConfig
        The database; see the module.
    appname : str, optional
        Prefix of each table, ``"sync_"`` if not given.
    schema : str, optional
        Schema of the tables, created if it is missing. None leaves it to ``search_path``.
    total_tokens : int, optional
        Number of tokens. Fixed once the tables are there. If not given, that of the cluster, or 10,000 for a
        new one.
    hash_function : str, optional
        ``"md5"``, ``"sha256"`` or ``"double_sha256"``, fixed like ``total_tokens``. If not given, that of the
        cluster, or ``"double_sha256"`` for a new one.
    revision : str
        Where to go; ``"head"`` is the newest.

    Raises
    ------
    ClusterMismatch
        The tables are there with another number of tokens or hash function.
    SchemaNotReady
        The tables are of a revision this version of the library does not know.
    ConfigurationError
        A value out of range, or a keyword beside a configuration.
    LockNotAcquired
        Others have held the tables for ``PATIENCE_SEC``. Nothing has changed. (Not on a ``Connection``, whose
        transaction and its time limits are the caller's.)
    """
    cluster = target(bind, appname, schema, total_tokens, hash_function)
    if isinstance(bind, Connection):
        _upgrade(bind, cluster, revision)
        return
    until = time.monotonic() + PATIENCE_SEC
    while True:
        try:
            _upgrade(bind, cluster, revision)
            return
        except DBAPIError as error:
            if sqlstate(error.orig) not in IN_USE:
                raise
            if time.monotonic() > until:
                raise LockNotAcquired(
                    f"the tables of appname {cluster.names.appname!r} were in use for all of {PATIENCE_SEC} s: end the "
                    "transactions that hold them (pg_stat_activity shows them, by xact_start), or wait, and upgrade "
                    "again. Nothing has changed"
                ) from error
        time.sleep(PAUSE_SEC)


def _upgrade(bind: Bind, cluster: Target, revision: str) -> None:
    with transaction(bind) as connection:
        # Workers that start together need not take turns, nor import Alembic, to find nothing to do: not if all is
        # done, and not after they have waited for the one that did it.
        if _is_at_head(connection, cluster, revision):
            return
        _serialise(connection, cluster)
        if not _is_at_head(connection, cluster, revision):
            if bind is not connection:
                # Not before: for another upgrade one waits as long as it takes.
                connection.execute(text(f"SET LOCAL lock_timeout = '{LOCK_SEC}s'"))
            _run(connection, cluster, "upgrade", revision)


def downgrade(bind: Bind, *, appname: str | None = None, schema: str | None = None, revision: str = "base") -> None:
    """Go back to an older revision. ``"base"`` removes all there is, with all locks, checkpoints and records.

    A schema that :func:`upgrade` created goes too, if nothing else is in it. Stop every worker first.

    Parameters
    ----------
    bind, appname, schema
        As for :func:`upgrade`.
    revision : str
        Where to go.

    Raises
    ------
    SchemaNotReady
        The tables are of a revision this version of the library does not know.
    sqlalchemy.exc.DBAPIError
        Columns of the application's tables use the token function; PostgreSQL's message names them.
    """
    cluster = target(bind, appname, schema)
    with transaction(bind) as connection:
        _serialise(connection, cluster)
        if current_revision(connection, cluster.names) is not None:
            _run(connection, cluster, "downgrade", revision)


def current(bind: Bind, *, appname: str | None = None, schema: str | None = None) -> str | None:
    """Revision the tables are at, or None if they are not there.

    Parameters
    ----------
    bind, appname, schema
        As for :func:`upgrade`.
    """
    cluster = target(bind, appname, schema)
    with transaction(bind) as connection:
        return current_revision(connection, cluster.names)


def head() -> str:
    """The newest revision this version of the library knows."""
    return _known_revisions()[0]


def check(
    bind: Bind,
    *,
    appname: str | None = None,
    schema: str | None = None,
    total_tokens: int | None = None,
    hash_function: str | None = None,
) -> list[str]:
    """What keeps a worker from running on these tables with the rights of this connection.

    Reads only, and needs no right beyond connecting.

    Parameters
    ----------
    bind, appname, schema
        As for :func:`upgrade`.
    total_tokens, hash_function : int, str, optional
        What the cluster has to have. If not given, it only has to agree with itself.

    Returns
    -------
    list[str]
        A sentence for each problem, with its remedy; empty if all is well.
    """
    cluster = target(bind, appname, schema, total_tokens, hash_function)
    with transaction(bind) as connection:
        return problems(connection, cluster, _known_revisions())


def migrations_path() -> Path:
    """Folder of the Alembic environment: inside the installed package, or beside it in a checkout.

    Raises
    ------
    SchemaNotReady
        It is in neither place.
    """
    package = Path(__file__).parents[1]
    places = (package / "_migrations", package.parent / "migrations")
    for place in places:
        # Some other project's "migrations" may well stand beside the package in site-packages.
        if (place / "versions" / "0001_tables.py").is_file():
            return place
    raise SchemaNotReady(
        f"the migrations are neither in {places[0]} nor in {places[1]}: the installation is incomplete, "
        "install jobsync-orm again"
    )


def _is_at_head(connection: Connection, cluster: Target, revision: str) -> bool:
    if revision not in ("head", HEAD) or current_revision(connection, cluster.names) != HEAD:
        return False
    _settle(connection, cluster)
    return True


def _serialise(connection: Connection, cluster: Target) -> None:
    key = cluster.names.advisory_key("migrate")
    connection.execute(text("SELECT pg_catalog.pg_advisory_xact_lock(:key)"), {"key": key})
    # That a table is not there has been remembered by this session; opening a relation makes it take in what others
    # have done while it waited.
    connection.execute(text("SELECT 1 FROM pg_catalog.pg_class LIMIT 1"))


def _settle(connection: Connection, cluster: Target) -> tuple[int, str]:
    """Number of tokens and hash function: the cluster's own, else those asked for, else the defaults."""
    found = cluster_settings(connection, cluster.names)
    if found is None:
        return cluster.total_tokens or DEFAULT_TOTAL_TOKENS, cluster.hash_function or DEFAULT_HASH_FUNCTION
    for name, wanted, value in (
        ("total_tokens", cluster.total_tokens, found[0]),
        ("hash_function", cluster.hash_function, found[1]),
    ):
        if wanted is not None and wanted != value:
            raise ClusterMismatch(
                f"{name}={wanted!r} was asked for, but {cluster.names.sql('cluster')} was created with "
                f"{value!r}, which is fixed: use {value!r}, or another appname; or, while no worker runs, change "
                "total_tokens with `jobsync-orm reshard`, or downgrade to base and upgrade again"
            )
    return found


def _run(connection: Connection, cluster: Target, command: str, revision: str) -> None:
    from alembic import command as commands
    from alembic.util import CommandError

    found = current_revision(connection, cluster.names)
    if found is not None and found not in _known_revisions():
        raise SchemaNotReady(
            f"{cluster.names.sql('alembic_version')} is at revision {found!r}, which this version of "
            "jobsync_orm does not know: install a newer one"
        )
    total_tokens, hash_function = _settle(connection, cluster)
    with _alembic, _set_aside():
        config = _config()
        config.attributes.update(
            connection=connection,
            names=cluster.names,
            total_tokens=total_tokens,
            hash_function=hash_function,
        )
        try:
            getattr(commands, command)(config, revision)
        except CommandError as error:
            raise ConfigurationError(
                f"revision={revision!r}: {error}. Known are {', '.join(_known_revisions())}, head and base"
            ) from error


@contextmanager
def _set_aside() -> Iterator[None]:
    """Give the application's ``env.py`` or migration, if this runs inside one, its environment back afterwards.

    Alembic keeps environment and operations behind names of two modules. The library's migrations take these names, and
    at their end they are removed.
    """
    import alembic.context
    import alembic.op

    theirs = [getattr(module, "_proxy", None) for module in (alembic.context, alembic.op)]
    try:
        yield
    finally:
        for proxy in theirs:
            if proxy is not None:
                proxy._install_proxy()


def _config() -> Config:
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(migrations_path()).replace("%", "%%"))
    return config


def _known_revisions() -> list[str]:
    """The revisions of this version of the library, newest first."""
    from alembic.script import ScriptDirectory

    with _alembic:
        return [script.revision for script in ScriptDirectory.from_config(_config()).walk_revisions()]
