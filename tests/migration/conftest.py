"""Roles and waiting, for the tests of the migrations."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import psycopg
import pytest
from sqlalchemy import URL, Engine, create_engine

from tests.conftest import Server, dsn


@dataclass(frozen=True)
class Role:
    """A role without rights, and an engine that connects as it."""

    name: str
    engine: Engine


@pytest.fixture
def role(server: Server, database: URL) -> Iterator[Role]:
    """A role on ``database``."""
    name = f"worker_{uuid.uuid4().hex[:12]}"
    with server.connect() as connection:
        connection.execute(f"CREATE ROLE {name} LOGIN PASSWORD 'pw'")
    engine = create_engine(database.set(username=name, password="pw"))
    yield Role(name, engine)
    engine.dispose()
    with psycopg.connect(dsn(database), autocommit=True) as connection:
        connection.execute(f"DROP OWNED BY {name}")
        connection.execute(f"DROP ROLE {name}")


@pytest.fixture
def empty(empty_database: URL) -> Iterator[Engine]:
    """An engine on a database with nothing in it."""
    engine = create_engine(empty_database)
    yield engine
    engine.dispose()


def wait_until(condition: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)
