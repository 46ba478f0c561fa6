"""The errors for a cluster that is named wrongly, and for tables that are missing, not filled, or too old."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sqlalchemy.exc import ProgrammingError

from jobsync_orm.autocommit import check_engine
from jobsync_orm.coordinator.admission import MISSING
from jobsync_orm.exceptions import ConfigurationError, OperationRefused, SchemaNotReady
from jobsync_orm.naming import Names, is_storable

__all__ = ["check_given", "check_texts", "no_cluster", "ready"]

# undefined_column, undefined_function
OLD = ("42703", "42883")


def check_given(engine: Any, names: Any) -> None:
    """Raise ConfigurationError unless these can name a cluster."""
    check_engine(engine)
    if not isinstance(names, Names):
        raise ConfigurationError(f"names={names!r} is no Names: give Names(appname, schema) of jobsync_orm.naming")


def check_texts(**given: str | None) -> None:
    """Raise OperationRefused if one of these is a text that PostgreSQL cannot store: so no node has such a name."""
    for what, value in given.items():
        if value is not None and not is_storable(value):
            raise OperationRefused(
                f"{what}={value!r} has a character that PostgreSQL cannot store (NUL, a lone surrogate)"
            )


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
