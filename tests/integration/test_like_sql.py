"""The server's own LIKE is the reference."""

from __future__ import annotations

import itertools

import psycopg
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jobsync_orm.exceptions import InvalidPattern
from jobsync_orm.like import matches, validate
from tests.conftest import Server


@pytest.fixture(scope="module")
def connection(server: Server):
    with server.connect() as connection:
        yield connection


def like(connection: psycopg.Connection, pairs: list[tuple[str, str]]) -> list[bool]:
    rows = connection.execute(
        "SELECT name LIKE pattern FROM unnest(%s::text[], %s::text[]) WITH ORDINALITY AS pair(name, pattern, n) "
        "ORDER BY n",
        [[name for name, _ in pairs], [pattern for _, pattern in pairs]],
    )
    return [found for (found,) in rows]


names = st.text(alphabet="aA%_\\\né\U0001f600", max_size=8)
patterns = st.lists(
    st.sampled_from(["%", "_", "a", "A", "\n", "é", "\U0001f600", r"\%", r"\_", r"\\", r"\a", r"\é"]), max_size=8
).map("".join)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(names, min_size=1, max_size=12), st.lists(patterns, min_size=1, max_size=12))
def test_as_the_server_says(connection: psycopg.Connection, some_names: list[str], some_patterns: list[str]) -> None:
    pairs = list(itertools.product(some_names, some_patterns))
    assert [matches(*pair) for pair in pairs] == like(connection, pairs)


def test_every_short_pattern_on_every_short_name(connection: psycopg.Connection) -> None:
    short = ["".join(letters) for length in range(4) for letters in itertools.product("ab_", repeat=length)]
    short_patterns = ["".join(parts) for n in range(4) for parts in itertools.product(["a", "%", "_", r"\_"], repeat=n)]
    pairs = list(itertools.product(short, short_patterns))
    found = like(connection, pairs)
    assert [matches(*pair) for pair in pairs] == found
    assert 0 < sum(found) < len(found)


def test_the_server_refuses_a_lone_backslash_too(connection: psycopg.Connection) -> None:
    with pytest.raises(psycopg.errors.InvalidEscapeSequence, match="must not end with escape character"):
        like(connection, [("ab", "a\\")])
    with pytest.raises(InvalidPattern):
        validate("a\\")
