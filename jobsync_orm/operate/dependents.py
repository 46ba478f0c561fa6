"""What in the database is computed by a cluster's token function.

| statement | locks | if the process stops right there |
|---|---|---|
| columns, others | nothing | nothing |
"""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import Connection, text

from jobsync_orm.naming import Names, quote

__all__ = ["Dependents", "TokenColumn", "Trigger", "dependents"]

# How ALTER TABLE makes a trigger again what pg_trigger says that it was.
ENABLE = {"O": "ENABLE", "A": "ENABLE ALWAYS", "R": "ENABLE REPLICA"}


@dataclass(frozen=True, slots=True)
class Trigger:
    """A trigger that is on, and how it is put on again."""

    name: str
    enable: str


@dataclass(frozen=True, slots=True)
class TokenColumn:
    """A stored column that the token function computes, of a table that holds rows: generated, or kept by a trigger.

    Attributes
    ----------
    table : str
        Quoted, with its schema. Of a partitioned table each partition by itself.
    column : str
        Its name.
    expression : str
        SQL that computes it.
    keys : tuple of str
        The columns it is computed from.
    identities : tuple of str
        Those of them that only the database may write (GENERATED ALWAYS AS IDENTITY).
    triggers : tuple of Trigger
        The table's, without those of foreign keys.
    pages : int
        Size of the table.
    rows : int or None
        Estimate by the last ANALYZE; None if there was none.
    size_bytes : int
        Of the table with its indexes.
    """

    table: str
    column: str
    expression: str
    keys: tuple[str, ...]
    identities: tuple[str, ...]
    triggers: tuple[Trigger, ...]
    pages: int
    rows: int | None
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Dependents:
    """What depends on the function: columns that can be computed anew, and sentences about what stands in the way."""

    columns: tuple[TokenColumn, ...]
    obstacles: tuple[str, ...]


# The trigger that keeps the column which the CHECK ``o`` guards: its function has the name of the CHECK.
_KEEPER = """SELECT z.oid FROM pg_trigger z JOIN pg_proc f ON f.oid = z.tgfoid
            WHERE z.tgrelid = o.conrelid AND f.proname = o.conname AND z.tgname ~ '^zz_'"""

_COLUMNS = """
    SELECT format('%I.%I', n.nspname, c.relname), a.attname, pg_get_expr(d.adbin, d.adrelid),
        ARRAY(SELECT k.attname::text FROM pg_depend p JOIN pg_attribute k
                ON k.attrelid = p.refobjid AND k.attnum = p.refobjsubid
            WHERE p.classid = 'pg_attrdef'::regclass AND p.objid = d.oid AND p.refclassid = 'pg_class'::regclass
                AND p.refobjid = c.oid AND p.refobjsubid NOT IN (0, a.attnum)
            GROUP BY k.attnum, k.attname ORDER BY k.attnum),
        ARRAY(SELECT k.attname::text FROM pg_attribute k WHERE k.attrelid = c.oid AND k.attidentity = 'a'),
        ARRAY(SELECT ARRAY[t.tgname::text, t.tgenabled::text] FROM pg_trigger t
            WHERE t.tgrelid = c.oid AND NOT t.tgisinternal AND t.tgenabled <> 'D' ORDER BY t.tgname),
        pg_relation_size(c.oid) / current_setting('block_size')::int,
        CASE WHEN c.reltuples >= 0 THEN c.reltuples::bigint END, pg_total_relation_size(c.oid),
        c.relkind::text, pg_has_role(c.relowner, 'USAGE')
    FROM pg_attrdef d
    JOIN pg_attribute a ON a.attrelid = d.adrelid AND a.attnum = d.adnum AND a.attgenerated = 's'
    JOIN pg_class c ON c.oid = d.adrelid AND c.relkind <> 'p'
    JOIN pg_namespace n ON n.oid = c.relnamespace
    WHERE EXISTS (SELECT 1 FROM pg_depend p WHERE p.classid = 'pg_attrdef'::regclass AND p.objid = d.oid
        AND p.refclassid = 'pg_proc'::regclass AND p.refobjid = to_regprocedure(:function))"""

# Columns that a trigger of ours keeps and a CHECK guards (jobsync_orm.migrate.online). The trigger stays on: it
# computes the token anew whatever is written. Rows that the CHECK would refuse now are those that need it.
_KEPT = f"""
    SELECT format('%I.%I', n.nspname, c.relname), 'token_id',
        format('CASE WHEN %s THEN token_id END', pg_get_expr(o.conbin, o.conrelid)),
        ARRAY['token_id'], ARRAY[]::text[],
        ARRAY(SELECT ARRAY[t.tgname::text, t.tgenabled::text] FROM pg_trigger t
            WHERE t.tgrelid = c.oid AND NOT t.tgisinternal AND t.tgenabled <> 'D' AND t.oid <> ({_KEEPER})
            ORDER BY t.tgname),
        pg_relation_size(c.oid) / current_setting('block_size')::int,
        CASE WHEN c.reltuples >= 0 THEN c.reltuples::bigint END, pg_total_relation_size(c.oid),
        c.relkind::text, pg_has_role(c.relowner, 'USAGE')
    FROM pg_constraint o
    JOIN pg_class c ON c.oid = o.conrelid AND c.relkind <> 'p'
    JOIN pg_namespace n ON n.oid = c.relnamespace
    WHERE ({_KEEPER}) IS NOT NULL AND EXISTS (SELECT 1 FROM pg_depend p
        WHERE p.classid = 'pg_constraint'::regclass AND p.objid = o.oid
        AND p.refclassid = 'pg_proc'::regclass AND p.refobjid = to_regprocedure(:function))"""

# Indexes, constraints and materialized views that keep what the function has computed.
_OTHERS = f"""
    SELECT CASE c.relkind WHEN 'm' THEN 'materialized view' ELSE 'index' END, c.oid::regclass::text
    FROM pg_depend p
    LEFT JOIN pg_rewrite r ON p.classid = 'pg_rewrite'::regclass AND r.oid = p.objid
    JOIN pg_class c ON c.oid = coalesce(r.ev_class, p.objid) AND c.relkind IN ('i', 'I', 'm')
    WHERE p.classid IN ('pg_class'::regclass, 'pg_rewrite'::regclass) AND p.refclassid = 'pg_proc'::regclass
        AND p.refobjid = to_regprocedure(:function)
    UNION ALL
    SELECT 'constraint', conname || ' of ' || coalesce(nullif(conrelid, 0)::regclass::text, contypid::regtype::text)
    FROM pg_depend p JOIN pg_constraint o ON o.oid = p.objid
    WHERE p.classid = 'pg_constraint'::regclass AND p.refclassid = 'pg_proc'::regclass
        AND p.refobjid = to_regprocedure(:function) AND ({_KEEPER}) IS NULL
    ORDER BY 1, 2"""

# Triggers of ours whose function calls the token function, without the CHECK that says how to find their rows.
_UNGUARDED = """
    SELECT format('%I.%I', n.nspname, c.relname), z.tgname, f.proname
    FROM pg_trigger z JOIN pg_proc f ON f.oid = z.tgfoid
    JOIN pg_class c ON c.oid = z.tgrelid AND c.relkind <> 'p'
    JOIN pg_namespace n ON n.oid = c.relnamespace
    WHERE NOT z.tgisinternal AND z.tgname ~ '^zz_' AND position(:called IN f.prosrc) > 0
        AND NOT EXISTS (SELECT 1 FROM pg_constraint o
            JOIN pg_depend p ON p.classid = 'pg_constraint'::regclass AND p.objid = o.oid
            WHERE o.conrelid = c.oid AND o.conname = f.proname AND p.refclassid = 'pg_proc'::regclass
                AND p.refobjid = to_regprocedure(:function))
    ORDER BY 1, 2"""

# Triggers of ours that are switched off, or on for replication only: their columns would not be computed anew.
_SWITCHED_OFF = f"""
    SELECT format('%I.%I', n.nspname, c.relname), z.tgname
    FROM pg_constraint o JOIN pg_trigger z ON z.oid = ({_KEEPER}) AND z.tgenabled IN ('D', 'R')
    JOIN pg_class c ON c.oid = o.conrelid AND c.relkind <> 'p'
    JOIN pg_namespace n ON n.oid = c.relnamespace
    WHERE EXISTS (SELECT 1 FROM pg_depend p WHERE p.classid = 'pg_constraint'::regclass AND p.objid = o.oid
        AND p.refclassid = 'pg_proc'::regclass AND p.refobjid = to_regprocedure(:function))
    ORDER BY 1, 2"""


def dependents(connection: Connection, names: Names) -> Dependents:
    """What depends on the token function of the cluster ``names``."""
    function = {"function": f"{names.sql('token_of')}(text)"}
    columns, obstacles = [], []
    owned = text("SELECT pg_has_role(proowner, 'USAGE') FROM pg_proc WHERE oid = to_regprocedure(:function)")
    if not connection.execute(owned, function).scalar_one_or_none():
        obstacles.append(f"this role does not own the function {function['function']}")
    columns_sql = f"{_COLUMNS} UNION ALL {_KEPT} ORDER BY 1, 2"
    for row in connection.execute(text(columns_sql.replace("::", r"\:\:")), function):
        table, column, expression, keys, always, triggers, pages, rows, size, kind, ours = row
        if kind != "r":
            obstacles.append(f"{table} is no ordinary table: its column {column} cannot be computed anew")
        elif not ours:
            obstacles.append(f"this role does not own {table}")
        columns.append(
            TokenColumn(
                table,
                column,
                expression,
                tuple(keys),
                tuple(key for key in keys if key in always),
                tuple(Trigger(name, ENABLE[enabled]) for name, enabled in triggers),
                pages,
                rows,
                size,
            )
        )
    obstacles += [
        f"{what} {name} keeps tokens: drop it, and make it anew afterwards"
        for what, name in connection.execute(text(_OTHERS.replace("::", r"\:\:")), function)
    ]
    schema = connection.execute(
        text(
            "SELECT n.nspname FROM pg_proc f JOIN pg_namespace n ON n.oid = f.pronamespace"
            " WHERE f.oid = to_regprocedure(:function)"
        ),
        function,
    ).scalar_one_or_none()
    called = {**function, "called": f"{Names(names.appname, schema).sql('token_of')}("}
    obstacles += [
        f"the trigger {trigger} keeps token_id of {table}, but the CHECK {check} that says which token a row has is "
        f"not there any more: give it back (ALTER TABLE {table} ADD CONSTRAINT {quote(check)} CHECK (token_id IS NOT"
        f" NULL AND token_id = {called['called']}...)) NOT VALID, with the key as text), or remove the column with"
        f" jobsync_orm.migrate.online.drop_token_column and add it anew afterwards"
        for table, trigger, check in connection.execute(text(_UNGUARDED.replace("::", r"\:\:")), called)
    ]
    obstacles += [
        f"the trigger {trigger} that keeps token_id of {table} is switched off: switch it on (ALTER TABLE {table} "
        f"ENABLE TRIGGER {quote(trigger)})"
        for table, trigger in connection.execute(text(_SWITCHED_OFF.replace("::", r"\:\:")), function)
    ]
    return Dependents(tuple(columns), tuple(obstacles))
