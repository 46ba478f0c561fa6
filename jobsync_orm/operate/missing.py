"""The error for tables that are not there, not filled, or of an older revision."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy.exc import ProgrammingError

from jobsync_orm.coordinator.admission import MISSING
from jobsync_orm.exceptions import SchemaNotReady
from jobsync_orm.naming import Names

__all__ = ["no_cluster", "ready"]

# undefined_column, undefined_function
OLD = ("42703", "42883")


@contextmanager
def ready(names: Names) -> Iterator[None]:
    """Statements on the tables of ``names``.

    Raises
    ------
    SchemaNotReady
        In place of the server's error, where tables, columns or the function are missing.
    """
    try:
        yield
    except ProgrammingError as error:
        if getattr(error.orig, "sqlstate", None) not in (*MISSING, *OLD):
            raise
        raise _not_ready(names, "are missing or of an older revision") from None


def no_cluster(names: Names) -> SchemaNotReady:
    """The error for tables without the cluster's row."""
    return _not_ready(names, "have no cluster in them")


def _not_ready(names: Names, how: str) -> SchemaNotReady:
    schema = "" if names.schema is None else f" in schema {names.schema!r}"
    return SchemaNotReady(
        f"the tables of appname {names.appname!r}{schema} {how}: run `jobsync-orm db upgrade`, or name the cluster "
        "with --appname and --schema"
    )
