"""What is in the database: the revision, the cluster's settings, and what is wrong with them. Reads only."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from sqlalchemy import Connection, text

from jobsync_orm.hashing import hasher
from jobsync_orm.migrate.autogenerate import TABLES
from jobsync_orm.migrate.binding import Target, raw
from jobsync_orm.migrate.rights import SEQUENCES
from jobsync_orm.migrate.rights import TABLES as RIGHTS
from jobsync_orm.naming import Names, quote

__all__ = ["cluster_settings", "current_revision", "problems"]

VERSION = "alembic_version"
PROBES = 16


def current_revision(connection: Connection, names: Names) -> str | None:
    """Revision in the cluster's version table, or None."""
    if not _exists(connection, names, VERSION):
        return None
    revision: str | None = connection.scalar(raw(f"SELECT version_num FROM {names.sql(VERSION)}"))
    return revision


def cluster_settings(connection: Connection, names: Names) -> tuple[int, str] | None:
    """``(total_tokens, hash_function)`` of the cluster's row, or None."""
    if not _exists(connection, names, "cluster"):
        return None
    row = connection.execute(raw(f"SELECT total_tokens, hash_function FROM {names.sql('cluster')}")).first()
    return None if row is None else (row.total_tokens, row.hash_function)


def problems(connection: Connection, cluster: Target, revisions: Sequence[str]) -> list[str]:
    """See :func:`jobsync_orm.migrate.check`; ``revisions`` are the known ones, newest first."""
    names = cluster.names
    upgrade = _upgrade_command(names)
    unusable = _schema_problem(connection, names.schema, upgrade)
    if unusable is not None:
        return [unusable]
    recreate = f"restore it, or downgrade to base and run `{upgrade}` while no worker runs"
    kinds = (*TABLES, VERSION)
    there = [kind for kind in kinds if _exists(connection, names, kind)]
    if not there or there == [VERSION]:
        where = "on the search_path" if names.schema is None else f"in schema {names.schema!r}"
        return [f"there are no tables {names.appname}... {where}: run `{upgrade}`"]
    found = []
    readable = set()
    for kind in there:
        lacking = _lacking_privileges(connection, names, kind)
        if lacking:
            found.append(_grant(connection, ", ".join(lacking), names.sql(kind)))
        if "SELECT" not in lacking:
            readable.add(kind)
    if VERSION in readable:
        outdated = _revision_problem(current_revision(connection, names), names, revisions, upgrade)
        if outdated is not None:
            # What is missing, or is too much, is right or wrong by another revision.
            return [*found, outdated]
    found += [f"table {names.sql(kind)} is missing: {recreate}" for kind in kinds if kind not in there]
    found += _sequence_problems(connection, names, recreate)
    found += _missing_function(connection, f"{names.sql('hold')}(int[], text, bigint)", recreate)
    if "cluster" in readable:
        found += _cluster_problems(connection, cluster, "token" in readable, recreate)
    return found


def _exists(connection: Connection, names: Names, kind: str) -> bool:
    found = connection.scalar(text("SELECT pg_catalog.to_regclass(:name) IS NOT NULL"), {"name": names.sql(kind)})
    return bool(found)


def _upgrade_command(names: Names) -> str:
    default = Names()
    return (
        "jobsync-orm db upgrade"
        + (f" --appname {names.appname}" if names.appname != default.appname else "")
        + (f" --schema {shlex.quote(names.schema)}" if names.schema is not None else "")
    )


def _role(connection: Connection) -> str:
    return str(connection.scalar(text("SELECT current_user")))


def _grant(connection: Connection, rights: str, on: str) -> str:
    role = _role(connection)
    return f"role {role!r} lacks {rights} on {on}: GRANT {rights} ON {on} TO {quote(role)}"


def _schema_problem(connection: Connection, schema: str | None, upgrade: str) -> str | None:
    if schema is None:
        return None
    usable = connection.scalar(
        text("SELECT pg_catalog.has_schema_privilege(oid, 'USAGE') FROM pg_catalog.pg_namespace WHERE nspname = :name"),
        {"name": schema},
    )
    if usable is None:
        return f"there is no schema {schema!r}: run `{upgrade}`"
    return None if usable else _grant(connection, "USAGE", f"SCHEMA {quote(schema)}")


def _lacking_privileges(connection: Connection, names: Names, kind: str) -> list[str]:
    needed = ("SELECT",) if kind == VERSION else RIGHTS[kind]
    ask = text("SELECT pg_catalog.has_table_privilege(:name, :right)")
    return [right for right in needed if not connection.scalar(ask, {"name": names.sql(kind), "right": right})]


def _sequence_problems(connection: Connection, names: Names, recreate: str) -> list[str]:
    ask = text("SELECT pg_catalog.has_sequence_privilege(:name, :right)")
    found = []
    for table, (column, needed) in SEQUENCES.items():
        kind = f"{table}_{column}"
        sequence = names.sql(kind)
        if not _exists(connection, names, table):
            continue  # said already
        if not _exists(connection, names, kind):
            found.append(f"sequence {sequence} is missing: {recreate}")
            continue
        lacking = [right for right in needed if not connection.scalar(ask, {"name": sequence, "right": right})]
        if lacking:
            found.append(_grant(connection, ", ".join(lacking), f"SEQUENCE {sequence}"))
    return found


def _revision_problem(revision: str | None, names: Names, revisions: Sequence[str], upgrade: str) -> str | None:
    newest = revisions[0]
    if revision == newest:
        return None
    if revision is None:
        return f"{names.sql(VERSION)} is empty, so the tables are of an unknown revision: restore its row"
    if revision in revisions:
        return f"the tables are at revision {revision}, behind {newest}: run `{upgrade}`"
    return (
        f"the tables are at revision {revision}, which this version of jobsync_orm (at {newest}) does not "
        "know: install a newer one"
    )


def _cluster_problems(connection: Connection, cluster: Target, tokens_readable: bool, recreate: str) -> list[str]:
    names = cluster.names
    settings = cluster_settings(connection, names)
    if settings is None:
        return [f"{names.sql('cluster')} has no row: {recreate}"]
    total, hash_function = settings
    found = [
        f"the cluster was created with {name}={value!r}, not {wanted!r}: set {name} to {value!r}, or use "
        "another appname"
        for name, wanted, value in (
            ("total_tokens", cluster.total_tokens, total),
            ("hash_function", cluster.hash_function, hash_function),
        )
        if wanted is not None and wanted != value
    ]
    if tokens_readable:
        ask = raw(f"SELECT count(*), min(token_id), max(token_id) FROM {names.sql('token')}")
        number, lowest, highest = connection.execute(ask).one()
        if (number, lowest, highest) != (total, 0, total - 1):
            found.append(
                f"{names.sql('token')} has {number} rows from {lowest} to {highest} instead of {total} from "
                f"0 to {total - 1}: insert the missing token_id values"
            )
    return found + _function_problems(connection, names, total, hash_function, recreate)


def _function_problems(
    connection: Connection, names: Names, total: int, hash_function: str, recreate: str
) -> list[str]:
    function = names.sql("token_of")
    if missing := _missing_function(connection, f"{function}(text)", recreate):
        return missing
    ask = raw(f"SELECT {function}(CAST(k AS text)) FROM generate_series(0, {PROBES - 1}) AS k ORDER BY k")
    token = hasher(total, hash_function)
    for key, answer in enumerate(connection.scalars(ask)):
        if answer != token(key):
            return [
                f"function {function} gives token {answer} for '{key}', but {hash_function} over {total} "
                f"tokens gives {token(key)}: {recreate}"
            ]
    return []


def _missing_function(connection: Connection, function: str, recreate: str) -> list[str]:
    allowed = connection.scalar(
        text(
            "SELECT pg_catalog.has_function_privilege(f, 'EXECUTE')"
            " FROM pg_catalog.to_regprocedure(:name) AS f WHERE f IS NOT NULL"
        ),
        {"name": function},
    )
    if allowed is None:
        return [f"function {function} is missing: {recreate}"]
    return [] if allowed else [_grant(connection, "EXECUTE", f"FUNCTION {function}")]
