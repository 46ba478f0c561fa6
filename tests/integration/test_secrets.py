"""The password of the URL appears nowhere: in no log, repr, error, status, output or command line."""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import URL, create_engine, make_url
from sqlalchemy.ext.asyncio import create_async_engine

from jobsync_orm import CoordinationConfig, Job, JobContext, JobQueue, JobState, JobWorker, Task, migrate
from jobsync_orm.exceptions import ConfigurationError
from jobsync_orm.migrate import online
from jobsync_orm.naming import Names
from jobsync_orm.operate import Operations
from jobsync_orm.worker import joining
from tests.integration.cluster import QUICK, wait_for

PASSWORD = "s3cret-Pa%ss/w@rd'"
PARTS = (PASSWORD, "s3cret", "Pa%25ss", "w%40rd")

Say = Callable[[object], None]


@pytest.fixture
def url(database: URL) -> URL:
    """The tests' server asks for no password, and is given this one all the same."""
    return database.set(password=PASSWORD)


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]) -> Iterator[list[str]]:
    """Everything that is said; looked through when the test is over, with the log and the output."""
    caplog.set_level(logging.DEBUG)
    texts: list[str] = []
    yield texts
    formatter = logging.Formatter("%(name)s %(message)s")
    texts += [formatter.format(record) + repr(record.args) for record in caplog.records]
    texts += capfd.readouterr()
    leaks = [text for text in texts for part in PARTS if part in text]
    assert leaks == []


def everything_of(error: BaseException) -> str:
    return "".join(traceback.format_exception(error)) + repr(error) + str(error.args)


def command_lines() -> list[str]:
    """Of this process and all below it."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            found.append((folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace"))
    return found


def handled(ctx: JobContext) -> str:
    return repr(ctx)


def test_a_life_without_failure(url: URL, said: list[str]) -> None:
    config = CoordinationConfig(url=url, **QUICK)  # type: ignore[arg-type]
    queue = JobQueue(config)
    queue.handler("in a thread")(handled)
    queue.handler("in a process", kind="process")(handled)

    @queue.handler("fails", max_retries=0)
    def fails(ctx: JobContext) -> None:
        raise RuntimeError("on purpose")

    with Job("w1", config) as job, JobWorker(queue, concurrency=2, processes=1) as worker:
        ids = [queue.submit(type).id for type in ("in a thread", "in a process", "fails")]
        wait_for(lambda: all(queue.status(id).state in (JobState.COMPLETED, JobState.FAILED) for id in ids), "they end")
        assert job.can_claim_task(Task(1)) in (True, False)
        said += map(repr, (config, job, queue, worker, job.get_coordination_status(), worker.health(), queue.stats()))
        said += map(str, (config, job, queue, worker, [queue.status(id) for id in ids], queue.worker_stats()))
        engine = config.application_engine()
        operations = Operations(engine, Names())
        said += map(repr, (operations, operations.status(), operations.nodes(), engine, engine.url))
        engine.dispose()
        lines = command_lines()
        assert any("python" in line for line in lines)
        said += lines
    queue.dispose()


@pytest.mark.parametrize(
    "broken",
    [{"port": 1}, {"database": "no_such_database"}, {"username": "no_such_role"}],
    ids=lambda broken: next(iter(broken)),
)
def test_connections_that_fail(
    url: URL, said: list[str], broken: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(joining, "ENTER_SEC", 1.0)
    bad = url.set(**broken)
    config = CoordinationConfig(url=bad, **QUICK)  # type: ignore[arg-type]
    queue = JobQueue(config)
    queue.handler("t")(handled)
    engine = create_engine(bad)
    attempts: list[Callable[[], object]] = [
        lambda: Job("w1", config, wait_on_enter=1).start(),
        lambda: JobWorker(queue).start(),
        lambda: queue.submit("t"),
        lambda: queue.stats(),
        lambda: migrate.upgrade(config),
        lambda: migrate.check(engine),
        lambda: online.add_token_column(engine, "item", key="sku"),
        lambda: Operations(engine, Names()).status(),
    ]
    for attempt in attempts:
        with pytest.raises(Exception) as caught:
            attempt()
        said.append(everything_of(caught.value))
    queue.dispose()
    engine.dispose()


def test_settings_that_are_refused(url: URL, said: list[str]) -> None:
    text = url.render_as_string(hide_password=False)
    refused: list[Callable[[], object]] = [
        lambda: CoordinationConfig(text),  # type: ignore[arg-type]
        lambda: CoordinationConfig(url=text.replace(":", "")),
        lambda: CoordinationConfig(url=text.replace("postgresql+psycopg", "mysql")),
        lambda: CoordinationConfig(url=text, password=PASSWORD),
        lambda: CoordinationConfig(url=text, engine=create_engine(url)),
        lambda: CoordinationConfig(host=url.host or "", password=PASSWORD, heartbeat_timeout_sec=0),
        lambda: migrate.upgrade(text),  # type: ignore[arg-type]
        lambda: JobQueue(text),  # type: ignore[arg-type]
        lambda: Job("w", text),  # type: ignore[arg-type]
    ]
    for call in refused:
        with pytest.raises((ConfigurationError, TypeError, AttributeError, ValueError)) as caught:
            call()
        said.append(everything_of(caught.value))


def test_other_ways_to_name_the_database(url: URL, said: list[str]) -> None:
    parts = CoordinationConfig(
        host=str(url.host or url.query["host"]),  # of the embedded server it is a folder
        port=url.port or 5432,
        dbname=url.database or "",
        user=url.username or "",
        password=PASSWORD,
    )
    engine, asynchronous = create_engine(url), create_async_engine(url)
    for config in (parts, CoordinationConfig(engine=engine), CoordinationConfig(engine=asynchronous)):
        job = Job("w1", config)
        said += map(repr, (config, job, config.sqlalchemy_url(), JobQueue(config)))
        with job:
            said.append(repr(job.get_coordination_status()))
    engine.dispose()


@pytest.mark.parametrize("broken", [False, True])
def test_the_command_line(url: URL, said: list[str], broken: bool) -> None:
    text = (url.set(port=1) if broken else url).render_as_string(hide_password=False)
    for command in (["status"], ["nodes", "--json"], ["db", "check"]):
        done = subprocess.run(
            [sys.executable, "-c", "from jobsync_orm.cli import main; main()", *command],
            env={**os.environ, "JOBSYNC_DATABASE_URL": text},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.stdout or done.stderr
        said += (done.stdout, done.stderr)


def test_the_tests_would_notice() -> None:
    shown = make_url("postgresql://u@h/d").set(password=PASSWORD).render_as_string(hide_password=False)
    assert all(part in shown + PASSWORD for part in PARTS)
