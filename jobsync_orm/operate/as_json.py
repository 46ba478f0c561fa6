"""From the answers of this layer to plain values that ``json`` can write: the one place that decides how."""

from __future__ import annotations

import dataclasses
import datetime
import enum
import math
import uuid
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from typing import Any

__all__ = ["as_json"]

# Digits of a number of seconds: to the microsecond, as the database counts.
DIGITS = 6


def as_json(value: Any) -> Any:
    """``value`` as dicts, lists, text, numbers, booleans and None.

    Dataclasses become objects with their fields' names. Moments are ISO 8601 with their zone. Durations are numbers,
    and their field's name says the unit (``_sec``). A set is sorted. A number that JSON has no word for (NaN, infinity)
    is null.

    Raises
    ------
    TypeError
        A moment without a zone, or a value of another type.
    """
    if value is None or (isinstance(value, bool | int) and not isinstance(value, enum.Enum)):
        return value
    if isinstance(value, enum.Enum):
        return as_json(value.value)
    if isinstance(value, str):
        return str(value)
    if isinstance(value, float):
        return round(value, DIGITS) if math.isfinite(value) else None
    if isinstance(value, datetime.datetime):
        if value.tzinfo is None:
            raise TypeError(f"{value!r} has no time zone")
        return value.isoformat()
    if isinstance(value, datetime.date):
        return value.isoformat()
    if isinstance(value, uuid.UUID):
        return str(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: as_json(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(as_json(key)): as_json(item) for key, item in value.items()}
    if isinstance(value, AbstractSet):
        return sorted(as_json(item) for item in value)
    if isinstance(value, list | tuple):
        return [as_json(item) for item in value]
    raise TypeError(f"{type(value).__name__} has no JSON form here")
