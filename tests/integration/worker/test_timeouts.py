"""What a worker does with attempts that take too long, are cancelled, or die: the job goes where it should, and the
slot goes on with the next one."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from jobsync_orm import JobQueue, JobWorker
from jobsync_orm.queue import Backoff, JobContext
from tests.integration.cluster import wait_for
from tests.integration.worker import handlers
from tests.integration.worker.conftest import Jobs
from tests.integration.worker.test_processes import lives, pids

Start = Callable[..., JobWorker]


def attempts(jobs: Jobs) -> list[tuple[str, str | None]]:
    return [(o, e) for o, e in jobs.sql("SELECT outcome, error FROM sync_job_attempt ORDER BY ended_at, attempt")]


def add(queue: JobQueue, type: str, timeout: float = 60, **payload: object) -> int:
    return queue.submit(type, payload, timeout=timeout, max_retries=0).id


def test_a_process_that_takes_too_long_is_gone_and_its_slot_free(
    queue: JobQueue, jobs: Jobs, start_worker: Start, tmp_path: Path
) -> None:
    queue.register("spin", handlers.spin, kind="process")
    queue.register("who", handlers.who, kind="process")
    add(queue, "spin", timeout=0.5, file=str(tmp_path / "pid"))
    add(queue, "who")
    start_worker(processes=1)
    jobs.wait(failed=1, completed=1)
    assert attempts(jobs) == [("timeout", "JobTimeout: took more than 0.5 s"), ("completed", None)]
    (pid,) = pids(tmp_path / "pid")
    wait_for(lambda: not lives(pid), "the child is gone")


def test_a_child_that_is_killed_is_a_failure_and_tried_again(
    queue: JobQueue, jobs: Jobs, start_worker: Start, tmp_path: Path
) -> None:
    queue.register("once", handlers.be_killed_once, kind="process", backoff=Backoff(base=0.1, jitter=0))
    queue.submit("once", {"file": str(tmp_path / "seen"), "number": int(signal.SIGKILL)})
    start_worker(processes=1)
    jobs.wait(completed=1)
    assert attempts(jobs) == [
        ("failed", "ProcessDied: the child process that ran the job was ended by SIGKILL (out of memory?)"),
        ("completed", None),
    ]
    assert jobs.sql("SELECT failures FROM sync_job") == [(1,)]


def test_a_stuck_thread_holds_no_slot(queue: JobQueue, jobs: Jobs, start_worker: Start) -> None:
    go = threading.Event()

    @queue.handler("stuck")
    def stuck(ctx: JobContext) -> str:
        go.wait(60)
        return "too late"

    @queue.handler("next")
    def next_one(ctx: JobContext) -> str | None:
        return threading.current_thread().name

    try:
        add(queue, "stuck", timeout=0.3)
        worker = start_worker(concurrency=1)
        jobs.wait(failed=1)
        add(queue, "next")
        jobs.wait(failed=1, completed=1)
        assert jobs.sql("SELECT outcome, error FROM sync_job_attempt ORDER BY job_id") == [
            ("timeout", "JobTimeout: took more than 0.3 s"),
            ("completed", None),
        ]
        ((trace,),) = jobs.sql("SELECT traceback FROM sync_job_attempt WHERE outcome = 'timeout'")
        assert "in stuck" in trace
        assert "go.wait(60)" in trace
        executor = worker._pump.executors["thread"] if worker._pump else None
        assert executor is not None
        assert (executor.abandoned, executor.free(), executor.problems()) == (1, 1, [])
        for _ in range(3):
            add(queue, "stuck", timeout=0.3)
        jobs.wait(failed=4, completed=1)
        assert (executor.abandoned, executor.free()) == (4, 0)
        assert "4 threads go on whose jobs have timed out" in executor.problems()[0]
        add(queue, "next")
        go.set()
        jobs.wait(failed=4, completed=2)
        assert (executor.abandoned, executor.problems()) == (0, [])
    finally:
        go.set()


def test_running_jobs_of_every_kind_can_be_cancelled(
    queue: JobQueue, jobs: Jobs, start_worker: Start, tmp_path: Path
) -> None:
    cleaned = []

    @queue.handler("thread")
    def thread(ctx: JobContext) -> None:
        while not ctx.cancelled.wait(60):
            pass
        cleaned.append("thread")
        ctx.check()

    @queue.handler("task")
    async def task(ctx: JobContext) -> None:
        try:
            await asyncio.sleep(60)
        finally:
            cleaned.append("task")

    queue.register("process", handlers.spin_with_company, kind="process")
    ids = [add(queue, "thread"), add(queue, "task"), add(queue, "process", file=str(tmp_path / "pid"))]
    start_worker()
    both = pids(tmp_path / "pid")
    jobs.wait(processing=3)
    for id in ids:
        queue.cancel(id)
    jobs.wait(cancelled=3)
    assert sorted(cleaned) == ["task", "thread"]
    assert attempts(jobs) == [("cancelled", None)] * 3
    wait_for(lambda: not any(map(lives, both)), "the child and what it started are gone")


@pytest.mark.parametrize("kind", ["thread", "async"])
def test_what_a_late_handler_returns_is_not_taken(
    queue: JobQueue, jobs: Jobs, start_worker: Start, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jobsync_orm.worker.event_loop.GIVE_WAY_SEC", 0.1)
    go, ended = threading.Event(), threading.Event()

    def in_thread(ctx: JobContext) -> str:
        go.wait(60)
        ended.set()
        return "too late"

    async def in_task(ctx: JobContext) -> str:
        try:
            await asyncio.sleep(60)
        finally:
            while not go.is_set():
                await asyncio.sleep(0.01)
            ended.set()
            return "too late"  # noqa: B012

    queue.register("late", in_thread if kind == "thread" else in_task)
    add(queue, "late", timeout=0.2)
    start_worker()
    jobs.wait(failed=1)
    go.set()
    assert ended.wait(60)
    add(queue, "late", timeout=0.2)
    jobs.wait(failed=1, completed=1)
    assert jobs.sql("SELECT outcome FROM sync_job_attempt ORDER BY job_id") == [("timeout",), ("completed",)]
    assert jobs.sql("SELECT state, result FROM sync_job ORDER BY id") == [("failed", None), ("completed", "too late")]


def test_a_session_works_in_a_child(queue: JobQueue, jobs: Jobs, start_worker: Start) -> None:
    jobs.sql("CREATE TABLE effect (job bigint, pid int)")
    queue.register("write", handlers.write_effect, kind="process")
    queue.register("follow", handlers.who, kind="process")
    id = add(queue, "write")
    start_worker(processes=1)
    jobs.wait(completed=2)
    ((job, pid),) = jobs.sql("SELECT job, pid FROM effect")
    assert job == id
    assert pid != 0
    assert jobs.sql("SELECT result FROM sync_job WHERE id = %s", id) == [({"pid": pid},)]
