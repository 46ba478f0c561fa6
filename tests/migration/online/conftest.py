"""A table that exists, without token_id, and what to look at afterwards."""

from __future__ import annotations

from collections.abc import Iterator

import psycopg
import pytest
from sqlalchemy import Engine, create_engine, text

from tests.conftest import Server, dsn

ITEM = """
CREATE TABLE item (id bigint PRIMARY KEY, sku varchar(20) NOT NULL, email text, done boolean NOT NULL DEFAULT false);
INSERT INTO item (id, sku, email) SELECT n, 'k' || n, 'A' || n FROM generate_series(1, 250) AS n
"""


@pytest.fixture
def shop(engine: Engine) -> Engine:
    """A database with 250 items."""
    with engine.begin() as connection:
        connection.execute(text(ITEM))
    return engine


@pytest.fixture(scope="module")
def unchanged(server: Server, template: str) -> Iterator[Engine]:
    """The same, for tests that change nothing."""
    url = server.create_database(template)
    engine = create_engine(url)
    with engine.begin() as connection:
        connection.execute(text(ITEM))
    yield engine
    engine.dispose()
    server.drop_database(url)


@pytest.fixture
def other(shop: Engine) -> Iterator[psycopg.Connection]:
    """A session of somebody else."""
    with psycopg.connect(dsn(shop.url), application_name="other") as connection:
        yield connection


def tokens(engine: Engine, table: str = "item", key: str = "sku::text") -> tuple[int, int]:
    """How many rows there are, and how many of them have the token of their key."""
    with engine.connect() as connection:
        row = connection.execute(
            text(f"SELECT count(*), count(*) FILTER (WHERE token_id = sync_token_of({key})) FROM {table}")
        ).one()
    return row[0], row[1]


def finished(engine: Engine, table: str = "item") -> bool:
    """Whether the column is NOT NULL and its CHECK validated."""
    with engine.connect() as connection:
        return bool(
            connection.scalar(
                text(
                    "SELECT a.attnotnull AND k.convalidated FROM pg_attribute a JOIN pg_constraint k"
                    " ON k.conrelid = a.attrelid AND k.contype = 'c' AND k.conname LIKE '%token_id%'"
                    " WHERE a.attrelid = CAST(:table AS regclass) AND a.attname = 'token_id'"
                ),
                {"table": table},
            )
        )
