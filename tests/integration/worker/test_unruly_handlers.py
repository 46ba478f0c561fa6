"""Handlers that do what no handler should: their own attempt suffers, and nothing else."""

from __future__ import annotations

import asyncio
import contextvars
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest

from jobsync_orm.queue import JobContext
from jobsync_orm.worker.event_loop import EventLoopExecutor
from jobsync_orm.worker.threads import ThreadExecutor
from tests.integration.cluster import ROOT, wait_for
from tests.integration.worker import handlers
from tests.integration.worker.executing import Bench
from tests.integration.worker.test_processes import lives, pids, processes

seen: contextvars.ContextVar[str] = contextvars.ContextVar("seen", default="nothing")


def leave(*_: Any) -> NoReturn:
    raise SystemExit(3)


@pytest.fixture
def threads() -> Iterator[Bench]:
    with Bench(ThreadExecutor, slots=1) as bench:
        yield bench


@pytest.fixture
def loop() -> Iterator[Bench]:
    with Bench(EventLoopExecutor, slots=3) as bench:
        yield bench


def test_a_backoff_that_ends_the_interpreter_ends_neither_a_thread_nor_the_watchdog(threads: Bench) -> None:
    go = threading.Event()

    def fail(ctx: JobContext) -> None:
        raise ValueError(1)

    def hang(ctx: JobContext) -> None:
        go.wait(60)

    threads.queue.register("fail", fail, backoff=leave)
    threads.queue.register("hang", hang, backoff=leave)
    try:
        assert threads.run("fail").error == "ValueError: 1"
        for _ in range(2):
            assert threads.run("hang", timeout=0.1).outcome == "timeout"
    finally:
        go.set()


def test_a_backoff_that_hangs_keeps_no_other_attempt_from_its_timeout() -> None:
    go = threading.Event()

    def hang(ctx: JobContext) -> None:
        go.wait(60)

    def hang_too(failures: int, error: BaseException) -> float:
        go.wait(60)
        return 1

    with Bench(ThreadExecutor, slots=2) as bench:
        bench.queue.register("first", hang, backoff=hang_too)
        bench.queue.register("second", hang)
        try:
            first, second = bench.submit("first", timeout=0.1), bench.submit("second", timeout=0.5)
            assert bench.ending(second).outcome == "timeout"
            assert first.job.id not in bench.endings
        finally:
            go.set()
        assert bench.ending(first).outcome == "timeout"


def test_an_error_that_cannot_be_told_is_a_failure(threads: Bench) -> None:
    class Untold(Exception):
        __str__ = leave

    def fail(ctx: JobContext) -> None:
        raise Untold

    threads.queue.register("fail", fail)
    assert threads.run("fail").error == "Untold: (its message cannot be had: SystemExit)"


def test_an_error_raised_into_a_thread_from_outside_costs_no_slot(threads: Bench) -> None:
    """As timeouts made with PyThreadState_SetAsyncExc do, when they come a moment too late."""

    def note(ctx: JobContext) -> int:
        return threading.get_ident()

    threads.queue.register("note", note)
    ident = int(threads.run("note").result or "")
    assert ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(ident), ctypes.py_object(TimeoutError)) == 1
    endings = [threads.ending(threads.submit("note")) for _ in range(3)]
    assert endings[-1].outcome == "completed"
    assert threads.executor.free() == 1


def test_what_a_handler_sets_in_its_context_is_gone_with_it(threads: Bench, loop: Bench) -> None:
    def in_thread(ctx: JobContext) -> str:
        before = seen.get()
        seen.set("something")
        return before

    async def in_task(ctx: JobContext) -> str:
        return in_thread(ctx)

    threads.queue.register("note", in_thread)
    loop.queue.register("note", in_task)
    for bench in (threads, loop):
        assert [bench.run("note").result for _ in range(2)] == ['"nothing"'] * 2


@pytest.mark.parametrize("how", ["task", "callback", "stop"])
def test_the_event_loop_outlives_what_a_handler_has_started_in_it(loop: Bench, how: str) -> None:
    async def start(ctx: JobContext) -> None:
        if how == "task":

            async def other() -> None:
                raise SystemExit(3)

            await asyncio.gather(other(), return_exceptions=True)
        elif how == "callback":
            asyncio.get_running_loop().call_soon(leave)
            await asyncio.sleep(0.01)
        else:
            asyncio.get_running_loop().stop()

    async def add(ctx: JobContext) -> int:
        await asyncio.sleep(0)
        return 5

    loop.queue.register("start", start)
    loop.queue.register("add", add)
    loop.run("start")
    assert loop.run("add").result == "5"
    assert loop.executor.problems() == []


def test_a_fork_of_the_worker_leaves_its_children_alone(tmp_path: Path) -> None:
    bench = Bench(processes, slots=1)
    bench.queue.register("spin", handlers.spin, kind="process")
    with bench:
        bench.submit("spin", file=str(tmp_path / "pid"))
        (child,) = pids(tmp_path / "pid")
        fork = os.fork()
        if fork == 0:
            bench.executor._kill_all()  # as at the end of any Python process
            os._exit(0)
        os.waitpid(fork, 0)
        time.sleep(0.3)
        assert lives(child)
        assert len(bench.executor.running()) == 1


def test_a_child_that_has_left_a_daemon_behind_is_seen_to_end(tmp_path: Path) -> None:
    bench = Bench(processes, slots=1)
    bench.queue.register("leave_daemon", handlers.leave_daemon, kind="process")
    bench.queue.register("add", handlers.add, kind="process")
    with bench:
        try:
            ending = bench.run("leave_daemon", file=str(tmp_path / "pid"))
            assert ending.error == "ProcessDied: the child process that ran the job ended with exit code 3"
            assert bench.run("add", a=2, b=3).result == "5"
        finally:
            for pid in pids(tmp_path / "pid"):
                os.kill(pid, signal.SIGKILL)


def test_ctrl_c_of_a_handlers_own_is_a_failure_with_its_traceback(tmp_path: Path) -> None:
    bench = Bench(processes, slots=1)
    bench.queue.register("interrupt", handlers.interrupt, kind="process")
    with bench:
        ending = bench.run("interrupt")
        assert ending.error == "KeyboardInterrupt: by hand"
        assert "in interrupt" in (ending.traceback or "")


def test_what_is_to_be_run_by_a_child_that_starts_is_not_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    starting, go = threading.Event(), threading.Event()

    def slow() -> None:
        starting.set()
        go.wait(60)

    monkeypatch.setattr("jobsync_orm.worker.processes.resource_tracker.ensure_running", slow)
    bench = Bench(processes, slots=1)
    bench.queue.register("add", handlers.add, kind="process")
    with bench:
        attempt = bench.submit("add", a=2, b=3)
        assert starting.wait(60)
        assert bench.executor.withdraw() == []
        assert bench.executor.free() == 0
        go.set()
        assert bench.ending(attempt).result == "5"


def test_a_child_ends_with_its_worker_though_a_fork_of_that_keeps_the_pipe(tmp_path: Path) -> None:
    script = (
        "import os, signal, sys, time\n"
        "from tests.integration.worker import handlers\n"
        "from tests.integration.worker.test_processes import Bench, pids, processes\n"
        "from pathlib import Path\n"
        "bench = Bench(processes, slots=1)\n"
        "bench.queue.register('spin', handlers.spin, kind='process')\n"
        "bench.executor.start()\n"
        "bench.submit('spin', file=sys.argv[1])\n"
        "pids(Path(sys.argv[1]))\n"
        "fork = os.fork()\n"
        "if fork == 0:\n"
        "    time.sleep(3600)\n"
        "print(fork, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path / "pid")], stdout=subprocess.PIPE, text=True, cwd=ROOT
    ) as worker:
        assert worker.stdout is not None
        fork = int(worker.stdout.readline())
        try:
            (child,) = pids(tmp_path / "pid")
            wait_for(lambda: not lives(child), "the child is gone")
        finally:
            os.kill(fork, signal.SIGKILL)
