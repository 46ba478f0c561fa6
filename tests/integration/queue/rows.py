"""Jobs in any state, put into the table directly."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
import pytest
from sqlalchemy import URL, Engine, text
from sqlalchemy.exc import DBAPIError

from jobsync_orm.autocommit import Autocommit
from tests.conftest import dsn


class SQL(str):
    """A value that is an SQL expression."""

    __slots__ = ()


LATER, NOW, ERROR = SQL("now() + interval '1 hour'"), SQL("now()"), "ValueError: no"

# What the table wants of a job in such a state.
FITTING: dict[str, dict[str, Any]] = {
    "processing": {"attempt": 1, "worker": "w1", "started_at": NOW, "deadline": LATER},
    "scheduled": {"run_at": LATER},
    "retrying": {"attempt": 1, "failures": 1, "run_at": LATER, "error": ERROR},
    "completed": {"attempt": 1, "started_at": NOW, "finished_at": NOW},
    "failed": {"attempt": 4, "failures": 4, "finished_at": NOW, "error": ERROR},
    "cancelled": {"finished_at": NOW},
}


def put(engine: Engine, state: str = "pending", *, count: int = 1, type: str = "t", **columns: Any) -> list[int]:
    """Insert ``count`` jobs; their ids."""
    values = {"type": type, "state": state, **FITTING.get(state, {}), **columns}
    if values.get("key") is not None:
        values.setdefault("token_id", 0)
    places = ", ".join(value if isinstance(value, SQL) else f":{name}" for name, value in values.items())
    insert = f"INSERT INTO sync_job ({', '.join(values)}) SELECT {places} FROM generate_series(1, {count}) RETURNING id"
    given = {name: value for name, value in values.items() if not isinstance(value, SQL)}
    with engine.begin() as connection:
        return list(connection.scalars(text(insert), given))


def depend(engine: Engine, job: int, *after: int) -> None:
    """Have ``job`` wait for others."""
    with engine.begin() as connection:
        for id in after:
            connection.execute(text("INSERT INTO sync_job_dependency VALUES (:after, :job)"), {"after": id, "job": job})


def tried(
    engine: Engine,
    job: int,
    outcome: str = "completed",
    *,
    began: float,
    ended: float,
    attempt: int = 1,
    **columns: Any,
) -> None:
    """Insert an attempt of ``job`` that began and ended so many seconds ago."""
    values = {"job_id": job, "attempt": attempt, "worker": "w1", "outcome": outcome, **columns}
    insert = f"""INSERT INTO sync_job_attempt (started_at, ended_at, {", ".join(values)})
        VALUES (now() - :began * interval '1 second', now() - :ended * interval '1 second',
            {", ".join(f":{name}" for name in values)})"""
    with engine.begin() as connection:
        connection.execute(text(insert), {**values, "began": began, "ended": ended})


def row(engine: Engine, id: int) -> Any:
    """The row of a job."""
    with engine.connect() as connection:
        return connection.execute(text("SELECT * FROM sync_job WHERE id = :id"), {"id": id}).one()


def states(engine: Engine) -> dict[int, str]:
    """Every job's state."""
    with engine.connect() as connection:
        rows = connection.execute(text("SELECT id, state FROM sync_job ORDER BY id"))
        return {row.id: row.state for row in rows}


@contextmanager
def a_lost_answer() -> Iterator[None]:
    """The first statement of a queue is executed, and its answer does not arrive."""
    execute, sent = Autocommit.execute, []

    def lose(self: Autocommit, *given: Any) -> Any:
        answer = execute(self, *given)
        sent.append(given)
        if len(sent) == 1:
            raise DBAPIError("", {}, Exception("the connection is lost"), connection_invalidated=True)
        return answer

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Autocommit, "execute", lose)
        yield


class Listener:
    """What the workers would hear."""

    def __init__(self, connection: psycopg.Connection) -> None:
        self._connection = connection

    def heard(self) -> list[Any]:
        """Payloads since the last call, decoded."""
        self._connection.execute("SELECT 1")
        found = self._connection.notifies(timeout=0)
        return [json.loads(notify.payload) if notify.payload else "" for notify in found]


@contextmanager
def listening(url: URL, channel: str) -> Iterator[Listener]:
    with psycopg.connect(dsn(url), autocommit=True) as connection:
        connection.execute(f'LISTEN "{channel}"')
        yield Listener(connection)
