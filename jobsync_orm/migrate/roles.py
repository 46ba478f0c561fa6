"""Three roles, none of which can do more than it must: SQL for whoever administers the database.

::

    from jobsync_orm.migrate import roles

    print(roles.setup(owner="shop_owner", worker="shop_worker", monitor="shop_monitor"))
    print(roles.grants(worker="shop_worker", monitor="shop_monitor", tables=["item"]))

:func:`setup` is run once by an administrator, before the first migration. Then migrations are run as the owner, and
after each of them :func:`grants`, also as the owner.

- the **owner** runs the migrations, the library's and the application's; tables and functions are its own;
- the **worker** runs a ``Job`` and a ``JobWorker``, enqueues, and reads and writes tables it is given;
- the **monitor** reads who owns what and how the queue is doing. It sees no payloads, results, errors, tracebacks and
  checkpoints, and writes nothing.

The roles are made without LOGIN and without a password, which has no place in a script: the users that log in are made
members, ``CREATE ROLE app LOGIN IN ROLE shop_worker``, and get their password with psql's ``\\password app``.

Each script can be run again at any time. :func:`grants` takes away first what the roles have of the library's tables,
so that afterwards they have what it says; it is one transaction, so workers that run lack nothing meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from jobsync_orm.exceptions import ConfigurationError
from jobsync_orm.migrate.autogenerate import TABLES
from jobsync_orm.migrate.rights import HIDDEN
from jobsync_orm.migrate.rights import SEQUENCES as SEQUENCE_RIGHTS
from jobsync_orm.migrate.rights import TABLES as TABLE_RIGHTS
from jobsync_orm.models import for_app
from jobsync_orm.naming import DEFAULT_APPNAME, MAX_IDENTIFIER, Names, is_identifier, literal, quote

__all__ = ["grants", "setup"]

# What makes a large object, which PostgreSQL lets everybody do who is connected.
LARGE_OBJECTS = ", ".join(
    f"pg_catalog.{function}" for function in ("lo_creat(integer)", "lo_create(oid)", "lo_from_bytea(oid, bytea)")
)


def setup(
    *,
    owner: str,
    worker: str,
    monitor: str | None = None,
    database: str | None = None,
    schema: str = "public",
) -> str:
    """SQL that makes the roles and the schema. Run it as an administrator, in the database that is meant.

    Parameters
    ----------
    owner, worker, monitor : str
        Names of the roles; those that are there are left as they are.
    database : str, optional
        Name of the database. If it is given, only these roles (and administrators) may connect to it, and of them the
        monitor makes no large objects either, which PostgreSQL lets everybody do.
    schema : str
        Schema of the library's tables, made if it is missing; the owner may create in it, and nobody else.

    Returns
    -------
    str
        A script for psql, or for any connection.

    Raises
    ------
    ConfigurationError
        A name PostgreSQL could not keep as it is, or one for two roles.
    """
    roles = _roles(owner=owner, worker=worker, monitor=monitor)
    everyone = ", ".join(map(quote, roles.values()))
    place = quote(Names(schema=_name("schema", schema)).schema or "")
    lines = ["-- Run once, as an administrator, before the first migration."]
    lines += [_create_role(role) for role in roles.values()]
    if database is not None:
        named = quote(_name("database", database))
        writers = f"{quote(owner)}, {quote(worker)}"
        lines += [
            f"REVOKE ALL ON DATABASE {named} FROM PUBLIC;",
            f"GRANT CONNECT ON DATABASE {named} TO {everyone};",
            "-- It takes a superuser: where this is a warning, the monitor can make large objects still.",
            f"REVOKE EXECUTE ON FUNCTION {LARGE_OBJECTS} FROM PUBLIC;",
            f"GRANT EXECUTE ON FUNCTION {LARGE_OBJECTS} TO {writers};",
        ]
    lines += [
        f"CREATE SCHEMA IF NOT EXISTS {place};",
        f"REVOKE CREATE ON SCHEMA {place} FROM PUBLIC;",
        f"GRANT USAGE, CREATE ON SCHEMA {place} TO {quote(owner)};",
        f"GRANT USAGE ON SCHEMA {place} TO {everyone};",
    ]
    return "\n".join(lines) + "\n"


def grants(
    *,
    worker: str,
    monitor: str | None = None,
    owner: str | None = None,
    appname: str = DEFAULT_APPNAME,
    schema: str = "public",
    tables: Iterable[str | tuple[str, str]] = (),
) -> str:
    """SQL that grants what the roles need. Run it as the owner of the tables, after each migration.

    Parameters
    ----------
    worker, monitor : str
        Names of the roles.
    owner : str, optional
        Only for tables that another role has made: they become this role's. Run the script as an administrator then,
        while no worker runs.
    appname, schema : str, str
        Of the cluster.
    tables : iterable of str or (str, str)
        The application's tables that the worker reads and writes; ``(schema, table)`` for those in another schema.

    Returns
    -------
    str
        A script for psql, or for a connection in AUTOCOMMIT.

    Raises
    ------
    ConfigurationError
        A name PostgreSQL could not keep as it is, or one for two roles.
    """
    roles = _roles(worker=worker, monitor=monitor, owner=owner)
    names = Names(appname, _name("schema", schema))
    lines = ["-- Run as the owner of the tables, after each migration.", "BEGIN;"]
    if owner is not None:
        lines += _ownership(names, owner)
    granted = ", ".join(quote(role) for kind, role in roles.items() if kind != "owner")
    everything = ", ".join(names.sql(kind) for kind in (*TABLES, "alembic_version"))
    sequences = [(names.sql(f"{table}_{column}"), rights) for table, (column, rights) in SEQUENCE_RIGHTS.items()]
    lines.append(f"REVOKE ALL ON {everything} FROM {granted};")
    lines.append(f"REVOKE ALL ON SEQUENCE {', '.join(sequence for sequence, _ in sequences)} FROM {granted};")
    lines += [f"GRANT {', '.join(TABLE_RIGHTS[kind])} ON {names.sql(kind)} TO {quote(worker)};" for kind in TABLES]
    lines += [f"GRANT {', '.join(rights)} ON SEQUENCE {sequence} TO {quote(worker)};" for sequence, rights in sequences]
    lines.append(f"GRANT SELECT ON {names.sql('alembic_version')} TO {granted};")
    lines.append(f"GRANT EXECUTE ON FUNCTION {names.sql('token_of')}(text) TO {granted};")
    lines.append(f"GRANT EXECUTE ON FUNCTION {names.sql('hold')}(int[], text, bigint) TO {quote(worker)};")
    for table in tables:
        at, name = table if isinstance(table, tuple) else (schema, table)
        qualified = f"{quote(_name('schema', at))}.{quote(_name('table', name))}"
        lines.append(f"GRANT SELECT, INSERT, UPDATE, DELETE ON {qualified} TO {quote(worker)};")
    if monitor is not None:
        lines += [f"GRANT SELECT{_visible(names, kind)} ON {names.sql(kind)} TO {quote(monitor)};" for kind in TABLES]
    return "\n".join([*lines, "COMMIT;"]) + "\n"


def _visible(names: Names, kind: str) -> str:
    """The columns of a table that a monitor reads, in SQL; nothing for all."""
    hidden = HIDDEN.get(kind)
    if hidden is None:
        return ""
    table = for_app(names.appname, names.schema).metadata.tables[f"{names.schema}.{names.bare(kind)}"]
    return f" ({', '.join(quote(column.name) for column in table.columns if column.name not in hidden)})"


def _ownership(names: Names, owner: str) -> Sequence[str]:
    functions = [f"{names.sql('token_of')}(text)", f"{names.sql('hold')}(int[], text, bigint)"]
    return [
        *(f"ALTER TABLE {names.sql(kind)} OWNER TO {quote(owner)};" for kind in (*TABLES, "alembic_version")),
        *(f"ALTER FUNCTION {function} OWNER TO {quote(owner)};" for function in functions),
    ]


def _create_role(role: str) -> str:
    body = f"BEGIN CREATE ROLE {quote(role)} NOLOGIN; EXCEPTION WHEN duplicate_object THEN NULL; END"
    return f"DO {literal(body)};"


def _roles(**named: str | None) -> Mapping[str, str]:
    roles = {kind: _name(kind, role) for kind, role in named.items() if role is not None}
    if len(set(roles.values())) < len(roles):
        raise ConfigurationError(f"{roles} names one role twice: each has rights of its own")
    return roles


def _name(what: str, name: object) -> str:
    if isinstance(name, str) and is_identifier(name):
        return name
    raise ConfigurationError(f"{what}={name!r} must be a name of 1 to {MAX_IDENTIFIER} bytes")
