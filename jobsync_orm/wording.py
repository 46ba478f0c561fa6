"""Numbers in sentences."""

from __future__ import annotations

__all__ = ["counted"]


def counted(number: int, one: str, many: str) -> str:
    """``1 token is parked``, ``2 tokens are parked``."""
    return f"{number} {one if number == 1 else many}"
