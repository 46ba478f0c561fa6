"""Workers are told of new jobs, after the commit and without anybody waiting for it."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from sqlalchemy import URL, Connection, Engine, create_engine, event, text
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from jobsync_orm import CoordinationConfig
from jobsync_orm.queue import JobQueue, waker
from tests.integration.cluster import ROOT, wait_for
from tests.integration.queue.rows import Listener, row
from tests.integration.queue.stored import finish, jobs, run
from tests.integration.relay import Relay

A = [["a", 0, False]]


def next_heard(listener: Listener) -> Any:
    """The next payloads that come."""
    return wait_for(listener.heard, "a notification")


def quiet(listener: Listener) -> bool:
    """Nothing is on its way: what is told of after everything else is the next that is heard."""
    return bool(wait_for(listener.heard, "the last notification") == [[["last", 0, False]]])


def test_told_after_the_commit_of_a_session(queue: JobQueue, store: Engine, listener: Listener) -> None:
    with Session(store) as session:
        queue.enqueue(session, "a")
        queue.enqueue(session, "a")
        queue.enqueue(session, "b", priority=-3, key="k")
        assert listener.heard() == []
        session.commit()
        assert next_heard(listener) == [[["a", 0, False], ["b", -3, True]]]


def test_told_after_the_commit_of_a_connection(queue: JobQueue, store: Engine, listener: Listener) -> None:
    with store.connect() as connection:
        for _ in range(2):
            queue.enqueue(connection, "a")
            assert listener.heard() == []
            connection.commit()
            assert next_heard(listener) == [A]


def test_not_told_of_what_was_rolled_back_or_is_not_ready(queue: JobQueue, store: Engine, listener: Listener) -> None:
    silent = JobQueue(engine=store, wake=False)
    silent.submit("a")
    queue.submit("a", delay=60, idempotency_key="i")
    queue.submit("a", idempotency_key="i")
    for place in (Session(store), store.connect()):
        with place:
            queue.enqueue(place, "a")
            place.rollback()
    queue.submit("last")
    assert quiet(listener)
    silent.dispose()


def test_what_is_around_a_savepoint_is_told(queue: JobQueue, store: Engine, listener: Listener) -> None:
    with Session(store) as session:
        queue.enqueue(session, "a")
        with session.begin_nested() as savepoint:
            queue.enqueue(session, "b")
            savepoint.rollback()
        with session.begin_nested():
            queue.enqueue(session, "c")
        queue.submit("last")
        assert quiet(listener)
        session.commit()
    lanes = next_heard(listener)[0]
    assert ["a", 0, False] in lanes
    assert ["c", 0, False] in lanes


def test_a_session_that_has_joined_a_transaction(queue: JobQueue, store: Engine, listener: Listener) -> None:
    with store.connect() as connection, connection.begin() as transaction:
        with Session(connection, join_transaction_mode="create_savepoint") as session:
            queue.enqueue(session, "a")
            session.commit()
        queue.submit("last")
        assert quiet(listener)
        transaction.commit()
    assert next_heard(listener) == [A]


@pytest.mark.asyncio
async def test_async(queue: JobQueue, store: Engine, listener: Listener) -> None:
    asynchronous = create_async_engine(store.url)
    async with AsyncSession(asynchronous) as session, session.begin():
        await queue.enqueue(session, "a")
    assert next_heard(listener) == [A]
    async with asynchronous.begin() as connection:
        await queue.enqueue(connection, "a")
    assert next_heard(listener) == [A]
    await asynchronous.dispose()


@pytest.fixture
def slow_commit(store: Engine) -> Iterator[Callable[[Connection], None]]:
    """Makes the COMMIT of a transaction take a while."""
    run(store, "CREATE TABLE slow (id int)")
    run(
        store,
        "CREATE FUNCTION dally() RETURNS trigger LANGUAGE plpgsql AS $$BEGIN PERFORM pg_sleep(0.4); RETURN NULL; END$$",
    )
    run(
        store,
        "CREATE CONSTRAINT TRIGGER dally AFTER INSERT ON slow DEFERRABLE INITIALLY DEFERRED FOR EACH ROW"
        " EXECUTE FUNCTION dally()",
    )
    yield lambda connection: connection.execute(text("INSERT INTO slow VALUES (1)"))  # type: ignore[func-returns-value]
    run(store, "DROP TABLE slow")
    run(store, "DROP FUNCTION dally")


def test_a_connection_whose_commit_takes_long(
    queue: JobQueue, store: Engine, listener: Listener, slow_commit: Callable[[Connection], None]
) -> None:
    with store.connect() as connection:
        queue.enqueue(connection, "a")
        slow_commit(connection)
        committing = threading.Thread(target=connection.commit)
        committing.start()
        assert next_heard(listener) == [A]
        assert len(jobs(store)) == 1
        committing.join()


def test_many_commits_are_told_together(queue: JobQueue, store: Engine, listener: Listener) -> None:
    queue.submit("first")
    next_heard(listener)
    began = time.monotonic()
    with Session(store) as session:
        for _ in range(100):
            queue.enqueue(session, "a")
            session.commit()
    took = time.monotonic() - began
    queue.submit("last")
    heard: list[Any] = []
    wait_for(lambda: heard.extend(listener.heard()) or any(["last", 0, False] in one for one in heard), "the last")
    assert len(heard) <= took / waker.INTERVAL_SEC + 3


def test_of_very_many_lanes_none_is_named(queue: JobQueue, store: Engine, listener: Listener) -> None:
    with Session(store) as session:
        for n in range(150):
            queue.enqueue(session, f"type {n}")
        session.commit()
    assert next_heard(listener) == [""]
    with Session(store) as session:
        for n in range(20):
            queue.enqueue(session, f"{n}" * 100)
        session.commit()
    assert next_heard(listener) == [""]


def test_a_dependency_that_completes_before_the_commit(queue: JobQueue, store: Engine, listener: Listener) -> None:
    first = queue.submit("first", delay=60)
    with Session(store) as session:
        second = queue.enqueue(session, "a", after=first)
        finish(store, first.id)
        assert row(store, first.id).state == "completed"
        session.commit()
    assert next_heard(listener) == [A]
    assert row(store, second.id).state == "pending"


def waker_pids(store: Engine) -> list[int]:
    with store.connect() as connection:
        query = "SELECT pid FROM pg_stat_activity WHERE application_name = 'jobsync_orm wake-ups'"
        mine = " AND datname = current_database()"
        return list(connection.scalars(text(query + mine)))


def test_one_connection_that_is_made_anew_when_it_breaks(queue: JobQueue, store: Engine, listener: Listener) -> None:
    for _ in range(3):
        queue.submit("a")
        next_heard(listener)
    (pid,) = waker_pids(store)
    run(store, "SELECT pg_terminate_backend(:pid)", pid=pid)
    wait_for(lambda: waker_pids(store) == [], "the connection is gone")
    queue.submit("a")
    assert next_heard(listener) == [A]
    queue.dispose()
    wait_for(lambda: waker_pids(store) == [], "the connection is closed")
    queue.submit("a")
    assert next_heard(listener) == [A]


@pytest.fixture
def relay(kept_database: URL) -> Iterator[Relay]:
    relay = Relay(kept_database)
    yield relay
    relay.close()


def test_nobody_waits_for_a_server_that_does_not_answer(
    store: Engine, listener: Listener, relay: Relay, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waker, "ANSWER_SEC", 0.3)
    queue = JobQueue(CoordinationConfig(url=relay.url))
    with Session(store) as session:
        queue.enqueue(session, "a")
        session.commit()
        assert next_heard(listener) == [A]
        relay.drop()
        for _ in range(50):
            queue.enqueue(session, "a")
            session.commit()
        relay.heal()
        wait_for(listener.heard, "a notification after the network has healed")
        relay.drop()
        queue.enqueue(session, "a")
        session.commit()
    began = time.monotonic()
    queue.dispose()
    assert time.monotonic() - began < 10


def test_a_server_that_is_not_there(store: Engine, caplog: pytest.LogCaptureFixture) -> None:
    queue = JobQueue(CoordinationConfig(url="postgresql+psycopg://nobody@127.0.0.1:1/nothing"))
    with caplog.at_level(logging.WARNING, "jobsync_orm.queue.waker"), Session(store) as session:
        queue.enqueue(session, "a")
        session.commit()
        wait_for(lambda: caplog.messages, "a warning")
    assert "find them by themselves" in caplog.messages[0]
    queue.dispose()
    assert len(jobs(store)) == 1


def test_what_could_not_be_told_is_told_when_the_server_is_there(
    kept_database: URL, store: Engine, listener: Listener, caplog: pytest.LogCaptureFixture
) -> None:
    away = [True]
    engine = create_engine(kept_database)

    @event.listens_for(engine, "do_connect")
    def refuse(dialect: object, record: object, arguments: object, parameters: dict[str, object]) -> None:
        if away:
            parameters["port"] = 1

    queue = JobQueue(CoordinationConfig(engine=engine))
    with caplog.at_level(logging.WARNING, "jobsync_orm.queue.waker"), Session(store) as session:
        queue.enqueue(session, "a")
        session.commit()
        wait_for(lambda: caplog.messages, "a warning")
    assert listener.heard() == []
    away.clear()
    assert next_heard(listener) == [A]
    queue.dispose()
    engine.dispose()


def test_each_answer_counts_for_the_pace(
    queue: JobQueue, store: Engine, listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers: list[float] = []

    class Counted(waker.Pace):
        def answered(self, seconds: float) -> None:
            answers.append(seconds)
            super().answered(seconds)

    monkeypatch.setattr(waker, "Pace", Counted)
    for told in range(1, 4):
        queue.submit("a")
        next_heard(listener)
        wait_for(lambda told=told: len(answers) == told, "the answer")
    assert min(answers) > 0


def test_the_shortest_answer_is_remembered_for_a_minute_and_of_one_server(
    queue: JobQueue, store: Engine, listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    used: list[waker.Pace] = []
    later = 0.0

    class Noted(waker.Pace):
        def answered(self, seconds: float) -> None:
            used.append(self)
            super().answered(seconds)

    def tell() -> None:
        told = len(used)
        queue.submit("a")
        wait_for(lambda: len(used) > told, "the answer")

    monkeypatch.setattr(waker, "Pace", Noted)
    monkeypatch.setattr(waker, "monotonic", lambda: began + later)
    began = time.monotonic()
    tell()
    later = 59.0
    tell()
    assert used[-1] is used[-2]
    later = 61.0
    tell()
    assert used[-1] is not used[-2], "the way to the server may have become a longer one"
    later += 1
    run(
        store,
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
        " WHERE application_name = 'jobsync_orm wake-ups' AND datname = current_database()",
    )
    tell()
    assert used[-1] is not used[-2], "the server may be another one"


def slowed(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Each answer has the next notification follow so long after."""

    class Slow(waker.Pace):
        def answered(self, _: float) -> None:
            self.interval = seconds

    monkeypatch.setattr(waker, "Pace", Slow)


def test_where_answers_are_late_what_is_committed_meanwhile_is_told_together(
    queue: JobQueue, listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    slowed(monkeypatch, 0.6)
    began = time.monotonic()
    queue.submit("first")
    assert next_heard(listener) == [[["first", 0, False]]]
    queue.submit("a")
    queue.submit("b")
    assert next_heard(listener) == [[["a", 0, False], ["b", 0, False]]]
    assert time.monotonic() - began >= 0.6


def test_who_leaves_tells_what_there_is_before(
    queue: JobQueue, listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    slowed(monkeypatch, 600)
    queue.submit("first")
    assert next_heard(listener) == [[["first", 0, False]]]
    queue.submit("a")
    queue.dispose()
    assert listener.heard() == [A]


def test_a_transaction_that_never_ends_is_not_looked_at_for_ever(
    queue: JobQueue, store: Engine, listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waker, "COMMIT_SEC", 0.2)

    class Hanging:
        is_active = True

    queue._waker.wake_after(Hanging(), [("a", 0, False)])
    assert next_heard(listener) == [A]


FORK = """
import os, sys
from sqlalchemy import create_engine
from sqlalchemy.orm import Session
from jobsync_orm.queue import JobQueue

engine = create_engine(sys.argv[1])
queue = JobQueue(engine=engine)

def enqueue(type):
    with Session(engine) as session:
        queue.enqueue(session, type)
        session.commit()

enqueue("parent")
child = os.fork()
if child == 0:
    engine.dispose(close=False)
    enqueue("child")
    queue.dispose()
    os._exit(0)
_, status = os.waitpid(child, 0)
assert status == 0
sender = queue._waker._sender
pid = sender._session.pid
enqueue("parent again")
queue.dispose()
assert sender._session.pid == pid, "the child has closed the parent's connection"
"""

EXIT = """
import sys
from jobsync_orm import CoordinationConfig
from jobsync_orm.queue import JobQueue

JobQueue(CoordinationConfig(url=sys.argv[1])).submit("a")
"""


def script(code: str, url: URL) -> None:
    given = url.render_as_string(hide_password=False)
    done = subprocess.run(
        [sys.executable, "-c", code, given], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_a_forked_child_has_a_thread_and_a_connection_of_its_own(kept_database: URL, listener: Listener) -> None:
    script(FORK, kept_database)
    assert listener.heard() == [[[type, 0, False]] for type in ("parent", "child", "parent again")]


def test_a_process_that_ends_at_once_has_told(kept_database: URL, listener: Listener) -> None:
    script(EXIT, kept_database)
    assert listener.heard() == [A]


def test_a_waker_that_is_not_used_does_nothing(store: Engine) -> None:
    before = threading.active_count()
    queue = JobQueue(engine=store)
    with Session(store) as session:
        queue.enqueue(session, "a", delay=60)
        session.commit()
    assert threading.active_count() == before
    queue.dispose()
