"""Cancel, retry, reprioritise, pause and resume."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, event, text

from jobsync_orm.exceptions import InvalidJob, JobConflict, UnknownJob
from jobsync_orm.models import JobPriority, JobState
from jobsync_orm.queue import JobQueue, batches, control
from jobsync_orm.queue.control import Pause
from tests.integration.cluster import wait_for
from tests.integration.queue.rows import SQL, Listener, a_lost_answer, depend, put, row, states

CONTROL = {"control": True}
WAITING = ("pending", "scheduled", "blocked", "retrying")
LIVE = (*WAITING, "processing")


@pytest.mark.parametrize("state", WAITING)
def test_a_job_that_waits_is_cancelled_at_once(queue: JobQueue, store: Engine, listener: Listener, state: str) -> None:
    other, job = put(store, state, count=2)
    assert queue.cancel(job) is JobState.CANCELLED
    found = row(store, job)
    assert (found.state, found.cancel_requested) == ("cancelled", False)
    assert found.finished_at is not None
    assert listener.heard() == [CONTROL]
    assert states(store)[other] == state


def test_a_job_under_way_is_to_be_cancelled_by_its_worker(queue: JobQueue, store: Engine, listener: Listener) -> None:
    (job,) = put(store, "processing")
    assert queue.cancel(job) is JobState.PROCESSING
    found = row(store, job)
    assert (found.state, found.cancel_requested, found.finished_at) == ("processing", True, None)
    assert listener.heard() == [CONTROL]
    assert queue.cancel(job) is JobState.PROCESSING
    assert listener.heard() == []  # said already


def test_to_cancel_twice_is_to_cancel(queue: JobQueue, store: Engine) -> None:
    (job,) = put(store)
    queue.cancel(job)
    before = row(store, job)
    assert queue.cancel(job) is JobState.CANCELLED
    assert row(store, job) == before


@pytest.mark.parametrize("state", ["completed", "failed"])
def test_what_has_finished_cannot_be_cancelled(queue: JobQueue, store: Engine, listener: Listener, state: str) -> None:
    (job,) = put(store, state)
    with pytest.raises(JobConflict, match=f"job {job} is {state}"):
        queue.cancel(job)
    assert states(store) == {job: state}
    assert listener.heard() == []


@pytest.mark.parametrize("state", ["failed", "cancelled", "retrying"])
def test_a_job_begins_again(queue: JobQueue, store: Engine, listener: Listener, state: str) -> None:
    (job,) = put(store, state, type="mail", priority=7, ready_at="2020-01-01", result="1")
    assert queue.retry(job) is JobState.PENDING
    found = row(store, job)
    assert (found.state, found.failures, found.error, found.result) == ("pending", 0, None, None)
    assert (found.finished_at, found.run_at) == (None, None)
    assert found.ready_at.year > 2020
    assert found.attempt == (4 if state == "failed" else 1 if state == "retrying" else 0)  # the fence only grows
    # In one transaction, so in this order.
    assert listener.heard() == [CONTROL, [["mail", 7, False]]]


def test_a_retried_job_of_a_key_wakes_those_that_look_for_keys(
    queue: JobQueue, store: Engine, listener: Listener
) -> None:
    (job,) = put(store, "failed", key="k")
    queue.retry(job)
    assert [["t", 0, True]] in listener.heard()


def test_a_job_cancelled_while_it_was_blocked_waits_again(queue: JobQueue, store: Engine) -> None:
    first, second = put(store, "cancelled", count=2)
    depend(store, second, first)
    assert queue.retry(second) is JobState.BLOCKED
    assert row(store, second).finished_at is None
    assert queue.retry(first) is JobState.PENDING


def test_a_dependency_that_has_completed_or_is_gone_does_not_block(queue: JobQueue, store: Engine) -> None:
    (done,) = put(store, "completed")
    (job,) = put(store, "cancelled")
    depend(store, job, done, 999)
    assert queue.retry(job) is JobState.PENDING


@pytest.mark.parametrize(
    ("state", "why"),
    [
        ("completed", "has completed"),
        ("pending", "is pending, so it is to run anyway"),
        ("scheduled", "is scheduled"),
        ("blocked", "is blocked"),
        ("processing", "is processing"),
    ],
)
def test_what_is_not_retried(queue: JobQueue, store: Engine, state: str, why: str) -> None:
    (job,) = put(store, state)
    before = row(store, job)
    with pytest.raises(JobConflict, match=f"job {job} {why}"):
        queue.retry(job)
    assert row(store, job) == before


@pytest.mark.parametrize("state", LIVE)
def test_a_live_job_of_the_same_idempotency_key_is_named(queue: JobQueue, store: Engine, state: str) -> None:
    (old,) = put(store, "failed", idempotency_key="pay:1")
    others = [
        *put(store, state, type="a", idempotency_key="pay:1"),
        *put(store, state, type="z", idempotency_key="pay:1"),
    ]
    (live,) = put(store, state, idempotency_key="pay:1")
    with pytest.raises(JobConflict, match=f"job {old} cannot be retried: job {live} \\({state}\\).*'t'.*'pay:1'"):
        queue.retry(old)
    assert states(store) == {old: "failed", live: state, **dict.fromkeys(others, state)}


def test_a_live_twin_that_finishes_in_between_is_no_conflict(
    queue: JobQueue, store: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    (old,) = put(store, "failed", idempotency_key="pay:1")
    (live,) = put(store, idempotency_key="pay:1")
    read = queue._read

    def cancel_first(*given: Any) -> Any:
        queue.cancel(live)
        return read(*given)

    monkeypatch.setattr(queue, "_read", cancel_first)
    assert queue.retry(old) is JobState.PENDING


@pytest.mark.parametrize("state", WAITING)
def test_a_job_that_waits_gets_another_priority(queue: JobQueue, store: Engine, listener: Listener, state: str) -> None:
    (job,) = put(store, state)
    assert queue.reprioritise(job, JobPriority.HIGH) is JobState(state)
    assert (row(store, job).priority, row(store, job).state) == (10, state)
    heard = listener.heard()
    assert CONTROL in heard
    assert ([["t", 10, False]] in heard) == (state == "pending")


@pytest.mark.parametrize("state", ["processing", "completed", "failed", "cancelled"])
def test_a_job_that_does_not_wait_keeps_its_priority(queue: JobQueue, store: Engine, state: str) -> None:
    (job,) = put(store, state)
    with pytest.raises(JobConflict, match=f"job {job} is {state}: only a job that waits"):
        queue.reprioritise(job, 5)
    assert row(store, job).priority == 0


def test_unknown_jobs_and_impossible_arguments_are_named(queue: JobQueue, store: Engine) -> None:
    (job,) = put(store)
    for call in (queue.cancel, queue.retry, lambda id: queue.reprioritise(id, 1)):
        with pytest.raises(UnknownJob, match="no job 1000000000000000"):
            call(10**15)
        for id in ("1", 1.0, True, None, 2**63):
            with pytest.raises(InvalidJob, match="id="):
                call(id)  # type: ignore[arg-type]
    for priority in (2**31, "high", 1.5, True, None):
        with pytest.raises(InvalidJob, match="priority="):
            queue.reprioritise(job, priority)  # type: ignore[arg-type]
    for type in ("", 3, "a\0b", "\ud800"):
        with pytest.raises(InvalidJob, match="type="):
            queue.pause(type)  # type: ignore[arg-type]
        with pytest.raises(InvalidJob, match="type="):
            queue.resume(type)  # type: ignore[arg-type]
    with pytest.raises(InvalidJob, match="reason="):
        queue.pause("t", "a\0b")
    assert queue.paused() == []
    assert row(store, job).priority == 0


def test_a_job_is_waited_for_while_somebody_writes_it(queue: JobQueue, store: Engine) -> None:
    """Whoever comes second sees what the first has made of the job, and not what it was when it began to wait."""
    (job,) = put(store, "processing")
    answers: list[object] = []
    with store.begin() as writer:
        writer.execute(text("UPDATE sync_job SET state = 'completed', deadline = NULL, finished_at = now()"))

        def cancel() -> None:
            with pytest.raises(JobConflict, match="is completed"):
                queue.cancel(job)
            answers.append("refused")

        thread = threading.Thread(target=cancel)
        thread.start()
        wait_for(lambda: waiting(store) == 1, "the call waits for the row")
    thread.join()
    assert answers == ["refused"]
    assert row(store, job).cancel_requested is False


def waiting(store: Engine) -> int:
    with store.connect() as connection:
        ask = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
        return int(connection.scalar(text(ask)) or 0)


def test_pauses_are_listed_and_end(queue: JobQueue, listener: Listener) -> None:
    queue.pause("mail", "the provider is down")
    first = queue.paused()
    queue.pause("mail", "still down")
    queue.pause()
    assert listener.heard() == [CONTROL] * 3
    everything, mail = queue.paused()
    assert (everything.type, everything.reason) == (None, None)
    assert mail == Pause("mail", first[0].since, "still down")
    assert queue.resume() is True
    assert queue.resume() is False
    assert listener.heard() == [CONTROL]
    assert [pause.type for pause in queue.paused()] == ["mail"]
    assert queue.resume("mail") is True
    assert queue.paused() == []


def test_all_jobs_of_a_type_are_cancelled(
    queue: JobQueue, store: Engine, listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "BATCH", 2)
    monkeypatch.setitem(queue.__dict__, "_control", control.ControlStatements(queue.names))
    mine = {state: put(store, state, count=3) for state in JobState}
    others = put(store, type="u", count=2)
    asked = put(store, "processing", cancel_requested=True)
    assert queue.cancel_many(type="t") == 5 * 3
    found = states(store)
    for state in WAITING:
        assert {found[id] for id in mine[JobState(state)]} == {"cancelled"}
    for state in ("completed", "failed", "processing"):
        assert {found[id] for id in mine[JobState(state)]} == {state}
    assert all(row(store, id).cancel_requested for id in mine[JobState.PROCESSING])
    assert {found[id] for id in others} == {"pending"}
    assert found[asked[0]] == "processing"
    assert set(map(str, listener.heard())) == {str(CONTROL)}


def test_all_jobs_in_a_state_are_cancelled(queue: JobQueue, store: Engine) -> None:
    pending, scheduled = put(store, count=2), put(store, "scheduled", type="u", count=2)
    assert queue.cancel_many(state=JobState.PENDING) == 2
    assert queue.cancel_many(type="u", state=["pending", "blocked"]) == 0
    found = states(store)
    assert {found[id] for id in pending} == {"cancelled"}
    assert {found[id] for id in scheduled} == {"scheduled"}


@pytest.mark.parametrize(
    "given", [{}, {"state": "completed"}, {"state": []}, {"state": ["pending", "lost"]}, {"type": "", "state": None}]
)
def test_the_queue_is_not_emptied_by_mistake(queue: JobQueue, store: Engine, given: dict[str, Any]) -> None:
    (job,) = put(store)
    with pytest.raises(InvalidJob):
        queue.cancel_many(**given)
    assert states(store) == {job: "pending"}


def test_a_job_that_somebody_writes_is_left_out(queue: JobQueue, store: Engine) -> None:
    first, second = put(store, count=2)
    with store.begin() as writer:
        writer.execute(text("SELECT 1 FROM sync_job WHERE id = :id FOR UPDATE"), {"id": first})
        assert queue.cancel_many(type="t") == 1
    assert states(store) == {first: "pending", second: "cancelled"}


def test_all_failed_jobs_are_retried(
    queue: JobQueue, store: Engine, listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "BATCH", 2)
    monkeypatch.setitem(queue.__dict__, "_control", control.ControlStatements(queue.names))
    jobs = {state: put(store, state, count=3) for state in JobState}
    other = put(store, "failed", type="u")
    assert queue.retry_many("t") == 3
    found = states(store)
    assert {found[id] for id in jobs[JobState.FAILED]} == {"pending"}
    for state in set(JobState) - {JobState.FAILED}:
        assert {found[id] for id in jobs[state]} == {state}
    assert found[other[0]] == "failed"
    assert set(listener.heard()) == {""}  # look at everything
    assert queue.retry_many(state=["failed", "cancelled", "retrying"]) == 7
    with pytest.raises(InvalidJob, match="state='completed' must be among"):
        queue.retry_many(state="completed")


def test_of_several_with_one_idempotency_key_one_is_retried(queue: JobQueue, store: Engine) -> None:
    twins = put(store, "failed", count=3, idempotency_key="a")
    without = put(store, "failed", count=2)
    other = put(store, "failed", type="u", idempotency_key="a")
    (live_twin,) = put(store, "failed", idempotency_key="b")
    (live,) = put(store, "scheduled", idempotency_key="b")
    assert queue.retry_many() == 4
    found = states(store)
    assert [found[id] for id in twins] == ["pending", "failed", "failed"]
    assert [found[id] for id in (*without, *other)] == ["pending"] * 3
    assert (found[live_twin], found[live]) == ("failed", "scheduled")
    assert queue.retry_many() == 0


def test_an_answer_that_is_lost_does_not_turn_what_was_done_into_a_conflict(queue: JobQueue, store: Engine) -> None:
    (job,) = put(store, "failed")
    with a_lost_answer():
        assert queue.retry(job) is JobState.PENDING
    queue.pause()
    with a_lost_answer():
        assert queue.resume() is True
    with a_lost_answer():
        assert queue.cancel(job) is JobState.CANCELLED


def test_without_blocking_an_event_loop(queue: JobQueue, store: Engine) -> None:
    first, second, third = put(store, count=3)

    async def steer() -> None:
        assert await queue.cancel_async(first) is JobState.CANCELLED
        assert await queue.retry_async(first) is JobState.PENDING
        assert await queue.reprioritise_async(second, 3) is JobState.PENDING
        await queue.pause_async("t")
        assert [pause.type for pause in await queue.paused_async()] == ["t"]
        assert await queue.resume_async("t") is True
        assert await queue.cancel_many_async(type="t") == 3
        assert await queue.retry_many_async("t", state="cancelled") == 3

    asyncio.run(steer())
    assert set(states(store).values()) == {"pending"}
    assert row(store, second).priority == 3
    assert third


@contextmanager
def counted(engine: Engine) -> Iterator[list[str]]:
    """What is sent to the database."""
    sent: list[str] = []

    def note(connection: Any, cursor: Any, statement: str, *rest: Any) -> None:
        sent.append(statement)

    event.listen(engine, "before_cursor_execute", note)
    try:
        yield sent
    finally:
        event.remove(engine, "before_cursor_execute", note)


def test_many_jobs_are_steered_a_thousand_at_a_time(queue: JobQueue, store: Engine, listener: Listener) -> None:
    failed = put(store, "failed", count=2500)
    with counted(queue.engine) as sent:
        assert list(queue.retry_each(failed)) == [(id, JobState.PENDING) for id in failed]
        assert len(sent) == 3
    assert set(states(store).values()) == {"pending"}
    assert set(listener.heard()) == {""}
    with counted(queue.engine) as sent:
        assert list(queue.cancel_each(reversed([*failed, failed[0]]))) == [(id, JobState.CANCELLED) for id in failed]
        assert len(sent) == 3
    assert set(states(store).values()) == {"cancelled"}
    assert set(map(str, listener.heard())) == {str(CONTROL)}


def test_of_each_job_it_is_said_what_became_of_it_as_of_one(queue: JobQueue, store: Engine) -> None:
    jobs = {state: put(store, state)[0] for state in JobState}
    (told,) = put(store, "processing")
    queue.cancel(told)
    wanted = [*jobs.values(), told, 10**9]
    outcomes = dict(queue.cancel_each(wanted))
    for state in LIVE:
        after = "processing" if state == "processing" else "cancelled"
        assert outcomes.pop(jobs[JobState(state)]) == after
    assert outcomes.pop(jobs[JobState.CANCELLED]) is JobState.CANCELLED
    assert outcomes.pop(told) is JobState.PROCESSING
    for id, error in outcomes.items():
        with pytest.raises(type(error), match=f"^{error}$"):
            queue.cancel(id)
    assert outcomes.keys() == {jobs[JobState.COMPLETED], jobs[JobState.FAILED], 10**9}


def test_of_each_job_to_be_retried_too(queue: JobQueue, store: Engine) -> None:
    jobs = {state: put(store, state)[0] for state in JobState}
    twins = put(store, "failed", count=2, idempotency_key="a")
    (blocked,) = put(store, "cancelled")
    depend(store, blocked, jobs[JobState.FAILED])
    outcomes = dict(queue.retry_each([*jobs.values(), *twins, blocked, 10**9]))
    for state in (JobState.FAILED, JobState.CANCELLED, JobState.RETRYING):
        assert outcomes.pop(jobs[state]) is JobState.PENDING
    assert outcomes.pop(blocked) is JobState.BLOCKED
    assert outcomes.pop(twins[0]) is JobState.PENDING
    assert str(outcomes.pop(twins[1])) == (
        f"job {twins[1]} cannot be retried: a live job of the same type 't' has its idempotency key 'a'; wait for that "
        "one, or cancel it"
    )
    for id, error in outcomes.items():
        with pytest.raises(type(error), match=f"^{error}$"):
            queue.retry(id)
    left = ("completed", "pending", "scheduled", "blocked", "processing")
    assert outcomes.keys() == {*(jobs[JobState(state)] for state in left), 10**9}


def test_one_of_many_that_somebody_writes_is_waited_for_alone(queue: JobQueue, store: Engine) -> None:
    first, second = put(store, count=2)
    with ThreadPoolExecutor(1) as pool:
        with store.begin() as writer:
            writer.execute(text("SELECT 1 FROM sync_job WHERE id = :id FOR UPDATE"), {"id": first})
            answer = pool.submit(lambda: list(queue.cancel_each([first, second])))
            wait_for(lambda: waiting(store) == 1, "it waits for the job")
            assert states(store)[second] == "cancelled"  # the batch has been committed
        assert answer.result(20) == [(second, JobState.CANCELLED), (first, JobState.CANCELLED)]


@contextmanager
def twins_under_way(store: Engine, old: Sequence[int]) -> Iterator[Connection]:
    """Live jobs with the idempotency keys of ``old``, not committed yet."""
    with store.connect() as writer:
        writer.execute(
            text(
                "INSERT INTO sync_job (type, state, idempotency_key)"
                " SELECT type, 'pending', idempotency_key FROM sync_job WHERE id = ANY (:old)"
            ),
            {"old": list(old)},
        )
        yield writer


def held(store: Engine, ids: Sequence[int]) -> int:
    """How many of the jobs somebody has locked."""
    with store.begin() as connection:
        taken = text("SELECT id FROM sync_job WHERE id = ANY (:ids) FOR UPDATE SKIP LOCKED")
        return len(ids) - len(connection.scalars(taken, {"ids": list(ids)}).all())


def failed_with_keys(store: Engine, count: int) -> list[int]:
    return put(store, "failed", count=count, idempotency_key=SQL("'k' || generate_series"))


def test_jobs_whose_idempotency_keys_are_in_hands_hold_up_no_others(queue: JobQueue, store: Engine) -> None:
    """One statement for all would keep 1,000 rows locked for as long as somebody's transaction is open."""
    failed = failed_with_keys(store, 1000)
    twins, others = [failed[0], failed[500], failed[999]], [*failed[1:500], *failed[501:999]]
    with ThreadPoolExecutor(1) as pool, twins_under_way(store, twins) as writer:
        outcomes = queue.retry_each(failed)
        answer = pool.submit(lambda: [next(outcomes) for _ in others])
        assert answer.result(20) == [(id, JobState.PENDING) for id in others]
        rest = pool.submit(lambda: dict(outcomes))
        wait_for(lambda: waiting(store) == 1, "one of the three is waited for")
        assert held(store, failed) <= 1
        assert queue.cancel(others[0]) is JobState.CANCELLED
        writer.rollback()
        assert rest.result(20) == dict.fromkeys(twins, JobState.PENDING)


def test_a_job_that_stays_in_hands_is_not_waited_for_for_good(
    queue: JobQueue, store: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batches, "PATIENCE_SEC", 0.3)
    twin, other, locked, missing = *failed_with_keys(store, 3), 10**9
    with twins_under_way(store, [twin]) as writer:
        writer.execute(text("SELECT 1 FROM sync_job WHERE id = :id FOR UPDATE"), {"id": locked})
        outcomes = dict(queue.retry_each([twin, other, locked, missing]))
        assert outcomes.pop(other) is JobState.PENDING
        assert isinstance(outcomes.pop(missing), UnknownJob)
        for id, error in outcomes.items():
            assert isinstance(error, JobConflict)
            assert f"job {id} is left as it is: a transaction that has not ended" in str(error)
        assert outcomes.keys() == {twin, locked}
        assert isinstance(dict(queue.cancel_each([locked]))[locked], JobConflict)
    assert [states(store)[id] for id in (twin, other, locked)] == ["failed", "pending", "failed"]


def test_jobs_whose_idempotency_keys_are_in_hands_are_left_out_of_all(queue: JobQueue, store: Engine) -> None:
    failed = failed_with_keys(store, 30)
    with twins_under_way(store, failed[3:5]):
        assert queue.retry_many() == 28
    assert [id for id, state in states(store).items() if state == "failed"] == failed[3:5]
    assert queue.retry_many() == 2


def test_the_time_for_locks_is_that_of_one_statement(queue: JobQueue, store: Engine) -> None:
    """Neither the connection, which goes back to the application's pool, nor the commit has it."""
    (job,) = put(store, "failed")
    with queue.engine.execution_options(isolation_level="READ COMMITTED").begin() as connection:
        given = {"ids": f"{{{job}}}", "wait": "50"}
        assert connection.execute(queue._control.retry_each, given).one()[2] == "pending"
        assert connection.scalar(text("SHOW lock_timeout")) == "0"
        assert connection.execute(queue._control.cancel_each, given).one()[2] == "cancelled"
        assert connection.scalar(text("SHOW lock_timeout")) == "0"


def test_a_live_twin_that_comes_at_this_moment_fails_only_its_own_job_of_a_batch(
    queue: JobQueue, store: Engine
) -> None:
    (twin,), (other,) = put(store, "failed", idempotency_key="a"), put(store, "failed")
    with ThreadPoolExecutor(1) as pool, twins_under_way(store, [twin]) as writer:
        outcomes = queue.retry_each([twin, other])
        assert next(outcomes) == (other, JobState.PENDING)
        answer = pool.submit(next, outcomes)
        wait_for(lambda: waiting(store) == 1, "it waits for the idempotency key")
        writer.commit()
        id, error = answer.result(20)
    assert id == twin
    assert f"job {twin} cannot be retried: a live job of the same type" in str(error)
    assert (states(store)[twin], states(store)[other]) == ("failed", "pending")


def test_a_batch_whose_answer_is_lost_has_done_what_it_did(queue: JobQueue, store: Engine) -> None:
    failed = put(store, "failed", count=2)
    with a_lost_answer():
        assert dict(queue.retry_each(failed)) == dict.fromkeys(failed, JobState.PENDING)
    with a_lost_answer():
        assert dict(queue.cancel_each(failed)) == dict.fromkeys(failed, JobState.CANCELLED)


def test_jobs_that_come_while_all_are_steered_are_not_among_them(
    queue: JobQueue, store: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(store)
    come: list[int] = []
    read = queue._read

    def one_more_comes(*given: Any) -> Any:
        found = read(*given)
        if not come:
            come.extend(put(store))
        return found

    monkeypatch.setattr(queue, "_read", one_more_comes)
    assert queue.cancel_many(type="t") == 1
