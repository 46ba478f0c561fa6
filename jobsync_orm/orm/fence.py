"""The fence: the last statement of a transaction, which holds its tokens in place until it has ended.

One statement, sent right before COMMIT::

    SELECT set_config('jobsync.node', :node, true), set_config('jobsync.epoch', :epoch, true),
        (SELECT count(*) FROM (
            SELECT FROM sync_token WHERE token_id = ANY(:tokens) AND node = :node AND epoch <= :epoch
            ORDER BY token_id FOR SHARE) AS held)

It locks the rows of the touched tokens ``FOR SHARE``, in ascending order. Whatever moves tokens skips locked rows and
never waits, so a token that was still this node's here is so when the transaction commits. If the process stops right
after it, the tokens stay until the server has noticed: until its session has ended, or, if it is paused in the middle
of a COMMIT, until it goes on; other tokens move meanwhile. ``epoch`` is that of the view with which the transaction
began: a token that went away and came back has a newer one. The settings tell the constraint trigger of
``create_ownership_fence`` who commits.

With psycopg, in synchronous programs, the statement and COMMIT travel in one message, so that the fence costs no round
trip, and there is no moment at which a paused process could hold the locks.
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
from jobsync_orm.naming import EPOCH_SETTING, NODE_SETTING, OWNERSHIP_LOST, Names

__all__ = ["commit", "declare", "hold", "owners_now", "owners_seen", "refused_by_trigger", "sqlstate"]

SERIALIZATION_FAILURE = "40001"
NOT_HELD = "22012"  # division by zero

_SETTINGS = f"set_config('{NODE_SETTING}', :node, true), set_config('{EPOCH_SETTING}', :epoch, true)"
# Every value travels as text: what a driver makes of an array differs.
_DECLARE = text(f"SELECT {_SETTINGS}")


@lru_cache(maxsize=64)
def _hold(names: Names) -> TextClause:
    return text(f"""
        SELECT {_SETTINGS}, (SELECT count(*) FROM (
            SELECT FROM {names.sql("token")} WHERE token_id = ANY (CAST(CAST(:tokens AS text) AS int[]))
                AND node = CAST(:node AS text) AND epoch <= CAST(CAST(:epoch AS text) AS bigint)
            ORDER BY token_id FOR SHARE) AS held)""")


def declare(connection: Connection, node: str, view: View) -> None:
    """Tell the constraint trigger who commits, where no touched tokens are known."""
    connection.execute(_DECLARE, {"node": node, "epoch": str(view.epoch)})


def hold(connection: Connection, names: Names, node: str, view: View, tokens: set[int]) -> None:
    """Lock ``tokens`` until the transaction ends, if all of them have been ``node``'s since ``view``.

    Raises
    ------
    OwnershipLost
        One is not. The transaction has then been rolled back in the database.
    """
    failure = None
    if all(map(view.owned.__getitem__, tokens)):
        try:
            values = {"node": node, "epoch": str(view.epoch), "tokens": array(tokens)}
            if connection.execute(_hold(names), values).one()[2] == len(tokens):
                return
        except DBAPIError as error:
            if sqlstate(error.orig) != SERIALIZATION_FAILURE:
                raise
            # A token row has changed since this transaction's snapshot. Whether its owner has, a new one shows.
            failure = error
    _raise_if_lost(connection, names, node, view, tokens, failure)
    if failure is not None:
        raise failure


def commit(connection: Connection, names: Names, node: str, view: View, tokens: set[int]) -> None:
    """:func:`hold` and COMMIT in one message, where the driver is psycopg, not async: one round trip less.

    The statement fails if a token is not held, and then the server does not come to the COMMIT behind it. A commit of
    psycopg's connection afterwards finds no transaction and sends nothing.

    Raises
    ------
    OwnershipLost
        As in :func:`hold`.
    sqlalchemy.exc.DBAPIError
        As from a COMMIT.
    """
    if not all(map(view.owned.__getitem__, tokens)):
        _raise_if_lost(connection, names, node, view, tokens, None)
    among = f"= {min(tokens)}" if len(tokens) == 1 else f"= ANY ('{array(tokens)}'::int[])"
    sql = (
        f"{_declared(node)}'{view.epoch}', true), 1 / (count(*) = {len(tokens)})::int FROM (SELECT FROM"
        f" {names.sql('token')} WHERE token_id {among} AND node = {_literal(node)} AND epoch <= {view.epoch}"
        " ORDER BY token_id FOR SHARE) AS held; COMMIT"
    )
    pooled: Any = connection.connection
    cursor = pooled.cursor()
    try:
        # Without values of its own, so that it is sent as one message; and so never prepared.
        cursor.execute(sql, prepare=False)
    except connection.dialect.loaded_dbapi.Error as error:
        if sqlstate(error) in (NOT_HELD, SERIALIZATION_FAILURE):
            _raise_if_lost(connection, names, node, view, tokens, error)
        # What SQLAlchemy does with an error of COMMIT.
        connection._handle_dbapi_exception(error, None, None, None, None)
    finally:
        cursor.close()


@lru_cache(maxsize=64)
def _declared(node: str) -> str:
    return f"SELECT set_config('{NODE_SETTING}', {_literal(node)}, true), set_config('{EPOCH_SETTING}', "


@lru_cache(maxsize=64)
def _literal(value: str) -> str:
    """``value`` as a string constant, whatever ``standard_conforming_strings`` says."""
    return "E'" + value.replace("\\", "\\\\").replace("'", "''") + "'"


def _raise_if_lost(
    connection: Connection, names: Names, node: str, view: View, tokens: set[int], failure: BaseException | None
) -> None:
    """Roll back and look anew. Without a ``failure`` that could have another reason something is lost in any case."""
    found = _look_anew(connection, names, tokens)
    kept = {token for token, owner, epoch in found if owner == node and epoch <= view.epoch and view.owned[token]}
    lost = tokens - kept
    if lost or failure is None:
        raise OwnershipLost(lost or tokens, {token: owner for token, owner, _ in found}) from failure


def owners_seen(connection: Connection, names: Names, tokens: Iterable[int]) -> dict[int, str | None]:
    """Who owns ``tokens``, as this transaction sees it."""
    return {token: owner for token, owner, _ in connection.exec_driver_sql(_owners_sql(names, tokens))}


def owners_now(connection: Connection, names: Names, tokens: Iterable[int]) -> dict[int, str | None]:
    """Who owns ``tokens`` now. Ends the transaction in the database."""
    return {token: owner for token, owner, _ in _look_anew(connection, names, tokens)}


def _look_anew(connection: Connection, names: Names, tokens: Iterable[int]) -> list[tuple[int, str | None, int]]:
    """Tokens, owners and epochs, read after a rollback that SQLAlchemy does not know of yet and will repeat."""
    pooled: Any = connection.connection
    rollback = connection.dialect.do_rollback
    try:
        rollback(pooled)
        cursor = pooled.cursor()
        try:
            cursor.execute(_owners_sql(names, tokens))
            return [(row[0], row[1], row[2]) for row in cursor.fetchall()]
        finally:
            cursor.close()
            rollback(pooled)
    except connection.dialect.loaded_dbapi.Error as error:
        # That the work must not be stored is known all the same. A connection that has broken must be known to have:
        # else the pool fails to put its isolation level back, and that is what the user gets to see.
        if connection.dialect.is_disconnect(error, pooled, None):
            connection.invalidate(error)
        return []


def _owners_sql(names: Names, tokens: Iterable[int]) -> str:
    # Without parameters, so that it is the same for every driver.
    return f"SELECT token_id, node, epoch FROM {names.sql('token')} WHERE token_id = ANY ('{array(tokens)}'::int[])"


def sqlstate(error: BaseException | None) -> str | None:
    """SQLSTATE of a driver's error, whatever the driver calls it."""
    return getattr(error, "sqlstate", None) or getattr(error, "pgcode", None)


def refused_by_trigger(error: DBAPIError) -> set[int] | None:
    """The token for which the constraint trigger has refused a commit; None for any other error."""
    if sqlstate(error.orig) != OWNERSHIP_LOST:
        return None
    # From the JSON in its detail, which every driver puts into the text of the error, behind the message.
    named = re.findall(r'\{"token" : (\d+)', str(error.orig))
    return {int(named[-1])} if named else set()
