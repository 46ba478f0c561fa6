"""`jobsync-orm worker`: a queue is found, its jobs run, and a signal ends it as it should."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import URL, Engine, text
from typer.testing import CliRunner, Result

from jobsync_orm.cli import application
from jobsync_orm.naming import Names
from jobsync_orm.operate import drain, undrain
from tests.conftest import dsn
from tests.integration.cluster import QUICK, wait_for

ROOT = Path(__file__).parents[2]

APPLICATION = """
    import asyncio, logging, os, time
    from jobsync_orm import CoordinationConfig, JobQueue

    queue = JobQueue(CoordinationConfig(url=os.environ["URL"], **{quick!r}))
    empty = JobQueue(queue.config)
    number = 7

    class app:
        queue = queue

    @queue.handler("quick")
    def quick(ctx):
        logging.getLogger("shop").info("quick one done")
        return "done"

    @queue.handler("child", kind="process")
    def child(ctx):
        return os.getppid()

    @queue.handler("hanging")
    async def hanging(ctx):
        await asyncio.to_thread(time.sleep, 3600)

    @queue.handler("slow")
    def slow(ctx, seconds):
        time.sleep(seconds)
        return "slept"
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    package = tmp_path / "shop"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "jobs.py").write_text(textwrap.dedent(APPLICATION).replace("{quick!r}", repr(QUICK)))
    (package / "broken.py").write_text("import a_module_that_is_not_there\n")
    return tmp_path


@pytest.fixture
def start(folder: Path, database: URL) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []

    def start(*arguments: str) -> subprocess.Popen[str]:
        command = "from jobsync_orm.cli import main; main()"
        process = subprocess.Popen(
            [sys.executable, "-W", "error", "-c", command, "worker", "shop.jobs:queue", *arguments],
            cwd=folder,
            env={**os.environ, "URL": dsn(database), "PYTHONPATH": str(ROOT)},
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def add(engine: Engine, type: str, payload: str = "{}") -> None:
    with engine.begin() as connection:
        statement = text("INSERT INTO sync_job (type, payload) VALUES (:type, CAST(:payload AS jsonb))")
        connection.execute(statement, {"type": type, "payload": payload})


def jobs(engine: Engine) -> list[tuple[Any, ...]]:
    with engine.connect() as connection:
        rows = connection.execute(text("SELECT type, state, result, worker, failures FROM sync_job ORDER BY id"))
        return [tuple(row) for row in rows]


def states(engine: Engine) -> list[str]:
    return [state for _, state, *_ in jobs(engine)]


def test_it_runs_jobs_and_sigterm_waits_for_those_that_run(
    start: Callable[..., subprocess.Popen[str]], engine: Engine
) -> None:
    add(engine, "quick")
    add(engine, "slow", '{"seconds": 1.5}')
    worker = start("--concurrency", "2", "--node-name", "box-7")
    wait_for(lambda: states(engine) == ["completed", "processing"], "the quick one is done, the slow one runs")

    worker.send_signal(signal.SIGTERM)
    add(engine, "quick")
    _, log = worker.communicate(timeout=60)

    assert worker.returncode == 0
    assert jobs(engine)[:2] == [
        ("quick", "completed", "done", "box-7", 0),
        ("slow", "completed", "slept", "box-7", 0),
    ]
    assert " INFO jobsync_orm: box-7 runs jobs of child, hanging, quick, slow\n" in log
    assert " INFO shop: quick one done\n" in log
    assert " INFO jobsync_orm: SIGTERM: " in log


def test_what_outlasts_the_grace_is_given_back_uncounted(
    start: Callable[..., subprocess.Popen[str]], engine: Engine
) -> None:
    add(engine, "slow", '{"seconds": 60}')
    worker = start("--grace", "0.2", "--types", "slow, quick")
    wait_for(lambda: states(engine) == ["processing"], "the slow one runs")

    worker.send_signal(signal.SIGINT)
    worker.communicate(timeout=60)

    assert worker.returncode == 0
    [(_, state, _, _, failures)] = jobs(engine)
    assert (state, failures) == ("pending", 0)


def test_it_runs_processes_and_coroutines_and_ends_though_a_thread_of_theirs_hangs(
    start: Callable[..., subprocess.Popen[str]], engine: Engine
) -> None:
    add(engine, "child")
    add(engine, "hanging")
    worker = start("--grace", "0.2", "--processes", "1", "--async-concurrency", "5", "--node-name", "box-7")
    wait_for(lambda: states(engine) == ["completed", "processing"], "the process has ended, the coroutine runs")

    worker.send_signal(signal.SIGTERM)
    _, log = worker.communicate(timeout=60)

    assert worker.returncode == 0
    assert jobs(engine) == [
        ("child", "completed", worker.pid, "box-7", 0),
        ("hanging", "pending", None, "box-7", 0),
    ]
    assert "threads of handlers go on" in log


def test_it_serves_metrics(start: Callable[..., subprocess.Popen[str]], database: URL) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        refused = start("--metrics-port", str(port), "--metrics-host", "127.0.0.1")
        _, errors = refused.communicate(timeout=60)
        assert refused.returncode == 2
        assert errors.startswith(f"error: --metrics-port: 127.0.0.1:{port} is not to be had: ")
        assert errors.count("\n") == 1
    process = start("--metrics-port", str(port), "--metrics-host", "127.0.0.1", "--node-name", "w1")

    def healthy() -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
                return 'jobsync_worker_healthy{appname="sync_",node="w1"} 1.0' in answer.read().decode()
        except OSError:
            return False

    wait_for(healthy, "it tells that it is healthy", 60)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 0


def test_it_answers_probes(start: Callable[..., subprocess.Popen[str]], engine: Engine) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        refused = start("--health-port", str(port), "--health-host", "127.0.0.1")
        _, errors = refused.communicate(timeout=60)
        assert (refused.returncode, errors.count("\n")) == (2, 1)
        assert errors.startswith(f"error: --health-port: 127.0.0.1:{port} is not to be had: ")
    process = start("--health-port", str(port), "--health-host", "127.0.0.1", "--node-name", "w1")

    def probe(path: str) -> tuple[int, Any] | None:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read()
        except OSError:
            return None

    wait_for(lambda: probe("/health/ready") == (200, {"status": "ready", "node": "w1", "problems": []}), "it is ready")
    assert probe("/health/live") == (200, {"status": "live", "node": "w1", "problems": []})
    found = probe("/elsewhere")
    assert found is not None
    assert found[0] == 404
    drain(engine, Names(), "w1", by="me", last_too=True)
    wait_for(lambda: (probe("/health/ready") or (0,))[0] == 503, "not ready while it is drained")
    assert (probe("/health/live") or (0,))[0] == 200
    undrain(engine, Names(), "w1")
    wait_for(lambda: (probe("/health/ready") or (0,))[0] == 200, "ready again")
    add(engine, "slow", '{"seconds": 3}')
    wait_for(lambda: states(engine) == ["processing"], "a job runs")
    process.send_signal(signal.SIGTERM)
    wait_for(lambda: (probe("/health/ready") or (0,))[0] == 503, "not ready while it finishes what runs")
    assert (probe("/health/live") or (0,))[0] == 200
    process.communicate(timeout=60)
    assert process.returncode == 0


def test_only_the_types_named_are_run(start: Callable[..., subprocess.Popen[str]], engine: Engine) -> None:
    add(engine, "slow", '{"seconds": 0}')
    add(engine, "quick")
    start("--types", "quick")

    wait_for(lambda: states(engine)[1] == "completed", "the quick one is done")
    assert states(engine)[0] == "pending"


def test_a_database_without_tables_is_an_error_in_one_line(
    start: Callable[..., subprocess.Popen[str]], engine: Engine
) -> None:
    with engine.begin() as connection:
        connection.exec_driver_sql("DROP SCHEMA public CASCADE; CREATE SCHEMA public")
    worker = start()
    _, log = worker.communicate(timeout=60)

    assert worker.returncode == 2
    assert log.splitlines()[-1].startswith("error: ")
    assert "Traceback" not in log


@pytest.fixture
def invoke(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Result]]:
    """Runs the command in this process; it is not to get as far as starting a worker."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("URL", "postgresql://nobody@127.0.0.1:1/nothing")

    def invoke(*arguments: str) -> Result:
        return CliRunner().invoke(application(), ["worker", "--app-dir", str(folder), *arguments])

    yield invoke
    for name in [name for name in sys.modules if name == "shop" or name.startswith("shop.")]:
        del sys.modules[name]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["shop.jobs"], "'shop.jobs' must be MODULE:QUEUE"),
        (["shop.jobs:"], "must be MODULE:QUEUE"),
        ([".jobs:queue"], "must be MODULE:QUEUE"),
        (["shop.tasks:queue"], "there is no module 'shop.tasks' in /"),
        (["store.jobs:queue"], "there is no module 'store' in /"),
        (["shop.jobs:jobs"], "module 'shop.jobs' has no 'jobs'; its queues are: empty, queue"),
        (["shop:queue"], "module 'shop' has no 'queue'; it has no JobQueue at all"),
        (["shop.jobs:number"], "shop.jobs:number is of type int, not a JobQueue"),
        (["shop.jobs:empty"], "the queue has no handlers"),
        (["shop.jobs:app.queue", "--types", "quick,fast"], "no handler for jobs of type 'fast'"),
        (["shop.jobs:queue", "--node-name", ""], "node_name"),
        (["shop.jobs:queue", "--app-dir", "/not/there"], "there is no folder /not/there"),
        (["shop.jobs:queue", "--log-level", "loud"], "'loud' is none of DEBUG, INFO"),
        (["shop.jobs:queue", "--concurrency", "0"], "concurrency=0 must be a whole number"),
        (["shop.jobs:queue", "--processes", "0"], "processes=0 must be a whole number"),
        (["shop.jobs:queue", "--async-concurrency", "-1"], "async_concurrency=-1 must be a whole number"),
    ],
)
def test_what_cannot_be_is_told_in_one_line(invoke: Callable[..., Result], arguments: list[str], message: str) -> None:
    done = invoke(*arguments)

    assert done.exit_code == 2
    assert message in " ".join(done.stderr.replace("│", " ").split())


def test_an_error_of_the_applications_own_is_shown_with_where_it_comes_from(invoke: Callable[..., Result]) -> None:
    done = invoke("shop.broken:queue")

    assert isinstance(done.exception, ModuleNotFoundError)
    assert done.exception.name == "a_module_that_is_not_there"
