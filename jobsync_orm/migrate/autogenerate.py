"""Keep the application's ``alembic revision --autogenerate`` away from the library's tables.

In the application's ``env.py``::

    from jobsync_orm import migrate

    mine = migrate.hooks(appname="billing_", schema="jobs")
    context.configure(..., include_name=mine.include_name, include_object=mine.include_object)

With the default prefix ``migrate.include_name`` and ``migrate.include_object`` do. Both are needed: without
``include_object`` a model made of one of the library's mixins on the application's Base would be created a
second time. Hooks of the application's own are given to :func:`hooks` and asked about everything else.

A column ``token_id`` that a trigger keeps (:mod:`jobsync_orm.migrate.online`) is not compared with the generated column
that the model has: it holds the same, as long as both have the same key.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

from sqlalchemy import CheckConstraint
from sqlalchemy.dialects import postgresql

from jobsync_orm.naming import DEFAULT_APPNAME, Names

__all__ = ["TABLES", "Hooks", "hooks", "include_name", "include_object"]

TABLES = (
    "cluster",
    "node",
    "token",
    "lock",
    "claim",
    "checkpoint",
    "audit",
    "rebalance",
    "job",
    "job_attempt",
    "job_dependency",
    "job_pause",
    "job_schedule",
    "job_worker",
)

IncludeName = Callable[[Any, str, Any], bool]
IncludeObject = Callable[[Any, Any, str, bool, Any], bool]


class Hooks(NamedTuple):
    """The two hooks for ``context.configure``."""

    include_name: IncludeName
    include_object: IncludeObject


def hooks(
    appname: str = DEFAULT_APPNAME,
    schema: str | None = None,
    *,
    include_name: IncludeName | None = None,
    include_object: IncludeObject | None = None,
) -> Hooks:
    """Hooks that leave out the tables of one cluster.

    Parameters
    ----------
    appname, schema : str, str
        As for :func:`jobsync_orm.migrate.upgrade`. With a schema, tables of these names that Alembic reports
        without one are left out too: so it reports the schema that comes first on ``search_path``.
    include_name, include_object : callable, optional
        The application's own hooks, asked about everything that is not the library's.

    Returns
    -------
    Hooks
        ``(include_name, include_object)``, also by these names.
    """
    names = Names(appname, schema)
    tables = {names.version_table, *(names.bare(kind) for kind in TABLES)}
    own_name, own_object = include_name, include_object

    def ours(name: Any, schema: Any) -> bool:
        return name in tables and schema in (None, names.schema)

    def name_hook(name: Any, type_: str, parent_names: Any) -> bool:
        if type_ == "table" and ours(name, parent_names.get("schema_name")):
            return False
        return own_name is None or own_name(name, type_, parent_names)

    def object_hook(object: Any, name: Any, type_: str, reflected: bool, compare_to: Any) -> bool:
        if type_ == "table" and ours(name, object.schema):
            return False
        if type_ == "check_constraint" and name == names.token_column(object.table.name):
            return False
        if type_ == "column" and not reflected and compare_to is not None and _same_token(names, object, compare_to):
            return False
        return own_object is None or own_object(object, name, type_, reflected, compare_to)

    return Hooks(name_hook, object_hook)


def _same_token(names: Names, generated: Any, kept: Any) -> bool:
    """Whether a trigger keeps in the column ``kept`` of the database what the model would have ``generated``."""
    if generated.name != "token_id" or generated.computed is None or kept.computed is not None:
        return False
    dialect: Any = postgresql.dialect  # has no types
    key = _key(names, str(generated.computed.sqltext.compile(dialect=dialect())))
    return any(
        isinstance(check, CheckConstraint)
        and check.name == names.token_column(kept.table.name)
        and _key(names, str(check.sqltext)) == key
        for check in kept.table.constraints
    )


def _key(names: Names, expression: str) -> str:
    """What is hashed in ``expression``, without what PostgreSQL may add or leave out when it prints it."""
    of = expression.partition(names.token_function)[2].replace("%%", "%")
    return re.sub(r'[\s()"]|::text', "", of)


include_name, include_object = hooks()
