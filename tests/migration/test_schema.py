"""The migrations make what the models say, to the last name."""

from __future__ import annotations

import pytest
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from sqlalchemy import Connection, Engine, text
from sqlalchemy.exc import IntegrityError

from jobsync_orm import migrate
from jobsync_orm.migrate.autogenerate import TABLES
from jobsync_orm.models import for_app
from jobsync_orm.naming import Names

CATALOG = """
SELECT 'column ' || c.relname || '.' || a.attname || ' ' || format_type(atttypid, atttypmod)
    || CASE WHEN attnotnull THEN ' not null' ELSE '' END || ' identity=' || CAST(attidentity AS text)
    || ' default=' || coalesce(pg_get_expr(adbin, adrelid), '')
FROM pg_attribute a JOIN pg_class c ON c.oid = attrelid LEFT JOIN pg_attrdef ON adrelid = attrelid AND adnum = attnum
WHERE relnamespace = CAST(:schema AS regnamespace) AND relkind = 'r' AND attnum > 0
UNION ALL
SELECT 'constraint ' || conrelid::regclass || ' ' || conname || ' ' || pg_get_constraintdef(oid)
FROM pg_constraint WHERE connamespace = CAST(:schema AS regnamespace)
UNION ALL
SELECT pg_get_indexdef(indexrelid) FROM pg_index JOIN pg_class c ON c.oid = indrelid
WHERE relnamespace = CAST(:schema AS regnamespace)
UNION ALL
SELECT 'sequence ' || relname FROM pg_class WHERE relnamespace = CAST(:schema AS regnamespace) AND relkind = 'S'
"""


def catalog(connection: Connection, schema: str) -> set[str]:
    found = connection.scalars(text(CATALOG.replace("::", r"\:\:")), {"schema": schema})
    return {line.replace(f"{schema}.", "") for line in found if "alembic_version" not in line}


def test_the_catalog_is_the_same_as_that_made_from_the_models(empty: Engine) -> None:
    migrate.upgrade(empty, appname="x_", schema="migrated", total_tokens=3)
    models = for_app("x_", "created")
    with empty.begin() as connection:
        connection.execute(text("CREATE SCHEMA created"))
        models.metadata.create_all(connection)
        migrated, created = catalog(connection, "migrated"), catalog(connection, "created")
    assert migrated == created
    assert len(migrated) > 70
    assert "sequence x_node_ordinal_seq" in migrated


@pytest.mark.parametrize("names", [Names(), Names("other_", "jobs")], ids=str)
def test_alembic_finds_no_difference(empty: Engine, names: Names) -> None:
    migrate.upgrade(empty, appname=names.appname, schema=names.schema, total_tokens=3)
    options = {
        "version_table": names.version_table,
        "version_table_schema": names.schema,
        "include_schemas": names.schema is not None,
        "compare_type": True,
        "compare_server_default": True,
    }
    with empty.begin() as connection:
        context = MigrationContext.configure(connection, opts=options)
        metadata = for_app(names.appname, names.schema).metadata
        assert compare_metadata(context, metadata) == []
        # It would find one.
        connection.execute(text(f"ALTER TABLE {names.sql('lock')} DROP COLUMN reason"))
        assert [difference[0] for difference in compare_metadata(context, metadata)] == ["add_column"]


def test_the_list_of_tables_is_that_of_the_models() -> None:
    assert {f"sync_{kind}" for kind in TABLES} == set(for_app().metadata.tables)


@pytest.mark.parametrize(
    "statement",
    [
        "INSERT INTO sync_cluster (id, total_tokens, hash_function, incarnation, protocol_version)"
        " SELECT 2, total_tokens, hash_function, incarnation, protocol_version FROM sync_cluster",
        "INSERT INTO sync_node (name, incarnation, state) SELECT 'n', incarnation, 'leaving' FROM sync_cluster",
        "INSERT INTO sync_node (name, ordinal, incarnation)"
        " SELECT n, 1, incarnation FROM sync_cluster, (VALUES ('a'), ('b')) AS v (n)",
        "INSERT INTO sync_token (token_id) VALUES (0)",
    ],
    ids=["two clusters", "unknown state", "one ordinal twice", "one token twice"],
)
def test_what_must_not_be_is_refused_by_the_tables(engine: Engine, statement: str) -> None:
    with engine.begin() as connection, pytest.raises(IntegrityError):
        connection.execute(text(statement))


def test_a_node_needs_no_more_than_name_and_incarnation(engine: Engine) -> None:
    with engine.begin() as connection:
        for name in ("b", "a"):
            connection.execute(
                text("INSERT INTO sync_node (name, incarnation) SELECT :name, incarnation FROM sync_cluster"),
                {"name": name},
            )
        nodes = connection.execute(text("SELECT name, state, weight, can_lead FROM sync_node ORDER BY ordinal"))
        assert nodes.all() == [("b", "joining", 1, True), ("a", "joining", 1, True)]
