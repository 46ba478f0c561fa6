"""Bars of text.   (pure)"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["bar", "columns"]

EIGHTHS_UP = " ▁▂▃▄▅▆▇█"
EIGHTHS_RIGHT = " ▏▎▍▌▋▊▉█"


def columns(values: Sequence[float], width: int, height: int, top: float | None = None) -> list[str]:
    """A plot of ``height`` lines: a column for each value, the last at the right edge.

    Parameters
    ----------
    values : sequence of float
        At least 0. Where there are more than ``width``, the last count.
    width, height : int
        Its size in characters.
    top : float, optional
        What a full column stands for; the largest value if not given.

    Returns
    -------
    list of str
        The uppermost line first, each of ``width`` characters.
    """
    shown = list(values)[-width:] if width > 0 else []
    most = max(shown, default=0) if top is None else top
    # Something that is not nothing is seen.
    steps = [0 if value <= 0 or most <= 0 else max(1, round(min(value / most, 1) * 8 * height)) for value in shown]
    lines = []
    for line in range(height - 1, -1, -1):
        cells = "".join(EIGHTHS_UP[min(8, max(0, step - 8 * line))] for step in steps)
        lines.append(cells.rjust(max(0, width)))
    return lines


def bar(share: float, width: int) -> str:
    """A horizontal bar of ``width`` characters that is filled to ``share``, from 0 to 1."""
    eighths = round(min(max(share, 0.0), 1.0) * 8 * width)
    full, rest = divmod(eighths, 8)
    return ("█" * full + (EIGHTHS_RIGHT[rest] if rest else "")).ljust(width)
