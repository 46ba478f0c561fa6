"""The tables, and rows of which the node ``me`` owns those with an even number."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from sqlalchemy import Engine, create_engine, text
from sqlalchemy.orm import Session

from jobsync_orm.hashing import task_to_token
from tests.conftest import Server
from tests.integration.orm.models import Base, FakeJob, Invoice, Item, Part, Shop, Tag, Tagging, Truck

KEYS = tuple(f"k{number}" for number in range(1, 7))
MINE = KEYS[1::2]


def own(engine: Engine, node: str | None, *keys: str) -> None:
    """Give the tokens of ``keys`` to ``node``."""
    with engine.begin() as connection:
        connection.execute(
            text("UPDATE sync_token SET node = :node WHERE token_id = ANY(:tokens)"),
            {"node": node, "tokens": [task_to_token(key, 10_000) for key in keys]},
        )


def stock(engine: Engine) -> None:
    """One row per key in each table; items are numbered from 1."""
    with Session(engine) as session, session.begin():
        shop, tag = Shop(id=1), Tag(id=1)
        session.add_all([shop, tag])
        for number, key in enumerate(KEYS, 1):
            session.add(Item(id=number, sku=key, shop=shop, parts=[Part(serial=key)]))
            session.add_all([Truck(plate=key), Invoice(number=key)])
        session.flush()
        session.add_all([Tagging(item_id=number, tag_id=1) for number in range(1, len(KEYS) + 1)])


@pytest.fixture(scope="session")
def orm_template(server: Server, template: str) -> Iterator[str]:
    """The library's tables, those of the models, and who owns what."""
    url = server.create_database(template)
    engine = create_engine(url)
    Base.metadata.create_all(engine)
    own(engine, "me", *MINE)
    own(engine, "other", *(key for key in KEYS if key not in MINE))
    engine.dispose()
    yield url.database or ""
    server.drop_database(url)


@pytest.fixture
def shop_engine(server: Server, orm_template: str) -> Iterator[Engine]:
    """A database with the models' tables, without rows in them."""
    url = server.create_database(orm_template)
    engine = create_engine(url)
    yield engine
    engine.dispose()
    server.drop_database(url)


@pytest.fixture(scope="session")
def stocked(server: Server, orm_template: str) -> Iterator[Engine]:
    """A database with one row per key in each table, for tests that roll back what they change."""
    url = server.create_database(orm_template)
    engine = create_engine(url)
    stock(engine)
    yield engine
    engine.dispose()
    server.drop_database(url)


@pytest.fixture
def job() -> FakeJob:
    return FakeJob()


@pytest.fixture
def standalone() -> FakeJob:
    return FakeJob(names=None)
