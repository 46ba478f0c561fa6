"""The fence: the last statement of a transaction, which holds its tokens in place until it has ended.

One statement, sent right before COMMIT::

    SELECT sync_hold(:tokens, :node, :epoch)

The function (migration 0002) locks the rows of the touched tokens ``FOR SHARE``, in ascending order, and fails unless
all of them are the node's, at an epoch that is not above ``epoch``. Whatever moves tokens skips locked rows and never
waits, so a token that was still this node's here is so when the transaction commits. ``epoch`` is that of the view with
which the transaction began: a token that went away and came back has a newer one. The function also sets
``jobsync.node`` and ``jobsync.epoch``, which tell the constraint trigger of ``create_ownership_fence`` who commits;
that is all where no tokens are known to be touched, but rows may have been written that the database goes on from.

With psycopg, in synchronous programs, the statement and COMMIT travel in one message, so that the fence costs no round
trip, and there is no moment at which a paused process could hold the locks. Elsewhere a process may stop between the
two: the server then ends the transaction after ``IDLE_SEC`` seconds, and the tokens can move.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

from sqlalchemy import Connection, TextClause, text
from sqlalchemy.exc import DBAPIError

from jobsync_orm.coordinator.session import array
from jobsync_orm.coordinator.view import View
from jobsync_orm.exceptions import OwnershipLost
from jobsync_orm.message import send
from jobsync_orm.naming import EPOCH_SETTING, NODE_SETTING, NOT_HELD, OWNERSHIP_LOST, Names
from jobsync_orm.sqlstates import SERIALIZATION_FAILURE, sqlstate

__all__ = ["commit", "hold", "owners_now", "owners_seen", "refused_by_trigger", "roll_back"]

# Between the fence and COMMIT nothing takes time but a process that does not run.
IDLE_SEC = 10

_DECLARE = text(f"SELECT set_config('{NODE_SETTING}', :node, true), set_config('{EPOCH_SETTING}', :epoch, true)")

_IDLE = "idle_in_transaction_session_timeout"
_SHORTER = f"current_setting('{_IDLE}')::interval BETWEEN interval '1 ms' AND interval '{IDLE_SEC} s'"


@lru_cache(maxsize=64)
def _hold(names: Names) -> TextClause:
    # Every value travels as text: what a driver makes of an array differs.
    function = names.text("hold")
    hold = (
        f"{function}(CAST(CAST(:tokens AS text) AS int[]), CAST(:node AS text), CAST(CAST(:epoch AS text) AS bigint))"
    )
    idle = f"set_config('{_IDLE}', CASE WHEN {_SHORTER} THEN current_setting('{_IDLE}') ELSE '{IDLE_SEC}s' END, true)"
    return text(f"SELECT {hold}, {idle}")


def hold(connection: Connection, names: Names, node: str, view: View, tokens: set[int]) -> None:
    """Lock ``tokens`` until the transaction ends, if all of them have been ``node``'s since ``view``.

    Without tokens, only tell the constraint trigger who commits.

    Raises
    ------
    OwnershipLost
        One is not. The transaction has then been rolled back in the database.
    """
    if not tokens:
        connection.execute(_DECLARE, {"node": node, "epoch": str(view.epoch)})
        return
    failure = None
    if all(map(view.owned.__getitem__, tokens)):
        try:
            values = {"node": node, "epoch": str(view.epoch), "tokens": array(sorted(tokens))}
            connection.execute(_hold(names), values)
            return
        except DBAPIError as error:
            if sqlstate(error.orig) not in (NOT_HELD, SERIALIZATION_FAILURE):
                raise
            # Or a token row has changed since this transaction's snapshot. Whether its owner has, a new one shows.
            failure = error
    _raise_if_lost(connection, names, node, view, tokens, failure and failure.orig)
    if failure is not None:
        raise failure


def commit(connection: Connection, names: Names, node: str, view: View, tokens: set[int]) -> None:
    """:func:`hold` and COMMIT in one message, where :func:`~jobsync_orm.message.may_send`: one round trip less.

    Without tokens, only who commits, and COMMIT. The statement fails if a token is not held, and then the server does
    not come to the COMMIT behind it. A commit of psycopg's connection afterwards finds no transaction and sends
    nothing.

    Raises
    ------
    OwnershipLost
        As in :func:`hold`.
    sqlalchemy.exc.DBAPIError
        As from a COMMIT.
    """
    if not all(map(view.owned.__getitem__, tokens)):
        _raise_if_lost(connection, names, node, view, tokens, None)
    # Without values of its own, so that it is one message; and so never prepared.
    if tokens:
        sql = f"{_hold_start(names)}{array(sorted(tokens))}', {_literal(node)}, {view.epoch})"
    else:  # it may be another database, without the function
        sql = f"{_declare_start(node)}{view.epoch}', true)"
    try:
        send(connection.connection.dbapi_connection, f"{sql}; COMMIT")
    except connection.dialect.loaded_dbapi.Error as error:
        if tokens and sqlstate(error) in (NOT_HELD, SERIALIZATION_FAILURE):
            _raise_if_lost(connection, names, node, view, tokens, error)
        # What SQLAlchemy does with an error of COMMIT.
        connection._handle_dbapi_exception(error, None, None, None, None)


@lru_cache(maxsize=64)
def _hold_start(names: Names) -> str:
    return f"SELECT {names.sql('hold')}('"


@lru_cache(maxsize=64)
def _declare_start(node: str) -> str:
    return f"SELECT set_config('{NODE_SETTING}', {_literal(node)}, true), set_config('{EPOCH_SETTING}', '"


@lru_cache(maxsize=64)
def _literal(value: str) -> str:
    """``value`` as a string constant, whatever ``standard_conforming_strings`` says."""
    return "E'" + value.replace("\\", "\\\\").replace("'", "''") + "'"


def _raise_if_lost(
    connection: Connection, names: Names, node: str, view: View, tokens: set[int], failure: BaseException | None
) -> None:
    """Roll back and look anew. Only a serialization failure could have another reason than a token that is lost."""
    found = _look_anew(connection, names, tokens)
    kept = {token for token, owner, epoch in found if owner == node and epoch <= view.epoch and view.owned[token]}
    lost = tokens - kept
    if lost or sqlstate(failure) != SERIALIZATION_FAILURE:
        raise OwnershipLost(lost or tokens, {token: owner for token, owner, _ in found}, node) from failure


def owners_seen(connection: Connection, names: Names, tokens: Iterable[int]) -> dict[int, str | None]:
    """Who owns ``tokens``, as this transaction sees it."""
    try:
        return {token: owner for token, owner, _ in _ask(connection, names, tokens)}
    except connection.dialect.loaded_dbapi.Error as error:
        connection._handle_dbapi_exception(error, None, None, None, None)


def owners_now(connection: Connection, names: Names, tokens: Iterable[int]) -> dict[int, str | None]:
    """Who owns ``tokens`` now. Ends the transaction in the database."""
    return {token: owner for token, owner, _ in _look_anew(connection, names, tokens)}


def _look_anew(connection: Connection, names: Names, tokens: Iterable[int]) -> list[tuple[int, str | None, int]]:
    """Tokens, owners and epochs, read after a rollback that SQLAlchemy does not know of yet and will repeat."""
    pooled: Any = connection.connection
    rollback = connection.dialect.do_rollback
    try:
        rollback(pooled)
        try:
            return _ask(connection, names, tokens)
        finally:
            rollback(pooled)
    except connection.dialect.loaded_dbapi.Error as error:
        # That the work must not be stored is known all the same. A connection that has broken must be known to have:
        # else the pool fails to put its isolation level back, and that is what the user gets to see.
        if connection.dialect.is_disconnect(error, pooled, None):
            connection.invalidate(error)
        return []


def roll_back(connection: Connection) -> None:
    """End the transaction in the database, whatever SQLAlchemy thinks of it; a connection that cannot is given up."""
    if connection.closed or connection.invalidated:
        return
    pooled: Any = connection.connection
    try:
        connection.dialect.do_rollback(pooled)
    except connection.dialect.loaded_dbapi.Error as error:
        connection.invalidate(error)


def _ask(connection: Connection, names: Names, tokens: Iterable[int]) -> list[tuple[int, str | None, int]]:
    pooled: Any = connection.connection
    cursor = pooled.cursor()
    try:
        # Without parameters, so that it is the same for every driver, whatever stands in the name of a schema.
        cursor.execute(_owners_sql(names, tokens))
        return [(row[0], row[1], row[2]) for row in cursor.fetchall()]
    finally:
        cursor.close()


def _owners_sql(names: Names, tokens: Iterable[int]) -> str:
    return f"SELECT token_id, node, epoch FROM {names.sql('token')} WHERE token_id = ANY ('{array(tokens)}'::int[])"


def refused_by_trigger(error: DBAPIError) -> set[int] | None:
    """The token for which the constraint trigger has refused a commit; None for any other error."""
    if sqlstate(error.orig) != OWNERSHIP_LOST:
        return None
    # From the JSON in its detail, which every driver puts into the text of the error, behind the message.
    named = re.findall(r'\{"token" : (\d+)', str(error.orig))
    return {int(named[-1])} if named else set()
