"""The text of a checkpoint's position: JSON that PostgreSQL's jsonb gives back as it came."""

from __future__ import annotations

import json
import math
import reprlib
from decimal import Decimal
from typing import Any

from jobsync_orm.exceptions import InvalidPosition

__all__ = ["position_text"]

# jsonb and json.loads both recurse; each manages this many levels with its default stack.
DEEPEST = 200

_ALLOWED = "give JSON: a dict with text keys, a list, text, an int, a finite float, True or False"


def position_text(position: Any) -> str:
    """``position`` as JSON that comes back equal, except that a tuple comes back as a list.

    Raises
    ------
    InvalidPosition
        It is None, or something in it is no JSON (NaN, an infinity, a date, a key that is no text) or cannot be stored
        (NUL, a lone surrogate, a number of more than 4,300 digits, more than 200 levels). The message says where.
    """
    if position is None:
        raise InvalidPosition("a position of None would read as no checkpoint: use clear_checkpoint()")
    return _text(position, "position", 0)


def _text(value: Any, place: str, depth: int) -> str:
    if depth > DEEPEST:
        raise InvalidPosition(f"position is nested more than {DEEPEST} levels deep")
    if value is None or value is True or value is False:
        return json.dumps(value)
    if isinstance(value, str):
        return _string(value, place)
    if isinstance(value, int):
        try:
            return int.__repr__(value)
        except ValueError:  # Python could not read it again either
            raise InvalidPosition(f"{place} is a number of too many digits") from None
    if isinstance(value, float):
        return _number(value, place)
    if isinstance(value, dict):
        parts = []
        for key, part in value.items():
            if not isinstance(key, str):
                raise InvalidPosition(f"{place} has the key {_brief(key)}, which is no text; {_ALLOWED}")
            parts.append(f"{_string(key, f'a key of {place}')}: {_text(part, f'{place}[{key!r}]', depth + 1)}")
        return "{" + ", ".join(parts) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_text(part, f"{place}[{i}]", depth + 1) for i, part in enumerate(value)) + "]"
    raise InvalidPosition(f"{place} is {_brief(value)} ({type(value).__name__}); {_ALLOWED}")


def _string(value: str, place: str) -> str:
    if "\0" in value:
        raise InvalidPosition(f"{place} is {_brief(value)}: PostgreSQL cannot store NUL")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise InvalidPosition(f"{place} is {_brief(value)}: PostgreSQL cannot store a lone surrogate") from None
    return json.dumps(str.__str__(value), ensure_ascii=False)


def _number(value: float, place: str) -> str:
    if not math.isfinite(value):
        raise InvalidPosition(f"{place} is {float.__repr__(value)}, which is no JSON; {_ALLOWED}")
    # jsonb writes numbers out: without a point, 1e+23 would come back as an int, and as another number.
    text = f"{Decimal(float.__repr__(value)):f}"
    return text if "." in text else f"{text}.0"


def _brief(value: object) -> str:
    return reprlib.repr(value)[:80]
