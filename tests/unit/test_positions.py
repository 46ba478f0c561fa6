"""What may be a checkpoint's position."""

from __future__ import annotations

import datetime
import decimal
import json
from enum import IntEnum
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobsync_orm import InvalidPosition
from jobsync_orm.positions import position_text


class Stage(IntEnum):
    READ = 3


@pytest.mark.parametrize(
    ("position", "text"),
    [
        (1, "1"),
        (True, "true"),
        ("é\n", '"é\\n"'),
        ((1, None), "[1, null]"),
        ({"a": {"b": [1.5]}}, '{"a": {"b": [1.5]}}'),
        (Stage.READ, "3"),
        (1e23, "100000000000000000000000.0"),
        (-1e-7, "-0.0000001"),
        (2.0, "2.0"),
        ({}, "{}"),
    ],
)
def test_text(position: Any, text: str) -> None:
    assert position_text(position) == text


def nested(levels: int) -> Any:
    inner: Any = 1
    for _ in range(levels):
        inner = [inner]
    return inner


CIRCULAR: list[Any] = []
CIRCULAR.append(CIRCULAR)


@pytest.mark.parametrize(
    ("position", "message"),
    [
        (None, "clear_checkpoint"),
        (float("nan"), "position is nan"),
        ({"a": [1, float("-inf")]}, r"position\['a'\]\[1\] is -inf"),
        ({"a": datetime.date(2020, 1, 2)}, r"position\['a'\] is datetime.date\(2020, 1, 2\) \(date\); give JSON"),
        ([decimal.Decimal(1)], r"position\[0\] is Decimal"),
        ({1: 2}, "position has the key 1, which is no text"),
        (b"x", "position is b'x'"),
        ({1, 2}, r"position is \{1, 2\} \(set\)"),
        ("a\0", "NUL"),
        ({"a\0": 1}, "a key of position is .* NUL"),
        ("\ud800", "lone surrogate"),
        ([10**5000], "too many digits"),
        (nested(201), "more than 200 levels"),
        (CIRCULAR, "more than 200 levels"),
    ],
)
def test_what_is_refused(position: Any, message: str) -> None:
    with pytest.raises(InvalidPosition, match=message):
        position_text(position)


def test_as_deep_as_it_may_be() -> None:
    assert json.loads(position_text(nested(200))) == nested(200)


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_a_float_stays_the_same_float(value: float) -> None:
    read = json.loads(position_text(value))
    assert type(read) is float
    assert read == value
