"""The operations for Alembic: run, rendered by autogenerate, and reversed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from alembic.autogenerate import renderers
from alembic.autogenerate.rewriter import Rewriter
from alembic.operations import MigrateOperation, Operations
from alembic.operations.ops import AddColumnOp, CreateIndexOp, DropColumnOp
from sqlalchemy import Column, Connection, TextClause

from jobsync_orm.exceptions import ConfigurationError
from jobsync_orm.migrate.online import steps
from jobsync_orm.migrate.online.backfill import Pace
from jobsync_orm.migrate.online.column import Wanted
from jobsync_orm.migrate.online.locks import Patience
from jobsync_orm.naming import DEFAULT_APPNAME, Names

if TYPE_CHECKING:
    from alembic.autogenerate.api import AutogenContext

__all__ = [
    "BATCH_ROWS",
    "LOCK_TIMEOUT",
    "PATIENCE",
    "REST",
    "AddTokenColumnOp",
    "CreateOnlineIndexOp",
    "DropTokenColumnOp",
    "write_online_operations",
]

BATCH_ROWS = 1000
REST = 0.5
LOCK_TIMEOUT = 0.5
PATIENCE = 600.0


class _TokenColumnOp(MigrateOperation):
    """What both operations know; each is the way back of the other."""

    def __init__(
        self,
        table: str,
        schema: str | None,
        key: str | None,
        key_sql: str | None,
        appname: str,
        token_schema: str | None,
        options: dict[str, Any],
    ) -> None:
        self.table, self.schema = table, schema
        self.key, self.key_sql = key, key_sql
        self.appname, self.token_schema = appname, token_schema
        self.options = options

    @property
    def wanted(self) -> Wanted:
        return Wanted(Names(self.appname, self.token_schema), self.table, self.schema, self.key, self.key_sql)


@Operations.register_operation("add_token_column")
class AddTokenColumnOp(_TokenColumnOp):
    """Alembic operation for :func:`jobsync_orm.migrate.online.add_token_column`."""

    @classmethod
    def add_token_column(
        cls,
        operations: Operations,
        table: str,
        schema: str | None = None,
        *,
        key: str | None = None,
        key_sql: str | None = None,
        appname: str = DEFAULT_APPNAME,
        token_schema: str | None = None,
        batch_rows: int = BATCH_ROWS,
        rest: float = REST,
        lock_timeout: float = LOCK_TIMEOUT,
        patience: float = PATIENCE,
    ) -> None:
        """Give a table that is in use its column ``token_id``, without making its readers and writers wait.

        The parameters are those of :func:`jobsync_orm.migrate.online.add_token_column`. The transaction of the
        migration is committed first.
        """
        options = {"batch_rows": batch_rows, "rest": rest, "lock_timeout": lock_timeout, "patience": patience}
        operations.invoke(cls(table, schema, key, key_sql, appname, token_schema, options))

    def reverse(self) -> DropTokenColumnOp:
        """The operation that undoes this one."""
        return DropTokenColumnOp(
            self.table, self.schema, self.key, self.key_sql, self.appname, self.token_schema, _waits(self.options)
        )

    def to_diff_tuple(self) -> tuple[Any, ...]:
        """What ``alembic check`` shows."""
        return ("add_token_column", self.table, self.schema)


@Operations.register_operation("drop_token_column")
class DropTokenColumnOp(_TokenColumnOp):
    """Alembic operation for :func:`jobsync_orm.migrate.online.drop_token_column`. The key is for the way back."""

    @classmethod
    def drop_token_column(
        cls,
        operations: Operations,
        table: str,
        schema: str | None = None,
        *,
        key: str | None = None,
        key_sql: str | None = None,
        appname: str = DEFAULT_APPNAME,
        token_schema: str | None = None,
        lock_timeout: float = LOCK_TIMEOUT,
        patience: float = PATIENCE,
    ) -> None:
        """Remove ``token_id`` and what keeps it; see :func:`jobsync_orm.migrate.online.drop_token_column`."""
        options = {"lock_timeout": lock_timeout, "patience": patience}
        operations.invoke(cls(table, schema, key, key_sql, appname, token_schema, options))

    def reverse(self) -> AddTokenColumnOp:
        """The operation that undoes this one."""
        return AddTokenColumnOp(
            self.table, self.schema, self.key, self.key_sql, self.appname, self.token_schema, _waits(self.options)
        )

    def to_diff_tuple(self) -> tuple[Any, ...]:
        """What ``alembic check`` shows."""
        return ("drop_token_column", self.table, self.schema)


@Operations.register_operation("create_online_index")
class CreateOnlineIndexOp(MigrateOperation):
    """Alembic operation for :func:`jobsync_orm.migrate.online.create_online_index`."""

    def __init__(self, index: CreateIndexOp) -> None:
        self.index = index

    @classmethod
    def create_online_index(
        cls,
        operations: Operations,
        name: str,
        table: str,
        columns: Sequence[str | TextClause],
        *,
        schema: str | None = None,
        unique: bool = False,
        **kw: Any,
    ) -> None:
        """Make an index while the table is written to, also where an interrupted attempt has left an invalid one.

        The parameters are those of ``op.create_index``. The transaction of the migration is committed first.
        """
        operations.invoke(cls(CreateIndexOp(name, table, columns, schema=schema, unique=unique, **kw)))

    def reverse(self) -> MigrateOperation:
        """The operation that undoes this one."""
        return self.index.reverse()

    def to_diff_tuple(self) -> tuple[Any, ...]:
        """What ``alembic check`` shows."""
        return ("create_online_index", self.index.index_name, self.index.table_name)


def _waits(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name in ("lock_timeout", "patience")}


# -- run ---------------------------------------------------------------------------------------------------------------


@contextmanager
def _autocommit(operations: Operations) -> Iterator[Connection]:
    context = operations.migration_context
    if context.dialect.name != "postgresql":
        raise ConfigurationError(
            f"this operation needs PostgreSQL, not {context.dialect.name!r}: leave it out there; create_all makes "
            "the column of a model with TokenOwned"
        )
    if context.as_sql:
        raise ConfigurationError(
            "this operation looks at the table as it goes, so it cannot be written as a script (--sql): run it on the "
            "database, or use op.add_column, which locks and rewrites the table"
        )
    if getattr(context, "_in_external_transaction", False):
        raise ConfigurationError(
            "this operation commits as it goes, but env.py has begun a transaction around all migrations: "
            "begin it with context.begin_transaction() alone, after context.configure()"
        )
    with context.autocommit_block():
        connection = context.connection
        assert connection is not None
        yield connection


@Operations.implementation_for(AddTokenColumnOp)
def _run_add(operations: Operations, operation: AddTokenColumnOp) -> None:
    options = operation.options
    pace = Pace(options.get("batch_rows", BATCH_ROWS), options.get("rest", REST))
    patience = _patience(options)
    operation.wanted.check_key()
    with _autocommit(operations) as connection:
        steps.add(connection, operation.wanted, pace, patience)


@Operations.implementation_for(DropTokenColumnOp)
def _run_drop(operations: Operations, operation: DropTokenColumnOp) -> None:
    patience = _patience(operation.options)
    with _autocommit(operations) as connection:
        steps.drop(connection, operation.wanted, patience)


@Operations.implementation_for(CreateOnlineIndexOp)
def _run_index(operations: Operations, operation: CreateOnlineIndexOp) -> None:
    index = operation.index.to_index(operations.migration_context)
    with _autocommit(operations) as connection:
        steps.create_index(connection, index)


def _patience(options: dict[str, Any]) -> Patience:
    return Patience(options.get("lock_timeout", LOCK_TIMEOUT), options.get("patience", PATIENCE))


# -- autogenerate ------------------------------------------------------------------------------------------------------


@renderers.dispatch_for(AddTokenColumnOp)
@renderers.dispatch_for(DropTokenColumnOp)
def _render(context: AutogenContext, operation: AddTokenColumnOp | DropTokenColumnOp) -> str:
    context.imports.add("import jobsync_orm.migrate.online")
    defaults = {"schema": None, "key": None, "key_sql": None, "appname": DEFAULT_APPNAME, "token_schema": None}
    given = {name: value for name, default in defaults.items() if (value := getattr(operation, name)) != default}
    given |= operation.options
    arguments = [repr(operation.table), *(f"{name}={value!r}" for name, value in given.items())]
    return f"op.{operation.to_diff_tuple()[0]}({', '.join(arguments)})"


@renderers.dispatch_for(CreateOnlineIndexOp)
def _render_index(context: AutogenContext, operation: CreateOnlineIndexOp) -> str:
    context.imports.add("import jobsync_orm.migrate.online")
    rendered = renderers.dispatch(operation.index)(context, operation.index)
    return str(rendered).replace("op.create_index(", "op.create_online_index(", 1)


write_online_operations = Rewriter()
"""``process_revision_directives`` for ``env.py``: autogenerate writes the operations of this package.

For a column ``token_id`` that a table gets which exists: ``op.add_token_column`` in place of ``op.add_column``, and
in the downgrade ``op.drop_token_column``; for an index with ``token_id``: ``op.create_online_index``. To use it
together with a hook of your own, ``write_online_operations.chain(yours)``.
"""


@write_online_operations.rewrites(AddColumnOp)
def _add(context: Any, revision: Any, operation: AddColumnOp) -> MigrateOperation:
    token = _token_of(operation.column)
    return operation if token is None else AddTokenColumnOp(operation.table_name, operation.schema, *token, {})


@write_online_operations.rewrites(DropColumnOp)
def _drop(context: Any, revision: Any, operation: DropColumnOp) -> MigrateOperation:
    added = getattr(operation, "_reverse", None)
    token = None if added is None else _token_of(added.column)
    return operation if token is None else DropTokenColumnOp(operation.table_name, operation.schema, *token, {})


@write_online_operations.rewrites(CreateIndexOp)
def _index(context: Any, revision: Any, operation: CreateIndexOp) -> MigrateOperation:
    named = [getattr(column, "name", column) for column in operation.columns]
    return CreateOnlineIndexOp(operation) if "token_id" in named else operation


def _token_of(column: Column[Any]) -> tuple[str | None, str | None, str, str | None] | None:
    """``(key, key_sql, appname, token_schema)`` of the column of a ``TokenOwned`` model; None for any other."""
    expression: Any = getattr(column.computed, "sqltext", None)
    # The class of the expression is the ORM part's, which this part must not import.
    names, source = getattr(expression, "names", None), getattr(expression, "source", None)
    if column.name != "token_id" or not isinstance(names, Names):
        return None
    key, key_sql = (source.name, None) if isinstance(source, Column) else (None, source)
    return key, key_sql, names.appname, names.schema
