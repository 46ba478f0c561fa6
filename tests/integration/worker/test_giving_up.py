"""Attempts that are given up just when they begin or end: each is reported once, and no slot is lost or won."""

from __future__ import annotations

import asyncio
import collections
import random
import threading
import time
from typing import Any

import pytest

from jobsync_orm.queue import JobContext
from jobsync_orm.worker import event_loop
from jobsync_orm.worker.event_loop import EventLoopExecutor
from jobsync_orm.worker.threads import ThreadExecutor
from tests.integration.cluster import wait_for
from tests.integration.worker.executing import Bench


def brief(ctx: JobContext) -> None:
    ctx.cancelled.wait(random.random() * 0.002)


async def brief_task(ctx: JobContext) -> None:
    try:
        await asyncio.sleep(random.random() * 0.002)
    except asyncio.CancelledError:
        if random.random() < 0.3:  # goes on for a while
            await asyncio.sleep(0.01)
        raise


@pytest.mark.parametrize(("make", "function"), [(ThreadExecutor, brief), (EventLoopExecutor, brief_task)])
def test_each_attempt_is_reported_once(make: Any, function: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_loop, "GIVE_WAY_SEC", 0.005)
    over = threading.Event()

    def give_up(bench: Bench) -> None:
        while not over.wait(0.0005):
            for attempt in bench.executor.running():
                bench.executor.give_up(attempt, random.choice(["timeout", "cancelled"]))
            bench.executor.look(time.monotonic())

    with Bench(make, slots=4) as bench:
        bench.queue.register("brief", function)
        thread = threading.Thread(target=give_up, args=(bench,))
        thread.start()
        try:
            for _ in range(40):
                attempts = [bench.submit("brief", timeout=0.001) for _ in range(20)]
                if random.random() < 0.3:
                    withdrawn = set(bench.executor.withdraw())
                    attempts = [attempt for attempt in attempts if attempt not in withdrawn]
                for attempt in attempts:
                    bench.ending(attempt)
        finally:
            over.set()
            thread.join()
        wait_for(lambda: bench.executor.abandoned == 0, "nothing goes on")
        assert bench.executor.free() == 4
        assert bench.executor.running() == []
    assert set(collections.Counter(bench.reports).values()) == {1}
