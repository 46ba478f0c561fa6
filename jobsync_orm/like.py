r"""PostgreSQL's LIKE in Python, and whether two patterns can name the same node.

A pin says by LIKE patterns which nodes may have a task. The leader resolves them in Python, a reader of the
tables may do so in SQL, and both must come to the same answer:

* ``%`` stands for any run of characters, also none, ``_`` for exactly one; newlines and characters outside
the Basic
  Multilingual Plane are characters like any other;
* a backslash takes the next character, whatever it is, literally: ``db\_1`` matches ``db_1`` only;
* everything else stands for itself, case-sensitively, and the pattern must cover the whole name.

    >>> matches("gpu-7", "gpu-%")
    True
    >>> can_meet("gpu-%", "%-7")
    True
    >>> can_meet("gpu-%", "cpu-%")
    False
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache

from jobsync_orm.exceptions import InvalidPattern

__all__ = ["can_meet", "compile_pattern", "matches", "validate"]

# Two characters long, so that neither can be taken for a literal, which is one.
_RUN = "%%"
_ONE = "__"

# Patterns that stay compiled. A cluster has one per pin at most, and most pins share a few.
_CACHED = 4096


def _tokens(pattern: str) -> list[str]:
    """``_RUN``, ``_ONE`` and literal characters, in order."""
    if not isinstance(pattern, str):
        raise InvalidPattern(f"pattern {pattern!r} must be text, not {type(pattern).__name__}")
    tokens = []
    characters = iter(pattern)
    for character in characters:
        if character == "\\":
            character = next(characters, "")
            if not character:
                raise InvalidPattern(
                    f"pattern {pattern!r} must not end in a lone backslash: write two to match a backslash"
                )
            tokens.append(character)
        else:
            tokens.append({"%": _RUN, "_": _ONE}.get(character, character))
    for character in tokens:
        if character == "\0" or "\ud800" <= character <= "\udfff":
            raise InvalidPattern(
                f"pattern {pattern!r} has a NUL or a lone surrogate, which PostgreSQL cannot store: leave it out"
            )
    return tokens


def validate(pattern: str) -> None:
    """Check that PostgreSQL would take ``pattern``.

    Raises
    ------
    InvalidPattern
        It is no text, ends in a lone backslash, or has a NUL character or a lone surrogate. (PostgreSQL
        itself complains of the backslash only when a name gets that far.)
    """
    _tokens(pattern)


@lru_cache(maxsize=_CACHED)
def compile_pattern(pattern: str) -> Callable[[str], bool]:
    """A function that says whether a name matches ``pattern``; the last few thousand are kept.

    Raises
    ------
    InvalidPattern
        See :func:`validate`.

    Notes
    -----
    Between two ``%`` stands text of fixed length, so its leftmost occurrence is as good as any: an atomic
    group takes it and never tries another. Time is at most length of name times length of pattern.
    """
    head, *rest = _segments(_tokens(pattern))
    expression = head
    if rest:
        *middle, tail = rest
        expression += "".join(f"(?>.*?{segment})" for segment in middle) + f".*{tail}"
    fullmatch = re.compile(expression, re.DOTALL).fullmatch
    return lambda name: fullmatch(name) is not None


def _segments(tokens: list[str]) -> list[str]:
    """Regular expressions of what stands before, between and after the ``%``."""
    segments = [""]
    for token in tokens:
        if token == _RUN:
            segments.append("")
        else:
            segments[-1] += "." if token == _ONE else re.escape(token)
    return segments


def matches(name: str, pattern: str) -> bool:
    """Whether ``name LIKE pattern`` in PostgreSQL.

    Raises
    ------
    InvalidPattern
        See :func:`validate`.
    """
    return compile_pattern(pattern)(name)


def can_meet(p: str, q: str) -> bool:
    """Whether some non-empty name matches both patterns.

    Raises
    ------
    InvalidPattern
        See :func:`validate`.
    """
    first, second = _tokens(p), _tokens(q)
    if not first or not second:
        return False  # the empty pattern matches the empty name only
    # Whether what is left of the two patterns can meet, from the back. The empty name needs no care: it
    # matches both only if both are nothing but %, and then every name does.
    after = [token == _RUN for token in second] + [True]
    for j in range(len(second) - 1, -1, -1):
        after[j] = after[j] and after[j + 1]
    for token in reversed(first):
        here = [False] * (len(second) + 1)
        here[-1] = token == _RUN and after[-1]
        for j in range(len(second) - 1, -1, -1):
            other = second[j]
            if token == _RUN or other == _RUN:
                here[j] = after[j] or here[j + 1]
            else:
                here[j] = after[j + 1] and (token == other or _ONE in (token, other))
        after = here
    return after[0]
