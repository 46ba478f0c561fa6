from __future__ import annotations

import datetime
import enum
import json
import os
import sqlite3
import subprocess
import sys
import uuid
from collections.abc import Iterator
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobsync_orm.exceptions import ConfigurationError, InvalidTaskId, JobsyncError, UnstableTaskId
from jobsync_orm.hashing import (
    HASH_FUNCTIONS,
    hasher,
    register_sqlite,
    task_key,
    task_to_token,
    token_function_ddl,
)
from tests.golden import IDS, TOKENS

CASES = [(name, total) for name in TOKENS for total in TOKENS[name]]


@pytest.mark.parametrize(("hash_function", "total"), CASES)
def test_tokens_are_those_of_the_original(hash_function: str, total: int) -> None:
    token = hasher(total, hash_function)
    expected = TOKENS[hash_function][total]
    assert [token(task_id) for task_id in IDS] == expected
    assert [task_to_token(task_id, total, hash_function) for task_id in IDS] == expected
    # The text of an id is the same task.
    assert [token(task_key(task_id)) for task_id in IDS] == expected


@pytest.fixture
def connection() -> Iterator[sqlite3.Connection]:
    connection = sqlite3.connect(":memory:")
    yield connection
    connection.close()


@pytest.mark.parametrize(("hash_function", "total"), CASES)
def test_sqlite_has_the_same_tokens(connection: sqlite3.Connection, hash_function: str, total: int) -> None:
    register_sqlite(connection, "token_of", total, hash_function)
    found = [connection.execute("SELECT token_of(?)", [task_key(task_id)]).fetchone()[0] for task_id in IDS]
    assert found == TOKENS[hash_function][total]
    assert connection.execute("SELECT token_of(7), token_of(NULL)").fetchone() == (
        task_to_token(7, total, hash_function),
        None,
    )


def test_sqlite_may_use_it_in_an_index_because_it_is_deterministic(connection: sqlite3.Connection) -> None:
    register_sqlite(connection, "token_of", 100)
    connection.execute("CREATE TABLE item (key TEXT)")
    connection.execute("CREATE INDEX item_token ON item (token_of(key))")
    connection.execute("INSERT INTO item VALUES ('a')")
    assert connection.execute("SELECT key FROM item WHERE token_of(key) = ?", [task_to_token("a", 100)]).fetchall() == [
        ("a",)
    ]


def test_double_sha256_is_the_default() -> None:
    assert task_to_token("task-1", 10_000) == task_to_token("task-1", 10_000, "double_sha256")
    assert hasher(10_000)("task-1") == task_to_token("task-1", 10_000, "double_sha256")
    assert token_function_ddl("f", 10_000) == token_function_ddl("f", 10_000, "double_sha256")
    assert set(HASH_FUNCTIONS) == {"md5", "sha256", "double_sha256"}


class Number(enum.IntEnum):
    SEVEN = 7


class Word(enum.StrEnum):
    SEVEN = "7"


class Loud(str):
    def __str__(self) -> str:
        return self.upper()


class Quiet(str):
    __slots__ = ()


class Color(str, enum.Enum):  # noqa: UP042
    RED = "red"


class Noon(datetime.datetime):
    pass


class Plain:
    pass


@pytest.mark.parametrize(
    ("task_id", "text"),
    [
        (7, "7"),
        (-(10**30), "-1000000000000000000000000000000"),
        (True, "True"),
        (None, "None"),
        ("", ""),
        (" é\U0001f600\n", " é\U0001f600\n"),
        (uuid.UUID(int=7), "00000000-0000-0000-0000-000000000007"),
        (datetime.date(2024, 2, 29), "2024-02-29"),
        (datetime.datetime(2024, 2, 29, 12, tzinfo=datetime.UTC), "2024-02-29 12:00:00+00:00"),
        (Decimal("1.50"), "1.50"),
        (Number.SEVEN, "7"),
        (Word.SEVEN, "7"),
        (Quiet("a"), "a"),
        (Noon(2024, 2, 29, 12), "2024-02-29 12:00:00"),
    ],
)
def test_text_of_an_id(task_id: object, text: str) -> None:
    assert task_key(task_id) == text == str(task_id)
    assert type(task_key(task_id)) is str
    for name in HASH_FUNCTIONS:
        assert hasher(10_000, name)(task_id) == hasher(10_000, name)(text) == task_to_token(task_id, 10_000, name)


CALLS = [
    task_key,
    lambda task_id: task_to_token(task_id, 10_000),
    hasher(10_000, "md5"),
    hasher(10_000, "sha256"),
    hasher(10_000, "double_sha256"),
]


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(
    "task_id",
    [
        1.5,
        1e16,
        float("nan"),
        b"a",
        bytearray(b"a"),
        ("a", 1),
        ["a"],
        {"a": 1},
        {"a"},
        frozenset("a"),
        Plain(),
        Plain,
        Fraction(1, 2),
        1j,
        Loud("a"),
        Color.RED,
        datetime.timedelta(1),
    ],
    ids=lambda value: type(value).__name__,
)
def test_ids_without_a_stable_text_are_refused(call, task_id: object) -> None:
    with pytest.raises(UnstableTaskId) as caught:
        call(task_id)
    assert isinstance(caught.value, TypeError)
    assert isinstance(caught.value, JobsyncError)
    message = str(caught.value)
    assert type(task_id).__qualname__ in message
    assert "pass str(...) of it, or an int, str or UUID" in message


def test_the_message_shows_the_value_but_not_all_of_it() -> None:
    with pytest.raises(UnstableTaskId, match=r"task id \(1, 'two'\) is of type builtins\.tuple"):
        task_key((1, "two"))
    with pytest.raises(UnstableTaskId) as caught:
        task_key(["x" * 10_000] * 1000)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(
    ("task_id", "message"),
    [
        ("a\0b", r"task id 'a\\x00b' has a NUL character, which PostgreSQL cannot store"),
        ("\0", "NUL character"),
        ("é\0", "NUL character"),
        ("ab\udc80", r"task id 'ab\\udc80' has a lone surrogate at position 2"),
        (Quiet("\ud800"), "lone surrogate at position 0"),
        (10**5000, "task id of type int is too long: .*4300 digits"),
    ],
    ids=["nul", "only nul", "nul after é", "surrogate", "subclass", "huge"],
)
def test_ids_that_postgresql_cannot_store_are_refused(call, task_id: object, message: str) -> None:
    with pytest.raises(InvalidTaskId, match=message) as caught:
        call(task_id)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize("total", [0, -1, 2**31, 1.5, "7", True, None])
def test_a_total_out_of_range_is_refused(total: object) -> None:
    for call in (hasher, lambda n: task_to_token("a", n), lambda n: token_function_ddl("f", n)):
        with pytest.raises(
            ConfigurationError, match=f"total_tokens={total!r} must be a whole number from 1 to 2147483647"
        ):
            call(total)  # type: ignore[operator]


def test_an_unknown_hash_function_is_refused() -> None:
    for call in (hasher, lambda n, name: task_to_token("a", n, name), lambda n, name: token_function_ddl("f", n, name)):
        with pytest.raises(ConfigurationError, match="hash_function='sha1' is none of double_sha256, md5, sha256"):
            call(7, "sha1")  # type: ignore[operator]


@given(st.one_of(st.text(), st.integers(), st.uuids(), st.dates(), st.none()), st.integers(1, 2**31 - 1))
def test_a_token_is_in_range_and_the_same_by_each_way(task_id: object, total: int) -> None:
    for name in HASH_FUNCTIONS:
        try:
            token = task_to_token(task_id, total, name)
        except InvalidTaskId:
            assert isinstance(task_id, str)
            assert "\0" in task_id
            return
        assert 0 <= token < total
        assert hasher(total, name)(task_id) == token == hasher(total, name)(str(task_id))


def test_every_process_has_the_same_tokens() -> None:
    program = (
        "import json, datetime, uuid, decimal\n"
        "from jobsync_orm.hashing import HASH_FUNCTIONS, hasher\n"
        "ids = ['a', 7, uuid.UUID(int=7), None, True, datetime.date(2024, 2, 29), decimal.Decimal('1.50')]\n"
        "print(json.dumps([[hasher(10_000, name)(i) for i in ids] for name in sorted(HASH_FUNCTIONS)]))\n"
    )
    root = Path(__file__).parents[2]
    found = {
        subprocess.run(
            [sys.executable, "-c", program],
            env=os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": str(root)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("0", "1", "4242")
    }
    assert len(found) == 1
    ids = ["a", 7, uuid.UUID(int=7), None, True, datetime.date(2024, 2, 29), Decimal("1.50")]
    assert json.loads(found.pop()) == [[hasher(10_000, name)(i) for i in ids] for name in sorted(HASH_FUNCTIONS)]
