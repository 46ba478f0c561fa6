"""Handlers are tested without a database."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import pytest

from jobsync_orm import CoordinationConfig, Discard, JobContext, JobQueue, Retry
from jobsync_orm.exceptions import InvalidJob, InvalidPayload, JobCancelled, SessionMisused, UnknownJobType
from jobsync_orm.testing import FakeContext, run_handler


@dataclass
class Order:
    id: int


@pytest.fixture
def queue() -> JobQueue:
    """Of a database that is not there."""
    queue = JobQueue(CoordinationConfig(url="postgresql://nobody@127.0.0.1:1/nothing"))

    @queue.handler("add")
    def add(ctx: JobContext, a: int, b: int = 1) -> dict[str, int]:
        return {"sum": a + b}

    @queue.handler("add_later")
    async def add_later(ctx: JobContext, a: int) -> int:
        await asyncio.sleep(0)
        return a + 1

    @queue.handler("ship", payload=Order)
    def ship(ctx: JobContext, order: Order) -> list[Any]:
        return [type(order).__name__, order.id, ctx.payload]

    return queue


def test_a_handler_is_called_with_what_would_be_stored(queue: JobQueue) -> None:
    queue.register("show", lambda ctx, pair: [pair, ctx.payload, ctx.id, ctx.attempt, ctx.worker])

    assert run_handler(queue, "show", {"pair": (1, 2)}) == [[1, 2], {"pair": [1, 2]}, 1, 1, "test"]
    assert run_handler(queue, "add", {"a": 1}) == {"sum": 2}


def test_what_it_returns_is_as_it_would_be_stored(queue: JobQueue) -> None:
    queue.register("pair", lambda ctx: (1, 2))
    queue.register("nothing", lambda ctx: None)

    assert run_handler(queue, "pair") == [1, 2]
    assert run_handler(queue, "nothing") is None


@pytest.mark.parametrize("payload", [{"id": 7}, Order(7)])
def test_a_payload_with_a_type(queue: JobQueue, payload: Any) -> None:
    assert run_handler(queue, "ship", payload) == ["Order", 7, {"id": 7}]


def test_a_coroutine_function_runs_in_an_event_loop(queue: JobQueue) -> None:
    async def within() -> Any:
        return run_handler(queue, "add_later", {"a": 1})

    assert run_handler(queue, "add_later", {"a": 1}) == 2
    assert asyncio.run(within()) == 2


def test_whatever_it_raises_comes_out(queue: JobQueue) -> None:
    async def fail_later(ctx: JobContext) -> None:
        raise Discard("no such order")

    def fail(ctx: JobContext) -> None:
        raise Retry(after=5)

    queue.register("fail", fail)
    queue.register("fail_later", fail_later)

    with pytest.raises(Retry):
        run_handler(queue, "fail")
    with pytest.raises(Discard, match="no such order"):
        run_handler(queue, "fail_later")
    with pytest.raises(Discard, match="no such order"):
        asyncio.run(_in_a_loop(lambda: run_handler(queue, "fail_later")))


async def _in_a_loop(call: Any) -> Any:
    return call()


def test_what_a_real_job_would_meet_is_met(queue: JobQueue) -> None:
    queue.register("set", lambda ctx: {1})
    queue.register("forgotten", lambda ctx: asyncio.sleep(0))

    with pytest.raises(InvalidPayload, match="'c'"):
        run_handler(queue, "add", {"a": 1, "c": 2})
    with pytest.raises(InvalidPayload, match="result"):
        run_handler(queue, "set")
    with pytest.raises(InvalidJob, match="coroutine, which nobody runs"):
        run_handler(queue, "forgotten")
    with pytest.raises(UnknownJobType, match="'sub'"):
        run_handler(queue, "sub")


def test_a_context_says_what_the_test_gave_it(queue: JobQueue) -> None:
    session = object()
    context = FakeContext(queue, "add", {"a": 1}, id=5, attempt=3, failures=2, key="k", max_retries=9, session=session)

    assert (context.id, context.type, context.attempt, context.failures, context.max_retries, context.key) == (
        5,
        "add",
        3,
        2,
        9,
        "k",
    )
    assert context.session is session
    assert context.payload == {"a": 1}
    with pytest.raises(SessionMisused, match="session=session"):
        _ = FakeContext(queue).session


def test_what_a_handler_enqueues_is_noted_down(queue: JobQueue) -> None:
    queue.register("parent", lambda ctx: ctx.enqueue("add", {"a": 1}, priority=5, key="x").id)
    context = FakeContext(queue, "parent")

    assert run_handler(queue, "parent", context=context) == 2
    [job] = context.enqueued
    assert (job.type, job.payload, job.priority, job.key) == ("add", {"a": 1}, 5, "x")
    with pytest.raises(InvalidPayload):
        context.enqueue("add", {"b": 1})
    with pytest.raises(UnknownJobType):
        context.enqueue("sub", {}, check=True)
    assert len(context.enqueued) == 1


def test_a_coroutine_function_awaits_the_same_calls(queue: JobQueue) -> None:
    session = object()

    @queue.handler("parent")
    async def parent(ctx: JobContext) -> bool:
        await ctx.enqueue("add", {"a": 1})
        await ctx.extend_async(5)
        await ctx.heartbeat_async()
        return await ctx.async_session() is session

    context = FakeContext(queue, "parent", session=session, timeout=60)
    assert run_handler(queue, "parent", context=context) is True
    assert [job.type for job in context.enqueued] == ["add"]
    assert context.extended == [5, 60]


def test_a_test_can_cancel_an_attempt(queue: JobQueue) -> None:
    context = FakeContext(queue)
    context.heartbeat()
    context.cancelled.set("cancelled")

    with pytest.raises(JobCancelled):
        context.check()
    with pytest.raises(JobCancelled):
        context.extend(5)
    assert context.extended == [3600, 5]
