"""A ``token_id`` that a trigger keeps: what it consists of, in SQL, and what of it a table has.

Four things, made in one transaction: the column, a function, the trigger that calls it before each INSERT and
UPDATE, and a CHECK which says that the column holds the token of the key. The trigger fills in what the CHECK
demands; whoever gets past the trigger (``session_replication_role``, another trigger that fires later) does not get
past the CHECK.
"""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import Connection, text

from jobsync_orm.exceptions import ConfigurationError
from jobsync_orm.migrate.binding import raw
from jobsync_orm.naming import MAX_IDENTIFIER, Names, is_identifier, literal, quote

__all__ = ["Column", "Found", "Wanted", "look", "refuse_unfit"]


@dataclass(frozen=True)
class Wanted:
    """What was asked for.

    Parameters
    ----------
    names : Names
        Cluster whose tokens the rows have.
    table, schema : str, str or None
        The table.
    key, key_sql : str or None, str or None
        Name of the column that is hashed, or SQL that yields the text to hash: one of them.
    """

    names: Names
    table: str
    schema: str | None = None
    key: str | None = None
    key_sql: str | None = None

    def __post_init__(self) -> None:
        for what, name in (("table", self.table), ("schema", self.schema), ("key", self.key)):
            if name is not None and not is_identifier(name):
                raise ConfigurationError(f"{what}={name!r} must be a name of 1 to {MAX_IDENTIFIER} bytes")

    def check_key(self) -> None:
        """Raise ConfigurationError unless there is exactly one of ``key`` and ``key_sql``."""
        if (self.key is None) == (self.key_sql is None):
            raise ConfigurationError(
                f"token_id of {self.table!r} needs one of key= (the column whose value is hashed) and key_sql= (SQL "
                f"that yields the text to hash); got {self.key!r} and {self.key_sql!r}"
            )

    @property
    def asked(self) -> str:
        """The table as it was named, in SQL."""
        return quote(self.table) if self.schema is None else f"{quote(self.schema)}.{quote(self.table)}"


@dataclass(frozen=True)
class Found:
    """What is there of a table and its column.

    Attributes
    ----------
    oid : int
        The table's.
    schema : str
        Schema it is in.
    kind : str
        ``relkind``: ``r`` for an ordinary table, ``p`` for a partitioned one.
    rows : int
        How many rows it has, as PostgreSQL estimates; 0 if it does not know.
    function_schema : str
        Schema of the token function.
    column, generated, not_null : bool
        Whether there is a column ``token_id``, whether it is a generated one, whether it is NOT NULL.
    body : str or None
        Body of the function behind the trigger; None unless trigger and CHECK are there.
    validated : bool
        Whether the CHECK is known to hold for all rows.
    fenced : bool
        Whether there is an ownership fence on the table.
    """

    oid: int
    schema: str
    kind: str
    rows: int
    function_schema: str
    column: bool
    generated: bool
    not_null: bool
    body: str | None
    validated: bool
    fenced: bool


@dataclass(frozen=True)
class Column:
    """The column of one table, in SQL. Names are qualified, so that nothing depends on anybody's search_path."""

    wanted: Wanted
    schema: str
    function_schema: str

    @property
    def table(self) -> str:
        return f"{quote(self.schema)}.{quote(self.wanted.table)}"

    @property
    def check(self) -> str:
        return quote(self.wanted.names.token_column(self.wanted.table))

    @property
    def token_of(self) -> str:
        return Names(self.wanted.names.appname, self.function_schema).sql("token_of")

    @property
    def _function(self) -> str:
        return f"{quote(self.schema)}.{self.check}"

    @property
    def _trigger(self) -> str:
        return quote(self.wanted.names.token_trigger(self.wanted.table))

    @property
    def expression(self) -> str:
        """The token of a row, from the row's columns."""
        if self.wanted.key is not None:
            return f"{self.token_of}(({quote(self.wanted.key)})::pg_catalog.text)"
        return f"{self.token_of}({self.wanted.key_sql})"

    @property
    def body(self) -> str:
        """Body of the trigger's function."""
        if self.wanted.key is not None:
            token = f"NEW.token_id := {self.token_of}((NEW.{quote(self.wanted.key)})::pg_catalog.text);"
        else:
            token = (
                f"SELECT {self.token_of}({self.wanted.key_sql}) INTO NEW.token_id"
                f" FROM (SELECT NEW.*) AS {quote(self.wanted.table)};"
            )
        return f"#variable_conflict use_column\nBEGIN {token} RETURN NEW; END"

    def attach(self) -> list[str]:
        """Statements that make all four. None of them reads the table."""
        return [
            f"ALTER TABLE {self.table} ADD COLUMN token_id integer;",
            f"CREATE FUNCTION {self._function}() RETURNS trigger LANGUAGE plpgsql AS {literal(self.body)};",
            f"CREATE TRIGGER {self._trigger} BEFORE INSERT OR UPDATE ON {self.table}"
            f" FOR EACH ROW EXECUTE FUNCTION {self._function}();",
            f"ALTER TABLE {self.table} ADD CONSTRAINT {self.check}"
            f" CHECK (token_id IS NOT NULL AND token_id = {self.expression}) NOT VALID;",
        ]

    def detach(self) -> list[str]:
        """Statements that remove what there is; the CHECK goes with the column."""
        return [
            f"DROP TRIGGER IF EXISTS {self._trigger} ON {self.table};",
            f"ALTER TABLE {self.table} DROP COLUMN token_id;",
            f"DROP FUNCTION IF EXISTS {self._function}();",
        ]

    def probe(self) -> list[str]:
        """Statements that fail if the key is no fit one: PostgreSQL itself says whether it could generate from it."""
        empty = f"{quote(self.schema)}.{quote(self.wanted.names.bare('token_id_probe'))}"
        return [
            f"CREATE TABLE {empty} (LIKE {self.table} INCLUDING GENERATED);",
            f"ALTER TABLE {empty} ADD COLUMN token_id_probe integer GENERATED ALWAYS AS ({self.expression}) STORED;",
            f"DROP TABLE {empty};",
        ]


_LOOK = """
SELECT c.oid, n.nspname AS schema, c.relkind::text AS kind, greatest(c.reltuples, 0)::bigint AS rows,
    a.attnum IS NOT NULL AS column, coalesce(a.attgenerated <> '', false) AS generated,
    coalesce(a.attnotnull, false) AS not_null, p.prosrc AS body, coalesce(k.convalidated, false) AS validated,
    EXISTS (SELECT FROM pg_catalog.pg_trigger f WHERE f.tgrelid = c.oid AND f.tgname = :fence) AS fenced
FROM pg_catalog.pg_class c
JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
LEFT JOIN pg_catalog.pg_attribute a ON a.attrelid = c.oid AND a.attname = 'token_id' AND NOT a.attisdropped
LEFT JOIN pg_catalog.pg_constraint k ON k.conrelid = c.oid AND k.conname = :check AND k.contype = 'c'
LEFT JOIN pg_catalog.pg_trigger t ON t.tgrelid = c.oid AND t.tgname = :trigger AND k.oid IS NOT NULL
LEFT JOIN pg_catalog.pg_proc p ON p.oid = t.tgfoid
WHERE c.oid = pg_catalog.to_regclass(:table)
"""


def look(connection: Connection, wanted: Wanted) -> Found:
    """What is there.

    Raises
    ------
    ConfigurationError
        There is no such table, or no token function of this cluster.
    """
    names = wanted.names
    function_schema = connection.scalar(
        text(
            "SELECT n.nspname FROM pg_catalog.pg_proc p JOIN pg_catalog.pg_namespace n ON n.oid = p.pronamespace"
            " WHERE p.oid = pg_catalog.to_regprocedure(:name)"
        ),
        {"name": f"{names.sql('token_of')}(text)"},
    )
    if function_schema is None:
        raise ConfigurationError(
            f"there is no function {names.sql('token_of')}(text): run jobsync_orm.migrate.upgrade first, or give the "
            "cluster's appname= and token_schema="
        )
    row = connection.execute(
        text(_LOOK),
        {
            "table": wanted.asked,
            "fence": names.fence(wanted.table),
            "check": names.token_column(wanted.table),
            "trigger": names.token_trigger(wanted.table),
        },
    ).one_or_none()
    if row is None:
        raise ConfigurationError(f"there is no table {wanted.asked}: create it first, or give schema=")
    return Found(function_schema=function_schema, **row._mapping)


def refuse_unfit(connection: Connection, column: Column, found: Found) -> None:
    """Look for whatever would make the work fail, or the application's writes, before anything is changed.

    Raises
    ------
    ConfigurationError
        The table cannot have such a column, its key cannot be one, or a role that writes it could not call the
        function.
    sqlalchemy.exc.DBAPIError
        PostgreSQL refuses the expression; its message says why.
    """
    wanted = column.wanted
    if found.kind not in "rp":
        raise ConfigurationError(f"{column.table} is no table (relkind {found.kind!r}): name the table itself")
    of_table = {"table": found.oid}
    children = text("SELECT 1 FROM pg_catalog.pg_inherits WHERE inhparent = :table LIMIT 1")
    if found.kind == "r" and connection.scalar(children, of_table):
        raise ConfigurationError(
            f"other tables inherit from {column.table}, and a trigger is not inherited: add the column to each of them"
        )
    if wanted.key is not None:
        _refuse_key(connection, column, wanted.key, found.oid)
    connection.execute(raw(f"DO {literal(' '.join(['BEGIN', *column.probe(), 'END']))}"))
    if wanted.key_sql is not None:
        ask = raw(f"SELECT 1 FROM {column.table} WHERE {column.expression} IS NULL LIMIT 1")
        if connection.scalar(ask):
            raise ConfigurationError(
                f"key_sql={wanted.key_sql!r} is NULL for rows of {column.table}, and a row without a key has no token: "
                "give those rows one, or use coalesce(...)"
            )
    # Who has been granted nothing has what a table's owner has by itself. Grantee 0 is PUBLIC.
    lacking = connection.scalars(
        text(
            "SELECT DISTINCT CASE WHEN a.grantee = 0 THEN 'PUBLIC' ELSE pg_catalog.quote_ident(r.rolname) END"
            " FROM pg_catalog.pg_class c, pg_catalog.aclexplode("
            "coalesce(c.relacl, pg_catalog.acldefault('r', c.relowner))) a"
            " LEFT JOIN pg_catalog.pg_roles r ON r.oid = a.grantee"
            " WHERE c.oid = :table AND a.privilege_type IN ('INSERT', 'UPDATE') AND NOT ("
            "pg_catalog.has_schema_privilege(a.grantee, :schema, 'USAGE')"
            " AND pg_catalog.has_function_privilege(a.grantee, :function, 'EXECUTE')) ORDER BY 1"
        ),
        {**of_table, "schema": found.function_schema, "function": f"{column.token_of}(text)"},
    ).all()
    if lacking:
        roles = ", ".join(lacking)
        raise ConfigurationError(
            f"{roles} may write {column.table}, but could not call {column.token_of}, so each write would fail: "
            f"GRANT USAGE ON SCHEMA {quote(found.function_schema)} TO {roles}; "
            f"GRANT EXECUTE ON FUNCTION {column.token_of}(text) TO {roles}"
        )


def _refuse_key(connection: Connection, column: Column, key: str, table: int) -> None:
    row = connection.execute(
        text(
            "SELECT a.attnotnull, t.typname, t.typtype::text FROM pg_catalog.pg_attribute a"
            " JOIN pg_catalog.pg_type t ON t.oid = a.atttypid"
            " WHERE a.attrelid = :table AND a.attname = :key AND NOT a.attisdropped AND a.attnum > 0"
        ),
        {"table": table, "key": key},
    ).one_or_none()
    if row is None:
        raise ConfigurationError(
            f"key={key!r} is no column of {column.table}: name the column (not the attribute of the model)"
        )
    not_null, type_name, _ = row
    if type_name not in _KEY_TYPES:
        raise ConfigurationError(
            f"key={key!r} of {column.table} is of type {type_name}, whose text need not be str() of its value in "
            "Python: use an integer, text or uuid column, or give the text to hash as key_sql="
        )
    if not not_null:
        raise ConfigurationError(
            f"key={key!r} of {column.table} may be NULL, and a row without a key has no token: make the "
            "column NOT NULL first"
        )


_KEY_TYPES = ("int2", "int4", "int8", "text", "varchar", "citext", "uuid")
