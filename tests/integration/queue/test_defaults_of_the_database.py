"""Settings of a database or a role that an application has chosen for itself: the queue's own calls go on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, NullPool, create_engine, text
from sqlalchemy.exc import DBAPIError

from jobsync_orm.models import JobState
from jobsync_orm.queue import JobQueue
from jobsync_orm.sqlstates import sqlstate
from tests.conftest import Server
from tests.integration.cluster import wait_for
from tests.integration.queue.conftest import TABLES
from tests.integration.queue.rows import put
from tests.integration.queue.stored import jobs

WAITING = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"


@pytest.fixture(scope="module")
def databases(server: Server, template: str) -> Iterator[Callable[[str, str], Engine]]:
    """An engine on a database with a setting of its own, one for each."""
    made: dict[str, Engine] = {}

    def database(name: str, value: str) -> Engine:
        if value not in made:
            url = server.create_database(template)
            before = create_engine(url, poolclass=NullPool)
            with before.begin() as connection:
                connection.execute(text(f"ALTER DATABASE \"{url.database}\" SET {name} = '{value}'"))
            made[value] = create_engine(url)
        return made[value]

    yield database
    for engine in made.values():
        engine.dispose()
        server.drop_database(engine.url)


@pytest.fixture(params=["repeatable read", "serializable"])
def store(databases: Callable[[str, str], Engine], request: pytest.FixtureRequest) -> Engine:
    engine = databases("default_transaction_isolation", request.param)
    with engine.begin() as connection:
        for kind in TABLES:
            connection.execute(text(f"DELETE FROM sync_{kind}"))
        assert connection.scalar(text("SHOW transaction_isolation")) == request.param
    return engine


def meanwhile(store: Engine, change: str, call: Callable[[], Any], then: str = "") -> Any:
    """What ``call`` returns, which has to wait for somebody who makes ``change`` and commits."""
    with store.connect() as connection, ThreadPoolExecutor(1) as pool:
        connection.execute(text(change))
        answer = pool.submit(call)
        wait_for(lambda: somebody_waits(store), "the call waits")
        connection.commit()
        return answer.result(20)


def somebody_waits(store: Engine) -> bool:
    with store.connect() as connection:
        return bool(connection.scalar(text(WAITING)))


CALLS: list[tuple[str, Callable[[JobQueue, int], Any], Any]] = [
    ("pending", lambda queue, id: queue.cancel(id), JobState.CANCELLED),
    ("failed", lambda queue, id: queue.retry(id), JobState.PENDING),
    ("pending", lambda queue, id: queue.reprioritise(id, 3), JobState.PENDING),
]


@pytest.mark.parametrize(("state", "call", "answer"), CALLS, ids=["cancel", "retry", "reprioritise"])
def test_who_changes_a_job_that_another_changes(
    store: Engine, queue: JobQueue, state: str, call: Callable[[JobQueue, int], Any], answer: Any
) -> None:
    (id,) = put(store, state)
    assert meanwhile(store, "UPDATE sync_job SET error = 'seen'", lambda: call(queue, id)) is answer


def test_who_ends_an_attempt_that_is_being_cancelled(store: Engine, queue: JobQueue) -> None:
    put(store)
    (job,) = queue.dequeue("t", "me")
    assert not meanwhile(store, "UPDATE sync_job SET cancel_requested = true", lambda: queue.extend(job, 5))
    meanwhile(store, "UPDATE sync_job SET error = 'seen'", lambda: queue.complete(job, {"a": 1}))
    assert jobs(store, "state, result") == [("completed", {"a": 1})]


def test_two_pause_at_once(store: Engine, queue: JobQueue) -> None:
    meanwhile(store, "INSERT INTO sync_job_pause (type) VALUES ('t')", lambda: queue.pause("t", "why"))
    (pause,) = queue.paused()
    assert pause.reason == "why"


def test_two_submit_the_same(store: Engine, queue: JobQueue) -> None:
    first = "INSERT INTO sync_job (type, idempotency_key) VALUES ('t', 'i')"
    assert not meanwhile(store, first, lambda: queue.submit("t", idempotency_key="i")).created
    assert jobs(store, "state") == ["pending"]


EACH: list[tuple[str, Callable[[JobQueue, int], Any], JobState]] = [
    ("pending", lambda queue, id: dict(queue.cancel_each([id])), JobState.CANCELLED),
    ("failed", lambda queue, id: dict(queue.retry_each([id])), JobState.PENDING),
]


@pytest.mark.parametrize(("state", "call", "after"), EACH, ids=["cancel", "retry"])
def test_who_changes_each_of_some_jobs_of_which_another_changes_one(
    store: Engine, queue: JobQueue, state: str, call: Callable[[JobQueue, int], Any], after: JobState
) -> None:
    (id,) = put(store, state)
    assert meanwhile(store, "UPDATE sync_job SET error = 'seen'", lambda: call(queue, id)) == {id: after}


def test_a_job_is_retried_although_the_server_ends_it_once_for_a_deadlock(store: Engine, queue: JobQueue) -> None:
    (failed,) = put(store, "failed", idempotency_key="i")

    def wait_for_it(connection: Connection) -> None:
        connection.execute(text("UPDATE sync_job SET error = 'seen' WHERE id = :id"), {"id": failed})

    with store.connect() as connection, ThreadPoolExecutor(2) as pool:
        connection.execute(text("SET LOCAL deadlock_timeout = '30s'"))
        connection.execute(text("INSERT INTO sync_job (type, idempotency_key) VALUES ('t', 'i')"))
        answer = pool.submit(queue.retry, failed)  # holds the job, and waits for the key
        wait_for(lambda: somebody_waits(store), "the call waits")
        pool.submit(wait_for_it, connection).result(20)  # holds the key, and waits for the job
        connection.rollback()
        assert answer.result(20) is JobState.PENDING
    assert jobs(store, "state") == ["pending"]


def test_what_is_read_only_stays_so(databases: Callable[[str, str], Engine]) -> None:
    """The queue does not write where somebody has said that nothing is to be written."""
    engine = databases("default_transaction_read_only", "on")
    queue = JobQueue(engine=engine, wake=False)
    with pytest.raises(DBAPIError) as error:
        queue.submit("t")
    assert sqlstate(error.value.orig) == "25006"
    assert queue.stats().counts[JobState.PENDING] == 0
    queue.dispose()
