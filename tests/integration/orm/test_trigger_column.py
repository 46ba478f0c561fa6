"""Models with TokenOwned on a table in which a trigger keeps token_id, as op.add_token_column makes it.

What is tested here is what may differ from the generated column: how a value comes to be, and comes back to the object.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from sqlalchemy import Column, Engine, FetchedValue, Integer, Table, delete, insert, select, text, update
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Session

from jobsync_orm.exceptions import ConfigurationError, FenceNotApplicable, OwnershipLost
from jobsync_orm.hashing import task_to_token
from jobsync_orm.migrate import online
from jobsync_orm.migrate.fence import create_ownership_fence
from jobsync_orm.orm import OwnedSession, TokenOwned
from tests.integration.orm.conftest import KEYS, MINE, stock
from tests.integration.orm.fence.conftest import HeldJob, take
from tests.integration.orm.models import FakeJob, Item, Shop


def token(key: str) -> int:
    return task_to_token(key, 10_000)


@pytest.fixture
def kept(shop_engine: Engine) -> Engine:
    """The shop with one row per key; the table of items has been given its column online."""
    stock(shop_engine)
    online.drop_token_column(shop_engine, "item")
    online.add_token_column(shop_engine, "item", key="sku")
    with shop_engine.begin() as connection:
        connection.execute(text("SELECT setval(pg_get_serial_sequence('item', 'id'), 100)"))
    return shop_engine


def test_values_come_back_to_the_objects(kept: Engine) -> None:
    with Session(kept) as session:
        shop = session.get_one(Shop, 1)
        item = Item(sku="a", shop=shop)
        session.add(item)
        session.flush()
        assert item.__dict__["token_id"] == token("a")
        item.sku = "b"
        session.flush()
        assert item.__dict__["token_id"] == token("b")
        session.execute(insert(Item), [{"sku": "c", "shop_id": 1}, {"sku": "d", "shop_id": 1}])
        session.execute(update(Item).where(Item.sku == "k1").values(sku="e"))
        found = session.execute(select(Item.sku, Item.token_id).where(Item.sku.in_([*"bcde"]))).all()
        assert {row.sku: row.token_id for row in found} == {key: token(key) for key in "bcde"}


def test_async_code_reads_the_token_after_an_update_of_the_key(kept: Engine) -> None:
    async def scenario() -> tuple[int, int]:
        engine = create_async_engine(kept.url)
        try:
            async with AsyncSession(engine) as session:
                item = Item(sku="a", shop_id=1)
                session.add(item)
                await session.flush()
                before = item.token_id
                item.sku = "b"
                await session.flush()
                return before, item.token_id
        finally:
            await engine.dispose()

    assert asyncio.run(scenario()) == (token("a"), token("b"))


def test_a_token_written_by_hand_is_overwritten(kept: Engine) -> None:
    with Session(kept) as session:
        item = Item(sku="a", shop_id=1)
        item.token_id = 7
        session.add(item)
        session.commit()
        assert item.token_id == token("a")
        session.execute(update(Item).values(token_id=7))
        session.commit()
        assert item.token_id == token("a")


def test_owned_by(kept: Engine, job: FakeJob) -> None:
    with Session(kept) as session:
        assert session.scalars(select(Item.sku).where(Item.owned_by(job)).order_by(Item.sku)).all() == [*MINE]


class TestFence:
    def test_a_stale_owner_cannot_commit(self, kept: Engine) -> None:
        with OwnedSession(kept, job=HeldJob()) as session:  # type: ignore[arg-type]
            item = session.scalars(select(Item).where(Item.sku == MINE[0])).one()
            item.note = "mine"
            session.flush()
            take(kept, MINE[0])
            with pytest.raises(OwnershipLost):
                session.commit()
        with Session(kept) as session:
            assert session.scalars(select(Item.note).where(Item.sku == MINE[0])).one() == ""

    def test_a_change_of_the_key_touches_both_tokens(self, kept: Engine) -> None:
        theirs = next(key for key in KEYS if key not in MINE)
        for old, new in ((MINE[0], theirs), (theirs, MINE[0])):
            with OwnedSession(kept, job=HeldJob()) as session:  # type: ignore[arg-type]
                item = session.scalars(select(Item).where(Item.sku == old)).first()
                assert item is not None
                item.sku = new
                with pytest.raises(OwnershipLost):
                    session.commit()

    def test_the_trigger_of_the_fence(self, kept: Engine) -> None:
        create_ownership_fence(kept, "item", undeclared="refuse")
        with kept.connect() as connection:
            connection.execute(text("UPDATE item SET sku = 'x' WHERE id = 1"))
            with pytest.raises(Exception, match="does not say who commits"):
                connection.commit()


class TestTablesOfTheApplicationsOwn:
    def model(self, engine: Engine, *columns: Column[Any]) -> Any:
        class Base(DeclarativeBase):
            pass

        table = Table("item", Base.metadata, *columns, autoload_with=engine)
        return type("Reflected", (TokenOwned, Base), {"__table__": table})

    def token_column(self) -> Column[Any]:
        return Column("token_id", Integer, FetchedValue(), server_onupdate=FetchedValue(), nullable=False)

    def test_the_column_must_be_left_to_the_database(self, kept: Engine) -> None:
        with pytest.raises(ConfigurationError, match="where a trigger keeps it, Column"):
            self.model(kept)

    def test_reflected(self, kept: Engine, job: FakeJob) -> None:
        model = self.model(kept, self.token_column())
        with Session(kept) as session:
            assert session.scalars(select(model.sku).where(model.owned_by(job)).order_by(model.sku)).all() == [*MINE]
            item = model(sku="a", note="", shop_id=1)
            session.add(item)
            session.flush()
            assert item.__dict__["token_id"] == token("a")
            item.sku = "b"
            session.flush()
            assert item.__dict__["token_id"] == token("b")

    def test_fenced_for_the_token_before_a_change_too(self, kept: Engine) -> None:
        model = self.model(kept, self.token_column())
        theirs = next(key for key in KEYS if key not in MINE)
        with OwnedSession(kept, job=HeldJob()) as session:  # type: ignore[arg-type]
            session.scalars(select(model).where(model.sku == theirs)).one().sku = MINE[0]
            with pytest.raises(OwnershipLost):
                session.commit()

    def test_what_the_trigger_reads_is_not_known(self, kept: Engine) -> None:
        """So each UPDATE must say which rows it changes; a DELETE shows their tokens itself."""
        model = self.model(kept, self.token_column())
        with OwnedSession(kept, job=HeldJob()) as session:  # type: ignore[arg-type]
            with pytest.raises(FenceNotApplicable, match="does not name by primary key"):
                session.execute(update(model).where(model.sku == MINE[0]).values(note="x"))
            session.rollback()
            session.execute(text("DELETE FROM part"))
            session.execute(text("DELETE FROM tagging"))
            session.execute(delete(model).where(model.sku == MINE[0]))
            session.commit()
