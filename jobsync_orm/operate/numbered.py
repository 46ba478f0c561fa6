"""The coordinator's statements, whose parameters are ``$n``, for SQLAlchemy."""

from __future__ import annotations

import re

from sqlalchemy import TextClause, text

__all__ = ["numbered"]


def numbered(statement: str, *values: object) -> tuple[TextClause, dict[str, object]]:
    """``statement`` and its parameters as :class:`~jobsync_orm.autocommit.Autocommit` takes them."""
    escaped = statement.replace(":", r"\:")
    given = {f"p{place}": value for place, value in enumerate(values, 1)}
    # The type that follows a parameter stays with it: CAST(:p1 AS text) would be the same.
    return text(re.sub(r"\$(\d+)", r":p\1", escaped)), given
