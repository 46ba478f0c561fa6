"""migrate.check: each fault by itself, in words that name it and its remedy."""

from __future__ import annotations

import pytest
from sqlalchemy import Engine, text

from jobsync_orm import migrate
from jobsync_orm.migrate.autogenerate import TABLES
from tests.migration.conftest import Role


def run(engine: Engine, *statements: str) -> None:
    with engine.begin() as connection:
        for statement in statements:
            connection.execute(text(statement))


def test_all_is_well_after_an_upgrade(engine: Engine) -> None:
    assert migrate.check(engine) == []
    assert migrate.check(engine, total_tokens=10_000, hash_function="double_sha256") == []


def test_an_empty_database(empty: Engine) -> None:
    assert migrate.check(empty) == ["there are no tables sync_... on the search_path: run `jobsync-orm db upgrade`"]
    assert migrate.check(empty, appname="x_", schema="s p") == [
        "there is no schema 's p': run `jobsync-orm db upgrade --appname x_ --schema 's p'`"
    ]
    run(empty, 'CREATE SCHEMA "s p"')
    assert migrate.check(empty, appname="x_", schema="s p") == [
        "there are no tables x_... in schema 's p': run `jobsync-orm db upgrade --appname x_ --schema 's p'`"
    ]


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        ("DROP TABLE sync_claim", 'table "sync_claim" is missing: restore it, or downgrade'),
        ("DROP TABLE sync_alembic_version", 'table "sync_alembic_version" is missing: restore it, or downgrade'),
        ("UPDATE sync_alembic_version SET version_num = '9999'", "at revision 9999, which this version of"),
        ("DELETE FROM sync_alembic_version", '"sync_alembic_version" is empty'),
        ("DELETE FROM sync_cluster", '"sync_cluster" has no row: restore it, or downgrade'),
        ("DELETE FROM sync_token WHERE token_id = 17", "has 9999 rows from 0 to 9999 instead of 10000 from 0 to 9999"),
        ("UPDATE sync_token SET token_id = 10000 WHERE token_id = 0", "has 10000 rows from 1 to 10000 instead of"),
        ("DROP FUNCTION sync_hold", 'function "sync_hold"(int[], text, bigint) is missing: restore it, or downgrade'),
        ("DROP FUNCTION sync_token_of", 'function "sync_token_of"(text) is missing: restore it, or downgrade'),
        (
            "CREATE OR REPLACE FUNCTION sync_token_of(text) RETURNS int LANGUAGE sql AS 'SELECT 3'",
            "function \"sync_token_of\" gives token 3 for '0', but double_sha256 over 10000 tokens gives",
        ),
        ("UPDATE sync_cluster SET hash_function = 'md5'", "but md5 over 10000 tokens gives"),
        (
            "ALTER TABLE sync_node ALTER ordinal DROP IDENTITY",
            'sequence "sync_node_ordinal_seq" is missing: restore it, or downgrade',
        ),
    ],
)
def test_one_fault_is_one_problem(engine: Engine, fault: str, expected: str) -> None:
    run(engine, fault)
    (problem,) = migrate.check(engine)
    assert expected in problem


@pytest.mark.parametrize("revision", ["0001", "0002"])
def test_tables_of_an_older_revision(engine: Engine, revision: str) -> None:
    migrate.downgrade(engine, revision=revision)
    assert migrate.check(engine) == [
        f"the tables are at revision {revision}, behind {migrate.HEAD}: run `jobsync-orm db upgrade`"
    ]
    migrate.upgrade(engine)
    assert migrate.check(engine) == []


def test_other_settings_than_the_clusters(engine: Engine) -> None:
    assert migrate.check(engine, total_tokens=5, hash_function="md5") == [
        "the cluster was created with total_tokens=10000, not 5: set total_tokens to 10000, or use another appname",
        "the cluster was created with hash_function='double_sha256', not 'md5': set hash_function to "
        "'double_sha256', or use another appname",
    ]


def test_several_faults_are_all_reported(engine: Engine) -> None:
    run(engine, "DROP TABLE sync_claim", "DROP TABLE sync_audit", "DELETE FROM sync_token WHERE token_id = 3")
    assert len(migrate.check(engine, total_tokens=9)) == 4


def test_a_role_without_rights_is_told_what_to_grant_and_then_has_them(engine: Engine, role: Role) -> None:
    run(engine, "REVOKE ALL ON FUNCTION sync_token_of FROM PUBLIC")
    found = migrate.check(role.engine)
    # The version, and three sequences.
    assert len(found) == len(TABLES) + 1 + 3
    everything = f'GRANT SELECT, INSERT, UPDATE, DELETE ON "sync_node" TO "{role.name}"'
    assert any(problem.endswith(everything) for problem in found)
    # The function is looked at once the cluster's row can be read.
    for _ in range(2):
        run(engine, *(problem.split(": ", 1)[1] for problem in migrate.check(role.engine)))
    assert migrate.check(role.engine) == []


@pytest.mark.parametrize("right", ["SELECT", "INSERT", "UPDATE", "DELETE"])
def test_one_right_missing_is_named(engine: Engine, role: Role, right: str) -> None:
    run(
        engine,
        f"GRANT ALL ON ALL TABLES IN SCHEMA public TO {role.name}",
        f"GRANT ALL ON ALL SEQUENCES IN SCHEMA public TO {role.name}",
        f"REVOKE {right} ON sync_node FROM {role.name}",
    )
    assert migrate.check(role.engine) == [
        f'role \'{role.name}\' lacks {right} on "sync_node": GRANT {right} ON "sync_node" TO "{role.name}"'
    ]


def test_a_schema_that_may_not_be_used(engine: Engine, role: Role) -> None:
    migrate.upgrade(engine, schema="closed", total_tokens=3)
    assert migrate.check(role.engine, schema="closed") == [
        f'role \'{role.name}\' lacks USAGE on SCHEMA "closed": GRANT USAGE ON SCHEMA "closed" TO "{role.name}"'
    ]
