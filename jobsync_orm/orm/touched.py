"""Which tokens one statement touches: learned from the database, with the statement itself.

What a statement writes is not known before it has run (``INSERT ... SELECT``, ``ON CONFLICT``, a WHERE clause, a key
computed in SQL), and ``token_id`` is computed by PostgreSQL anyway. So INSERT, UPDATE and DELETE of a fenced table get
a RETURNING clause with it, and the rows are taken off the result again, which then looks as it would without. Where
that cannot tell the tokens the rows are read and locked by primary key before the statement: for an UPDATE of the key,
which returns the new token only, and for UPDATE and DELETE with many sets of parameters, for which drivers return no
rows. What can be learned by neither is refused before it is sent.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from sqlalchemy import Alias, BindParameter, Connection, CursorResult, Delete, Insert, Table, Update
from sqlalchemy.dialects.postgresql.dml import OnConflictDoUpdate
from sqlalchemy.engine.cursor import _NO_RESULT_METADATA
from sqlalchemy.sql import operators
from sqlalchemy.sql.dml import UpdateBase
from sqlalchemy.sql.elements import BinaryExpression, BooleanClauseList, Grouping

from jobsync_orm.exceptions import FenceNotApplicable
from jobsync_orm.orm.fenced_tables import FencedTable

__all__ = ["Write", "extended", "leading_columns", "resolve", "write_target"]

# Name of each column that is added to a RETURNING clause of the user's.
_LABEL = "jobsync_fence_"

Params = Sequence[Mapping[str, Any]]


def write_target(statement: UpdateBase) -> Table | None:
    """The table that ``statement`` writes."""
    # A bulk statement of the ORM names its class; the table of the hierarchy that it is sent for is noted aside.
    annotations = statement._annotations
    table: Any = annotations.get("_emit_insert_table", annotations.get("_emit_update_table", statement.table))
    if isinstance(table, Alias):
        table = table.element
    table = table._deannotate() if table._annotations else table
    return table if isinstance(table, Table) else None


def extended(statement: Any, columns: Sequence[Any]) -> Any:
    """``statement``, whose RETURNING clause is the user's, with ``columns`` behind it."""
    return statement.returning(*(column.label(f"{_LABEL}{place}") for place, column in enumerate(columns)))


def leading_columns(statement: UpdateBase, targets: Sequence[FencedTable]) -> tuple[Any, ...]:
    """Columns of what ``statement`` writes that lead to the tokens of its rows."""
    # Several targets are the same parent table, of classes that each have their tokens: they share its primary key.
    columns = targets[0].returned
    if isinstance(statement.table, Alias):
        return tuple(statement.table.columns[column.key] for column in columns)
    return columns


class Write:
    """One INSERT, UPDATE or DELETE of a fenced table on its way.

    Parameters
    ----------
    statement : Insert, Update or Delete
        As it came.
    table : Table
        What it writes.
    targets : sequence of FencedTable
        What is known of ``table``.
    params : sequence of mappings
        Its sets of parameters.

    Attributes
    ----------
    statement
        As it is to be sent.
    by_caller : bool
        Whether who executes the statement has extended it, and reads the tokens.

    Raises
    ------
    FenceNotApplicable
        It cannot be known which tokens it will touch.
    """

    def __init__(self, statement: Any, table: Table, targets: Sequence[FencedTable], params: Params) -> None:
        self.statement = statement
        self.table = table
        self.targets = targets
        self._direct = targets[0].direct
        self._columns = leading_columns(statement, targets)
        self._many = len(params) > 1
        self._keys: list[tuple[Any, ...]] = []  # of the rows, where RETURNING does not tell
        self._locks = False  # whether those rows are read before the statement
        self._locked = 0
        self._defaults = self._silent = False
        self.by_caller = False
        self._own = self._behind = 0  # columns in a RETURNING that is all ours, and behind the user's
        if isinstance(statement, Insert):
            self._check_conflict(statement)
        else:
            moves = self._may_move(statement, params)
            if moves or self._many:
                self._find_keys(statement, params, moves)
                self._locks = moves or self._direct
            if self._many:
                return
        self._return_tokens(statement)

    # -- before it is sent -------------------------------------------------------------------------------------

    def lock(self, connection: Connection) -> set[int]:
        """Tokens of the rows as they are before the statement, locked so that they stay so, where that is needed."""
        if not self._locks:
            return set()
        delete = isinstance(self.statement, Delete)
        statements = [statement for target in self.targets for statement in target.locking(self._keys, delete=delete)]
        found = [token for statement in statements for token in connection.execute(statement).scalars()]
        self._locked = len(found)
        return set(found)

    def _find_keys(self, statement: Update | Delete, params: Params, moves: bool) -> None:
        keys = _primary_keys(statement, self.targets[0].primary_key, params)
        if keys is not None:
            self._keys = keys
        elif isinstance(statement, Delete) and not self._many:
            raise FenceNotApplicable(
                f"DELETE of {self.table.description!r} does not name its rows by primary key, and token_id is in "
                f"{self.targets[0].token.table.description!r}: delete the objects with session.delete()"
            )
        elif moves:
            raise FenceNotApplicable(
                f"this UPDATE of {self.table.description!r} may change the tokens of rows that it does not name by "
                f"primary key (tokens depend on: {', '.join(sorted(self._deciding()))}), and what they were cannot be "
                "seen: change the objects and let the session flush them, or update each row with a WHERE clause "
                "that says `primary key = value`"
            )
        else:
            raise FenceNotApplicable(
                f"this {_verb(statement)} of {self.table.description!r} with {len(params)} sets of parameters does "
                "not name its rows by primary key, and drivers return no rows for such a statement: execute it once "
                "for each set of parameters"
            )

    def _deciding(self) -> set[str]:
        return {key for target in self.targets for key in target.deciding}

    def _check_conflict(self, statement: Insert) -> None:
        clause = statement._post_values_clause
        if clause is None:
            return
        if isinstance(clause, OnConflictDoUpdate):
            set_: Any = clause.update_values_to_set  # a dict in SQLAlchemy 2.1, a list of pairs in 2.0
            deciding = self._deciding() | {self.table.columns[key].name for key in self._deciding()}
            named = {_key(key) for key in dict(set_)}
            if not named & deciding and None not in named:
                return
            raise FenceNotApplicable(
                f"ON CONFLICT DO UPDATE of {self.table.description!r} sets a column on which the token depends "
                f"({', '.join(sorted(self._deciding()))}), and what the row's token was cannot be seen: leave the "
                "column out of set_, or read the row and change the object"
            )

    def _may_move(self, statement: Update | Delete, params: Params) -> bool:
        """Whether the rows' tokens before the statement may be others than those that RETURNING leads to."""
        if isinstance(statement, Delete):
            return not self._direct  # what leads to the token is deleted
        deciding = self._deciding()
        if not deciding:
            return False
        if any(self._sets_itself(key) for key in deciding):
            return True
        deciding |= {self.table.columns[key].name for key in deciding}
        mapper = statement._propagate_attrs.get("plugin_subject")
        ordered = getattr(statement, "_ordered_values", None)  # SQLAlchemy 2.0 keeps those of ordered_values() apart
        named: list[Any] = [*(statement._values or ()), *dict(ordered or ())]
        if params:
            bound = {bind.key for bind in statement._get_embedded_bindparams()}
            named += [key for key in params[0] if key not in bound]
        for key in named:
            name = _key(key)
            if name is None or name in deciding:
                return True
            if isinstance(key, str) and mapper is not None and name not in self.table.columns:
                # An attribute of another name, or one that sets other columns (a hybrid, a composite).
                column = mapper.mapper.columns.get(name)
                if column is None or column.key in deciding:
                    return True
        return False

    def _sets_itself(self, key: str) -> bool:
        column = self.table.columns[key]
        return column.onupdate is not None or column.server_onupdate is not None

    def _return_tokens(self, statement: Any) -> None:
        if statement._returning:
            if any(str(getattr(one, "name", "")).startswith(_LABEL) for one in statement._returning):
                self.by_caller = True  # who extended it reads it
                return
            self.statement = extended(statement, self._columns)
            self._behind = len(self._columns)
            return
        possible = self.table.implicit_returning
        if isinstance(statement, Insert):
            possible = possible and not statement._inline and not statement._multi_values
        if not possible:
            if not isinstance(statement, Insert) and statement._propagate_attrs.get("compile_state_plugin") == "orm":
                raise FenceNotApplicable(
                    f"table {self.table.description!r} has implicit_returning=False, so the ORM lets nothing be "
                    f"returned from its {_verb(statement)}: name the table instead of the class, Model.__table__"
                )
            self.statement = statement.returning(*self._columns)
            self._own = len(self._columns)
            return
        self._defaults = True
        if statement._return_defaults:
            present = statement._return_defaults_columns
            if not present or all(any(one is column for one in present) for column in self._columns):
                return
        else:
            self._silent = True
        self.statement = statement.return_defaults(*self._columns)

    # -- after it has run --------------------------------------------------------------------------------------

    def tokens(self, connection: Connection, result: CursorResult[Any]) -> set[int]:
        """The tokens of the rows as they are after the statement; takes what was added off ``result``."""
        if self._many and not isinstance(self.statement, Insert):
            if self._locks:
                self._check_count(result.rowcount)
                return set()
            return resolve(connection, self.targets, self._keys)
        rows: Sequence[Any]
        if self._defaults:
            rows = result.returned_defaults_rows or ()
            found = [tuple(row._mapping[column] for column in self._columns) for row in rows]
            compiled: Any = result.context.compiled
            if self._silent and (self._many or len(compiled.implicit_returning) == len(self._columns)):
                _silence(result)
            if self._direct and isinstance(self.statement, Update):
                # The ORM takes what comes back for refreshed, but puts only values that it has evaluated itself into
                # the objects: of a key that was changed, they would keep the old token. Without RETURNING it expires
                # what the database computes.
                context: Any = result.context
                context.postfetch_cols = [*context.postfetch_cols, *self._columns]
        elif self._own:
            rows = result.all()
            found = [tuple(row) for row in rows]
            result.context._is_explicit_returning = False
            if not isinstance(self.statement, Insert):
                result.context._rowcount = len(rows)
            _silence(result)
        else:
            result.context._rowcount = result.rowcount  # not known any more when all rows have been fetched
            rows = result.all()
            found = [tuple(row[-self._behind :]) for row in rows]
            names = list(result.keys())[: -self._behind]
            result._rewind(rows)
            result.columns(*range(len(names)))
            # What an expression is called is decided when it is rendered; columns() takes what it was before.
            metadata: Any = result._metadata
            metadata._keys = names
        if self._locks:
            self._check_count(len(rows))
        return resolve(connection, self.targets, found)

    def _check_count(self, written: int) -> None:
        """Rows that came between the lock and the statement have tokens that nobody knows."""
        if written > self._locked and self._direct:
            raise FenceNotApplicable(
                f"{_verb(self.statement)} of {self.table.description!r} wrote {written} rows, of which only "
                f"{self._locked} were there when they were locked: another transaction added rows with these primary "
                "keys at this moment. Roll back and repeat"
            )


def _silence(result: CursorResult[Any]) -> None:
    """Without the columns that were added there would have been no rows to ask for."""
    result._metadata = _NO_RESULT_METADATA


def resolve(connection: Connection, targets: Sequence[FencedTable], found: Iterable[tuple[Any, ...]]) -> set[int]:
    """Tokens of the rows of which RETURNING gave ``found``."""
    if targets[0].direct:
        return {row[0] for row in found}
    keys = list(dict.fromkeys(found))
    statements = [statement for target in targets for statement in target.locking(keys, delete=False)]
    return {token for statement in statements for token in connection.execute(statement).scalars()}


def _verb(statement: Any) -> str:
    return str(statement.__visit_name__).upper()


def _key(key: Any) -> str | None:
    """Name of the column that ``key`` stands for in SET; None if it is none."""
    if isinstance(key, str):
        return key
    name = getattr(key, "key", None)
    return name if isinstance(name, str) and getattr(key, "table", None) is not None else None


def _primary_keys(
    statement: Update | Delete, primary_key: Sequence[Any], params: Params
) -> list[tuple[Any, ...]] | None:
    """The primary keys of the rows, if the WHERE clause says ``key = value`` for all of it; else None."""
    places = {column: place for place, column in enumerate(primary_key)}
    binds: dict[int, BindParameter[Any]] = {}
    for clause in _conjuncts(statement.whereclause):
        if not isinstance(clause, BinaryExpression) or clause.operator is not operators.eq:
            continue
        for column, value in ((clause.left, clause.right), (clause.right, clause.left)):
            if isinstance(value, BindParameter) and column in places:
                binds.setdefault(places[column], value)
    if len(binds) < len(places) or not places:
        return None
    return [tuple(_value(binds[place], given) for place in range(len(places))) for given in (params or ({},))]


def _value(bind: BindParameter[Any], given: Mapping[str, Any]) -> Any:
    return given.get(bind.key, bind.effective_value)


def _conjuncts(clause: Any) -> Iterable[Any]:
    if isinstance(clause, Grouping):
        clause = clause.element
    if isinstance(clause, BooleanClauseList) and clause.operator is operators.and_:
        for part in clause.clauses:
            yield from _conjuncts(part)
    elif clause is not None:
        yield clause
