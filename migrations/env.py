"""How Alembic runs the library's migrations, for any prefix and schema.

Programmatic runs (:mod:`jobsync_orm.migrate`) put ``connection``, ``names``, ``total_tokens`` and
``hash_function`` into ``config.attributes``; on the command line they come from ``-x``. Each migration's
``upgrade`` and ``downgrade`` are called with the last three.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from logging.config import fileConfig
from typing import Any

from alembic import context
from sqlalchemy import URL, Connection, NullPool, create_engine, make_url, text

from jobsync_orm.exceptions import ConfigurationError
from jobsync_orm.hashing import hasher
from jobsync_orm.migrate.binding import DEFAULT_HASH_FUNCTION, DEFAULT_TOTAL_TOKENS, raw
from jobsync_orm.models import for_app
from jobsync_orm.naming import DEFAULT_APPNAME, Names, quote

CREATED_BY_US = "created by jobsync_orm"

config = context.config


def from_command_line(given: Mapping[str, str]) -> dict[str, Any]:
    """What the migrations are called with, from ``-x name=value``."""
    unknown = set(given) - {"url", "appname", "schema", "total_tokens", "hash_function"}
    if unknown:
        raise ConfigurationError(f"-x {min(unknown)}=...: there is no such setting")
    total = given.get("total_tokens", str(DEFAULT_TOTAL_TOKENS))
    if not total.isdecimal():
        raise ConfigurationError(f"-x total_tokens={total} must be a whole number")
    arguments = {
        "names": Names(given.get("appname", DEFAULT_APPNAME), given.get("schema")),
        "total_tokens": int(total),
        "hash_function": given.get("hash_function", DEFAULT_HASH_FUNCTION),
    }
    hasher(arguments["total_tokens"], arguments["hash_function"])
    return arguments


def database_url() -> URL:
    """The database of a run from the command line."""
    given: dict[str, str] = context.get_x_argument(as_dictionary=True)
    url = make_url(
        given.get("url") or os.environ.get("JOBSYNC_DATABASE_URL") or config.get_main_option("sqlalchemy.url") or ""
    )
    return url.set(drivername="postgresql+psycopg") if url.drivername == "postgresql" else url


def options(names: Names) -> dict[str, Any]:
    """What Alembic has to know about a cluster. The last three serve ``check`` and ``--autogenerate``."""
    metadata = for_app(names.appname, names.schema).metadata
    tables = {table.name for table in metadata.tables.values()}

    def ours(name: str | None, type_: str, parents: Any) -> bool:
        if type_ == "schema":
            return name == names.schema
        return type_ != "table" or name in tables

    return {
        "version_table": names.version_table,
        "version_table_schema": names.schema,
        "target_metadata": metadata,
        "include_schemas": names.schema is not None,
        "include_name": ours,
    }


def prepare_schema(connection: Connection, schema: str) -> None:
    """Create the schema if it is missing, and remember that it is ours to drop."""
    known = connection.scalar(text("SELECT 1 FROM pg_catalog.pg_namespace WHERE nspname = :name"), {"name": schema})
    if known is None:
        for statement in schema_ddl(schema):
            connection.execute(statement)


def schema_ddl(schema: str) -> list[Any]:
    """Statements that create the schema. ``IF NOT EXISTS`` is for scripts, which cannot look first."""
    return [
        raw(f"CREATE SCHEMA IF NOT EXISTS {quote(schema)}"),
        raw(f"COMMENT ON SCHEMA {quote(schema)} IS '{CREATED_BY_US}'"),
    ]


def clean_up(connection: Connection, names: Names) -> None:
    """After the last downgrade: the version table, and the schema if we made it and nothing else is in it."""
    connection.execute(raw(f"DROP TABLE {names.sql('alembic_version')}"))
    if names.schema is None:
        return
    ours = text(
        "SELECT 1 FROM pg_catalog.pg_namespace n WHERE nspname = :name"
        " AND pg_catalog.obj_description(n.oid, 'pg_namespace') = :comment"
        " AND NOT EXISTS (SELECT FROM pg_catalog.pg_depend d"
        "  WHERE d.refclassid = CAST('pg_catalog.pg_namespace' AS regclass) AND d.refobjid = n.oid)"
    )
    if connection.scalar(ours, {"name": names.schema, "comment": CREATED_BY_US}) is not None:
        connection.execute(raw(f"DROP SCHEMA {quote(names.schema)}"))


def run_online(connection: Connection, arguments: dict[str, Any]) -> None:
    """Run on ``connection``; whoever comes second waits for the first and then finds nothing left to do."""
    names: Names = arguments["names"]
    context.configure(connection=connection, **options(names))
    with context.begin_transaction():
        migration = context.get_context()
        if migration.opts.get("dont_mutate"):
            context.run_migrations(**arguments)
            return
        lock = {"key": names.advisory_key("migrate")}
        connection.execute(text("SELECT pg_catalog.pg_advisory_xact_lock(:key)"), lock)
        if names.schema is not None:
            prepare_schema(connection, names.schema)
        context.run_migrations(**arguments)
        if not migration.get_current_heads():
            clean_up(connection, names)


def run_offline(arguments: dict[str, Any]) -> None:
    """Write a script (``--sql``)."""
    names: Names = arguments["names"]
    # The driver's paramstyle would double each percent sign, which a script must not.
    style = {"paramstyle": "named"}
    context.configure(dialect_name="postgresql", dialect_opts=style, literal_binds=True, **options(names))
    with context.begin_transaction():
        context.execute(f"SELECT pg_catalog.pg_advisory_xact_lock({names.advisory_key('migrate')})")
        if names.schema is not None and context.get_starting_revision_argument() is None:
            for statement in schema_ddl(names.schema):
                context.execute(statement)
        context.run_migrations(**arguments)


def main() -> None:
    if "names" in config.attributes:
        arguments = {name: config.attributes[name] for name in ("names", "total_tokens", "hash_function")}
        run_online(config.attributes["connection"], arguments)
        return
    if config.config_file_name is not None:
        fileConfig(config.config_file_name, disable_existing_loggers=False)
    arguments = from_command_line(context.get_x_argument(as_dictionary=True))
    if context.is_offline_mode():
        run_offline(arguments)
        return
    engine = create_engine(database_url(), poolclass=NullPool)
    with engine.connect() as connection:
        run_online(connection, arguments)


main()
