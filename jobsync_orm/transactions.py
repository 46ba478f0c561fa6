"""The application's transactions: the session behind what was given, and whether what was done in one has lasted.

Imported when a session is given: a worker that uses none does not wait for ``sqlalchemy.orm``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from sqlalchemy import event
from sqlalchemy.orm import Session, SessionTransaction, scoped_session

from jobsync_orm.exceptions import ConfigurationError

__all__ = ["at_commit", "run_in", "session_of"]

T = TypeVar("T")

_waiting: WeakKeyDictionary[Session, list[Callable[[], object]]] = WeakKeyDictionary()


def session_of(session: Any, awaitable: str) -> Session:
    """The Session behind a Session or a scoped_session.

    Raises
    ------
    ConfigurationError
        It is something else; for an AsyncSession the message names ``awaitable``, the method to use.
    """
    if isinstance(session, scoped_session):
        session = session()
    if isinstance(session, Session):
        return session
    remedy = f"use `await {awaitable}`" if "async" in type(session).__name__.lower() else "give a Session"
    raise ConfigurationError(f"session is of type {type(session).__name__}: {remedy}")


async def run_in(session: Any, call: Callable[[Session], T]) -> T:
    """What ``call`` returns, given the Session behind an AsyncSession or an async_scoped_session.

    Raises
    ------
    ConfigurationError
        ``session`` is something else.
    """
    from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session

    if isinstance(session, async_scoped_session):
        session = session()
    if not isinstance(session, AsyncSession):
        raise ConfigurationError(f"session is of type {type(session).__name__}: give an AsyncSession")
    return await session.run_sync(call)


def at_commit(session: Session, call: Callable[[], object]) -> None:
    """Have ``call`` called when the present transaction of ``session`` has been committed.

    It is not called if anything of the transaction is rolled back from here on, be it only a savepoint, nor if the
    session is in a transaction of someone else, who commits or rolls back later.
    """
    if session not in _waiting:
        _waiting[session] = []
        event.listen(session, "after_commit", _committed)
        event.listen(session, "after_soft_rollback", _rolled_back)
        event.listen(session, "after_transaction_end", _ended)
    _waiting[session].append(call)


def _committed(session: Session) -> None:
    transaction = session.get_transaction()
    if transaction is None or session.get_nested_transaction() is not None:
        return
    # SessionTransaction.connections is there from SQLAlchemy 2.1.7 on.
    if not any(entry[0].in_transaction() for entry in transaction._connections.values()):
        for call in _waiting[session]:
            call()


def _rolled_back(session: Session, transaction: SessionTransaction) -> None:
    _waiting[session].clear()


def _ended(session: Session, transaction: SessionTransaction) -> None:
    if transaction.parent is None:
        _waiting[session].clear()
