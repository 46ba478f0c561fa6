"""Plain jobs that wait for a transaction to begin in the database, as objects of the ORM wait for a flush.

A session has no connection until its transaction does something. Jobs that are enqueued before that wait, and are sent
when the first of these happens:

- the session takes its connection, for whatever it is: they go first, in one message with the BEGIN.
- the session commits. They are then the whole transaction, and it takes one message: the server commits it, and
  SQLAlchemy's COMMIT finds nothing to do.
- somebody reads the ``id`` of one of them.

A rollback, or the end of the session, leaves nothing of them. So whatever looks at the database within the transaction
sees them; what differs is only that an error of their INSERT comes from where they are sent. If one has failed, the
commit fails too: who catches the error of a query does not lose a job by it.

If the process stops before they are sent, there was no transaction. If it stops after the message of a commit, the
server does what it has been told to.

They wait only where nobody can tell the difference: not in a savepoint; not beside what the transaction has already
done; not if others have a say in how the session's transactions begin, as they may set what the INSERT depends on, or
end, as they could still write; not on an engine that is listened to or logs, whose pool's checkouts are listened to, or
that has not been seen to have transactions (in AUTOCOMMIT nobody may commit).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, Final, Protocol
from weakref import WeakKeyDictionary, WeakSet, ref

from sqlalchemy import Connection, Engine, event
from sqlalchemy.exc import UnboundExecutionError
from sqlalchemy.orm import Session, SessionTransaction

from jobsync_orm.exceptions import ConfigurationError, NotEnqueued
from jobsync_orm.models.states import JobState
from jobsync_orm.orm.fenced_transaction import is_autocommit
from jobsync_orm.queue.new_jobs import Enqueued
from jobsync_orm.queue.one_message import TYPES, is_heard, is_plain

__all__ = ["Puts", "UnsentJob", "note", "wait"]

# So many wait at most; with one more they are all sent.
MOST: Final = 100

Columns = dict[str, str]


class Puts(Protocol):
    """What puts jobs in."""

    def _put_begun(self, session: Session, connection: Connection, jobs: list[Columns]) -> list[int]:
        """On ``connection``, as part of its and the session's transaction; returns their ids."""

    def _put_whole(self, engine: Engine, jobs: list[Columns]) -> list[int] | None:
        """As a transaction of their own; None if they cannot be one, or its BEGIN would say something."""


class UnsentJob(Enqueued):
    """What has been enqueued; reading its ``id`` has it sent, if it has not been."""

    __slots__ = ("_batch", "_id")

    _batch: _Batch | None
    _id: int | None

    created = True
    state = JobState.PENDING
    stuck_behind = ()

    def __init__(self, batch: _Batch) -> None:
        # It is frozen, as what it is a kind of.
        object.__setattr__(self, "_batch", batch)
        object.__setattr__(self, "_id", None)

    @property
    def id(self) -> int:
        """The job.

        Raises
        ------
        NotEnqueued
            Its transaction has ended, and it was never sent.
        sqlalchemy.exc.SQLAlchemyError
            As from any statement of its session.
        """
        if self._id is None:
            assert self._batch is not None
            self._batch.send_now()
            assert self._id is not None
        return self._id

    def sent(self, id: int) -> None:
        """It has been sent, and has this id."""
        object.__setattr__(self, "_batch", None)
        object.__setattr__(self, "_id", id)

    def __eq__(self, other: object) -> bool:
        return self._as_sent() == other

    def __hash__(self) -> int:
        return hash(self._as_sent())

    def __reduce__(self) -> tuple[Any, ...]:
        return Enqueued, (self.id, self.created, self.state)

    def __repr__(self) -> str:
        # Whoever only looks, a debugger say, must not write.
        return "Enqueued(id=<not sent yet>)" if self._id is None else repr(self._as_sent())

    def _as_sent(self) -> Enqueued:
        return Enqueued(self.id, self.created, self.state)


class _Batch:
    """The jobs that wait for one transaction of a session's."""

    def __init__(self, session: Session, root: SessionTransaction, engine: Engine, queue: Puts) -> None:
        self._session, self._root = ref(session), ref(root)
        self._process = os.getpid()
        self.engine = engine
        self.queue = queue
        self.jobs: list[tuple[UnsentJob, Columns]] = []
        # Why they cannot be sent any more. Only its text: the error would keep the session, and all that it had.
        self._failure = ""

    def add(self, columns: Columns) -> UnsentJob:
        job = UnsentJob(self)
        self.jobs.append((job, columns))
        if len(self.jobs) >= MOST:
            self.send_now()
        return job

    def send_now(self) -> None:
        """Have the transaction begin, and them sent."""
        session, root = self._session(), self._root()
        if session is None or root is None or root is not session.get_transaction():
            raise NotEnqueued(
                f"it is not known whether the job is there: {self._failure}"
                if self._failure
                else "the job was enqueued in a transaction that has been rolled back, or closed without a commit, "
                "before it was sent: there is none, and never was one"
            )
        connection = session.connection(bind_arguments={"bind": self.engine})
        if self.jobs:  # the session had its connection before, and an attempt has failed
            self.send_in(session, connection)

    def send_in(self, session: Session, connection: Connection) -> None:
        """Send them on the connection of their transaction."""
        self._check()
        root = self._root()
        # Connection, transaction, whether it is committed with the session, whether it is closed with it.
        theirs = root is not None and not root._connections[connection][3]
        if theirs or is_autocommit(connection):
            what = "a connection of another transaction" if theirs else "isolation level AUTOCOMMIT"
            self._failure = f"the session has been given {what} after jobs were enqueued in it: do that before"
            raise ConfigurationError(self._failure)
        self._send(lambda jobs: self.queue._put_begun(session, connection, jobs))

    def send_whole(self) -> bool:
        """Send them as a transaction of their own, which is committed on return. False if that cannot be."""
        return self._send(lambda jobs: self.queue._put_whole(self.engine, jobs))

    def _check(self) -> None:
        if self._failure:
            # Whether they are in the transaction or not nobody may know; and they must not be there twice.
            raise NotEnqueued(
                "this transaction must be rolled back: what was enqueued in it could not be sent: " + self._failure
            )
        if self._process != os.getpid():
            raise NotEnqueued("the job was enqueued before this process was forked, in a session of its parent's")

    def _send(self, put: Callable[[list[Columns]], list[int] | None]) -> bool:
        self._check()
        self._failure = "interrupted"
        try:
            ids = put([columns for _, columns in self.jobs])
        except Exception as error:
            self._failure = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
            raise
        if ids is not None:
            for (job, _), id in zip(self.jobs, ids, strict=True):
                job.sent(id)
            self.jobs.clear()
        self._failure = ""
        return ids is not None


_waiting: WeakKeyDictionary[SessionTransaction, _Batch] = WeakKeyDictionary()

# Engines on which plain jobs were part of a transaction.
_transactional: WeakSet[Engine] = WeakSet()


def note(connection: Connection, columns: Columns) -> None:
    """A job has been put in as part of the transaction of ``connection``: others of this engine's may wait."""
    if is_plain(connection, columns) and not is_autocommit(connection):
        _transactional.add(connection.engine)


def wait(session: Session, columns: Columns, mapper: Any, queue: Puts) -> Enqueued | None:
    """Have a job wait until the transaction of ``session``, which has just been flushed, begins.

    Parameters
    ----------
    session : Session
        Of whose transaction it is part.
    columns : dict
        Of the job.
    mapper : Mapper
        By which the session knows its engine.
    queue : Puts
        Of the job.

    Returns
    -------
    Enqueued, optional
        None if it may not wait.
    """
    if not columns.keys() <= TYPES.keys() or not _is_unheard(session):
        return None
    if not session.in_transaction():
        if not session.autobegin:
            return None
        session.begin()
    # Whoever listens to the beginning may have done something already, or enqueued.
    root = session.get_transaction()
    engine = _engine(session, mapper)
    if root is None or engine is None or not _is_at_its_beginning(session, root):
        return None
    batch = _waiting.get(root)
    if batch is None:
        batch = _waiting[root] = _Batch(session, root, engine, queue)
    elif batch.queue is not queue or batch.engine is not engine:
        return None
    return batch.add(columns)


def _is_unheard(session: Session) -> bool:
    """Whether nobody but this module has a say in how the session's transactions begin and end."""
    if len(session.dispatch.after_begin) > 1 or len(session.dispatch.before_commit) > 1:
        return False
    kind = type(session)
    return kind.connection is Session.connection and kind.begin is Session.begin


def _is_at_its_beginning(session: Session, root: SessionTransaction) -> bool:
    if session._flushing or session.twophase or getattr(session, "execution_options", None):
        return False
    # SessionTransaction.connections is there from SQLAlchemy 2.1.7 on.
    return root.is_active and not root._connections and not session.in_nested_transaction()


def _engine(session: Session, mapper: Any) -> Engine | None:
    try:
        engine = session.get_bind(mapper=mapper)
    except UnboundExecutionError:
        return None
    if not isinstance(engine, Engine) or engine not in _transactional:
        return None
    # What is done to each connection that leaves the pool may depend on when it does.
    return None if is_heard(engine) or engine.pool.dispatch.checkout else engine


@event.listens_for(Session, "after_begin")
def _begun(session: Session, transaction: SessionTransaction, connection: Connection) -> None:
    batch = _waiting.get(transaction)
    if batch is not None and batch.jobs and connection.engine is batch.engine:
        batch.send_in(session, connection)


@event.listens_for(Session, "before_commit")
def _committing(session: Session) -> None:
    root = session.get_transaction()
    batch = None if root is None else _waiting.get(root)
    if root is None or batch is None or not batch.jobs:
        return
    # In a savepoint it may be that, or the whole transaction, that is committed.
    last = len(session.dispatch.before_commit) == 1 and not session.in_nested_transaction() and session._is_clean()
    if not (last and not root._connections and batch.send_whole()):
        batch.send_now()
