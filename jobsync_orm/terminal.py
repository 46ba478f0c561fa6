"""Text that comes from anywhere, on a terminal: it neither steers it nor looks like what it is not. Pure.

A name, a reason or an error in the database is whatever somebody has put there. What is not printable is replaced:
control characters (ESC and U+009B begin what moves the cursor, sets the window's title or answers in the reader's
name), line breaks, and what turns the direction of writing or is not to be seen.
"""

from __future__ import annotations

import json
import logging
from typing import Any

__all__ = ["PrintableLog", "json_line", "one_line", "several_lines"]

INSTEAD = "\N{REPLACEMENT CHARACTER}"


def one_line(value: object) -> str:
    """``value`` as text without anything that is not printable."""
    return "".join(c if c.isprintable() else INSTEAD for c in str(value))


def several_lines(value: object) -> str:
    """The same for text that may have lines: an error, a traceback."""
    return "".join(c if c.isprintable() or c in "\n\t" else INSTEAD for c in str(value))


def json_line(document: Any) -> str:
    """JSON of one line, in which everything that is not printable is written as ``\\uXXXX``."""
    text = json.dumps(document, ensure_ascii=False)
    return "".join(c if c.isprintable() else json.dumps(c)[1:-1] for c in text)


class PrintableLog(logging.Formatter):
    """Formats records for a terminal."""

    def format(self, record: logging.LogRecord) -> str:
        """The record, traceback included."""
        return several_lines(super().format(record))
