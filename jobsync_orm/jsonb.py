"""JSON text that PostgreSQL's jsonb gives back as it came, and errors that say where a value is that cannot be kept."""

from __future__ import annotations

import json
import math
import reprlib
from decimal import Decimal
from typing import Any

__all__ = ["DEEPEST", "exact_text"]

# jsonb and json.loads both recurse; each manages this many levels with its default stack.
DEEPEST = 200

_ALLOWED = "give JSON: a dict with text keys, a list, text, an int, a finite float, True or False"


def exact_text(value: Any, name: str, error: type[Exception]) -> str:
    """``value`` as JSON that comes back equal, except that a tuple comes back as a list.

    Parameters
    ----------
    value : Any
        None, or JSON as Python has it.
    name : str
        What to call it in an error.
    error : type
        What to raise.

    Raises
    ------
    error
        Something in it is no JSON (NaN, an infinity, a date, a key that is no text) or cannot be stored (NUL, a lone
        surrogate, a number of more than 4,300 digits, more than 200 levels). The message says where.
    """
    return _Text(name, error).of(value, name, 0)


class _Text:
    def __init__(self, name: str, error: type[Exception]) -> None:
        self._name = name
        self._error = error

    def of(self, value: Any, place: str, depth: int) -> str:
        if depth > DEEPEST:
            raise self._error(f"{self._name} is nested more than {DEEPEST} levels deep")
        if value is None or value is True or value is False:
            return json.dumps(value)
        if isinstance(value, str):
            return self._string(value, place)
        if isinstance(value, int):
            try:
                return int.__repr__(value)
            except ValueError:  # Python could not read it again either
                raise self._error(f"{place} is a number of too many digits") from None
        if isinstance(value, float):
            return self._number(value, place)
        if isinstance(value, dict):
            parts = []
            for key, part in value.items():
                if not isinstance(key, str):
                    raise self._error(f"{place} has the key {_brief(key)}, which is no text; {_ALLOWED}")
                name = self._string(key, f"a key of {place}")
                parts.append(f"{name}: {self.of(part, f'{place}[{key!r}]', depth + 1)}")
            return "{" + ", ".join(parts) + "}"
        if isinstance(value, list | tuple):
            return "[" + ", ".join(self.of(part, f"{place}[{i}]", depth + 1) for i, part in enumerate(value)) + "]"
        raise self._error(f"{place} is {_brief(value)} ({type(value).__name__}); {_ALLOWED}")

    def _string(self, value: str, place: str) -> str:
        if "\0" in value:
            raise self._error(f"{place} is {_brief(value)}: PostgreSQL cannot store NUL")
        try:
            value.encode()
        except UnicodeEncodeError:
            raise self._error(f"{place} is {_brief(value)}: PostgreSQL cannot store a lone surrogate") from None
        return json.dumps(str.__str__(value), ensure_ascii=False)

    def _number(self, value: float, place: str) -> str:
        if not math.isfinite(value):
            raise self._error(f"{place} is {float.__repr__(value)}, which is no JSON; {_ALLOWED}")
        # jsonb writes numbers out: without a point, 1e+23 would come back as an int, and as another number.
        text = f"{Decimal(float.__repr__(value)):f}"
        return text if "." in text else f"{text}.0"


def _brief(value: object) -> str:
    return reprlib.repr(value)[:80]
