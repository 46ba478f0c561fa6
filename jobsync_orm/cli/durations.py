"""Durations as a person writes them: ``45s``, ``30m``, ``12h``, ``7d``."""

from __future__ import annotations

import re

import typer

__all__ = ["duration"]

UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 7 * 86_400}
FORM = re.compile(r"(\d+(?:\.\d+)?)\s*([smhdw])")


def duration(written: str | float) -> float:
    """A duration in seconds.

    Raises
    ------
    typer.BadParameter
        It is no number with a unit.
    """
    if isinstance(written, float):  # a default
        return written
    found = FORM.fullmatch(written.strip())
    if found is None:
        raise typer.BadParameter(f"{written!r} is no duration: give a number with its unit, as 45s, 30m, 12h, 7d or 2w")
    return float(found[1]) * UNITS[found[2]]
