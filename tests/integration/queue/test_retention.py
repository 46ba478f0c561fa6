"""Pruning: what goes, what stays, in which steps."""

from __future__ import annotations

import datetime
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from sqlalchemy import Engine, event, text
from sqlalchemy.orm import Session

from jobsync_orm.exceptions import InvalidJob, UnknownJob
from jobsync_orm.models import JobState
from jobsync_orm.models.states import FINISHED, LIVE
from jobsync_orm.queue import JobQueue, NewJob
from tests.integration.cluster import wait_for
from tests.integration.queue.rows import SQL, depend, put, row, states, tried

HOUR_AGO = SQL("now() - interval '1 hour'")
OLD = {"finished_at": HOUR_AGO, "created_at": SQL("now() - interval '2 hours'")}


def number(store: Engine, table: str) -> int:
    with store.connect() as connection:
        return int(connection.scalar(text(f"SELECT count(*) FROM sync_{table}")) or 0)


def test_what_finished_long_ago_goes_with_its_attempts(queue: JobQueue, store: Engine) -> None:
    old = put(store, "completed", count=5, **OLD)
    young = put(store, "completed", count=2, created_at=OLD["created_at"])
    others = [id for state in set(JobState) - {JobState.COMPLETED} for id in put(store, state, **late(state))]
    for id in (*old, *young, *others):
        tried(store, id, began=10, ended=5)
        tried(store, id, began=10, ended=5, attempt=2)
    assert queue.prune(datetime.timedelta(minutes=30)) == 5
    assert set(states(store)) == {*young, *others}
    assert number(store, "job_attempt") == 2 * len({*young, *others})
    assert queue.prune(1800) == 0
    assert queue.prune(1800, ["failed", JobState.CANCELLED]) == 2
    assert queue.prune(0, FINISHED) == 2
    assert set(states(store).values()) == set(LIVE)


def late(state: JobState) -> dict[str, Any]:
    return OLD if state in ("failed", "cancelled") else {"created_at": OLD["created_at"]}


def test_it_walks_in_batches_and_stops_at_what_was_enqueued_too_late(queue: JobQueue, store: Engine) -> None:
    put(store, "pending", count=3, created_at=OLD["created_at"])
    put(store, "completed", count=7, **OLD)
    put(store, "pending", count=40)
    sent: list[Any] = []
    event.listen(store, "before_cursor_execute", lambda *given: sent.append(given[3]))
    assert queue.prune(1800, batch=5) == 7
    # The time, then the jobs 1-5, 6-10, 11-15: all of these were enqueued too late.
    assert len(sent) == 4
    assert len(states(store)) == 43


@pytest.mark.parametrize("state", ["failed", "cancelled"])
def test_a_job_that_others_wait_for_stays(queue: JobQueue, store: Engine, state: str) -> None:
    (bad,) = put(store, state, **OLD)
    (waiting,) = put(store, "blocked")
    depend(store, waiting, bad)
    assert queue.prune(1800, state) == 0
    queue.cancel(waiting)
    assert queue.prune(1800, state) == 0  # it could be retried, and would wait again
    with store.begin() as connection:
        connection.execute(text("UPDATE sync_job SET state = 'completed' WHERE id = :id"), {"id": waiting})
    assert queue.prune(1800, state) == 1
    assert number(store, "job_dependency") == 0


def test_a_completed_job_goes_and_counts_as_completed(queue: JobQueue, store: Engine) -> None:
    (done,), (live,) = put(store, "completed", **OLD), put(store)
    (waiting,) = put(store, "blocked")
    depend(store, waiting, done, live)
    assert queue.prune(1800) == 1
    assert queue.status(waiting).waits_for == (live,)
    assert number(store, "job_dependency") == 1
    queue.cancel(waiting)
    queue.cancel(live)
    assert queue.prune(0, "cancelled") == 1  # the one that waited; the other in the same batch still had it
    assert queue.prune(0, "cancelled") == 1
    assert number(store, "job_dependency") == 0


def test_two_that_belong_together_go_at_once(queue: JobQueue, store: Engine) -> None:
    (first,), (second,) = put(store, "completed", **OLD), put(store, "completed", **OLD)
    depend(store, second, first)
    assert queue.prune(1800) == 2
    assert number(store, "job_dependency") == 0


def test_a_locked_job_is_left_for_the_next_time(queue: JobQueue, store: Engine) -> None:
    first, second = put(store, "failed", count=2, **OLD)
    with store.begin() as writer:
        writer.execute(text("SELECT 1 FROM sync_job WHERE id = :id FOR UPDATE"), {"id": first})
        assert queue.prune(1800, "failed") == 1
    assert list(states(store)) == [first]
    assert second
    queue.retry(first)
    assert queue.prune(1800, "failed") == 0
    assert row(store, first).state == "pending"


def test_several_may_prune_at_once(queue: JobQueue, store: Engine) -> None:
    put(store, "completed", count=500, **OLD)
    removed: list[int] = []
    threads = [threading.Thread(target=lambda: removed.append(queue.prune(1800, batch=20))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    wait_for(lambda: len(removed) == 3, "all have returned")
    removed.append(queue.prune(1800))
    assert sum(removed) == 500
    assert states(store) == {}


@pytest.mark.parametrize(
    "given",
    [
        {"older_than": -1},
        {"older_than": datetime.timedelta(days=-1)},
        {"older_than": "7 days"},
        {"older_than": 0, "states": "pending"},
        {"older_than": 0, "states": []},
        {"older_than": 0, "batch": 0},
        {"older_than": 0, "batch": True},
        {"older_than": 0, "pause_sec": -1},
    ],
)
def test_what_makes_no_sense_is_refused(queue: JobQueue, store: Engine, given: dict[str, Any]) -> None:
    (job,) = put(store, "completed", **OLD)
    with pytest.raises(InvalidJob):
        queue.prune(**given)
    assert states(store) == {job: "completed"}


@pytest.mark.parametrize("state", ["failed", "cancelled"])
@pytest.mark.parametrize("many", [None, "of a type", "of many"])
def test_a_job_that_one_being_enqueued_is_to_wait_for_stays(
    queue: JobQueue, store: Engine, state: str, many: str | None
) -> None:
    (first,) = put(store, state, **OLD)
    with Session(store) as session:
        if many == "of a type":
            (second,) = queue.enqueue_many(session, "t", [{}], after=first)
        elif many:
            (second,) = queue.enqueue_many(session, [NewJob("t", after=first)])
        else:
            second = queue.enqueue(session, "t", after=first).id
        assert queue.prune(60, state) == 0
        session.commit()
    assert queue.prune(60, state) == 0
    assert states(store) == {first: state, second: "blocked"}


def test_a_job_that_is_just_being_removed_is_unknown(queue: JobQueue, store: Engine) -> None:
    (first,) = put(store, "failed", **OLD)

    def waits() -> bool:
        waiting = "SELECT 1 FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
        with store.connect() as another:
            return bool(another.execute(text(waiting)).all())

    with ThreadPoolExecutor(1) as pool, store.connect() as connection:
        connection.execute(text("DELETE FROM sync_job"))
        enqueued = pool.submit(queue.submit, "t", after=first)
        wait_for(waits, "it waits for the row")
        connection.commit()
        with pytest.raises(UnknownJob):
            enqueued.result(10)
    assert states(store) == {}
