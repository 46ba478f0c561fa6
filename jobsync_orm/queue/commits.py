"""When the transaction that jobs were enqueued in has been committed, the workers are told.

A wake-up too many is harmless, one that is missing costs a second: so whatever was enqueued is told of when the
outermost transaction commits, even if a savepoint has taken some of it back.

In a session that is its ``after_commit``, which comes when the COMMIT has been answered. A Connection's ``commit``
comes before it is sent, so there the waker is given the transaction and sees by itself when it has ended. A session may
have joined a transaction of a Connection of the application's: then that one's COMMIT counts.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

from sqlalchemy import Connection, event
from sqlalchemy.orm import Session

from jobsync_orm.orm.fenced_transaction import is_autocommit
from jobsync_orm.queue.waker import Lane, QueueWaker

__all__ = ["tell_at_commit"]


class _Told:
    """What is to be told of one transaction."""

    __slots__ = ("blocked", "connection", "lanes")

    def __init__(self) -> None:
        self.lanes: set[Lane] = set()
        self.blocked: set[int] = set()
        self.connection: Connection | None = None


_waiting: WeakKeyDictionary[Session | Connection, dict[QueueWaker, _Told]] = WeakKeyDictionary()

# Connections that have been listened to.
_heard: WeakKeyDictionary[Connection, bool] = WeakKeyDictionary()


def tell_at_commit(
    place: Session | Connection,
    connection: Connection,
    waker: QueueWaker,
    lanes: set[Lane],
    blocked: set[int],
) -> None:
    """Have ``waker`` told of jobs when the present transaction of ``place`` has been committed.

    Parameters
    ----------
    place : Session or Connection
        Where they were enqueued.
    connection : Connection
        The one that was used.
    waker : QueueWaker
        Of their queue.
    lanes : set of (type, priority, keyed)
        Of the jobs that are ready.
    blocked : set of int
        Ids of those that wait for others.
    """
    if is_autocommit(connection):
        waker.wake(lanes, blocked)
        return
    waker.prepare()
    told = _waiting.get(place)
    if told is None:
        told = _waiting[place] = {}
        if isinstance(place, Connection) and place not in _heard:
            _heard[place] = True
            event.listen(place, "commit", _committing)
            event.listen(place, "commit_twophase", _committing)
    one = told.get(waker)
    if one is None:
        one = told[waker] = _Told()
    one.lanes |= lanes
    one.blocked |= blocked
    if isinstance(place, Session):
        one.connection = connection


def _committing(connection: Connection, *_: Any) -> None:
    transaction = connection.get_transaction()
    for waker, told in _waiting.pop(connection, {}).items():
        if transaction is None:
            waker.wake(told.lanes, told.blocked)
        else:
            waker.wake_after(transaction, told.lanes, told.blocked)


@event.listens_for(Session, "after_commit")
def _committed(session: Session) -> None:
    if session not in _waiting or session.in_nested_transaction():
        return
    for waker, told in _waiting.pop(session).items():
        if told.connection is not None and told.connection.in_transaction():
            tell_at_commit(told.connection, told.connection, waker, told.lanes, told.blocked)
        else:
            waker.wake(told.lanes, told.blocked)
