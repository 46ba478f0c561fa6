"""Indexes of the application's tables whose rows have tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from jobsync_orm.naming import quote
from jobsync_orm.operate.doctor.findings import Finding, Severity, Subject

__all__ = ["check"]

# A table has tokens if a generated column is computed by the function, or a CHECK says so of one that a trigger fills.
# Partitions go with their parent.
TABLES = """
    WITH function AS (SELECT to_regprocedure(:function) AS oid),
    tokens (oid, name) AS (
        SELECT d.adrelid, a.attname FROM pg_attrdef d
        JOIN pg_attribute a ON a.attrelid = d.adrelid AND a.attnum = d.adnum AND a.attgenerated = 's'
        JOIN pg_depend p ON p.classid = 'pg_attrdef'::regclass AND p.objid = d.oid
            AND p.refclassid = 'pg_proc'::regclass AND p.refobjid = (SELECT oid FROM function)
        UNION
        SELECT o.conrelid, a.attname FROM pg_constraint o
        JOIN pg_attribute a ON a.attrelid = o.conrelid AND a.attname = 'token_id' AND NOT a.attisdropped
        JOIN pg_depend p ON p.classid = 'pg_constraint'::regclass AND p.objid = o.oid
            AND p.refclassid = 'pg_proc'::regclass AND p.refobjid = (SELECT oid FROM function))
    SELECT format('%I.%I', n.nspname, c.relname), t.name::text, c.relkind = 'p',
        coalesce((SELECT sum(pg_relation_size(f.relid))::bigint FROM pg_partition_tree(c.oid) f),
            pg_relation_size(c.oid)),
        coalesce((SELECT json_agg(ARRAY(
            SELECT coalesce(a.attname::text, '') FROM unnest(i.indkey::int2[]) WITH ORDINALITY AS k (number, place)
            LEFT JOIN pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = k.number
            WHERE k.place <= i.indnkeyatts ORDER BY k.place))
            FROM pg_index i WHERE i.indrelid = c.oid AND i.indisvalid AND i.indisready), '[]'),
        ARRAY(SELECT a.attname::text FROM pg_index i CROSS JOIN unnest(i.indkey::int2[]) AS k (number)
            JOIN pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = k.number
            WHERE i.indrelid = c.oid AND i.indisprimary)
    FROM tokens t JOIN pg_class c ON c.oid = t.oid JOIN pg_namespace n ON n.oid = c.relnamespace
    WHERE c.relkind IN ('r', 'p') AND NOT c.relispartition ORDER BY 1"""


@dataclass(frozen=True, slots=True)
class TokenTable:
    """A table of the application whose rows have tokens."""

    table: str
    column: str
    partitioned: bool
    size_bytes: int
    indexes: Sequence[Sequence[str]]
    primary_key: Sequence[str]


def check(subject: Subject) -> Iterator[Finding]:
    """Tables that lack one of the two indexes of ``docs/filtering.md``, or both."""
    for row in subject.rows(TABLES, function=f"{subject.names.sql('token_of')}(text)"):
        table = TokenTable(*row)
        token = table.column
        order = [name for name in table.primary_key if name != token] or ["ORDER_COLUMN"]
        by_token = any(columns[0] == token and len(columns) > 1 for columns in table.indexes)
        by_order = any(token in columns[1:] for columns in table.indexes)
        missing = [
            columns for there, columns in ((by_token, [token, *order]), (by_order, [*order, token])) if not there
        ]
        if not missing:
            continue
        kinds = [f"({token}, ...)"] * (not by_token) + [f"(..., {token})"] * (not by_order)
        yield Finding(
            "indexes",
            Severity.WARNING if table.size_bytes >= subject.limits.large_bytes else Severity.NOTE,
            f"table {table.table} has no index on {' and none on '.join(kinds)}",
            "fetching a batch of owned rows reads the rows of all owners"
            + ": two indexes let PostgreSQL choose by how much of the table a node owns",
            "; ".join(_index(table, columns) for columns in missing)
            + f" -- with the column you order by in place of {order[0]}, and WHERE what most rows no longer meet",
        )


def _index(table: TokenTable, columns: Sequence[str]) -> str:
    # Not to be had concurrently on a partitioned table.
    how = "" if table.partitioned else "CONCURRENTLY "
    return f"CREATE INDEX {how}ON {table.table} ({', '.join(map(quote, columns))})"
