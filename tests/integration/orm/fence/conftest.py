"""A job whose view is made by hand, and another node that takes its tokens."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakSet

import psycopg
import pytest
from sqlalchemy import Engine, create_engine, text
from sqlalchemy.orm import Session

from jobsync_orm.coordinator.view import View
from jobsync_orm.hashing import task_to_token
from jobsync_orm.orm import OwnedSession, fence
from tests.conftest import Server
from tests.integration.orm.conftest import KEYS, MINE, stock
from tests.integration.orm.models import Base, FakeJob


def token(key: object) -> int:
    return task_to_token(key, 10_000)


def view_of(keys: Iterable[str], epoch: int) -> View:
    owned = bytearray(10_000)
    for key in keys:
        owned[token(key)] = 1
    return View(bytes(owned), epoch, float("inf"))


@dataclass
class HeldJob(FakeJob):
    """A job that runs, and what it believes it owns."""

    view: View | None = field(default_factory=lambda: view_of(MINE, 7))
    is_running: bool = True

    def check_process(self) -> None:
        pass

    def held_view(self) -> View | None:
        return self.view


def take(engine: Engine, *keys: str, node: str | None = "other", epoch: int = 8) -> None:
    """Another node gets the tokens of ``keys``."""
    with engine.begin() as connection:
        connection.execute(
            text("UPDATE sync_token SET node = :node, epoch = :epoch WHERE token_id = ANY(:tokens)"),
            {"node": node, "epoch": epoch, "tokens": [token(key) for key in keys]},
        )


@pytest.fixture
def job() -> HeldJob:
    return HeldJob()


@pytest.fixture
def session(stocked_engine: Engine, job: HeldJob) -> Iterator[Session]:
    with OwnedSession(stocked_engine, job=job) as session:
        yield session


@pytest.fixture(scope="session")
def fence_database(server: Server, orm_template: str) -> Iterator[Engine]:
    url = server.create_database(orm_template)
    # Nothing here has to survive a crash of the server.
    engine = create_engine(url.update_query_dict({"options": "-c synchronous_commit=off"}))
    yield engine
    engine.dispose()
    server.drop_database(url)


@pytest.fixture
def stocked_engine(fence_database: Engine) -> Iterator[Engine]:
    """One row per key in each table; who owns what is as in ``orm_template``."""
    with fence_database.begin() as connection:
        tables = ", ".join(table.name for table in Base.metadata.sorted_tables)
        connection.execute(text(f"TRUNCATE {tables} RESTART IDENTITY CASCADE"))
    take(fence_database, *MINE, node="me", epoch=0)
    take(fence_database, *(key for key in KEYS if key not in MINE), epoch=0)
    stock(fence_database)
    restart_sequences(fence_database)
    engine = create_engine(fence_database.url)
    yield engine
    engine.dispose()


def restart_sequences(engine: Engine) -> None:
    """Rolled back or not, a generated key is used up."""
    with engine.begin() as connection:
        for name in ("item", "part", "vehicle", "document"):
            connection.execute(text(f"SELECT setval('{name}_id_seq', 50, false)"))


class Statements:
    """What is sent to the database of an engine from now on, as the driver gets it."""

    def __init__(self, engine: Engine) -> None:
        self.database = engine.url.database
        self.sent: list[str] = []
        engine.connect().close()  # what SQLAlchemy asks of a server once
        _recorders.add(self)

    @property
    def fences(self) -> list[str]:
        return [sql for sql in self.sent if "sync_hold" in sql]


_recorders: WeakSet[Statements] = WeakSet()
_execute, _send = psycopg.Cursor.execute, fence.send


def _note(connection: Any, sql: str) -> None:
    for recorder in list(_recorders):
        if recorder.database == connection.info.dbname:
            recorder.sent.append(sql)


def _record(cursor: Any, query: Any, *arguments: Any, **options: Any) -> Any:
    _note(cursor.connection, str(query))
    return _execute(cursor, query, *arguments, **options)


def _record_message(connection: Any, sql: str) -> Any:
    _note(connection, sql)
    return _send(connection, sql)


# For good: the events of SQLAlchemy do not show what is sent with a COMMIT.
psycopg.Cursor.execute = _record  # type: ignore[method-assign]
fence.send = _record_message
