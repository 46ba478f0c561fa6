from __future__ import annotations

import asyncio
import datetime
import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from sqlalchemy.exc import OperationalError

from jobsync_orm import CoordinationConfig
from jobsync_orm.exceptions import InvalidJob, JobCancelled, LeaseLost
from jobsync_orm.models.states import AttemptOutcome, JobState
from jobsync_orm.queue import CancelFlag, ClaimedJob, Discard, Ending, JobContext, JobQueue, Retry, Snooze
from jobsync_orm.queue.execution import execute, execute_async, failed


@pytest.fixture
def queue() -> JobQueue:
    return JobQueue(CoordinationConfig(url="postgresql+psycopg://nobody@nowhere/none"), max_payload_bytes=100)


def a_job(payload: Any = None, **fields: Any) -> ClaimedJob:
    values = {"failures": 0, "max_retries": 3, "timeout": 60.0, "key": None} | fields
    return ClaimedJob(
        id=7, type="t", priority=0, attempt=2, payload=payload or {}, ready_at=0, created_at=1_000_000, **values
    )


def run(
    queue: JobQueue, function: Callable[..., Any], job: ClaimedJob | None = None, reason: Any = None, **options: Any
) -> Ending:
    """How an attempt at ``job`` ends; ``reason`` is why it is no longer wanted."""
    job = job or a_job()
    queue.handlers.clear()
    handler = queue.register("t", function, **options)
    context = JobContext(queue, job, "w1", CancelFlag())
    if reason:
        context.cancelled.set(reason)
    if handler.kind == "async":
        return asyncio.run(execute_async(queue, handler, job, context))
    return execute(queue, handler, job, context)


def raising(error: BaseException, *, is_async: bool = False) -> Callable[..., Any]:
    def function(ctx: Any) -> None:
        raise error

    async def coroutine(ctx: Any) -> None:
        raise error

    return coroutine if is_async else function


both = pytest.mark.parametrize("is_async", [False, True], ids=["thread", "async"])


def test_return_completes(queue: JobQueue) -> None:
    seen = []

    def function(ctx: JobContext, a: int, b: str = "x") -> dict[str, Any]:
        seen.append((ctx.id, ctx.type, ctx.attempt, ctx.failures, ctx.worker, ctx.key, ctx.payload, a, b))
        return {"sum": 1.5, "text": "ü"}

    ending = run(queue, function, a_job({"a": 1}, key="k", failures=1))
    assert seen == [(7, "t", 2, 1, "w1", "k", {"a": 1}, 1, "x")]
    assert (ending.job_id, ending.attempt) == (7, 2)
    assert (ending.outcome, ending.state) == (AttemptOutcome.COMPLETED, JobState.COMPLETED)
    assert json.loads(ending.result or "") == {"sum": 1.5, "text": "ü"}
    assert (ending.error, ending.traceback, ending.delay, ending.counts, ending.written) == (None,) * 3 + (False,) * 2
    assert ending.began_at <= ending.ended_at


def test_coroutine_completes(queue: JobQueue) -> None:
    async def coroutine(ctx: JobContext, a: int) -> int:
        await asyncio.sleep(0)
        return a + 1

    ending = run(queue, coroutine, a_job({"a": 1}))
    assert (ending.state, ending.result) == (JobState.COMPLETED, "2")


def test_no_result_is_null(queue: JobQueue) -> None:
    assert run(queue, lambda ctx: None).result is None


def test_context_knows_when_the_job_was_enqueued(queue: JobQueue) -> None:
    context = JobContext(queue, a_job(), "w1", CancelFlag())
    assert context.enqueued_at == datetime.datetime(1970, 1, 1, 0, 0, 1, tzinfo=datetime.UTC)
    assert context.max_retries == 3


@pytest.mark.parametrize(
    "result",
    [object(), {1, 2}, float("nan"), {"a": float("inf")}, "x" * 200, "\0", "\ud800", {"a": "b\0"}],
    ids=["object", "set", "nan", "inf", "long", "nul", "surrogate", "nul within"],
)
def test_result_that_cannot_be_stored_does_not_undo_the_job(
    queue: JobQueue, result: object, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "jobsync_orm"):
        ending = run(queue, lambda ctx: result)
    assert (ending.outcome, ending.state) == (AttemptOutcome.COMPLETED, JobState.COMPLETED)
    assert ending.result is None
    assert (ending.error or "").startswith("InvalidPayload: ")
    assert "\0" not in (ending.error or "")
    (ending.error or "").encode()
    assert "job 7 (t) has completed, but its result is not stored" in caplog.text


def test_coroutine_that_a_plain_function_returns_is_a_failure(queue: JobQueue) -> None:
    async def coroutine() -> None: ...

    ending = run(queue, lambda ctx: coroutine())
    assert ending.state == JobState.RETRYING
    assert "kind='async'" in (ending.error or "")


@both
def test_exception_is_retried_after_the_backoff(queue: JobQueue, is_async: bool) -> None:
    error = ValueError("no such order")
    asked = []

    def backoff(failures: int, given: BaseException) -> float:
        asked.append((failures, given))
        return 12.5

    ending = run(queue, raising(error, is_async=is_async), a_job(failures=2), backoff=backoff)
    assert (ending.outcome, ending.state, ending.counts) == (AttemptOutcome.FAILED, JobState.RETRYING, True)
    assert ending.delay == 12.5
    assert asked == [(2, error)]
    assert ending.error == "ValueError: no such order"
    trace = (ending.traceback or "").splitlines()
    assert trace[0] == "Traceback (most recent call last):"
    assert "test_execution.py" in trace[1]
    assert trace[-1] == "ValueError: no such order"


@both
def test_exception_after_the_last_retry_fails_for_good(queue: JobQueue, is_async: bool) -> None:
    ending = run(queue, raising(ValueError("x"), is_async=is_async), a_job(failures=3))
    assert (ending.outcome, ending.state, ending.counts) == (AttemptOutcome.FAILED, JobState.FAILED, True)
    assert ending.delay is None
    assert run(queue, raising(ValueError("x")), a_job(max_retries=0)).state == JobState.FAILED


def test_system_exit_of_a_handler_ends_the_attempt_and_not_its_thread(queue: JobQueue) -> None:
    ending = run(queue, raising(SystemExit(3)))
    assert (ending.state, ending.error) == (JobState.RETRYING, "SystemExit: 3")


@both
def test_keyboard_interrupt_goes_through(queue: JobQueue, is_async: bool) -> None:
    with pytest.raises(KeyboardInterrupt):
        run(queue, raising(KeyboardInterrupt(), is_async=is_async))


@pytest.mark.parametrize("wrong", [-1, float("nan"), None, "soon", 1e300])
def test_backoff_that_returns_nonsense_is_the_default_one(
    queue: JobQueue, wrong: Any, caplog: pytest.LogCaptureFixture
) -> None:
    ending = run(queue, raising(ValueError()), backoff=lambda failures, error: wrong)
    assert ending.delay is not None
    assert 54 <= ending.delay <= 60
    assert "the backoff of 't' jobs failed" in caplog.text


def test_backoff_that_raises_is_the_default_one(queue: JobQueue, caplog: pytest.LogCaptureFixture) -> None:
    def backoff(failures: int, error: BaseException) -> float:
        raise RuntimeError("of the backoff")

    ending = run(queue, raising(ValueError("of the job")), a_job(failures=1), backoff=backoff)
    assert ending.delay is not None
    assert 108 <= ending.delay <= 120
    assert ending.error == "ValueError: of the job"
    assert "of the backoff" in caplog.text


@both
def test_retry(queue: JobQueue, is_async: bool) -> None:
    ending = run(queue, raising(Retry(after=30, reason="busy"), is_async=is_async))
    assert (ending.outcome, ending.state, ending.counts) == (AttemptOutcome.FAILED, JobState.RETRYING, True)
    assert (ending.delay, ending.error) == (30, "Retry: busy")
    last = run(queue, raising(Retry(after=30), is_async=is_async), a_job(failures=3))
    assert (last.state, last.counts, last.error) == (JobState.FAILED, True, "Retry: after 30 s")


def test_retry_without_a_time_takes_the_backoff_and_the_error_it_came_from(queue: JobQueue) -> None:
    seen: list[BaseException] = []

    def function(ctx: JobContext) -> None:
        try:
            raise KeyError("field")
        except KeyError as error:
            raise Retry from error

    def backoff(failures: int, error: BaseException) -> float:
        seen.append(error)
        return 5

    ending = run(queue, function, backoff=backoff)
    assert (ending.delay, ending.error) == (5, "KeyError: 'field'")
    assert isinstance(seen[0], KeyError)
    assert "Retry" in (ending.traceback or "")


@both
def test_snooze_counts_for_nothing(queue: JobQueue, is_async: bool) -> None:
    ending = run(queue, raising(Snooze(90), is_async=is_async), a_job(failures=3))
    assert (ending.outcome, ending.state) == (AttemptOutcome.SNOOZED, JobState.SCHEDULED)
    assert (ending.delay, ending.until, ending.counts) == (90, None, False)
    moment = datetime.datetime(2031, 5, 6, 7, 8, 9, 123456, datetime.timezone(datetime.timedelta(hours=2)))
    ending = run(queue, raising(Snooze(until=moment), is_async=is_async))
    assert (ending.delay, ending.until) == (None, moment.timestamp())


@both
def test_discard_fails_for_good_at_once(queue: JobQueue, is_async: bool) -> None:
    ending = run(queue, raising(Discard("the order is gone"), is_async=is_async))
    assert (ending.outcome, ending.state, ending.counts) == (AttemptOutcome.DISCARDED, JobState.FAILED, False)
    assert ending.error == "Discard: the order is gone"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Retry(after=-1), "Retry.after=-1"),
        (lambda: Retry(after="1"), "Retry.after='1'"),  # type: ignore[arg-type]
        (lambda: Snooze(), "either seconds=... or until=..."),
        (lambda: Snooze(1, datetime.datetime.now(datetime.UTC)), "either seconds=... or until=..."),
        (lambda: Snooze(-5), "Snooze.seconds=-5"),
        (lambda: Snooze(until=datetime.datetime(2031, 1, 1)), "with a time zone"),
        (lambda: Snooze(until=datetime.date(2031, 1, 1)), "with a time zone"),  # type: ignore[arg-type]
    ],
)
def test_outcomes_that_cannot_be(make: Callable[[], BaseException], message: str) -> None:
    with pytest.raises(InvalidJob, match=message):
        make()


@both
@pytest.mark.parametrize(
    ("reason", "outcome", "state", "counts", "written"),
    [
        (None, AttemptOutcome.CANCELLED, JobState.CANCELLED, False, False),
        ("cancelled", AttemptOutcome.CANCELLED, JobState.CANCELLED, False, False),
        ("timeout", AttemptOutcome.TIMEOUT, JobState.RETRYING, True, False),
        ("stopping", AttemptOutcome.RELEASED, JobState.PENDING, False, False),
        ("lost", AttemptOutcome.DIED, JobState.PENDING, False, True),
    ],
)
def test_attempt_that_gives_way(
    queue: JobQueue,
    is_async: bool,
    reason: Any,
    outcome: AttemptOutcome,
    state: JobState,
    counts: bool,
    written: bool,
) -> None:
    ending = run(queue, raising(JobCancelled("x"), is_async=is_async), reason=reason)
    assert (ending.outcome, ending.state, ending.counts, ending.written) == (outcome, state, counts, written)
    if reason == "timeout":
        assert ending.error == "JobTimeout: took more than 60 s"
        assert ending.delay


def test_check_raises_once_the_attempt_is_not_wanted(queue: JobQueue) -> None:
    def function(ctx: JobContext) -> None:
        ctx.check()
        assert not ctx.cancelled
        ctx.cancelled.set("cancelled")
        ctx.cancelled.set("timeout")  # too late to be the reason
        assert ctx.cancelled.wait(0)
        ctx.check()

    ending = run(queue, function)
    assert ending.outcome == AttemptOutcome.CANCELLED


def test_work_done_although_the_attempt_was_not_wanted_is_done(queue: JobQueue) -> None:
    assert run(queue, lambda ctx: 1, reason="timeout").state == JobState.COMPLETED


def test_lease_lost_of_another_job_is_a_failure(queue: JobQueue) -> None:
    assert run(queue, raising(LeaseLost("x"))).state == JobState.RETRYING
    assert run(queue, raising(LeaseLost("x")), reason="lost").written


def test_cancelled_task_of_an_attempt_that_timed_out(queue: JobQueue) -> None:
    async def coroutine(ctx: JobContext) -> None:
        await asyncio.sleep(100)

    async def main() -> Ending:
        handler = queue.register("t", coroutine)
        context = JobContext(queue, a_job(), "w1", CancelFlag())
        task = asyncio.create_task(execute_async(queue, handler, context.job, context))
        await asyncio.sleep(0)
        context.cancelled.set("timeout")
        task.cancel()
        return await task

    ending = asyncio.run(main())
    assert (ending.outcome, ending.state) == (AttemptOutcome.TIMEOUT, JobState.RETRYING)


def test_cancelled_task_of_an_attempt_that_is_wanted(queue: JobQueue) -> None:
    async def coroutine(ctx: JobContext) -> None:
        await asyncio.sleep(100)

    async def main() -> None:
        handler = queue.register("t", coroutine)
        context = JobContext(queue, a_job(), "w1", CancelFlag())
        task = asyncio.create_task(execute_async(queue, handler, context.job, context))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())


def test_cancelled_error_of_the_handlers_own_is_a_failure(queue: JobQueue) -> None:
    ending = run(queue, raising(asyncio.CancelledError(), is_async=True))
    assert (ending.state, ending.error) == (JobState.RETRYING, "CancelledError")


@pytest.mark.parametrize("payload", [{}, {"a": 1, "b": 2}, {"ctx": 1, "a": 1}])
def test_payload_that_does_not_fit_fails_for_good(queue: JobQueue, payload: dict[str, Any]) -> None:
    ending = run(queue, lambda ctx, a: None, a_job(payload))
    assert (ending.outcome, ending.state, ending.counts) == (AttemptOutcome.FAILED, JobState.FAILED, True)
    assert (ending.error or "").startswith("InvalidPayload: payload of a 't' job does not fit")


def test_type_error_of_the_handlers_own_is_retried(queue: JobQueue) -> None:
    def function(ctx: JobContext, a: int) -> None:
        function(ctx)  # type: ignore[call-arg]

    ending = run(queue, function, a_job({"a": 1}))
    assert (ending.state, (ending.error or "")[:10]) == (JobState.RETRYING, "TypeError:")


@dataclass
class Order:
    id: int


@both
def test_typed_payload(queue: JobQueue, is_async: bool) -> None:
    async def coroutine(ctx: JobContext, order: Order) -> int:
        return order.id

    function = coroutine if is_async else lambda ctx, order: order.id
    assert run(queue, function, a_job({"id": 5}), payload=Order).result == "5"
    ending = run(queue, function, a_job({"idd": 5}), payload=Order)
    assert ending.state == JobState.FAILED
    assert (ending.error or "").startswith("InvalidPayload: ")


class Silent(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no message")


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ValueError("a\0b"), "ValueError: a\\x00b"),
        (ValueError("a\ud800b"), "ValueError: a\\ud800b"),
        (ValueError(), "ValueError"),
        (Silent(), "Silent: (its message cannot be had: RuntimeError)"),
    ],
)
def test_error_is_text_that_can_be_stored(queue: JobQueue, error: Exception, text: str) -> None:
    ending = run(queue, raising(error))
    assert ending.error == text
    assert ending.traceback is not None
    assert "\0" not in ending.traceback
    ending.traceback.encode()
    assert "test_execution.py" in ending.traceback


def test_long_error_and_traceback_are_cut_and_keep_both_ends(queue: JobQueue) -> None:
    ending = run(queue, raising(ValueError("x" * 100_000 + "end")))
    assert ending.error is not None
    assert len(ending.error) == 4_000
    assert ending.error.endswith("...")
    assert ending.traceback is not None
    assert len(ending.traceback) < 20_200
    assert ending.traceback.startswith("Traceback")
    assert ending.traceback.endswith("xend\n")
    assert "characters ...]" in ending.traceback


class Postgres(Exception):
    def __init__(self, sqlstate: str) -> None:
        super().__init__()
        self.sqlstate = sqlstate


@pytest.mark.parametrize(
    ("sqlstate", "broken", "soon"),
    [("40001", False, True), ("40P01", False, True), ("57P01", True, True), ("23505", False, False)],
)
def test_what_the_database_ended_is_repeated_soon(queue: JobQueue, sqlstate: str, broken: bool, soon: bool) -> None:
    error = OperationalError("UPDATE", {}, Postgres(sqlstate), connection_invalidated=broken)
    ending = run(queue, raising(error), a_job(failures=2))
    assert (ending.state, ending.counts) == (JobState.RETRYING, True)
    assert ending.delay is not None
    assert (ending.delay <= 1) is soon


def test_failure_that_somebody_else_has_found(queue: JobQueue) -> None:
    handler = queue.register("t", lambda ctx: None)
    ending = failed(handler, a_job(), ValueError("x"), 1.0, 2.0, AttemptOutcome.TIMEOUT)
    assert (ending.outcome, ending.traceback) == (AttemptOutcome.TIMEOUT, None)
    assert (ending.began_at, ending.ended_at) == (1.0, 2.0)
