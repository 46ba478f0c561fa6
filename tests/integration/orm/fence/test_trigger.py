"""Bound sessions and the constraint trigger: raw SQL is refused as what the fence itself sees."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from sqlalchemy import Column, Engine, MetaData, Table, Text, column, delete, select, table, text, update
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from jobsync_orm.exceptions import OwnershipLost
from jobsync_orm.migrate.fence import create_ownership_fence, drop_ownership_fence
from jobsync_orm.orm import OwnedSession
from jobsync_orm.orm.owned_session import bind
from tests.integration.orm.conftest import KEYS, own
from tests.integration.orm.fence.conftest import HeldJob, Statements, take, token
from tests.integration.orm.models import Item, Shop

TOUCH = text("UPDATE item SET note = 'raw' WHERE sku = :sku")


@pytest.fixture(params=["allow", "refuse"])
def guarded(stocked_engine: Engine, request: pytest.FixtureRequest) -> Iterator[Engine]:
    create_ownership_fence(stocked_engine, "item", undeclared=request.param)
    yield stocked_engine
    drop_ownership_fence(stocked_engine, "item")


def notes(engine: Engine) -> dict[str, str]:
    with Session(engine) as reader:
        return {sku: note for sku, note in reader.execute(select(Item.sku, Item.note)) if note}


def test_raw_sql_of_an_owner_passes(guarded: Engine, session: Session) -> None:
    sent = Statements(guarded)
    session.execute(TOUCH, {"sku": "k2"})
    session.commit()
    assert notes(guarded) == {"k2": "raw"}
    assert len(sent.sent) == 3, "the write, who commits with COMMIT, and the look above"


def test_raw_sql_of_a_stale_owner_is_refused(guarded: Engine, session: Session) -> None:
    session.execute(TOUCH, {"sku": "k2"})
    session.connection().exec_driver_sql("UPDATE item SET note = 'raw' WHERE sku = 'k4'")
    take(guarded, "k4")
    with pytest.raises(OwnershipLost) as caught:
        session.commit()
    assert (caught.value.tokens, caught.value.owners) == ((token("k4"),), {token("k4"): "other"})
    session.rollback()
    assert notes(guarded) == {}


def test_the_token_is_not_mistaken_for_part_of_a_name(guarded: Engine) -> None:
    job = HeldJob('token 7 {"token" : 8')
    own(guarded, job.node_name, *KEYS)
    with OwnedSession(guarded, job=job) as session:
        session.execute(TOUCH, {"sku": "k2"})
        take(guarded, "k2", node=None)
        with pytest.raises(OwnershipLost) as caught:
            session.commit()
    assert (caught.value.tokens, caught.value.owners) == ((token("k2"),), {token("k2"): None})


def test_beside_what_the_fence_sees(guarded: Engine, session: Session) -> None:
    item = session.scalars(select(Item).where(Item.sku == "k2")).one()
    item.note = "seen"
    session.execute(TOUCH, {"sku": "k4"})
    session.commit()
    assert notes(guarded) == {"k2": "seen", "k4": "raw"}
    item.note = "seen again"
    session.execute(TOUCH, {"sku": "k1"})
    with pytest.raises(OwnershipLost) as caught:
        session.commit()
    assert (caught.value.tokens, caught.value.owners) == ((token("k1"),), {token("k1"): "other"})
    session.rollback()
    assert notes(guarded) == {"k2": "seen", "k4": "raw"}


@pytest.fixture
def cascading(guarded: Engine) -> Iterator[Engine]:
    """Deleting a shop changes its items."""
    change = "ALTER TABLE item DROP CONSTRAINT item_shop_id_fkey, ADD FOREIGN KEY (shop_id) REFERENCES shop"
    with guarded.begin() as connection:
        connection.execute(text("SET LOCAL session_replication_role = replica"))  # this is not what is checked
        connection.execute(text("UPDATE item SET shop_id = NULL WHERE sku <> 'k2'"))
        connection.execute(text(f"{change} ON DELETE SET NULL"))
    yield guarded
    with guarded.begin() as connection:
        connection.execute(text(change))


def write_without_a_class(name: str) -> Any:
    if name == "foreign key":
        return delete(Shop)
    if name == "name":
        return update(table("item", column("sku"), column("note"))).where(text("sku = 'k2'")).values(note="x")
    other = Table("item", MetaData(), Column("sku", Text), Column("note", Text))
    return update(other).where(other.c.sku == "k2").values(note="x")


@pytest.mark.parametrize("name", ["foreign key", "name", "other table object"])
def test_what_the_fence_does_not_know_to_have_tokens(cascading: Engine, session: Session, name: str) -> None:
    session.execute(write_without_a_class(name))
    session.rollback()
    session.execute(write_without_a_class(name))
    take(cascading, "k2")
    with pytest.raises(OwnershipLost):
        session.commit()
    session.rollback()
    take(cascading, "k2", node="me", epoch=0)
    session.execute(write_without_a_class(name))
    session.commit()


def test_a_check_before_the_commit(guarded: Engine, session: Session, request: pytest.FixtureRequest) -> None:
    """Too early: the session has not said yet who it is."""
    session.execute(TOUCH, {"sku": "k1"})
    early = text("SET CONSTRAINTS ALL IMMEDIATE")
    if "refuse" in request.node.name:
        with pytest.raises(DBAPIError) as caught:
            session.execute(early)
        assert isinstance(caught.value.orig, psycopg.Error)
        assert caught.value.orig.sqlstate == "JO002"
    else:
        session.execute(early)
        session.commit()
        assert notes(guarded) == {"k1": "raw"}


def test_async(guarded: Engine) -> None:
    async def run() -> None:
        engine = create_async_engine(guarded.url)
        try:
            async with AsyncSession(engine) as session:
                bind(session, HeldJob())
                await session.execute(TOUCH, {"sku": "k2"})
                await session.commit()
                await session.execute(TOUCH, {"sku": "k1"})
                with pytest.raises(OwnershipLost):
                    await session.commit()
        finally:
            await engine.dispose()

    asyncio.run(run())
    assert notes(guarded) == {"k2": "raw"}
