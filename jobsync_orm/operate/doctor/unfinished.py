"""Columns and indexes of tokens whose making has stopped half-way."""

from __future__ import annotations

from collections.abc import Iterator

from jobsync_orm.operate.doctor.findings import Finding, Severity, Subject

__all__ = ["check"]

# Columns that a trigger keeps (jobsync_orm.migrate.online) and that are not NOT NULL, or whose CHECK is not validated:
# both come last. The function behind the trigger has the name of the CHECK. Partitions go with their parent.
COLUMNS = """
    SELECT format('%I.%I', n.nspname, c.relname), c.relname::text, n.nspname::text, o.convalidated
    FROM pg_constraint o JOIN pg_class c ON c.oid = o.conrelid JOIN pg_namespace n ON n.oid = c.relnamespace
    JOIN pg_attribute a ON a.attrelid = c.oid AND a.attname = 'token_id' AND NOT a.attisdropped
    WHERE o.contype = 'c' AND NOT (o.convalidated AND a.attnotnull) AND NOT c.relispartition
        AND EXISTS (SELECT 1 FROM pg_trigger z JOIN pg_proc f ON f.oid = z.tgfoid
            WHERE z.tgrelid = c.oid AND f.proname = o.conname AND starts_with(z.tgname, :trigger))
        AND EXISTS (SELECT 1 FROM pg_depend p WHERE p.classid = 'pg_constraint'::regclass AND p.objid = o.oid
            AND p.refclassid = 'pg_proc'::regclass AND p.refobjid = to_regprocedure(:function))
    ORDER BY 1"""

# Invalid indexes with a column whose value the function computes, which nobody is making at the moment.
INDEXES = """
    WITH tokens (oid, number) AS (
        SELECT d.adrelid, d.adnum FROM pg_attrdef d
        JOIN pg_depend p ON p.classid = 'pg_attrdef'::regclass AND p.objid = d.oid
            AND p.refclassid = 'pg_proc'::regclass AND p.refobjid = to_regprocedure(:function)
        UNION
        SELECT o.conrelid, a.attnum FROM pg_constraint o
        JOIN pg_attribute a ON a.attrelid = o.conrelid AND a.attname = 'token_id' AND NOT a.attisdropped
        JOIN pg_depend p ON p.classid = 'pg_constraint'::regclass AND p.objid = o.oid
            AND p.refclassid = 'pg_proc'::regclass AND p.refobjid = to_regprocedure(:function))
    SELECT format('%I.%I', n.nspname, c.relname), format('%I.%I', m.nspname, x.relname), pg_get_indexdef(x.oid),
        c.relkind = 'p'
    FROM pg_index i JOIN tokens t ON t.oid = i.indrelid AND t.number = ANY (i.indkey::int2[])
    JOIN pg_class c ON c.oid = i.indrelid JOIN pg_namespace n ON n.oid = c.relnamespace
    JOIN pg_class x ON x.oid = i.indexrelid JOIN pg_namespace m ON m.oid = x.relnamespace
    WHERE NOT i.indisvalid AND NOT EXISTS (SELECT 1 FROM pg_stat_progress_create_index g WHERE g.index_relid = x.oid)
    ORDER BY 1, 2"""


def check(subject: Subject) -> Iterator[Finding]:
    """Columns that ``add_token_column`` has not finished, and indexes of tokens that are not valid."""
    function = f"{subject.names.sql('token_of')}(text)"
    trigger = subject.names.token_trigger("")
    for table, name, schema, validated in subject.rows(COLUMNS, function=function, trigger=trigger):
        yield Finding(
            "unfinished",
            Severity.WARNING,
            f"the column token_id of table {table} is not finished, or is being added just now: "
            + ("it is not NOT NULL" if validated else "its CHECK is not validated"),
            "rows that have no token yet belong to nobody: no worker finds them",
            f"run the migration that adds it again; it goes on where it stopped: op.add_token_column({name!r},"
            f" schema={schema!r}, key=...), or jobsync_orm.migrate.online.add_token_column(engine, ...)",
        )
    for table, index, definition, partitioned in subject.rows(INDEXES, function=function):
        how = "" if partitioned else "CONCURRENTLY "
        again = definition.replace(" INDEX ", f" INDEX {how}", 1).replace(" ON ONLY ", " ON ", 1)
        yield Finding(
            "unfinished",
            Severity.WARNING,
            f"the index {index} of table {table} is not valid: making it was interrupted, or has failed",
            "each write keeps it up, and no query uses it",
            f"DROP INDEX {how}{index}; {again}",
        )
