"""Which payloads can be kept, and what is said of others."""

from __future__ import annotations

import datetime
import json
from collections import OrderedDict
from enum import IntEnum, StrEnum
from types import MappingProxyType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jobsync_orm.exceptions import InvalidPayload
from jobsync_orm.queue.payload import json_text, payload_text

MOST = 1_000_000

TEXT = st.text(st.characters(blacklist_categories=("Cs",), blacklist_characters="\0"), max_size=10)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=10,
)


class Size(IntEnum):
    BIG = 3


class Colour(StrEnum):
    RED = "red"


@pytest.mark.parametrize(
    ("payload", "text"),
    [
        ({}, "{}"),
        ({"order_id": 7, "amount": "9.99"}, '{"order_id":7,"amount":"9.99"}'),
        ({"é": ["\n", (1, None, True)]}, '{"é":["\\n",[1,null,true]]}'),
        ({"size": Size.BIG, Colour.RED: Colour.RED}, '{"size":3,"red":"red"}'),
        (OrderedDict(b=1, a=2), '{"b":1,"a":2}'),
        (MappingProxyType({"a": 1}), '{"a":1}'),
        ({"a": 1e22}, '{"a": 10000000000000000000000.0}'),
        ({"a": "1e+22"}, '{"a": "1e+22"}'),
        ({"a": "\\u0000"}, '{"a": "\\\\u0000"}'),
    ],
)
def test_text(payload: Any, text: str) -> None:
    assert payload_text(payload, MOST) == text


def nested(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return {"a": value}


@pytest.mark.parametrize(
    ("payload", "message"),
    [
        ([1], r"payload is \[1\] \(list\): give a dict"),
        ("text", "payload is 'text'"),
        ({"items": [1, 2, 3, datetime.datetime(2026, 1, 1)]}, r"payload\['items'\]\[3\] is datetime.*\(datetime\)"),
        ({"a": {"b": {1, 2}}}, r"payload\['a'\]\['b'\] is \{1, 2\} \(set\)"),
        ({"a": float("nan")}, r"payload\['a'\] is nan"),
        ({"a": [-float("inf")]}, r"payload\['a'\]\[0\] is -inf"),
        ({"a": "x\0y"}, r"payload\['a'\] is .*NUL"),
        ({"a\0": 1}, r"a key of payload is .*NUL"),
        ({"a": "\ud800"}, r"payload\['a'\] is .*surrogate"),
        ({"\udfff": 1}, r"a key of payload is .*surrogate"),
        ({1: "one"}, "payload has the key 1, which is no text"),
        ({"a": [{None: 1}]}, r"payload\['a'\]\[0\] has the key None"),
        ({"a": 10**5000}, r"payload\['a'\] is a number of too many digits"),
        (nested(300), "200 levels"),
        (nested(100_000), "200 levels"),
        ({"a": "x" * MOST}, r"1,000,008 bytes long as JSON, more than max_payload_bytes=1,000,000"),
        ({"a": "é" * (MOST // 2)}, "1,000,008 bytes"),
    ],
    ids=range(17),
)
def test_what_cannot_be_kept(payload: Any, message: str) -> None:
    with pytest.raises(InvalidPayload, match=message):
        payload_text(payload, MOST)


def test_a_payload_that_contains_itself() -> None:
    payload: dict[str, Any] = {}
    payload["self"] = payload
    with pytest.raises(InvalidPayload, match="200 levels"):
        payload_text(payload, MOST)


def test_the_longest_payload() -> None:
    assert len(payload_text({"a": "x" * 92}, 100)) == 100
    with pytest.raises(InvalidPayload, match="101 bytes"):
        payload_text({"a": "x" * 93}, 100)


def test_a_result_is_called_so() -> None:
    with pytest.raises(InvalidPayload, match=r"result\[0\] is nan"):
        json_text([float("nan")], "result", MOST)


@settings(max_examples=50, deadline=None)
@given(st.dictionaries(TEXT, JSON, max_size=4))
def test_what_can_be_kept_is_read_as_it_was(payload: dict[str, Any]) -> None:
    assert json.loads(payload_text(payload, MOST)) == payload
