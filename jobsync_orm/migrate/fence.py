"""A trigger that keeps stale owners from committing to a table, by whatever SQL they wrote.

The commit fence of a bound session sees what SQLAlchemy sends. Raw SQL (``text()``, a driver's cursor, another
program) it cannot see. For tables where that matters, a migration of the application adds the trigger::

    from alembic import op

    import jobsync_orm.migrate.fence  # makes op.create_ownership_fence known


    def upgrade():
        op.create_ownership_fence("item")


    def downgrade():
        op.drop_ownership_fence("item")

The import may stand in the migration, or once in ``env.py``. Without Alembic: :func:`create_ownership_fence` and
:func:`drop_ownership_fence` with an engine or a connection.

What it does
------------
For each row that is inserted, updated or deleted the trigger waits for COMMIT (it is a deferred constraint trigger).
Then it reads who commits from two settings of the transaction, ``jobsync.node`` and ``jobsync.epoch``, and locks the
token of the row, before and after the change, FOR SHARE: so the token stays where it is until the commit is done. If
the token is not that node's, or came to it after the epoch it knows, the commit fails with SQLSTATE ``JO001``, which a
bound session raises as ``OwnershipLost``.

A bound session declares both settings with the last statement before COMMIT. Other code does so itself, with the epoch
it knew *before* it read what it writes about::

    SELECT set_config('jobsync.node', 'worker-01', true), set_config('jobsync.epoch', '17', true)

(``job.node_name`` and ``job.token_version``). A transaction that declares nothing passes with ``undeclared="allow"``,
which is for tables that web servers write to as well, and fails with SQLSTATE ``JO002`` with ``undeclared="refuse"``.

| statement | locks | if the process stops right after sending it |
|---|---|---|
| COMMIT | the tokens of the rows written, FOR SHARE, in the order of the rows | committed or not; no lock stays |

Movers take token rows with SKIP LOCKED and share locks do not exclude each other, so the order cannot deadlock.

What it does not do
-------------------
``TRUNCATE`` fires no trigger for rows, and neither does a role that sets ``session_replication_role``; logical
replication applies what was checked where it was written. A child table of joined inheritance that has no ``token_id``
of its own cannot have the trigger. ``migrate.downgrade`` to ``base`` leaves the trigger behind, without the tokens it
asks for: drop it first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from alembic.autogenerate import renderers
from alembic.operations import MigrateOperation, Operations
from sqlalchemy import Connection, text

from jobsync_orm.exceptions import ConfigurationError
from jobsync_orm.migrate.binding import Bind, raw, target, transaction
from jobsync_orm.naming import (
    DEFAULT_APPNAME,
    EPOCH_SETTING,
    MAX_IDENTIFIER,
    NODE_SETTING,
    OWNER_UNDECLARED,
    OWNERSHIP_LOST,
    Names,
    is_identifier,
    literal,
    quote,
)

if TYPE_CHECKING:
    from alembic.autogenerate.api import AutogenContext

__all__ = [
    "CreateOwnershipFenceOp",
    "DropOwnershipFenceOp",
    "create_ownership_fence",
    "drop_ownership_fence",
]

Undeclared: TypeAlias = Literal["allow", "refuse"]


def create_ownership_fence(
    bind: Bind,
    table: str,
    schema: str | None = None,
    *,
    appname: str | None = None,
    token_schema: str | None = None,
    undeclared: Undeclared = "allow",
) -> None:
    """Guard a table with the trigger. Takes SHARE ROW EXCLUSIVE on the table: writers wait, readers do not.

    Parameters
    ----------
    bind : Engine, Connection, AsyncEngine or CoordinationConfig
        The database, as for :func:`jobsync_orm.migrate.upgrade`.
    table : str
        A table with a column ``token_id``, partitioned or not.
    schema : str, optional
        The table's schema. None leaves it to ``search_path``.
    appname, token_schema : str, optional
        ``appname`` and ``schema`` of the cluster whose tokens the table has; see :func:`jobsync_orm.migrate.upgrade`.
    undeclared : {"allow", "refuse"}
        What becomes of a transaction that does not say who commits.

    Raises
    ------
    ConfigurationError
        The table or its ``token_id`` is not there, or the cluster's token table is not; a value out of range.
    sqlalchemy.exc.DBAPIError
        The trigger is there already, or the role may not create it.
    """
    fence = _Fence(target(bind, appname, token_schema).names, table, schema, undeclared)
    with transaction(bind) as connection:
        _create(connection, fence)


def drop_ownership_fence(
    bind: Bind,
    table: str,
    schema: str | None = None,
    *,
    appname: str | None = None,
    token_schema: str | None = None,
) -> None:
    """Remove the trigger and its function. Takes ACCESS EXCLUSIVE on the table.

    Parameters
    ----------
    bind, table, schema, appname, token_schema
        As for :func:`create_ownership_fence`.

    Raises
    ------
    sqlalchemy.exc.DBAPIError
        There is no such trigger.
    """
    fence = _Fence(target(bind, appname, token_schema).names, table, schema)
    with transaction(bind) as connection:
        for statement in fence.drop():
            connection.execute(raw(statement))


@dataclass(frozen=True)
class _Fence:
    """The trigger of one table, in SQL."""

    names: Names
    table: str
    schema: str | None = None
    undeclared: str = "allow"

    def __post_init__(self) -> None:
        if self.undeclared not in ("allow", "refuse"):
            raise ConfigurationError(f'undeclared={self.undeclared!r} must be "allow" or "refuse"')
        for what, name in (("table", self.table), ("schema", self.schema)):
            if name is not None and not is_identifier(name):
                raise ConfigurationError(f"{what}={name!r} must be a name of 1 to {MAX_IDENTIFIER} bytes")

    def _qualified(self, name: str) -> str:
        return quote(name) if self.schema is None else f"{quote(self.schema)}.{quote(name)}"

    @property
    def table_sql(self) -> str:
        return self._qualified(self.table)

    def create(self, token_table: str) -> tuple[str, str]:
        """Statements that make the function and the trigger. ``token_table`` is SQL, with its schema."""
        name = quote(self.names.fence(self.table))
        body = _FUNCTION.replace("<token>", token_table).replace("<undeclared>", _UNDECLARED[self.undeclared])
        return (
            f"CREATE FUNCTION {self._qualified(self.names.fence(self.table))}() RETURNS trigger LANGUAGE plpgsql"
            f" AS {literal(body)}",
            f"CREATE CONSTRAINT TRIGGER {name} AFTER INSERT OR UPDATE OR DELETE ON {self.table_sql}"
            f" DEFERRABLE INITIALLY DEFERRED FOR EACH ROW"
            f" EXECUTE FUNCTION {self._qualified(self.names.fence(self.table))}()",
        )

    def drop(self) -> tuple[str, str]:
        """Statements that remove the trigger and the function."""
        name = self.names.fence(self.table)
        return (
            f"DROP TRIGGER {quote(name)} ON {self.table_sql}",
            f"DROP FUNCTION {self._qualified(name)}()",
        )


_UNDECLARED = {
    "allow": "RETURN NULL;",
    "refuse": f"""
        RAISE EXCEPTION USING ERRCODE = '{OWNER_UNDECLARED}', TABLE = TG_TABLE_NAME, SCHEMA = TG_TABLE_SCHEMA,
            MESSAGE = pg_catalog.format('rows of %s were written by a transaction that does not say who commits',
                TG_TABLE_NAME),
            HINT = 'Write through a session bound to a job, or set {NODE_SETTING} and {EPOCH_SETTING}'
                ' for the transaction.';""",
}

# A setting that was LOCAL to an earlier transaction of the session is empty, not NULL. An UPDATE is checked for the
# token of the new row first, then, if the key has changed, for that of the old one.
_FUNCTION = f"""
DECLARE
    me CONSTANT text := nullif(pg_catalog.current_setting('{NODE_SETTING}', true), '');
    known CONSTANT bigint := nullif(pg_catalog.current_setting('{EPOCH_SETTING}', true), '');
    token int;
    owner text;
    since bigint;
BEGIN
    IF me IS NULL THEN <undeclared>
    END IF;
    token := CASE WHEN TG_OP = 'DELETE' THEN OLD.token_id ELSE NEW.token_id END;
    LOOP
        PERFORM FROM <token> t WHERE t.token_id = token AND t.node = me AND t.epoch <= known
            AND t.next_node IS DISTINCT FROM t.node FOR SHARE;  -- else the cluster rests
        IF NOT FOUND THEN
            SELECT t.node, t.epoch INTO owner, since FROM <token> t WHERE t.token_id = token;
            RAISE EXCEPTION USING ERRCODE = '{OWNERSHIP_LOST}', TABLE = TG_TABLE_NAME, SCHEMA = TG_TABLE_SCHEMA,
                MESSAGE = pg_catalog.format('%s may not commit to token %s of %s: it belongs to %s since epoch %s, and'
                    ' this transaction knows epoch %s', me, token, TG_TABLE_NAME, coalesce(owner, 'nobody'), since,
                    coalesce(known::text, 'none ({EPOCH_SETTING} is not set)')),
                DETAIL = pg_catalog.json_build_object('token', token, 'owner', owner),
                HINT = 'Roll back, and work again on rows that are still owned.';
        END IF;
        EXIT WHEN TG_OP <> 'UPDATE';
        EXIT WHEN token = OLD.token_id;
        token := OLD.token_id;
    END LOOP;
    RETURN NULL;
END
"""


def _create(connection: Connection, fence: _Fence) -> None:
    ask = text(
        "SELECT c.oid IS NOT NULL, EXISTS (SELECT FROM pg_catalog.pg_attribute a WHERE a.attrelid = c.oid"
        " AND a.attname = 'token_id' AND NOT a.attisdropped) FROM pg_catalog.to_regclass(:table) AS c (oid)"
    )
    there, has_token = connection.execute(ask, {"table": fence.table_sql}).one()
    if not there:
        raise ConfigurationError(f"there is no table {fence.table_sql}: create it first, or give schema=")
    if not has_token:
        raise ConfigurationError(
            f"table {fence.table_sql} has no column token_id: the fence goes on the table of the class that has the "
            "TokenOwned mixin (of joined inheritance, the table that holds token_id)"
        )
    for statement in fence.create(_token_table(connection, fence.names)):
        connection.execute(raw(statement))


def _token_table(connection: Connection, names: Names) -> str:
    """The token table with the schema it is in, so that the trigger does not depend on each session's search_path."""
    ask = text(
        "SELECT n.nspname FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace"
        " WHERE c.oid = pg_catalog.to_regclass(:name)"
    )
    schema = connection.scalar(ask, {"name": names.sql("token")})
    if schema is None:
        raise ConfigurationError(
            f"there is no token table {names.sql('token')}: run jobsync_orm.migrate.upgrade first, or give the "
            "cluster's appname= and token_schema="
        )
    return Names(names.appname, schema).sql("token")


# -- Alembic ---------------------------------------------------------------------------------------------------------


class _OwnershipFenceOp(MigrateOperation):
    """What both operations know; each is the way back of the other."""

    def __init__(
        self, table: str, schema: str | None, appname: str, token_schema: str | None, undeclared: Undeclared
    ) -> None:
        self.table, self.schema = table, schema
        self.appname, self.token_schema = appname, token_schema
        self.undeclared = undeclared


@Operations.register_operation("create_ownership_fence")
class CreateOwnershipFenceOp(_OwnershipFenceOp):
    """Alembic operation for :func:`create_ownership_fence`."""

    @classmethod
    def create_ownership_fence(
        cls,
        operations: Operations,
        table: str,
        schema: str | None = None,
        *,
        appname: str = DEFAULT_APPNAME,
        token_schema: str | None = None,
        undeclared: Undeclared = "allow",
    ) -> None:
        """Guard a table with a trigger that refuses commits of stale owners.

        The parameters are those of :func:`jobsync_orm.migrate.fence.create_ownership_fence`. For a script
        (``alembic upgrade --sql``) ``token_schema`` must be given, because nothing can be looked up.
        """
        operations.invoke(cls(table, schema, appname, token_schema, undeclared))

    def reverse(self) -> DropOwnershipFenceOp:
        """The operation that undoes this one."""
        return DropOwnershipFenceOp(self.table, self.schema, self.appname, self.token_schema, self.undeclared)

    def to_diff_tuple(self) -> tuple[Any, ...]:
        """What ``alembic check`` shows."""
        return ("create_ownership_fence", self.table, self.schema)


@Operations.register_operation("drop_ownership_fence")
class DropOwnershipFenceOp(_OwnershipFenceOp):
    """Alembic operation for :func:`drop_ownership_fence`. ``undeclared`` is for the way back."""

    @classmethod
    def drop_ownership_fence(
        cls,
        operations: Operations,
        table: str,
        schema: str | None = None,
        *,
        appname: str = DEFAULT_APPNAME,
        token_schema: str | None = None,
        undeclared: Undeclared = "allow",
    ) -> None:
        """Remove the trigger and its function; see :func:`jobsync_orm.migrate.fence.drop_ownership_fence`."""
        operations.invoke(cls(table, schema, appname, token_schema, undeclared))

    def reverse(self) -> CreateOwnershipFenceOp:
        """The operation that undoes this one."""
        return CreateOwnershipFenceOp(self.table, self.schema, self.appname, self.token_schema, self.undeclared)

    def to_diff_tuple(self) -> tuple[Any, ...]:
        """What ``alembic check`` shows."""
        return ("drop_ownership_fence", self.table, self.schema)


def _fence(operation: CreateOwnershipFenceOp | DropOwnershipFenceOp) -> _Fence:
    names = Names(operation.appname, operation.token_schema)
    return _Fence(names, operation.table, operation.schema, operation.undeclared)


def _require_postgresql(operations: Operations) -> None:
    dialect = operations.migration_context.dialect.name
    if dialect != "postgresql":
        raise ConfigurationError(f"an ownership fence needs PostgreSQL, not {dialect!r}: leave it out there")


@Operations.implementation_for(CreateOwnershipFenceOp)
def _run_create(operations: Operations, operation: CreateOwnershipFenceOp) -> None:
    _require_postgresql(operations)
    fence = _fence(operation)
    if not operations.migration_context.as_sql:
        _create(operations.get_bind(), fence)
        return
    if fence.names.schema is None:
        raise ConfigurationError(
            f"a script cannot look up which schema {fence.names.bare('token')!r} is in: give token_schema=, "
            'for example op.create_ownership_fence("item", token_schema="public")'
        )
    for statement in fence.create(fence.names.sql("token")):
        operations.execute(raw(statement))


@Operations.implementation_for(DropOwnershipFenceOp)
def _run_drop(operations: Operations, operation: DropOwnershipFenceOp) -> None:
    _require_postgresql(operations)
    for statement in _fence(operation).drop():
        operations.execute(raw(statement))


@renderers.dispatch_for(CreateOwnershipFenceOp)
@renderers.dispatch_for(DropOwnershipFenceOp)
def _render(context: AutogenContext, operation: CreateOwnershipFenceOp | DropOwnershipFenceOp) -> str:
    """The call, for migrations that a hook of the application adds the operation to."""
    context.imports.add("import jobsync_orm.migrate.fence")
    defaults = {"schema": None, "appname": DEFAULT_APPNAME, "token_schema": None, "undeclared": "allow"}
    given = [
        f"{name}={value!r}" for name, default in defaults.items() if (value := getattr(operation, name)) != default
    ]
    return f"op.{operation.to_diff_tuple()[0]}({', '.join([repr(operation.table), *given])})"
