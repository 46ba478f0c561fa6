"""Payloads and results as they are shown: values whose name says that they are secret are left out, long text is cut.

That is a courtesy, not a guarantee: a secret under another name is shown. Do not put secrets into payloads; or keep
people out with ``read_auth``.
"""

from __future__ import annotations

import re
from typing import Any

__all__ = ["MASK", "masked"]

MASK = "•••"

SECRET = re.compile(r"(pass(word|wd|phrase)?|token)$|secret|(api|private)_?key|authorization|credential", re.IGNORECASE)

# Characters of a text, elements of a list or an object, and levels that are shown.
TEXT, ELEMENTS, DEPTH = 4_000, 200, 20


def masked(value: Any, depth: int = 0) -> Any:
    """``value``, as JSON gives it, as it may be shown."""
    if isinstance(value, dict | list) and depth >= DEPTH:
        return "…"
    if isinstance(value, dict):
        shown = {
            key: MASK if SECRET.search(key) and item is not None else masked(item, depth + 1)
            for key, item in list(value.items())[:ELEMENTS]
        }
        return {**shown, "…": f"{len(value) - ELEMENTS} more"} if len(value) > ELEMENTS else shown
    if isinstance(value, list):
        shown_items = [masked(item, depth + 1) for item in value[:ELEMENTS]]
        return [*shown_items, f"… {len(value) - ELEMENTS} more"] if len(value) > ELEMENTS else shown_items
    if isinstance(value, str) and len(value) > TEXT:
        return f"{value[:TEXT]}… ({len(value)} characters)"
    return value
