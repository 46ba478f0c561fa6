"""A job whose view is made by hand, and another node that takes its tokens."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import pytest
from sqlalchemy import Engine, event, text
from sqlalchemy.orm import Session

from jobsync_orm.coordinator.view import View
from jobsync_orm.hashing import task_to_token
from jobsync_orm.orm import OwnedSession
from tests.integration.orm.conftest import MINE
from tests.integration.orm.models import FakeJob


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


@pytest.fixture
def stocked_engine(shop_engine: Engine) -> Engine:
    """A database of this test's own, with one row per key in each table."""
    from tests.integration.orm.conftest import stock

    stock(shop_engine)
    return shop_engine


class Statements:
    """What is sent on an engine."""

    def __init__(self, engine: Engine) -> None:
        self.sent: list[str] = []
        event.listen(engine, "before_cursor_execute", self._note)

    def _note(self, _connection: object, _cursor: object, sql: str, *_: object) -> None:
        self.sent.append(sql)

    @property
    def fences(self) -> list[str]:
        return [sql for sql in self.sent if "FOR SHARE" in sql and "sync_token" in sql]
