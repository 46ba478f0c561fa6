"""Payloads and results: which values can be kept, and as which text they are sent.

A payload is a JSON object: what comes back from the database is equal to what was given, except that a tuple comes back
as a list. So what the ``json`` module would change or PostgreSQL refuse is an
:class:`~jobsync_orm.exceptions.InvalidPayload` before anything is written: a key that is no text (``json`` makes
``"1"`` of ``1``), NaN, an infinity, NUL, a lone surrogate, more than 200 levels.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from jobsync_orm.exceptions import InvalidPayload
from jobsync_orm.jsonb import DEEPEST, exact_text
from jobsync_orm.queue.options import brief

__all__ = ["json_text", "payload_text"]

_encode: Final = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode

_SCALARS: Final = frozenset({str, int, float, bool, type(None)})


def payload_text(payload: Any, most_bytes: int) -> str:
    """A payload as JSON.

    Parameters
    ----------
    payload : Mapping
        With text keys and JSON values.
    most_bytes : int
        How long the text may be, in UTF-8.

    Raises
    ------
    InvalidPayload
        It is something else, or too long. The message says where in it the value is that cannot be kept.
    """
    if type(payload) is not dict:
        if not isinstance(payload, Mapping):
            raise InvalidPayload(
                f"payload is {brief(payload)} ({type(payload).__name__}): give a dict, whose entries are the handler's "
                'arguments, as in {"order_id": 7}'
            )
        payload = dict(payload)
    return json_text(payload, "payload", most_bytes)


def json_text(value: Any, name: str, most_bytes: int) -> str:
    """``value`` as JSON that comes back equal.

    Parameters
    ----------
    value : Any
        JSON as Python has it.
    name : str
        What to call it in an error: ``"payload"`` or ``"result"``.
    most_bytes : int
        How long the text may be, in UTF-8.

    Raises
    ------
    InvalidPayload
        It cannot be kept, or is too long.
    """
    # What is wrong, and where, is looked for only if something may be: the common case costs one call of the encoder.
    try:
        text = _encode(value)
    except (TypeError, ValueError, RecursionError):
        text = exact_text(value, name, InvalidPayload)
    else:
        # An escaped NUL, or text that looks like one; a float that jsonb would give back as an int, or text like that.
        if "\\u0000" in text or "e+" in text or not _as_it_is(value, 0):
            text = exact_text(value, name, InvalidPayload)
    try:
        size = len(text) if text.isascii() else len(text.encode())
    except UnicodeEncodeError:  # a lone surrogate
        text = exact_text(value, name, InvalidPayload)
        size = len(text.encode())
    if size > most_bytes:
        raise InvalidPayload(
            f"{name} is {size:,} bytes long as JSON, more than max_payload_bytes={most_bytes:,}: keep the data in a "
            f"table or a file, and say in the {name} where"
        )
    return text


def _as_it_is(value: Any, depth: int) -> bool:
    """Whether all keys are text, and no value is too deep."""
    kind = type(value)
    if kind in _SCALARS:
        return True
    if depth > DEEPEST:
        return False
    if isinstance(value, dict):
        for key, part in value.items():
            if type(key) is not str and not isinstance(key, str):
                return False
            if type(part) not in _SCALARS and not _as_it_is(part, depth + 1):
                return False
    elif isinstance(value, list | tuple):
        for part in value:
            if type(part) not in _SCALARS and not _as_it_is(part, depth + 1):
                return False
    return True
