"""Dequeue, complete, fail, release, extend and clean up: a loop of one's own."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from typing import Any

import pytest
from sqlalchemy import Engine, select, text
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from jobsync_orm.exceptions import ConfigurationError, InvalidJob, InvalidPayload, LeaseLost
from jobsync_orm.models import AttemptOutcome, JobState
from jobsync_orm.queue import Backoff, ClaimedJob, JobQueue, statements
from jobsync_orm.queue.manual_statements import ManualStatements
from jobsync_orm.queue.statements import claiming
from tests.integration.cluster import wait_for
from tests.integration.queue.rows import SQL, Listener, a_lost_answer, depend, put, row, states

HOUR_AGO = SQL("now() - interval '1 hour'")
NOWHERE = ClaimedJob(10**15, "t", 0, 1, 0, 3, 60.0, None, {}, 0, 0)


def taken(queue: JobQueue, types: Any = "t", limit: int = 100, **options: Any) -> list[int]:
    return [job.id for job in queue.dequeue(types, "me", limit, **options)]


def test_a_job_is_taken_once_and_known_in_full(queue: JobQueue, store: Engine) -> None:
    (id,) = put(store, type="mail", payload='{"to": "a"}', priority=3, timeout=60, max_retries=7)
    put(store, type="other")
    (job,) = queue.dequeue(["mail"], "loop-1", 10)
    assert (job.id, job.type, job.payload, job.priority) == (id, "mail", {"to": "a"}, 3)
    assert (job.attempt, job.failures, job.max_retries, job.timeout, job.key) == (1, 0, 7, 60, None)
    found = row(store, id)
    assert (found.state, found.worker, found.incarnation) == ("processing", "loop-1", None)
    assert (found.deadline - found.started_at).total_seconds() == pytest.approx(90, abs=5)
    assert queue.dequeue(["mail"], "loop-2") == []


def test_the_most_urgent_goes_first(queue: JobQueue, store: Engine) -> None:
    (low,) = put(store, priority=-10, key="a")
    (normal,) = put(store)
    (old,) = put(store, priority=-10, ready_at=HOUR_AGO)  # twenty minutes of waiting outweigh the priority
    (high,) = put(store, priority=10, type="u")
    (keyed,) = put(store, priority=20, key="b")
    assert [taken(queue, ["t", "u"], limit=1) for _ in range(5)] == [[old], [keyed], [high], [normal], [low]]
    assert taken(queue, ["t", "u"]) == []


@pytest.mark.parametrize("ageing_sec", [1e-15, 3_000_000_000])
def test_a_priority_may_be_any_integer(store: Engine, ageing_sec: float) -> None:
    queue = JobQueue(engine=store, ageing_sec=ageing_sec)
    ids = [put(store, priority=priority)[0] for priority in (-(2**31), 0, 2**31 - 1)]
    assert taken(queue) == (ids if ageing_sec < 1 else ids[::-1])
    queue.dispose()


@pytest.mark.parametrize("ageing_sec", [0, -1, float("inf"), float("nan"), 1e300, "60"])
def test_how_much_waiting_weighs_is_a_number_of_seconds(store: Engine, ageing_sec: Any) -> None:
    with pytest.raises(ConfigurationError, match="ageing_sec="):
        JobQueue(engine=store, ageing_sec=ageing_sec)


def test_a_key_may_be_an_empty_text(queue: JobQueue, store: Engine) -> None:
    ids = put(store, key="", count=2) + put(store, key="a")
    assert taken(queue) == [ids[0], ids[2]]


def test_rows_that_enqueue_would_refuse_hold_up_none_of_the_others(queue: JobQueue, store: Engine) -> None:
    ids = put(store), put(store, payload='{"i": 1e5000}'), put(store, timeout=float("inf")), put(store)
    jobs = queue.dequeue("t", "me", 10)
    assert [[job.id] for job in jobs] == list(ids)
    assert jobs[1].payload == {"i": 10**5000}
    assert jobs[2].timeout < float("inf")


def test_all_at_once_come_in_that_order(queue: JobQueue, store: Engine) -> None:
    late, soon = put(store, count=2), put(store, count=2, priority=10)
    assert taken(queue, limit=3) == [*soon, late[0]]


def test_of_a_key_one_at_a_time_and_in_order(queue: JobQueue, store: Engine) -> None:
    jobs = put(store, key="k", count=3)
    others = put(store, key="other", count=1)
    put(store, "processing", key="busy")
    put(store, key="busy")
    for job in jobs:
        taken_now = queue.dequeue("t", "me", 10)
        assert [one.id for one in taken_now if one.key == "k"] == [job]
        assert {one.key for one in taken_now} <= {"k", "other"}
        for one in taken_now:
            queue.complete(one)
    assert states(store)[others[0]] == "completed"
    assert taken(queue) == []


def test_a_job_that_backs_off_blocks_its_key_or_lets_others_by(queue: JobQueue, store: Engine) -> None:
    put(store, "retrying", key="blocks")
    put(store, key="blocks")
    put(store, "retrying", key="skips", retry_blocks_key=False)
    (free,) = put(store, key="skips")
    assert taken(queue) == [free]


def test_an_older_job_of_a_key_waits_for_the_one_under_way(queue: JobQueue, store: Engine) -> None:
    (older,) = put(store, "failed", key="k")
    put(store, "processing", key="k")
    queue.retry(older)
    assert taken(queue) == []


def test_without_keys(queue: JobQueue, store: Engine) -> None:
    put(store, key="k")
    (job,) = put(store)
    assert taken(queue, keys=False) == [job]


def test_what_is_paused_is_left_out(queue: JobQueue, store: Engine) -> None:
    put(store)
    put(store, key="k")
    (other,) = put(store, type="u")
    queue.pause("t")
    assert taken(queue, ["t", "u"]) == [other]
    queue.resume("t")
    queue.pause()
    assert taken(queue) == []
    queue.resume()
    assert len(taken(queue)) == 2


def test_each_of_many_keys_has_its_turn(queue: JobQueue, store: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claiming, "KEYS_AT_ONCE", 3)
    made = ManualStatements(queue.names, statements.QueueStatements(queue.names))
    monkeypatch.setitem(queue.__dict__, "_manual", made)
    for number in range(10):
        put(store, "processing", key=f"a{number}")
        put(store, key=f"a{number}")
    wanted = [id for number in range(7) for id in put(store, key=f"b{number}", count=2)]
    found = [id for _ in range(7) for id in taken(queue, limit=1)]
    assert sorted(found) == wanted[::2]
    assert taken(queue) == []


def test_the_look_at_the_keys_goes_around_once(queue: JobQueue, store: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claiming, "KEYS_AT_ONCE", 2)
    made = ManualStatements(queue.names, statements.QueueStatements(queue.names))
    monkeypatch.setitem(queue.__dict__, "_manual", made)
    (job,) = put(store, key="b")
    for number in range(5):
        put(store, "processing", key=f"c{number}")
    for mark in ("z", "c1", "b"):
        queue._key_mark = mark
        (found,) = queue.dequeue("t", "me")
        assert found.id == job
        queue.release(found)
    put(store, "processing", key="a")
    (_,) = queue.dequeue("t", "me")
    for mark in ("", "a", "c1", "z"):
        queue._key_mark = mark
        assert queue.dequeue("t", "me") == []


def test_what_is_due_becomes_ready_without_workers(queue: JobQueue, store: Engine) -> None:
    due = put(store, "scheduled", run_at=HOUR_AGO) + put(store, "retrying", run_at=HOUR_AGO, key="k")
    put(store, "scheduled")
    assert sorted(taken(queue)) == sorted(due)


def test_many_loops_share_the_jobs(queue: JobQueue, store: Engine) -> None:
    """Each job once, and of each key one at a time, in order."""
    put(store, count=60)
    for number in range(4):
        put(store, key=f"k{number}", count=10)
    seen: list[int] = []
    order: dict[str, list[int]] = {}
    running: Counter[str] = Counter()
    broken: list[object] = []

    def loop() -> None:
        while jobs := queue.dequeue("t", threading.current_thread().name, 3):
            for job in jobs:
                if job.key is not None:
                    running[job.key] += 1
                    if running[job.key] > 1:
                        broken.append(job)
                    order.setdefault(job.key, []).append(job.id)
            for job in jobs:
                if job.key is not None:
                    running[job.key] -= 1
                queue.complete(job)
                seen.append(job.id)

    threads = [threading.Thread(target=loop) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    loop()  # who found nothing may have left while the last of a key was under way
    assert sorted(seen) == sorted(states(store))
    assert broken == []
    assert all(ids == sorted(ids) for ids in order.values())


def test_to_complete_is_to_keep_the_result_and_the_attempt(queue: JobQueue, store: Engine) -> None:
    put(store)
    (job,) = queue.dequeue("t", "me")
    queue.complete(job, {"a": [1, None, 2.5]})
    status = queue.status(job.id)
    assert (status.state, status.result, status.error, status.failures) == ("completed", {"a": [1, None, 2.5]}, None, 0)
    assert status.finished_at is not None
    assert status.deadline is None
    (attempt,) = status.attempts
    assert (attempt.attempt, attempt.outcome, attempt.worker) == (1, AttemptOutcome.COMPLETED, "me")
    assert attempt.started_at == status.started_at
    assert attempt.ended_at >= attempt.started_at
    with pytest.raises(LeaseLost):
        queue.complete(job)


def test_a_result_that_cannot_be_kept_is_refused(queue: JobQueue, store: Engine) -> None:
    put(store)
    (job,) = queue.dequeue("t", "me")
    with pytest.raises(InvalidPayload, match="result"):
        queue.complete(job, object())
    assert states(store) == {job.id: "processing"}


def test_jobs_that_waited_are_free_and_the_workers_hear_of_it(
    queue: JobQueue, store: Engine, listener: Listener
) -> None:
    put(store)
    (job,) = queue.dequeue("t", "me")
    (next,), (other,) = put(store, "blocked", type="u"), put(store, "blocked")
    depend(store, next, job.id)
    depend(store, other, job.id, *put(store, "processing"))
    queue.complete(job)
    assert (states(store)[next], states(store)[other]) == ("pending", "blocked")
    wait_for(lambda: [["u", 0, False]] in listener.heard(), "the workers are woken")


def test_work_and_completion_are_committed_together(queue: JobQueue, store: Engine) -> None:
    put(store)
    (job,) = queue.dequeue("t", "me")
    (next,) = put(store, "blocked")
    depend(store, next, job.id)
    with Session(store) as session:
        session.add(queue.models.JobPause(type="work"))  # type: ignore[call-arg]
        queue.complete(job, 1, session)
        session.rollback()
    assert states(store) == {job.id: "processing", next: "blocked"}
    assert queue.paused() == []
    with Session(store) as session, session.begin():
        session.add(queue.models.JobPause(type="work"))  # type: ignore[call-arg]
        queue.complete(job, 1, session)
    assert queue.status(job.id).result == 1
    assert [pause.type for pause in queue.paused()] == ["work"]
    wait_for(lambda: states(store)[next] == "pending", "the waiting job is free")


def test_work_of_a_lost_attempt_is_not_committed(queue: JobQueue, store: Engine) -> None:
    put(store)
    (job,) = queue.dequeue("t", "me")
    assert queue.cleanup_stale(0) == 1
    with Session(store) as session:
        session.add(queue.models.JobPause(type="work"))  # type: ignore[call-arg]
        with pytest.raises(LeaseLost, match=f"attempt 1 of job {job.id}"):
            queue.complete(job, session=session)
    assert queue.paused() == []


def test_the_other_kind_of_session(queue: JobQueue, store: Engine) -> None:
    put(store, count=2)
    first, second = queue.dequeue("t", "me", 2)

    async def finish() -> None:
        engine = create_async_engine(store.url)
        async with AsyncSession(engine) as session:
            with pytest.raises(ConfigurationError, match="complete_async"):
                queue.complete(first, session=session)  # type: ignore[arg-type]
            await queue.complete_async(first, "r", session)
            await session.commit()
            assert await session.scalar(select(queue.models.QueuedJob.state).where(text("id = :id")), {"id": first.id})
        await queue.complete_async(second)
        await engine.dispose()

    asyncio.run(finish())
    assert set(states(store).values()) == {"completed"}
    assert queue.status(first.id).result == "r"


def test_a_failure_is_tried_again_after_the_handlers_backoff(queue: JobQueue, store: Engine) -> None:
    queue.register("mail", lambda ctx: None, backoff=Backoff(base=1000, jitter=0))
    put(store, type="mail")
    (job,) = queue.dequeue("mail", "me")
    with pytest.raises(ValueError) as raised:
        raise ValueError("no such address")
    assert queue.fail(job, raised.value) is JobState.RETRYING
    status = queue.status(job.id)
    assert (status.error, status.failures) == ("ValueError: no such address", 1)
    (attempt,) = status.attempts
    assert (attempt.outcome, attempt.error) == (AttemptOutcome.FAILED, status.error)
    assert "test_manual.py" in str(attempt.traceback)
    assert status.run_at is not None
    assert (status.run_at - attempt.ended_at).total_seconds() == pytest.approx(1000, abs=1)


def test_a_failure_with_a_delay_and_without_retries(queue: JobQueue, store: Engine) -> None:
    put(store, max_retries=1)
    (job,) = queue.dequeue("t", "me")
    assert queue.fail(job, "busy", delay=0) is JobState.RETRYING
    (job,) = queue.dequeue("t", "me")
    assert (job.attempt, job.failures) == (2, 1)
    assert queue.fail(job, "busy") is JobState.FAILED
    status = queue.status(job.id)
    assert (status.state, status.error, status.failures) == ("failed", "busy", 2)
    assert status.finished_at is not None
    assert [attempt.traceback for attempt in status.attempts] == [None, None]


def test_a_failure_for_good(queue: JobQueue, store: Engine) -> None:
    put(store)
    (job,) = queue.dequeue("t", "me")
    assert queue.fail(job, "the order is gone", retry=False) is JobState.FAILED
    assert queue.status(job.id).attempts[0].outcome is AttemptOutcome.DISCARDED


def test_to_release_counts_for_nothing(queue: JobQueue, store: Engine, listener: Listener) -> None:
    put(store, ready_at=HOUR_AGO)
    (job,) = queue.dequeue("t", "me")
    queue.release(job)
    found = row(store, job.id)
    assert (found.state, found.failures, found.attempt) == ("pending", 0, 1)
    assert found.ready_at < found.started_at
    assert queue.status(job.id).attempts[0].outcome is AttemptOutcome.RELEASED
    wait_for(lambda: [["t", 0, False]] in listener.heard(), "the workers are woken")
    with pytest.raises(LeaseLost):
        queue.release(job)


def test_a_job_cancelled_meanwhile_ends_as_that(queue: JobQueue, store: Engine) -> None:
    put(store, count=3)
    released, failing, done = queue.dequeue("t", "me", 3)
    for job in (released, failing, done):
        assert queue.extend(job, 60) is True
        queue.cancel(job.id)
        assert queue.extend(job, 60) is False
    queue.release(released)
    assert queue.fail(failing, "no") is JobState.CANCELLED
    queue.complete(done)
    assert [states(store)[job.id] for job in (released, failing, done)] == ["cancelled", "cancelled", "completed"]
    assert all(row(store, job.id).finished_at is not None for job in (released, failing, done))


def test_to_extend_moves_the_deadline(queue: JobQueue, store: Engine) -> None:
    put(store, timeout=10)
    (job,) = queue.dequeue("t", "me")
    queue.extend(job, 5000)
    found = row(store, job.id)
    assert (found.deadline - found.started_at).total_seconds() > 5000
    for seconds in (0, -1, "5", None):
        with pytest.raises(InvalidJob, match="seconds="):
            queue.extend(job, seconds)  # type: ignore[arg-type]


def test_stale_jobs_are_freed(queue: JobQueue, store: Engine, listener: Listener) -> None:
    (fresh,) = put(store, "processing")
    (overdue,) = put(store, "processing", deadline=HOUR_AGO)
    (last,) = put(store, "processing", deadline=HOUR_AGO, max_retries=0)
    (cancelled,) = put(store, "processing", deadline=HOUR_AGO, cancel_requested=True)
    (long,) = put(store, "processing", started_at=HOUR_AGO, incarnation=SQL("gen_random_uuid()"))
    assert queue.cleanup_stale() == 3
    found = states(store)
    assert (found[fresh], found[overdue], found[last], found[cancelled]) == (
        "processing", "pending", "failed", "cancelled"
    )  # fmt: skip
    assert listener.heard() == [[["t", 0, False]]]
    assert queue.cleanup_stale(1800) == 1
    assert (states(store)[long], states(store)[fresh]) == ("pending", "processing")
    status = queue.status(overdue)
    assert (status.failures, status.error) == (1, "worker w1 held the job for too long")
    assert status.attempts[0].outcome is AttemptOutcome.DIED
    with pytest.raises(InvalidJob, match="timeout="):
        queue.cleanup_stale(-1)


def test_an_answer_that_is_lost_is_no_lost_lease(queue: JobQueue, store: Engine) -> None:
    put(store, count=2)
    (next,) = put(store, "blocked")
    first, second = queue.dequeue("t", "me", 2)
    depend(store, next, first.id)
    with a_lost_answer():
        queue.complete(first, 1)
    assert states(store)[next] == "pending"
    with a_lost_answer():
        assert queue.fail(second, "no") is JobState.RETRYING
    assert [len(queue.status(job.id).attempts) for job in (first, second)] == [1, 1]
    assert queue.status(second.id).failures == 1


@pytest.mark.parametrize("call", ["complete", "fail", "release", "extend"])
def test_an_attempt_that_is_over_changes_nothing(queue: JobQueue, store: Engine, call: str) -> None:
    put(store)
    (mine,) = queue.dequeue("t", "me")
    assert queue.cleanup_stale(0) == 1
    (theirs,) = queue.dequeue("t", "other")
    before = row(store, mine.id)
    arguments = {"complete": (), "fail": ("no",), "release": (), "extend": (60,)}[call]
    for job in (mine, NOWHERE):
        with pytest.raises(LeaseLost, match=f"attempt 1 of job {job.id} is over"):
            getattr(queue, call)(job, *arguments)
    assert row(store, mine.id) == before
    assert theirs.attempt == 2
    assert len(queue.status(mine.id).attempts) == 1


@pytest.mark.parametrize(
    "given",
    [
        {"types": []},
        {"types": ""},
        {"types": [3]},
        {"worker_id": ""},
        {"worker_id": "a\0"},
        {"worker_id": None},
        {"limit": 0},
        {"limit": 1001},
        {"limit": True},
    ],
)
def test_what_makes_no_sense_is_refused(queue: JobQueue, store: Engine, given: dict[str, Any]) -> None:
    (job,) = put(store)
    with pytest.raises(InvalidJob):
        queue.dequeue(**{"types": "t", "worker_id": "me", **given})
    assert states(store) == {job: "pending"}
    with pytest.raises(InvalidJob, match="job="):
        queue.complete(job)  # type: ignore[arg-type]
    with pytest.raises(InvalidJob, match="error="):
        queue.fail(NOWHERE, 5)  # type: ignore[arg-type]


def test_without_blocking_an_event_loop(queue: JobQueue, store: Engine) -> None:
    put(store, count=3)

    async def loop() -> None:
        first, second, third = await queue.dequeue_async("t", "me", 3)
        await queue.complete_async(first)
        assert await queue.fail_async(second, "no", delay=1000) is JobState.RETRYING
        assert await queue.extend_async(third, 100) is True
        await queue.release_async(third)
        assert await queue.cleanup_stale_async() == 0

    asyncio.run(loop())
    assert sorted(states(store).values()) == ["completed", "pending", "retrying"]


def test_settings_of_a_walk_end_with_it(queue: JobQueue, store: Engine) -> None:
    """The settings of the walk are the transaction's own: the application's connection is as it was."""
    ask = text("SELECT current_setting('enable_seqscan'), current_setting('idle_in_transaction_session_timeout')")
    (inside,) = queue._walk(ask, {})
    assert tuple(inside) == ("off", "10s")
    with store.connect() as connection:
        assert tuple(connection.execute(ask).one()) == ("on", "0")
