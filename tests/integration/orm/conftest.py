"""The tables, and rows of which the node ``me`` owns those with an even number."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from sqlalchemy import Engine, create_engine, text

from jobsync_orm.hashing import task_to_token
from tests.conftest import Server
from tests.integration.orm.models import Base, FakeJob

KEYS = tuple(f"k{number}" for number in range(1, 7))
MINE = KEYS[1::2]


def own(engine: Engine, node: str | None, *keys: str) -> None:
    """Give the tokens of ``keys`` to ``node``."""
    with engine.begin() as connection:
        connection.execute(
            text("UPDATE sync_token SET node = :node WHERE token_id = ANY(:tokens)"),
            {"node": node, "tokens": [task_to_token(key, 10_000) for key in keys]},
        )


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


@pytest.fixture
def job() -> FakeJob:
    return FakeJob()


@pytest.fixture
def standalone() -> FakeJob:
    return FakeJob(names=None)
