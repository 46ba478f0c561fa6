"""What plain values become of answers."""

from __future__ import annotations

import datetime
import enum
import json
import uuid
from dataclasses import dataclass

import pytest

from jobsync_orm.operate import as_json


class Colour(enum.Enum):
    RED = "red"


class Level(enum.IntEnum):
    HIGH = 3


@dataclass(frozen=True, slots=True)
class Inner:
    at: datetime.datetime
    wait_sec: float | None


@dataclass(frozen=True, slots=True)
class Outer:
    colours: dict[Colour, int]
    names: frozenset[str]
    inner: tuple[Inner, ...]


def test_each_kind_of_value() -> None:
    at = datetime.datetime(2026, 1, 2, 3, 4, 5, tzinfo=datetime.timezone(datetime.timedelta(hours=2)))
    value = Outer({Colour.RED: 1}, frozenset({"b", "a"}), (Inner(at, 0.12345678), Inner(at, None)))
    assert json.loads(json.dumps(as_json(value))) == {
        "colours": {"red": 1},
        "names": ["a", "b"],
        "inner": [
            {"at": "2026-01-02T03:04:05+02:00", "wait_sec": 0.123457},
            {"at": "2026-01-02T03:04:05+02:00", "wait_sec": None},
        ],
    }
    assert as_json([Level.HIGH, True, datetime.date(2026, 1, 2), uuid.UUID(int=1)]) == [
        3,
        True,
        "2026-01-02",
        "00000000-0000-0000-0000-000000000001",
    ]
    assert as_json([float("inf"), float("nan")]) == [None, None]


@pytest.mark.parametrize("value", [datetime.datetime(2026, 1, 1), object(), b"x"])
def test_what_has_no_form_is_refused(value: object) -> None:
    with pytest.raises(TypeError):
        as_json(value)
