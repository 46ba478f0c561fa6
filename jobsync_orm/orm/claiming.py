"""Take rows to work on: owned, locked, and of tokens that stay.

::

    with Session.begin() as session:
        for item in job.claim(session, select(Item).where(Item.pending).order_by(Item.created_at), limit=100):
            item.pending = False

:func:`claim` sends two statements.

1. The statement it is given, with the criterion of :func:`~jobsync_orm.orm.owned_by`, ``LIMIT`` and ``FOR UPDATE OF
   item SKIP LOCKED``. Rows that another transaction has locked are passed over, so any number of threads and processes
   may claim at the same time, and no two of them get the same row.
2. The tokens of the rows found, once more. The first statement sees tokens as they were when it began, and may have
   taken long. Rows of a token that has moved since, or is to be handed over, are left out, and so are those of a token
   that came to this node after the transaction began, because it could not be committed. (They stay locked until the
   transaction ends.) Under REPEATABLE READ and SERIALIZABLE a second look would show what the first one saw. There the
   tokens are locked in a savepoint that is rolled back at once; that raises a serialization failure if one has changed.

No lock on a token stays, so a worker that is paused here keeps nobody from taking over: it is the fence that refuses
its commit (the session is bound to the job).

| statement | locks | if the process stops right after it |
|---|---|---|
| claim | rows of the application, in the order in which the statement finds them (skip) | free when the session ends |
| second look | nothing; at the higher isolation levels tokens (share, skip), until the next message | likewise |
"""

from __future__ import annotations

from collections.abc import Coroutine, Iterable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from sqlalchemy import ARRAY, Column, Connection, Integer, Select, any_, bindparam, func, inspect
from sqlalchemy.exc import DBAPIError, InvalidRequestError
from sqlalchemy.orm import Session, scoped_session
from sqlalchemy.sql.selectable import CTE, Subquery

from jobsync_orm.coordinator.view import View
from jobsync_orm.exceptions import ConfigurationError, FilterNotApplicable
from jobsync_orm.naming import Names
from jobsync_orm.observe import RowsClaimed
from jobsync_orm.orm.criteria import Owner, owned_by, owned_tokens, token_mapper
from jobsync_orm.orm.fenced_tables import fenced_table
from jobsync_orm.orm.fenced_transaction import is_autocommit, transaction_of
from jobsync_orm.orm.owned_session import bind
from jobsync_orm.sqlstates import sqlstate

if TYPE_CHECKING:
    from jobsync_orm.orm.owned_session import Bindable

__all__ = ["claim"]

FEATURE_NOT_SUPPORTED = "0A000"

# What decides which rows are found, or is decided here.
_CLAUSES = {
    "_limit_clause": "a LIMIT: pass limit=",
    "_fetch_clause": "a FETCH: pass limit=",
    "_offset_clause": "an OFFSET: claimed rows are passed over by themselves",
    "_for_update_arg": "FOR UPDATE: claim() locks the rows",
    "_distinct": "DISTINCT: PostgreSQL cannot lock the rows behind it",
    "_group_by_clauses": "GROUP BY: PostgreSQL cannot lock the rows behind it",
    "_having_criteria": "HAVING: PostgreSQL cannot lock the rows behind it",
}


def claim(session: Bindable, job: Owner, statement: Any, limit: int) -> list[Any] | Coroutine[Any, Any, list[Any]]:
    """See :meth:`jobsync_orm.Job.claim`."""
    if isinstance(session, scoped_session):
        session = session()
    if isinstance(session, Session):
        return _claim(session, job, statement, limit)
    bind(session, job)  # raises if it is no session at all
    return _claim_async(session, job, statement, limit)


async def _claim_async(session: Any, job: Owner, statement: Any, limit: int) -> list[Any]:
    from sqlalchemy.ext.asyncio import async_scoped_session

    if isinstance(session, async_scoped_session):
        session = session()
    rows: list[Any] = await session.run_sync(_claim, job, statement, limit)
    return rows


def _claim(session: Session, job: Owner, statement: Any, limit: int) -> list[Any]:
    if not isinstance(limit, int) or isinstance(limit, bool) or limit < 1:
        raise ConfigurationError(f"limit={limit!r} must be a whole number, 1 or more")
    entity = _claimable(statement)
    token: Any = entity.token_id
    locking = (
        statement.where(owned_by(entity, job))
        .add_columns(token.label("jobsync_token"))
        .limit(limit)
        .with_for_update(of=_tables_of(entity), skip_locked=True)
        .execution_options(populate_existing=True)
    )
    bind(session, job)
    # Otherwise, without autoflush, what is fresh from the database would overwrite what is changed here.
    session.flush()
    mapper = inspect(entity).mapper
    connection = session.connection(bind_arguments={"mapper": mapper})
    view = _view(connection, job, mapper.columns["token_id"])
    width = len(statement.column_descriptions)
    single = width == 1
    try:
        result = session.execute(locking)
        # The row of an entity stands in the result once for each row that it is joined to.
        found = (result.unique() if single and statement.column_descriptions[0]["expr"] is entity else result).freeze()
    except DBAPIError as error:
        if sqlstate(error.orig) != FEATURE_NOT_SUPPORTED:
            raise
        raise FilterNotApplicable(f"PostgreSQL cannot lock the rows of this statement: {error.orig}") from error
    except InvalidRequestError as error:
        if "unique()" not in str(error):
            raise
        raise FilterNotApplicable(
            "rows of several columns cannot be claimed with a collection that joinedload() loads: use selectinload()"
        ) from error
    rows: Sequence[Any] = found.data
    if view is not None and job.names is not None:
        stay = _staying(connection, job.names, job.node_name, view, {row[-1] for row in rows})
        rows = [row for row in rows if row[-1] in stay]
    if rows and job.audience.active:
        job.audience.tell(RowsClaimed(job.node_name, len(rows)))
    if single:
        return [row[0] for row in rows]
    return list(found.with_new_rows(rows)().columns(*range(width)).all())


def _claimable(statement: Any) -> Any:
    """The one ``TokenOwned`` entity whose rows ``statement`` selects."""
    if not isinstance(statement, Select):
        raise FilterNotApplicable(
            f"claim() takes a select() of a TokenOwned class, not {type(statement).__name__}: a union, a textual or a "
            "legacy Query statement cannot be filtered and locked"
        )
    for attribute, what in _CLAUSES.items():
        clause = getattr(statement, attribute)
        if clause is not None and clause is not False and clause != ():
            raise ConfigurationError(f"the statement to claim has {what}")
    described = (description.get("entity") for description in statement.column_descriptions)
    entities = {
        inspect(entity): entity for entity in described if entity is not None and token_mapper(entity) is not None
    }
    if len(entities) != 1:
        names = ", ".join(str(inspected) for inspected in entities) or "none"
        raise FilterNotApplicable(
            f"claim() locks the rows of one TokenOwned entity, and this statement returns {names}: select one, or "
            "columns of one, and join the others without returning them"
        )
    ((inspected, entity),) = entities.items()
    if isinstance(inspected.selectable, Subquery | CTE):
        raise FilterNotApplicable(
            f"{inspected} stands for a subquery, of which PostgreSQL would lock every row: select the class itself, or "
            "aliased(..., flat=True)"
        )
    return entity


def _tables_of(entity: Any) -> list[Any]:
    """A column of each table that a row of ``entity`` is made of, without those of its subclasses."""
    columns: dict[Any, Any] = {}
    for attribute in inspect(entity).mapper.column_attrs:
        column = attribute.columns[0]
        if isinstance(column, Column):
            columns.setdefault(column.table, getattr(entity, attribute.key))
    return list(columns.values())


def _view(connection: Connection, job: Owner, token: Column[Any]) -> View | None:
    """What the job held when the transaction began; None for a standalone job.

    Raises
    ------
    ConfigurationError
        Locks would not last, or what is claimed could not be committed.
    NotRunning
        The job was not running when the transaction began.
    """
    if is_autocommit(connection):
        raise ConfigurationError(
            "under isolation level AUTOCOMMIT a claimed row is not locked any more when it is returned: use a session "
            "with another isolation level"
        )
    if job.names is None:
        return None
    transaction, table = transaction_of(connection), token.table
    assert transaction is not None
    return transaction.begun_with(connection, fenced_table(table))


def _staying(connection: Connection, names: Names, node: str, view: View, tokens: Iterable[int]) -> set[int]:
    """Those of ``tokens`` that were the node's when the transaction began, and are so now."""
    wanted = [token for token in tokens if view.owned[token] == 1]
    if not wanted:
        return set()
    look, hold = _second_look(names)
    values = {"node": node, "epoch": view.epoch, "tokens": wanted}
    isolation, staying = connection.execute(look, values).one()
    if isolation in ("repeatable read", "serializable"):
        with connection.begin_nested() as savepoint:
            staying = connection.scalars(hold, values).all()
            savepoint.rollback()
    return set(staying or ())


@lru_cache(maxsize=64)
def _second_look(names: Names) -> tuple[Select[Any], Select[Any]]:
    tokens = owned_tokens(names, bindparam("node"))
    token: Any = tokens.columns_clause_froms[0]
    among = tokens.where(
        token.c.token_id == any_(bindparam("tokens", type_=ARRAY(Integer))), token.c.epoch <= bindparam("epoch")
    )
    isolation = func.current_setting("transaction_isolation")
    return (
        among.with_only_columns(isolation, func.array_agg(token.c.token_id)),
        among.with_for_update(read=True, skip_locked=True),
    )
