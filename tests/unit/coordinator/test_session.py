"""The coordinator's session says when it looked at its connection, and leaves a server that has become read-only."""

from __future__ import annotations

import os
import select
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from sqlalchemy import URL, create_engine, event

from jobsync_orm.coordinator import session as module
from jobsync_orm.coordinator.session import Session, SessionLost
from tests.conftest import Server


class Watched:
    """A session whose process sleeps for 100 s inside each poll, by a clock of this test's."""

    def __init__(self, url: URL, monkeypatch: pytest.MonkeyPatch) -> None:
        self.at = 1000.0
        self.polls: list[tuple[float, bool]] = []  # when each began, and whether there was something to read
        self.looks: list[tuple[float, ...]] = []
        self._poll = module._poll
        self._engine = create_engine(url)
        self._fds = os.pipe()
        self.session = Session(
            self._engine.pool, self._fds[0], lambda *at: self.looks.append(at), 0.02, "LISTEN test_channel"
        )
        self.session.open()
        self.looks.clear()
        monkeypatch.setattr(module, "now", lambda: self.at)
        monkeypatch.setattr(module, "_poll", self.poll)

    def poll(self, watch: list[tuple[int, int]], seconds: float) -> dict[int, int]:
        began = self.at
        ready = self._poll(watch, seconds)
        self.polls.append((began, bool(ready.get(watch[0][0], 0) & ~select.POLLOUT)))
        self.at += 100
        return ready

    def quiet(self) -> list[tuple[float]]:
        """Those looks that may be told: when a poll that found nothing to read began."""
        return [(began,) for began, readable in self.polls if not readable]

    def close(self) -> None:
        self.session.close()
        self._engine.dispose()
        for fd in self._fds:
            os.close(fd)


@pytest.fixture
def watched(server: Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Watched]:
    watched = Watched(server.url, monkeypatch)
    yield watched
    watched.close()


def test_a_look_counts_from_before_the_poll(watched: Watched) -> None:
    assert watched.session.wait(0) == set()
    assert watched.looks == [(watched.at - 100,)], "the process may have slept since"


def test_waiting_for_an_answer_tells_looks_but_not_the_poll_that_found_the_answer(watched: Watched) -> None:
    assert watched.session.execute("SELECT 7 FROM pg_sleep(0.2)", timeout=1e9) == [("7",)]
    assert (watched.polls[-1][1], len(watched.looks) > 1) == (True, True)
    assert watched.looks == watched.quiet()


def test_a_notification_is_no_look(watched: Watched, server: Server) -> None:
    with server.connect() as other:
        other.execute("NOTIFY test_channel")
    assert watched.session.wait(1e9) == {"test_channel"}
    assert watched.polls[-1][1]
    assert watched.looks == watched.quiet()


def test_the_end_of_the_connection_is_no_look(watched: Watched, server: Server) -> None:
    with server.connect() as other:
        other.execute("SELECT pg_terminate_backend(%s)", (watched.session.pid,))
    with pytest.raises(SessionLost):
        watched.session.wait(1e9)
    assert watched.polls[-1][1]
    assert watched.looks == watched.quiet()


def test_a_server_that_has_become_read_only_is_left(empty_database: URL) -> None:
    """A primary that has been demoted refuses to write with 25006, and goes on answering."""
    engine = create_engine(empty_database)
    wake_fd, write_fd = os.pipe()
    session = Session(engine.pool, wake_fd, lambda *_: None, 0.1, "SELECT 1")
    try:
        session.open()
        first = session.pid
        session.script("SET default_transaction_read_only = on")
        with pytest.raises(SessionLost, match="25006"):
            session.execute("CREATE TABLE t ()", timeout=10)
        assert not session.is_open
        session.open()
        assert session.pid != first
        session.execute("CREATE TABLE t ()", timeout=10)
    finally:
        session.close()
        engine.dispose()
        os.close(wake_fd)
        os.close(write_fd)


def test_a_transaction_that_a_hook_of_the_engine_has_begun_is_no_obstacle(server: Server) -> None:
    engine = create_engine(server.url)

    @event.listens_for(engine, "connect")
    def look(connection: Any, _record: object) -> None:
        connection.execute("SELECT 1")  # and no COMMIT

    session = Session(engine.pool, -1, lambda at: None, 0.02, "")
    try:
        session.open()
        assert session.execute("SELECT 2", timeout=10) == [("2",)]
    finally:
        session.close()
        engine.dispose()


def test_a_connection_that_cannot_be_used_is_closed(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = create_engine(server.url)
    made: list[psycopg.Connection] = []

    def fail(connection: psycopg.Connection) -> None:
        made.append(connection)
        raise psycopg.OperationalError("gone")

    monkeypatch.setattr(psycopg.Connection, "rollback", fail)

    @event.listens_for(engine, "connect")
    def look(connection: Any, _record: object) -> None:
        connection.execute("SELECT 1")

    session = Session(engine.pool, -1, lambda at: None, 0.02, "")
    with pytest.raises(SessionLost, match="cannot connect: gone"):
        session.open()
    assert [connection.closed for connection in made] == [True]
    engine.dispose()
