"""Sessions whose commits are fenced: :class:`OwnedSession`, and :func:`bind` for a session of another class.

::

    Session = sessionmaker(engine, class_=OwnedSession, job=job)
    with Session.begin() as session:
        for item in session.scalars(select(Item).where(Item.owned_by(job))):
            item.done = True
    # committed only if the tokens of all rows written are still this node's; else OwnershipLost, and nothing is stored

``docs/fence.md`` says what is fenced, and what is not.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakKeyDictionary

from sqlalchemy import Connection, Result, event
from sqlalchemy.orm import ORMExecuteState, Session, SessionTransaction, scoped_session
from sqlalchemy.sql.dml import UpdateBase

from jobsync_orm.exceptions import ConfigurationError
from jobsync_orm.orm import fenced_transaction
from jobsync_orm.orm.criteria import Owner
from jobsync_orm.orm.fenced_tables import FencedTable, fenced_table
from jobsync_orm.orm.touched import extended, leading_columns, resolve, write_target

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session

    Bindable = Session | scoped_session[Any] | AsyncSession | async_scoped_session[Any]

__all__ = ["OwnedSession", "bind", "job_of"]

S = TypeVar("S", bound="Bindable")

_jobs: WeakKeyDictionary[Session, Owner] = WeakKeyDictionary()


class OwnedSession(Session):
    """A session whose commits are refused if they wrote rows of tokens that are not this node's any more.

    Takes the arguments of :class:`sqlalchemy.orm.Session` and the job: ``OwnedSession(engine, job=job)``,
    ``sessionmaker(engine, class_=OwnedSession, job=job)``, ``async_sessionmaker(engine,
    sync_session_class=OwnedSession, job=job)``. The job need not run yet when the session is made, but when its first
    transaction begins. With a standalone job, which owns everything, nothing is checked.

    Parameters
    ----------
    job : Owner
        The job.

    Raises
    ------
    ConfigurationError
        ``job`` is no job.
    """

    def __init__(self, *args: Any, job: Owner, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        _remember(self, job)


def bind(session: S, job: Owner) -> S:
    """Fence the commits of ``session``, from now on, with the tokens of ``job``.

    Parameters
    ----------
    session : Session, scoped_session, AsyncSession or async_scoped_session
        Of a scoped session the one that belongs to this thread or task is bound. If it is in a transaction already,
        what it wrote before is not checked.
    job : Owner
        The job.

    Returns
    -------
    The same session.

    Raises
    ------
    ConfigurationError
        The session is bound to another job, or is none.
    """
    target = _session(session)
    if _jobs.get(target) is job:
        return session
    _remember(target, job)
    if job.names is None:
        return session
    event.listen(target, "after_begin", _after_begin)
    event.listen(target, "do_orm_execute", _on_orm_execute)
    transaction = target.get_transaction()
    if transaction is not None:
        for connection in _connections(transaction):
            fenced_transaction.begin(target, connection, job)
    return session


def job_of(session: Session) -> Owner | None:
    """The job that ``session`` is bound to."""
    return _jobs.get(session)


def _remember(session: Session, job: Owner) -> None:
    if not hasattr(job, "held_view"):
        raise ConfigurationError(f"a session is bound to a Job, not to {job!r}")
    present = _jobs.get(session)
    if present is not None and present is not job:
        raise ConfigurationError(
            f"this session is bound to the job {present.node_name} already: use another session for {job.node_name}"
        )
    _jobs[session] = job


def _session(target: Any) -> Session:
    if isinstance(target, scoped_session):
        target = target()
    if isinstance(target, Session):
        return target
    # Whoever has an asynchronous one has imported the module. A program without asyncio may lack greenlet.
    if "sqlalchemy.ext.asyncio" in sys.modules:
        from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session

        if isinstance(target, async_scoped_session):
            target = target()
        if isinstance(target, AsyncSession):
            return target.sync_session
    raise ConfigurationError(
        f"{target!r} is no session: pass a Session, scoped_session, AsyncSession or async_scoped_session"
    )


def _connections(transaction: SessionTransaction) -> set[Connection]:
    # SessionTransaction.connections is there from SQLAlchemy 2.1.7 on.
    return {entry[0] for entry in transaction._connections.values()}


@event.listens_for(OwnedSession, "after_begin")
def _after_begin(session: Session, _transaction: SessionTransaction, connection: Connection) -> None:
    job = _jobs.get(session)
    if job is not None:
        fenced_transaction.begin(session, connection, job)


@event.listens_for(OwnedSession, "do_orm_execute")
def _on_orm_execute(state: ORMExecuteState) -> Result[Any] | None:
    """Read the tokens off the result of a write with RETURNING, of which the ORM makes objects.

    What is added to the clause would appear to the caller as one more element of each row, so it is added and taken
    away here. Everything else is seen on the connection.
    """
    if state.is_select:
        return None
    statement: Any = state.statement
    if not isinstance(statement, UpdateBase) or not statement._returning or not _makes_objects(state, statement):
        return None
    table = write_target(statement)
    targets = fenced_table(table) if table is not None else ()
    job = _jobs.get(state.session)
    if not targets or job is None or job.names is None:
        return None
    connection = state.session.connection(bind_arguments=dict(state.bind_arguments))
    token = _token_attribute(state, targets[0])
    columns = leading_columns(statement, targets) if token is None else (token,)
    frozen = state.invoke_statement(statement=extended(statement, columns)).freeze()
    transaction = fenced_transaction.transaction_of(connection)
    if transaction is not None:
        found = [tuple(row[-len(columns) :]) for row in frozen.data]
        if token is not None:
            transaction.touch(connection, targets, {row[0] for row in found})
        else:
            transaction.touch(connection, targets, resolve(connection, targets, found))
    result = frozen()
    return result.columns(*range(len(result.keys()) - len(columns)))


def _token_attribute(state: ORMExecuteState, target: FencedTable) -> Any:
    """The attribute, for an INSERT that the ORM takes apart into one for each table of the hierarchy; else None."""
    mapper = state.bind_mapper
    if not state.is_insert or target.direct or mapper is None or target.token not in mapper.columns.values():
        return None
    return getattr(mapper.class_, mapper.get_property_by_column(target.token).key)


def _makes_objects(state: ORMExecuteState, statement: UpdateBase) -> bool:
    raw = state.execution_options.get("dml_strategy") == "raw"
    return state.is_orm_statement and "parententity" in statement.table._annotations and not raw
