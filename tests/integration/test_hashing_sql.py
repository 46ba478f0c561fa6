"""The function in the database and the one in Python are the same function."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import psycopg
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import URL

from jobsync_orm.hashing import HASH_FUNCTIONS, hasher, task_key, token_function_ddl
from tests.conftest import Server, dsn
from tests.golden import IDS, TOKENS

CASES = [(name, total) for name in TOKENS for total in TOKENS[name]]


@pytest.fixture(scope="module")
def scratch(server: Server) -> Iterator[psycopg.Connection]:
    """A connection to an empty database that the tests of this module share."""
    url = server.create_database()
    with server.connect(url.database) as connection:
        yield connection
    server.drop_database(url)


def tokens(connection: psycopg.Connection, texts: list[str], function: str = "token_of") -> list[int]:
    rows = connection.execute(
        f"SELECT {function}(key) FROM unnest(%s::text[]) WITH ORDINALITY AS one(key, n) ORDER BY n", [texts]
    )
    return [token for (token,) in rows]


@pytest.mark.parametrize(("hash_function", "total"), CASES)
def test_tokens_are_those_of_the_original(scratch: psycopg.Connection, hash_function: str, total: int) -> None:
    scratch.execute(token_function_ddl("token_of", total, hash_function))
    assert tokens(scratch, [task_key(task_id) for task_id in IDS]) == TOKENS[hash_function][total]


storable = st.text(st.characters(codec="utf-8", exclude_characters="\0"))


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    texts=st.lists(storable, min_size=50, max_size=200),
    total=st.one_of(st.integers(1, 100_000), st.integers(2**31 - 1000, 2**31 - 1)),
    hash_function=st.sampled_from(sorted(HASH_FUNCTIONS)),
)
def test_python_and_sql_agree_on_any_text(
    scratch: psycopg.Connection, texts: list[str], total: int, hash_function: str
) -> None:
    scratch.execute(token_function_ddl("token_of", total, hash_function))
    assert tokens(scratch, texts) == list(map(hasher(total, hash_function), texts))


def test_the_text_of_an_integer_or_uuid_column_is_the_text_of_the_id(scratch: psycopg.Connection) -> None:
    scratch.execute(token_function_ddl("token_of", 10_000))
    token = hasher(10_000)
    key = uuid.UUID(int=2**100 + 7)
    row = scratch.execute(
        "SELECT token_of(%s::bigint::text), token_of(%s::smallint::text), token_of(%s::uuid::text)", [2**40, -7, key]
    ).fetchone()
    assert row == (token(2**40), token(-7), token(key))


def test_null_has_no_token(scratch: psycopg.Connection) -> None:
    scratch.execute(token_function_ddl("token_of", 10_000))
    assert scratch.execute("SELECT token_of(NULL)").fetchone() == (None,)


def test_it_can_be_replaced_in_place_and_is_declared_for_indexes_and_parallel_plans(
    scratch: psycopg.Connection,
) -> None:
    for name in HASH_FUNCTIONS:
        scratch.execute(token_function_ddl("token_of", 10_000, name))
    row = scratch.execute(
        "SELECT provolatile, proisstrict, proparallel, prorettype::regtype::text, proargtypes::regtype[]::text, "
        "proconfig FROM pg_proc WHERE proname = 'token_of'"
    ).fetchall()
    assert row == [("i", True, "s", "integer", "[0:0]={text}", None)]


HOSTILE = """
CREATE SCHEMA hostile;
CREATE FUNCTION hostile.sha256(bytea) RETURNS bytea LANGUAGE sql AS $$ SELECT 'x'::bytea $$;
CREATE FUNCTION hostile.convert_to(text, name) RETURNS bytea LANGUAGE sql AS $$ SELECT 'x'::bytea $$;
CREATE FUNCTION hostile.md5(bytea) RETURNS text LANGUAGE sql AS $$ SELECT repeat('0', 32) $$;
CREATE FUNCTION hostile.substr(bytea, int, int) RETURNS bytea LANGUAGE sql AS $$ SELECT 'x'::bytea $$;
CREATE FUNCTION hostile.substr(text, int, int) RETURNS text LANGUAGE sql AS $$ SELECT repeat('0', 16) $$;
CREATE FUNCTION hostile.encode(bytea, text) RETURNS text LANGUAGE sql AS $$ SELECT repeat('0', 16) $$;
CREATE FUNCTION hostile.textcat(text, text) RETURNS text LANGUAGE sql AS $$ SELECT 'x0' $$;
CREATE FUNCTION hostile.mod(bigint, bigint) RETURNS bigint LANGUAGE sql AS $$ SELECT 0::bigint $$;
CREATE FUNCTION hostile.int8pl(bigint, bigint) RETURNS bigint LANGUAGE sql AS $$ SELECT 0::bigint $$;
CREATE FUNCTION hostile.int4(bigint) RETURNS int LANGUAGE sql AS $$ SELECT 0 $$;
CREATE DOMAIN hostile.text AS pg_catalog.int4;
CREATE DOMAIN hostile.int8 AS pg_catalog.text;
CREATE DOMAIN hostile.bit AS pg_catalog.text;
"""


@pytest.mark.parametrize("hash_function", sorted(HASH_FUNCTIONS))
def test_a_hostile_search_path_changes_nothing(server: Server, empty_database: URL, hash_function: str) -> None:
    with psycopg.connect(dsn(empty_database), autocommit=True) as connection:
        connection.execute(HOSTILE)
        connection.execute("SET search_path = hostile, pg_catalog")
        connection.execute(token_function_ddl("public.token_of", 10_000, hash_function))
        expected = hasher(10_000, hash_function)("task-1")
        for path in ("hostile, pg_catalog", "''", "public"):
            connection.execute(f"SET search_path = {path}")
            assert connection.execute("SELECT public.token_of('task-1')").fetchone() == (expected,)


@pytest.mark.parametrize("hash_function", sorted(HASH_FUNCTIONS))
def test_a_stored_generated_column_survives_dump_and_restore(
    server: Server, scratch: psycopg.Connection, empty_database: URL, hash_function: str
) -> None:
    scratch.execute('DROP SCHEMA IF EXISTS "Odd name" CASCADE; CREATE SCHEMA "Odd name"')
    scratch.execute(token_function_ddl('"Odd name"."token of"', 10_000, hash_function))
    table = (
        'CREATE TABLE "Odd name".item (key text PRIMARY KEY, '
        'token_id int GENERATED ALWAYS AS ("Odd name"."token of"(key)) STORED NOT NULL)'
    )
    scratch.execute(table)
    scratch.execute("INSERT INTO \"Odd name\".item SELECT 'task-' || n FROM generate_series(1, 50) n")
    scratch.execute("UPDATE \"Odd name\".item SET key = 'renamed' WHERE key = 'task-1'")
    token = hasher(10_000, hash_function)
    rows = dict(scratch.execute('SELECT key, token_id FROM "Odd name".item').fetchall())
    assert rows == {key: token(key) for key in ["renamed", *(f"task-{n}" for n in range(2, 51))]}

    # What a restore does: the definition as the server prints it, an empty search_path, the data again.
    (definition,) = scratch.execute('SELECT pg_get_functiondef(\'"Odd name"."token of"\'::regproc)').fetchone() or ("",)
    with psycopg.connect(dsn(empty_database), autocommit=True) as restored:
        restored.execute("SELECT pg_catalog.set_config('search_path', '', false)")
        restored.execute('CREATE SCHEMA "Odd name"')
        restored.execute(definition)
        restored.execute(table)
        with restored.cursor().copy('COPY "Odd name".item (key) FROM STDIN') as copy:
            for key in rows:
                copy.write_row((key,))
        assert dict(restored.execute('SELECT key, token_id FROM "Odd name".item').fetchall()) == rows


@pytest.mark.parametrize("hash_function", sorted(HASH_FUNCTIONS))
def test_a_database_of_another_encoding_has_the_same_tokens(server: Server, hash_function: str) -> None:
    name = f"jobsync_test_{uuid.uuid4().hex[:12]}"
    with server.connect() as admin:
        admin.execute(f"CREATE DATABASE {name} TEMPLATE template0 ENCODING 'LATIN1' LC_COLLATE 'C' LC_CTYPE 'C'")
    try:
        with server.connect(name) as connection:
            connection.execute("SET client_encoding = 'UTF8'")
            connection.execute(token_function_ddl("token_of", 10_000, hash_function))
            texts = ["task-1", "é", "naïve ß", "\\x41", ""]
            assert tokens(connection, texts) == list(map(hasher(10_000, hash_function), texts))
    finally:
        server.drop_database(server.url.set(database=name))
