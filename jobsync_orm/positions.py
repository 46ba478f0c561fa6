"""The text of a checkpoint's position: JSON that PostgreSQL's jsonb gives back as it came."""

from __future__ import annotations

from typing import Any

from jobsync_orm.exceptions import InvalidPosition
from jobsync_orm.jsonb import exact_text

__all__ = ["position_text"]


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
    return exact_text(position, "position", InvalidPosition)
