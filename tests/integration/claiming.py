"""For tests of claims, audit and checkpoints: what is stored, what is sent, and tokens that are taken away."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
from sqlalchemy import Engine, event, text


@contextmanager
def counted(engine: Engine) -> Iterator[list[str]]:
    """The statements sent through ``engine``."""
    sent: list[str] = []

    def note(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        sent.append(statement)

    event.listen(engine, "before_cursor_execute", note)
    try:
        yield sent
    finally:
        event.remove(engine, "before_cursor_execute", note)


@contextmanager
def answer_lost(engine: Engine) -> Iterator[None]:
    """The next statement is executed and committed, and its connection breaks before the answer is there."""
    lost = threading.Event()

    def lose(cursor: Any, statement: str, parameters: Any, _context: Any) -> bool | None:
        if lost.is_set():
            return None
        lost.set()
        cursor.execute(statement, parameters)
        cursor.connection.close()
        raise psycopg.OperationalError("the connection is lost")

    event.listen(engine, "do_execute", lose)
    try:
        yield
    finally:
        event.remove(engine, "do_execute", lose)
        assert lost.is_set()


@contextmanager
def nothing_answers(engine: Engine) -> Iterator[None]:
    """Nothing that is sent through ``engine`` is executed; each connection breaks."""

    def lose(cursor: Any, *_: Any) -> bool | None:
        cursor.connection.close()
        raise psycopg.OperationalError("the connection is lost")

    event.listen(engine, "do_execute", lose)
    try:
        yield
    finally:
        event.remove(engine, "do_execute", lose)


def run(engine: Engine, sql: str, **values: object) -> None:
    with engine.begin() as connection:
        connection.execute(text(sql), values)


def audit(engine: Engine) -> list[tuple[Any, ...]]:
    with engine.connect() as connection:
        rows = connection.execute(text("SELECT node, task_id, token_id, epoch FROM sync_audit ORDER BY id"))
        return [tuple(row) for row in rows]


def give_away(engine: Engine, token: int, to: str) -> None:
    """What the leader does with a token whose owner it takes for dead, or which does not drain in time."""
    run(
        engine,
        "UPDATE sync_token SET node = :to, epoch = (SELECT epoch + 100 FROM sync_cluster), next_node = NULL"
        " WHERE token_id = :token",
        token=token,
        to=to,
    )
    run(engine, "UPDATE sync_cluster SET epoch = epoch + 100")


def claims(engine: Engine) -> list[tuple[str, str, str]]:
    with engine.connect() as connection:
        rows = connection.execute(text("SELECT task_id, node, incarnation::text FROM sync_claim ORDER BY 1"))
        return [tuple(row) for row in rows]
