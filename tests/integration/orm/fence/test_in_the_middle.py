"""What is executed in the middle of a write, changed under way, tried again, or refused at the end."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from sqlalchemy import (
    ColumnDefault,
    Connection,
    Engine,
    Table,
    Update,
    bindparam,
    create_engine,
    event,
    func,
    select,
    text,
    true,
    update,
)
from sqlalchemy.exc import InvalidRequestError, StatementError
from sqlalchemy.orm import Session

from jobsync_orm.exceptions import FenceNotApplicable, OwnershipLost
from jobsync_orm.orm import OwnedSession
from jobsync_orm.orm.fenced_transaction import transaction_of
from jobsync_orm.orm.owned_session import bind
from jobsync_orm.orm.touched import extended
from tests.integration.orm.fence.conftest import HeldJob, take, token
from tests.integration.orm.models import Item

item: Table = Item.__table__  # type: ignore[assignment]


def notes(engine: Engine) -> dict[str, str]:
    with Session(engine) as reader:
        return {sku: note for sku, note in reader.execute(select(Item.sku, Item.note)) if note}


def refused(session: Session, engine: Engine) -> None:
    take(engine, "k2")
    with pytest.raises(OwnershipLost):
        session.commit()
    session.rollback()
    assert notes(engine) == {}


@pytest.mark.parametrize("moment", ["before_cursor_execute", "after_cursor_execute"])
def test_a_listener_executes_something(session: Session, stocked_engine: Engine, moment: str) -> None:
    connection = session.connection()
    done: list[bool] = []

    def look(_connection: Connection, _cursor: Any, statement: str, *_: Any) -> None:
        if statement.startswith("UPDATE") and not done:
            done.append(True)
            connection.execute(select(1))
            connection.execute(update(item).where(item.c.sku == "k4").values(shop_id=1))

    event.listen(connection, moment, look)
    result = session.execute(update(item).where(item.c.sku == "k2").values(note="x"))
    assert not result.returns_rows
    transaction = transaction_of(connection)
    assert transaction is not None
    assert transaction.tokens == {token("k2"), token("k4")}
    refused(session, stocked_engine)


@pytest.fixture
def counted() -> Iterator[None]:
    """Updating an item sets its note, from what the database says."""

    def count(context: Any) -> str:
        return str(context.connection.scalar(select(func.count()).select_from(item)))

    ColumnDefault(count, for_update=True)._set_parent(item.c.note)  # type: ignore[no-untyped-call]
    yield
    item.c.note.onupdate = None


@pytest.mark.usefixtures("counted")
def test_a_default_executes_something(session: Session, stocked_engine: Engine) -> None:
    session.scalars(select(Item).where(Item.sku == "k2")).one().shop_id = None
    session.flush()
    refused(session, stocked_engine)


def test_a_listener_changes_the_write(session: Session, stocked_engine: Engine) -> None:
    """Seen or refused: never sent unseen."""
    session.connection()

    def change(_connection: Connection, statement: Any, multiparams: Any, params: Any, _options: Any) -> Any:
        return statement.where(true()) if isinstance(statement, Update) else statement, multiparams, params

    event.listen(stocked_engine, "before_execute", change, retval=True)
    with pytest.raises(FenceNotApplicable, match="listener of before_execute"):
        session.execute(update(item).where(item.c.sku == "k2").values(note="x"))
    assert session.execute(select(1)).scalar_one() == 1, "it has not been sent"


def test_one_that_could_not_be_sent_is_tried_again(session: Session, stocked_engine: Engine) -> None:
    """The statement is the same object, and the rows are others."""
    write = update(item).where(item.c.id == bindparam("one")).values(note=bindparam("new"))
    connection = session.connection()
    with pytest.raises(StatementError, match="value is required"):
        connection.execute(write, [{"one": 4, "new": "x"}, {"one": 6}])
    connection.execute(write, [{"one": 4, "new": "x"}, {"one": 2, "new": "y"}])
    refused(session, stocked_engine)


def test_a_claim_does_not_stand_in_for_tokens_that_were_not_read(session: Session, stocked_engine: Engine) -> None:
    connection = session.connection()
    connection.execute(extended(update(item).where(item.c.sku == "k2").values(note="x"), [item.c.token_id]))
    transaction = transaction_of(connection)
    assert transaction is not None
    transaction.touch(connection, (), {token("k4")})
    with pytest.raises(FenceNotApplicable, match="could not be read"):
        session.commit()


def test_a_key_that_an_update_sets_by_itself(session: Session, stocked_engine: Engine) -> None:
    ColumnDefault(lambda: "k2", for_update=True)._set_parent(item.c.sku)  # type: ignore[no-untyped-call]
    try:
        with pytest.raises(OwnershipLost):
            session.execute(update(Item).where(Item.id == 1).values(note="x"))
        session.rollback()
        with pytest.raises(FenceNotApplicable, match="may change the tokens"):
            session.execute(update(Item).where(Item.note == "").values(note="x"))
    finally:
        item.c.sku.onupdate = None


def refuse_at_the_end(session: Session, engine: Engine) -> None:
    """Commit what the fence refuses without having asked the database."""
    connection = session.connection()
    done: list[bool] = []

    def insert_between(*arguments: Any) -> None:
        if arguments[2].startswith("UPDATE") and not done:
            done.append(True)
            with engine.begin() as other:
                other.execute(text("INSERT INTO item (id, sku, note) VALUES (100, 'k1', '')"))

    event.listen(connection, "before_cursor_execute", insert_between)
    with pytest.raises(FenceNotApplicable, match="UPDATE of 'item' wrote 1 rows"):
        session.execute(update(Item).where(Item.id == 100).values(sku="k2", note="x"))
    with pytest.raises(FenceNotApplicable, match="must be rolled back"):
        session.commit()


def test_what_is_refused_is_not_committed_by_who_comes_next(stocked_engine: Engine, job: HeldJob) -> None:
    with stocked_engine.connect() as connection:
        with Session(connection) as session:
            refuse_at_the_end(bind(session, job), stocked_engine)
        with pytest.raises(InvalidRequestError, match="rolled back"):
            connection.execute(select(1))
        connection.rollback()
        connection.execute(select(1))
        connection.commit()
    assert notes(stocked_engine) == {}


@pytest.mark.parametrize("reset", ["commit", None])
def test_nor_by_the_pool(stocked_engine: Engine, job: HeldJob, reset: Any) -> None:
    engine = create_engine(stocked_engine.url, pool_size=1, max_overflow=0, pool_reset_on_return=reset)
    with OwnedSession(engine, job=job) as session:
        refuse_at_the_end(session, stocked_engine)
    with engine.connect() as connection:
        connection.execute(select(1))
        connection.commit()
    engine.dispose()
    assert notes(stocked_engine) == {}
