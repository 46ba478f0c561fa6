"""The steps of adding and removing the column, each of which looks at what is there already."""

from __future__ import annotations

import logging

from sqlalchemy import Connection, text
from sqlalchemy.schema import CreateIndex, Index

from jobsync_orm.exceptions import ConfigurationError
from jobsync_orm.migrate.binding import raw
from jobsync_orm.migrate.online.backfill import Pace, backfill, primary_key
from jobsync_orm.migrate.online.column import Column, Found, Wanted, look, refuse_unfit
from jobsync_orm.migrate.online.locks import Patience, exclusively, unlimited
from jobsync_orm.naming import quote

__all__ = ["add", "create_index", "drop"]

log = logging.getLogger("jobsync_orm.migrate")


def add(connection: Connection, wanted: Wanted, pace: Pace, patience: Patience) -> None:
    """See :func:`jobsync_orm.migrate.online.add_token_column`; ``connection`` is in AUTOCOMMIT."""
    wanted.check_key()
    found = look(connection, wanted)
    column = Column(wanted, found.schema, found.function_schema)
    with unlimited(connection):
        if not found.column:
            refuse_unfit(connection, column, found)
            primary_key(connection, column, found)
            exclusively(connection, column.table, found.oid, column.attach(), patience, unless=_has_column(found))
            found = look(connection, wanted)
        _refuse_another(column, found)
        if not found.validated:
            backfill(connection, column, found, pace, patience.total)
            connection.execute(raw(f"ALTER TABLE {column.table} VALIDATE CONSTRAINT {column.check}"))
        if not found.not_null:
            not_null = f"ALTER TABLE {column.table} ALTER COLUMN token_id SET NOT NULL;"
            exclusively(connection, column.table, found.oid, [not_null], patience)
            connection.execute(raw(f"ANALYZE {column.table} (token_id)"))
    log.info("%s has its column token_id", column.table)


def _has_column(found: Found) -> str:
    return (
        f"EXISTS (SELECT FROM pg_catalog.pg_attribute WHERE attrelid = {found.oid} AND attname = 'token_id'"
        " AND NOT attisdropped)"
    )


def _refuse_another(column: Column, found: Found) -> None:
    if found.generated:
        raise ConfigurationError(
            f"token_id of {column.table} is a generated column already: leave it, it does the same; or drop it first"
        )
    if found.body is None:
        raise ConfigurationError(
            f"{column.table} has a column token_id that is none of this library's: rename it, or drop it first"
        )
    if found.body != column.body:
        raise ConfigurationError(
            f"token_id of {column.table} is computed from another key: op.drop_token_column first, while no worker runs"
        )


def drop(connection: Connection, wanted: Wanted, patience: Patience) -> None:
    """See :func:`jobsync_orm.migrate.online.drop_token_column`; ``connection`` is in AUTOCOMMIT."""
    found = look(connection, wanted)
    column = Column(wanted, found.schema, found.function_schema)
    if not found.column:
        raise ConfigurationError(f"{column.table} has no column token_id to drop")
    if found.fenced:
        raise ConfigurationError(
            f"{column.table} has an ownership fence, which reads token_id at each write: op.drop_ownership_fence first"
        )
    exclusively(connection, column.table, found.oid, column.detach(), patience)


def create_index(connection: Connection, index: Index) -> None:
    """See :func:`jobsync_orm.migrate.online.create_online_index`; ``connection`` is in AUTOCOMMIT."""
    table = index.table
    assert table is not None
    qualified = quote(table.name) if table.schema is None else f"{quote(table.schema)}.{quote(table.name)}"
    ask = text(
        "SELECT n.nspname, i.indisvalid FROM pg_catalog.pg_index i JOIN pg_catalog.pg_class c ON c.oid = i.indexrelid"
        " JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace"
        " WHERE i.indrelid = pg_catalog.to_regclass(:table) AND c.relname = :name"
    )
    there = connection.execute(ask, {"table": qualified, "name": index.name}).one_or_none()
    with unlimited(connection):
        if there is not None:
            schema, valid = there
            if valid:
                log.info("index %s is there already", index.name)
                return
            # CREATE INDEX CONCURRENTLY that was interrupted leaves one that is kept up at each write and never used.
            log.info("index %s was left unfinished; it is made anew", index.name)
            connection.execute(raw(f"DROP INDEX CONCURRENTLY {quote(schema)}.{quote(str(index.name))}"))
        options = index.dialect_options["postgresql"]
        before, options["concurrently"] = options["concurrently"], True
        try:
            connection.execute(CreateIndex(index))
        finally:
            options["concurrently"] = before  # the index is the caller's
