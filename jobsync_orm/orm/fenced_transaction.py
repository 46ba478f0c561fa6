"""The transactions of a fenced session: which tokens each has touched, and the fence when it commits.

The session says on which connection a transaction begins; from there on the connection is watched, not the session,
because whatever way a write takes, it passes there, and because its "commit" event is the last moment before COMMIT.
The listeners stand on the engine, once, and do nothing for a connection that no fenced session uses.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary, WeakSet, ref

from sqlalchemy import Connection, Engine, TextClause, event
from sqlalchemy.engine import ExceptionContext, ExecutionContext, Transaction, TwoPhaseTransaction
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session
from sqlalchemy.sql.dml import UpdateBase
from sqlalchemy.sql.elements import ReleaseSavepointClause, RollbackToSavepointClause, SavepointClause

from jobsync_orm.coordinator.view import View
from jobsync_orm.exceptions import ConfigurationError, FenceNotApplicable, NotRunning, OwnershipLost
from jobsync_orm.message import may_send
from jobsync_orm.naming import Names
from jobsync_orm.observe import FenceRejected
from jobsync_orm.orm import fence
from jobsync_orm.orm.criteria import Owner, running_name
from jobsync_orm.orm.fenced_tables import FencedTable, fenced_table
from jobsync_orm.orm.touched import Write, write_target

__all__ = ["FencedTransaction", "begin", "is_autocommit", "transaction_of"]

_by_connection: WeakKeyDictionary[Connection, FencedTransaction] = WeakKeyDictionary()

_UNREAD = FenceNotApplicable("the rows that a write returned could not be read, so its tokens are not known")

_engines: WeakSet[Engine] = WeakSet()
_engines_guard = threading.Lock()


class _Savepoint:
    """What was done since a savepoint, or since the transaction began."""

    __slots__ = ("name", "raw", "tokens", "unknown")

    def __init__(self, name: str) -> None:
        self.name = name
        self.clear()

    def clear(self) -> None:
        self.tokens: set[int] = set()
        self.raw = False  # something that may have written rows unseen: SQL text, or a table that others hang on
        self.unknown: Exception | None = None  # why it is not known which tokens were touched


class FencedTransaction:
    """The transaction on one connection of a fenced session.

    Parameters
    ----------
    job : Owner
        Whose tokens count.
    names : Names
        Names of the job's cluster.
    """

    def __init__(self, job: Owner, names: Names) -> None:
        self.job = job
        self.names = names
        self._busy = False
        self.start()

    def start(self) -> None:
        """A transaction begins."""
        self._view: View | None = self.job.held_view()
        self._root: ref[Transaction] | None = None
        self._savepoints = [_Savepoint("")]
        self._writes: list[Write] = []  # on their way: a default or a listener may execute others in the middle of one
        self._checked = False
        self._fenced = False
        self._refused = False

    def join(self, session: Session, transaction: Transaction | None) -> bool:
        """Take ``session`` in, if ``transaction`` is this one. It may be one that an earlier session has left open."""
        if transaction is None or (self._root is not None and self._root() is not transaction):
            return False
        self._root = ref(transaction)
        self._session = ref(session)
        return True

    @property
    def session_goes_on(self) -> bool:
        """Whether the session is still in its transaction, so that its connection's next one is the session's too."""
        session = self._session()
        return session is not None and session.in_transaction()

    # -- statements --------------------------------------------------------------------------------------------

    def before(self, connection: Connection, statement: Any, params: Sequence[Mapping[str, Any]]) -> Any:
        """``statement`` as it is to be sent."""
        if self._busy:
            return statement
        if isinstance(statement, UpdateBase):
            if self._place_of(statement) is not None:
                return statement
            table = write_target(statement)
            targets = fenced_table(table) if table is not None else ()
            if not targets or table is None:
                return statement
            if self._checked:
                fence.roll_back(connection)
                raise FenceNotApplicable(
                    f"a listener of the commit writes {table.description!r} after the tokens were checked: write before"
                )
            self._check_allowed(connection, targets)
            write = Write(statement, table, targets, params)
            if write.statement is statement:
                # Each write is known by a statement that is its own; one that has failed may be sent once more.
                write.statement = statement._generate()
            self._touch(connection, self._quietly(write.lock, connection))
            self._writes.append(write)
            return write.statement
        if isinstance(statement, SavepointClause):
            if self._savepoints[-1].name != statement.ident:
                self._savepoints.append(_Savepoint(statement.ident))
        elif isinstance(statement, RollbackToSavepointClause):
            self._forget(statement.ident)
        elif isinstance(statement, ReleaseSavepointClause):
            self._release(statement.ident)
        return statement

    def after(self, connection: Connection, statement: Any, result: Any) -> None:
        """``statement`` has run."""
        place = self._place_of(statement)
        if place is None or self._busy:
            return
        write = self._writes[place]
        del self._writes[place:]  # what was executed in the middle of it has ended
        if write.by_caller:
            self._savepoints[-1].unknown = self._savepoints[-1].unknown or _UNREAD
            return
        try:
            tokens = self._quietly(write.tokens, connection, result)
        except Exception as error:
            self._savepoints[-1].unknown = error
            raise
        self._touch(connection, tokens)

    def touch(self, connection: Connection, targets: Sequence[FencedTable], tokens: set[int]) -> None:
        """Add ``tokens`` to those touched.

        Raises
        ------
        OwnershipLost
            One of them was not this node's when the transaction began.
        """
        self._check_allowed(connection, targets)
        savepoint = self._savepoints[-1]
        if targets and savepoint.unknown is _UNREAD:
            savepoint.unknown = None
        self._touch(connection, tokens)

    def begun_with(self, connection: Connection, targets: Sequence[FencedTable]) -> View:
        """What the job held when the transaction began, if rows of ``targets`` could be written in it.

        Raises
        ------
        ConfigurationError, NotRunning
            As a write of such rows would.
        """
        self._check_allowed(connection, targets)
        assert self._view is not None
        return self._view

    def look(self, context: ExecutionContext | None) -> None:
        """A statement is about to be sent: note what may write unseen, refuse what hides a write inside."""
        compiled: Any = context.compiled if context is not None else None
        if self._busy:
            return
        if compiled is None or isinstance(compiled.statement, TextClause):
            self._savepoints[-1].raw = True
            return
        invoked: Any = context.invoked_statement if context is not None else None
        if isinstance(invoked, UpdateBase) and self._place_of(invoked) is None:
            table = write_target(invoked)
            if table is not None and fenced_table(table):
                raise FenceNotApplicable(
                    f"a listener of before_execute has changed this write of {table.description!r} after it was seen: "
                    "register the listener before the first bound session uses the engine"
                )
            # A foreign key or a trigger of the database may change rows that have tokens.
            self._savepoints[-1].raw = True
        for cte in getattr(compiled, "ctes", None) or ():
            element = cte.element
            if isinstance(element, UpdateBase):
                table = write_target(element)
                if table is not None and fenced_table(table):
                    raise FenceNotApplicable(
                        f"a CTE of this statement writes {table.description!r}, and the tokens of the rows cannot be "
                        "seen there: execute the write as a statement of its own"
                    )

    def _place_of(self, statement: Any) -> int | None:
        """Where ``statement`` is among the writes on their way."""
        for place in range(len(self._writes) - 1, -1, -1):
            if self._writes[place].statement is statement:
                return place
        return None

    def _quietly(self, call: Any, *arguments: Any) -> Any:
        """Call what executes statements of this library's own."""
        self._busy = True
        try:
            return call(*arguments)
        finally:
            self._busy = False

    def _touch(self, connection: Connection, tokens: set[int]) -> None:
        if not tokens:
            return
        self._savepoints[-1].tokens |= tokens
        view = self._view
        if view is None:
            return
        lost = {token for token in tokens if not view.owned[token]}
        if lost:
            owners = self._quietly(fence.owners_seen, connection, self.names, lost)
            self._tell_refused("write")
            raise OwnershipLost(lost, owners, self.job.node_name)

    def _tell_refused(self, where: str) -> None:
        if not self._refused:  # what is refused at COMMIT may be by the trigger, whose error passes twice
            self._refused = True
            self.job.audience.tell(FenceRejected(self.job.node_name, where))

    def _check_allowed(self, connection: Connection, targets: Sequence[FencedTable]) -> None:
        """Refuse the first write where there can be no fence."""
        for target in targets:
            if target.names != self.names:
                raise ConfigurationError(
                    f"table {target.table.description!r} takes its tokens from appname={target.names.appname!r}, "
                    f"schema={target.names.schema!r}, but the session is bound to a job of "
                    f"appname={self.names.appname!r}, schema={self.names.schema!r}: use a session for each cluster"
                )
        if self._fenced:
            return
        running_name(self.job)
        if self._view is None:
            raise NotRunning(
                f"{self.job.node_name} was not running yet when this transaction began, and owned nothing: start the "
                "job first"
            )
        if connection.dialect.name != "postgresql":
            raise ConfigurationError(f"a fenced session needs PostgreSQL, not {connection.dialect.name}")
        if isinstance(connection.get_transaction(), TwoPhaseTransaction):
            raise ConfigurationError(
                "a two-phase transaction ends after its session has let go of it, when nothing is checked any more: "
                "use a fenced session without twophase=True"
            )
        if is_autocommit(connection):
            raise ConfigurationError(
                "under isolation level AUTOCOMMIT each statement is stored before it can be checked: use a fenced "
                "session with another isolation level"
            )
        self._fenced = True

    # -- savepoints --------------------------------------------------------------------------------------------

    def _place(self, name: str) -> int | None:
        for place in range(len(self._savepoints) - 1, 0, -1):
            if self._savepoints[place].name == name:
                return place
        return None

    def _forget(self, name: str) -> None:
        place = self._place(name)
        if place is not None:
            del self._savepoints[place + 1 :]
            self._savepoints[place].clear()

    def _release(self, name: str) -> None:
        place = self._place(name)
        if place is not None:
            into = self._savepoints[place - 1]
            for released in self._savepoints[place:]:
                into.tokens |= released.tokens
                into.raw |= released.raw
                into.unknown = into.unknown or released.unknown
            del self._savepoints[place:]

    # -- the end -----------------------------------------------------------------------------------------------

    @property
    def tokens(self) -> set[int]:
        """The tokens touched so far."""
        return set().union(*(savepoint.tokens for savepoint in self._savepoints))

    def check(self, connection: Connection) -> None:
        """The transaction is about to commit.

        Raises
        ------
        OwnershipLost
            A touched token is not this node's.
        """
        if self._checked or self._busy:
            return
        for savepoint in self._savepoints:
            if savepoint.unknown is not None:
                raise FenceNotApplicable(
                    f"this transaction must be rolled back: {savepoint.unknown}"
                ) from savepoint.unknown
        tokens, view = self.tokens, self._view
        raw = any(savepoint.raw for savepoint in self._savepoints) and _may_declare(connection)
        if view is not None and (tokens or raw):
            # Whoever listens behind this listener must find the transaction open.
            last = tuple(connection.dispatch.commit)[-1] is _on_commit
            finish = fence.commit if last and may_send(connection) else fence.hold
            self._checked = finish is fence.commit  # what the trigger refuses then, it refuses at COMMIT
            try:
                self._quietly(finish, connection, self.names, self.job.node_name, view, tokens)
            except OwnershipLost:
                self._tell_refused("commit")
                raise
        self._checked = True

    def translate(self, connection: Connection, error: DBAPIError) -> OwnershipLost | None:
        """The refusal of the constraint trigger in this library's words; None for any other error."""
        tokens = fence.refused_by_trigger(error)
        if tokens is None:
            return None
        # Earlier than at COMMIT there may be a savepoint to go back to, and no other transaction in between.
        owners = fence.owners_now(connection, self.names, tokens) if self._checked else {}
        self._tell_refused("trigger")
        return OwnershipLost(tokens, owners, self.job.node_name)


def is_autocommit(connection: Connection) -> bool:
    """Whether each statement on ``connection`` is a transaction of its own."""
    level = connection.get_execution_options().get("isolation_level")
    return level == "AUTOCOMMIT" or getattr(connection.connection.dbapi_connection, "autocommit", False) is True


def _may_declare(connection: Connection) -> bool:
    """Whether there is a trigger that could listen, and a transaction that it would be told of."""
    return connection.dialect.name == "postgresql" and not is_autocommit(connection)


def begin(session: Session, connection: Connection, job: Owner) -> None:
    """A transaction of ``session``, which is bound to ``job``, begins or goes on on ``connection``.

    Raises
    ------
    ConfigurationError
        Another session, bound to another job, is in this transaction.
    """
    if job.names is None:
        return
    _watch(connection.engine)
    transaction = connection.get_transaction()
    present = _by_connection.get(connection)
    if present is None or not present.join(session, transaction):
        present = _by_connection[connection] = FencedTransaction(job, job.names)
        present.join(session, transaction)
    elif present.job is not job:
        raise ConfigurationError(
            f"this connection's transaction belongs to a session of {present.job.node_name}: a session of "
            f"{job.node_name} needs a connection of its own"
        )


def transaction_of(connection: Connection) -> FencedTransaction | None:
    """The fenced transaction on ``connection``, if there is one."""
    return _by_connection.get(connection)


# -- listeners -------------------------------------------------------------------------------------------------


def _watch(engine: Engine) -> None:
    if engine in _engines:
        return
    with _engines_guard:
        if engine in _engines:
            return
        # Each may be called twice, for an engine and another made of it by execution_options(); the second call of
        # each changes nothing.
        event.listen(engine, "begin", _on_begin)
        event.listen(engine, "begin_twophase", _on_begin)
        event.listen(engine, "before_execute", _on_before_execute, retval=True)
        event.listen(engine, "before_cursor_execute", _on_before_cursor_execute, retval=True)
        event.listen(engine, "after_execute", _on_after_execute)
        event.listen(engine, "commit", _on_commit)
        event.listen(engine, "handle_error", _on_error)
        _engines.add(engine)


def _on_begin(connection: Connection, *_: Any) -> None:
    present = _by_connection.get(connection)
    if present is None:
        return
    # Someone has committed on the session's connection, or a session uses its connection again.
    if present.session_goes_on:
        present.start()
    else:
        del _by_connection[connection]


def _on_before_execute(
    connection: Connection, statement: Any, multiparams: Any, params: Any, _options: Any
) -> tuple[Any, Any, Any]:
    present = _by_connection.get(connection)
    if present is not None and connection.get_transaction() is None:
        # It would begin by itself after this call, and what is noted here would be of the transaction before.
        connection.begin()
        present = _by_connection.get(connection)
    if present is not None:
        statement = present.before(connection, statement, multiparams or ((params,) if params else ()))
    return statement, multiparams, params


def _on_before_cursor_execute(
    connection: Connection, _cursor: Any, sql: str, parameters: Any, context: ExecutionContext | None, _many: bool
) -> tuple[str, Any]:
    present = _by_connection.get(connection)
    if present is not None:
        present.look(context)
    return sql, parameters


def _on_after_execute(
    connection: Connection, statement: Any, _multiparams: Any, _params: Any, _options: Any, result: Any
) -> None:
    present = _by_connection.get(connection)
    if present is not None:
        present.after(connection, statement, result)


def _on_commit(connection: Connection) -> None:
    present = _by_connection.get(connection)
    if present is None:
        return
    try:
        present.check(connection)
    except BaseException:
        # SQLAlchemy takes a transaction whose commit has failed for ended, and sends no ROLLBACK any more.
        fence.roll_back(connection)
        raise


def _on_error(context: ExceptionContext) -> BaseException | None:
    connection, error = context.connection, context.sqlalchemy_exception
    present = _by_connection.get(connection) if connection is not None else None
    if connection is None or present is None or not isinstance(error, DBAPIError):
        return None
    return present.translate(connection, error)
