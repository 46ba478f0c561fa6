"""Coroutine handlers: many at once, each ended when it has to, and a blocked loop is nobody else's trouble."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import threading
from collections.abc import Iterator

import pytest

from jobsync_orm.queue import JobContext
from jobsync_orm.worker import event_loop
from jobsync_orm.worker.event_loop import EventLoopExecutor
from tests.integration.cluster import wait_for
from tests.integration.worker.executing import Bench


@pytest.fixture
def bench() -> Iterator[Bench]:
    with Bench(EventLoopExecutor, slots=3) as bench:
        yield bench


def test_as_many_run_at_once_as_there_are_slots() -> None:
    met = 0

    async def meet(ctx: JobContext) -> int:
        nonlocal met
        met += 1
        while met < 100:
            await asyncio.sleep(0)
        return met

    with Bench(EventLoopExecutor, slots=100) as bench:
        bench.queue.register("meet", meet)
        attempts = [bench.submit("meet") for _ in range(100)]
        assert {bench.ending(attempt).result for attempt in attempts} == {"100"}
        assert bench.executor.free() == 100


def test_what_does_not_fit_waits_and_can_be_withdrawn(bench: Bench) -> None:
    go = threading.Event()

    async def stay(ctx: JobContext) -> None:
        while not go.is_set():
            await asyncio.sleep(0.01)

    bench.queue.register("stay", stay)
    attempts = [bench.submit("stay") for _ in range(5)]
    wait_for(lambda: len(bench.executor.running()) == 3, "three run")
    assert bench.executor.free() == -2
    assert bench.executor.withdraw() == attempts[3:]
    assert bench.executor.free() == 0
    again = bench.submit("stay")
    go.set()
    assert [bench.ending(attempt).outcome for attempt in (*attempts[:3], again)] == ["completed"] * 4
    assert sorted(bench.reports) == sorted(attempt.job.id for attempt in (*attempts[:3], again))


@pytest.mark.parametrize("why", ["timeout", "cancelled"])
def test_a_task_that_has_to_end_cleans_up_first(bench: Bench, why: str) -> None:
    cleaned = []

    async def sleep(ctx: JobContext) -> None:
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.01)
            cleaned.append(ctx.cancelled.reason)

    bench.queue.register("sleep", sleep)
    attempt = bench.submit("sleep", timeout=0.1 if why == "timeout" else 60)
    if why == "cancelled":
        wait_for(bench.executor.running, "it runs")
        bench.executor.give_up(attempt, "cancelled")
    ending = bench.ending(attempt)
    assert (ending.outcome, cleaned) == (why, [why])
    assert ending.error == ("JobTimeout: took more than 0.1 s" if why == "timeout" else None)
    assert bench.executor.free() == 3
    assert bench.reports == [attempt.job.id]


def test_one_that_is_lost_is_cancelled_and_not_reported(bench: Bench) -> None:
    ended = threading.Event()

    async def sleep(ctx: JobContext) -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()

    bench.queue.register("sleep", sleep)
    attempt = bench.submit("sleep")
    wait_for(bench.executor.running, "it runs")
    bench.executor.give_up(attempt, "lost")
    assert ended.wait(60)
    wait_for(lambda: bench.executor.free() == 3, "its slot is free")
    assert all(bench.endings[id].written for id in bench.reports)  # nothing is to be written


def test_one_that_goes_on_is_abandoned(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(event_loop, "GIVE_WAY_SEC", 0.2)
    go, seen = threading.Event(), []

    async def stubborn(ctx: JobContext) -> str:
        while not go.is_set():
            try:
                await asyncio.sleep(0.01)
            except asyncio.CancelledError:
                seen.append(ctx.cancelled.reason)
        return "at last"

    bench.queue.register("stubborn", stubborn)
    attempts = [bench.submit("stubborn", timeout=0.1) for _ in range(3)]
    assert {bench.ending(attempt).outcome for attempt in attempts} == {"timeout"}
    assert seen == ["timeout"] * 3
    assert (bench.executor.abandoned, bench.executor.free()) == (3, 3)
    assert f"job {attempts[0].job.id} (stubborn) goes on although it was cancelled" in caplog.text
    more = [bench.submit("stubborn", timeout=0.1) for _ in range(9)]
    assert {bench.ending(attempt).outcome for attempt in more} == {"timeout"}
    assert (bench.executor.abandoned, bench.executor.free()) == (12, 0)
    assert bench.executor.problems() == [
        "12 coroutine handlers go on although they were cancelled: no more are started"
    ]
    go.set()
    wait_for(lambda: bench.executor.free() == 3, "they have ended")
    assert bench.executor.problems() == []
    assert len(bench.reports) == 12


def test_a_blocked_loop_is_named(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    go = threading.Event()

    async def block(ctx: JobContext) -> None:
        go.wait(60)

    bench.queue.register("block", block)
    attempt = bench.submit("block")
    (problem,) = wait_for(bench.executor.problems, "the loop is blocked")
    assert f"by job {attempt.job.id} (block)" in problem
    assert bench.executor.free() == 0
    wait_for(lambda: f"by job {attempt.job.id} (block)" in caplog.text, "a warning")
    go.set()
    assert bench.ending(attempt).outcome == "completed"
    wait_for(lambda: bench.executor.free() == 3, "it goes on")
    assert bench.executor.problems() == []
    assert caplog.text.count("(block)") == 1


def test_a_timeout_is_told_though_the_loop_is_blocked(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_loop, "GIVE_WAY_SEC", 0.2)
    go = threading.Event()

    async def block(ctx: JobContext) -> None:
        go.wait(60)

    bench.queue.register("block", block)
    assert bench.run("block", timeout=0.1).outcome == "timeout"
    go.set()


def test_whatever_a_handler_raises_ends_its_attempt_only(bench: Bench) -> None:
    async def fail(ctx: JobContext, what: str) -> None:
        if what == "itself":
            task = asyncio.current_task()
            assert task is not None
            task.cancel()
            await asyncio.sleep(1)
        raise {"SystemExit": SystemExit, "KeyboardInterrupt": KeyboardInterrupt, "ValueError": ValueError}[what](1)

    bench.queue.register("fail", fail)
    for what in ("ValueError", "SystemExit", "KeyboardInterrupt"):
        ending = bench.run("fail", what=what)
        assert (ending.outcome, ending.error) == ("failed", f"{what}: 1")
    assert bench.run("fail", what="itself").error == "CancelledError: the handler cancelled its own task"


def test_stopping_gives_a_task_its_grace_and_releases_the_rest(
    bench: Bench, caplog: pytest.LogCaptureFixture, recwarn: pytest.WarningsRecorder
) -> None:
    caplog.set_level(logging.WARNING)

    async def short(ctx: JobContext) -> None:
        await asyncio.sleep(0.1)

    async def long(ctx: JobContext) -> None:
        await asyncio.sleep(60)

    async def stubborn(ctx: JobContext) -> None:
        asyncio.create_task(asyncio.sleep(60))  # noqa: RUF006
        while True:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(60)

    for function in (short, long, stubborn):
        bench.queue.register(function.__name__, function)
    attempts = [bench.submit(function.__name__) for function in (short, long, stubborn)]
    wait_for(lambda: len(bench.executor.running()) == 3, "they run")
    bench.executor.stop(0.5)
    assert [bench.endings[attempt.job.id].outcome for attempt in attempts] == ["completed", "released", "released"]
    bench.executor.stop(0)
    gc.collect()
    assert "destroyed" not in caplog.text
    assert not recwarn.list
