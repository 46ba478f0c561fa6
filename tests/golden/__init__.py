"""Tokens computed by the published package jobsync 1.3.14, for the same ids in each hash function and total."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable
from datetime import date, datetime
from decimal import Decimal
from pathlib import Path

__all__ = ["IDS", "TOKENS"]

_MAKE: dict[str, Callable[[str], object]] = {
    "int": int,
    "str": str,
    "uuid": uuid.UUID,
    "bool": lambda text: text == "True",
    "none": lambda text: None,
    "date": date.fromisoformat,
    "datetime": datetime.fromisoformat,
    "decimal": Decimal,
}

_data = json.loads(Path(__file__).with_name("hashing.json").read_text(encoding="utf-8"))

IDS: list[object] = [_MAKE[one["type"]](one["text"] * one.get("times", 1)) for one in _data["ids"]]

TOKENS: dict[str, dict[int, list[int]]] = {
    name: {int(total): tokens for total, tokens in by_total.items()} for name, by_total in _data["tokens"].items()
}
