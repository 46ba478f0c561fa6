"""Handlers that run in child processes: they end when they have to, and nothing else suffers from how they end."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from jobsync_orm.exceptions import InvalidJob
from jobsync_orm.queue import JobContext, JobQueue
from jobsync_orm.worker.attempts import Report
from jobsync_orm.worker.processes import ProcessExecutor
from tests.integration.cluster import wait_for
from tests.integration.worker import handlers
from tests.integration.worker.executing import Bench


def processes(queue: JobQueue, slots: int, report: Report) -> ProcessExecutor:
    return ProcessExecutor(queue, slots, report, "w1", queue.handlers)


def lives(pid: int) -> bool:
    """Whether there is such a process, one that is more than an entry waiting to be looked at."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def pids(file: Path) -> list[int]:
    """The process ids that a handler has written down, when it has."""
    return wait_for(lambda: file.exists() and [int(pid) for pid in file.read_text().split()], "the handler runs")


@pytest.fixture(scope="module")
def kept() -> Iterator[Bench]:
    bench = Bench(processes, slots=1)
    for name in ("who", "add", "fail", "spin", "spin_with_company", "leave", "be_killed", "ignore_signals", "size"):
        bench.queue.register(name, getattr(handlers, name), kind="process")
    with bench:
        yield bench


@pytest.fixture
def bench(kept: Bench) -> Bench:
    """One slot, with a child that has been started already: starting one takes a while."""
    kept.reports.clear()
    assert kept.run("add", a=1, b=1).outcome == "completed"
    return kept


@pytest.fixture
def to_stop(bench: Bench) -> Iterator[Bench]:
    """The same, for a test that stops it."""
    yield bench
    bench.executor.start()


def test_a_child_is_kept_and_told_what_a_handler_needs(bench: Bench) -> None:
    first, second = bench.submit("who"), bench.submit("who")
    for attempt in (first, second):
        told = json.loads(bench.ending(attempt).result or "")
        assert told == {"pid": told["pid"], "parent": os.getpid(), "worker": "w1", "job": attempt.job.id}
        assert told["pid"] != os.getpid()
    assert bench.endings[first.job.id].outcome == "completed"
    assert len({json.loads(bench.endings[a.job.id].result or "")["pid"] for a in (first, second)}) == 1
    assert bench.executor.free() == 1


def test_an_error_is_a_failure_with_the_handlers_traceback(bench: Bench) -> None:
    ending = bench.run("fail")
    assert (ending.outcome, ending.state, ending.error) == ("failed", "retrying", "LookupError: no such order")
    assert "handlers.py" in (ending.traceback or "")


def test_a_payload_larger_than_a_pipe_holds(bench: Bench) -> None:
    assert bench.run("size", text="x" * 900_000).result == "900000"


def test_what_takes_too_long_is_killed_and_the_next_runs(bench: Bench, tmp_path: Path) -> None:
    bench.run("add", a=1, b=1)
    ending = bench.run("spin", timeout=0.3, file=str(tmp_path / "pid"))
    assert (ending.outcome, ending.state) == ("timeout", "retrying")
    assert ending.error == "JobTimeout: took more than 0.3 s"
    assert bench.executor.free() == 1
    (pid,) = pids(tmp_path / "pid")
    wait_for(lambda: not lives(pid), "the child is gone")
    assert bench.run("add", a=2, b=3).result == "5"


def test_what_a_handler_has_started_ends_with_it(bench: Bench, tmp_path: Path) -> None:
    attempt = bench.submit("spin_with_company", file=str(tmp_path / "pid"))
    both = pids(tmp_path / "pid")
    bench.executor.give_up(attempt, "cancelled")
    assert bench.ending(attempt).outcome == "cancelled"
    wait_for(lambda: not any(map(lives, both)), "both are gone")
    assert bench.reports == [attempt.job.id - 1, attempt.job.id]


def test_an_attempt_that_is_lost_is_killed_and_not_reported(bench: Bench, tmp_path: Path) -> None:
    attempt = bench.submit("spin", file=str(tmp_path / "pid"))
    (pid,) = pids(tmp_path / "pid")
    bench.executor.give_up(attempt, "lost")
    wait_for(lambda: not lives(pid), "the child is gone")
    assert bench.run("add", a=2, b=3).result == "5"
    assert attempt.job.id not in bench.endings


@pytest.mark.parametrize(
    ("type", "payload", "says"),
    [
        ("be_killed", {"number": int(signal.SIGSEGV)}, "was ended by SIGSEGV"),
        ("leave", {"code": 0}, "ended with exit code 0"),
    ],
)
def test_a_child_that_dies_is_a_failure_of_its_attempt(
    bench: Bench, type: str, payload: dict[str, int], says: str
) -> None:
    ending = bench.run(type, **payload)
    assert (ending.outcome, ending.state, ending.counts) == ("failed", "retrying", True)
    assert ending.error == f"ProcessDied: the child process that ran the job {says}"
    assert bench.run("add", a=2, b=3).result == "5"


def test_a_child_leaves_signals_to_its_worker_and_not_to_its_own_children(bench: Bench) -> None:
    assert bench.run("ignore_signals").result == '"SIGTERM"'


def test_stopping_lets_an_attempt_finish_within_the_grace(to_stop: Bench) -> None:
    pid = json.loads(to_stop.run("who").result or "")["pid"]
    attempt = to_stop.submit("add", a=2, b=3)
    wait_for(lambda: attempt.began_at is not None, "it has begun")
    to_stop.executor.stop(30)
    assert to_stop.endings[attempt.job.id].outcome == "completed"
    assert not lives(pid)


def test_stopping_kills_what_is_left_and_releases_it(to_stop: Bench, tmp_path: Path) -> None:
    attempt = to_stop.submit("spin", file=str(tmp_path / "pid"))
    (pid,) = pids(tmp_path / "pid")
    to_stop.executor.stop(0)
    ending = to_stop.endings[attempt.job.id]
    assert (ending.outcome, ending.state, ending.counts) == ("released", "pending", False)
    assert not lives(pid)


def test_what_waits_for_a_slot_can_be_withdrawn(bench: Bench, tmp_path: Path) -> None:
    running = bench.submit("spin", file=str(tmp_path / "pid"))
    pids(tmp_path / "pid")
    waiting = [bench.submit("add", a=i, b=1) for i in range(3)]
    assert bench.executor.free() == -3
    assert bench.executor.running() == [running]
    assert bench.executor.withdraw() == waiting
    assert bench.executor.free() == 0
    bench.executor.give_up(running, "cancelled")
    assert [bench.ending(running).outcome, bench.executor.free()] == ["cancelled", 1]
    assert bench.reports == [running.job.id - 1, running.job.id]


def test_functions_that_a_child_cannot_import_are_refused(tmp_path: Path) -> None:
    bench = Bench(processes)

    def inner(ctx: JobContext) -> None: ...

    with pytest.raises(InvalidJob, match=r"defined with def, in a module"):
        bench.queue.register("inner", inner, kind="process")
    inner.__qualname__ = "inner"
    bench.queue.register("inner", inner, kind="process")
    with pytest.raises(InvalidJob, match=r"cannot import .* by its name"):
        bench.executor.start()
    del bench.queue.handlers["inner"]
    bench.queue.register("add", handlers.add, kind="process", backoff=lambda failures, error: 1)
    with pytest.raises(InvalidJob, match="its backoff or payload cannot be sent"):
        bench.executor.start()


def test_a_module_that_cannot_be_imported_fails_its_jobs_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_in_children.py").write_text(
        f"import os\nif os.getpid() != {os.getpid()}: raise RuntimeError('not here')\ndef work(ctx): pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    import broken_in_children  # type: ignore[import-not-found]

    other = Bench(processes, slots=1)
    other.queue.register("work", broken_in_children.work, kind="process")
    other.queue.register("add", handlers.add, kind="process")
    with other:
        ending = other.run("work")
        assert ending.outcome == "failed"
        assert "RuntimeError: not here" in (ending.error or "")
        assert other.run("add", a=2, b=3).result == "5"
