"""A worker that is told to stop, or is killed: what becomes of what it ran."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from sqlalchemy import URL

from tests.integration.cluster import ROOT, wait_for
from tests.integration.relay import Relay
from tests.integration.worker.conftest import Jobs
from tests.integration.worker.test_processes import lives

KINDS = ("thread", "process", "task")


class Application:
    """The process of ``application.py``."""

    def __init__(self, url: URL, environment: dict[str, str], options: dict[str, Any]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-W", "error", "-m", "tests.integration.worker.application"],
            cwd=ROOT,
            env={
                **os.environ,
                **environment,
                "URL": url.render_as_string(hide_password=False),
                "OPTIONS": json.dumps(options),
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.events: list[dict[str, Any]] = []
        self.log: list[str] = []
        self._readers = [threading.Thread(target=f, daemon=True) for f in (self._read, self._read_log)]
        for reader in self._readers:
            reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.events.append(json.loads(line))

    def _read_log(self) -> None:
        assert self.process.stderr is not None
        self.log.extend(self.process.stderr)

    def saw(self, event: str) -> dict[str, Any]:
        """The first such event, when there is one."""
        found = wait_for(lambda: next((e for e in list(self.events) if e["event"] == event), None), event)
        assert isinstance(found, dict)
        return found

    def logged(self, text: str) -> None:
        wait_for(lambda: text in "".join(self.log), f"{text!r} in the log")

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def exit_code(self, timeout: float = 30) -> int:
        code = self.process.wait(timeout)
        for reader in self._readers:
            reader.join(timeout)
        return code

    def end(self) -> None:
        self.process.kill()
        self.exit_code()
        for stream in (self.process.stdout, self.process.stderr):
            assert stream is not None
            stream.close()


Run = Callable[..., Application]


@pytest.fixture
def run(database: URL) -> Iterator[Run]:
    made: list[Application] = []

    def run(url: URL = database, environment: dict[str, str] | None = None, **options: Any) -> Application:
        made.append(Application(url, environment or {}, options))
        return made[-1]

    yield run
    for application in made:
        application.end()


def enqueue(jobs: Jobs, seconds: float, *types: str) -> None:
    for type in types:
        jobs.sql(
            "INSERT INTO sync_job (type, payload) VALUES (%s, jsonb_build_object('seconds', %s::float8))", type, seconds
        )


def test_sigterm_lets_every_kind_finish_and_takes_nothing_more(run: Run, jobs: Jobs) -> None:
    enqueue(jobs, 2, *KINDS)
    application = run()
    for kind in KINDS:
        application.saw(f"{kind} runs")
    child = application.saw("process runs")["pid"]
    os.kill(child, signal.SIGINT)  # as Ctrl-C in a terminal does, and SIGTERM of a service manager
    os.killpg(application.process.pid, signal.SIGTERM)
    os.kill(child, signal.SIGTERM)
    application.logged("SIGTERM: finishing what runs")
    enqueue(jobs, 0, *KINDS)
    assert application.exit_code() == 0
    assert application.saw("ended")["restored"]
    assert jobs.states() == {"completed": 3, "pending": 3}
    assert jobs.outcomes() == {"completed": 3}
    assert jobs.sql("SELECT count(*) FROM sync_job_worker") == [(0,)]
    assert "destroyed" not in "".join(application.log)
    assert "Traceback" not in "".join(application.log)


def test_what_is_left_after_the_grace_is_given_back_uncounted(run: Run, jobs: Jobs) -> None:
    enqueue(jobs, 60, *KINDS)
    application = run(grace_sec=0.5)
    for kind in KINDS:
        application.saw(f"{kind} runs")
    child = application.saw("process runs")["pid"]
    application.signal(signal.SIGTERM)
    assert application.exit_code() == 0
    assert jobs.states() == {"pending": 3}
    assert jobs.sql("SELECT DISTINCT failures, attempt FROM sync_job") == [(0, 1)]
    assert jobs.outcomes() == {"released": 3}
    assert not lives(child)


def test_a_second_signal_does_not_wait(run: Run, jobs: Jobs) -> None:
    enqueue(jobs, 60, "thread")
    application = run(grace_sec=60)
    application.saw("thread runs")
    application.signal(signal.SIGTERM)
    application.logged("SIGTERM: finishing what runs")
    application.signal(signal.SIGINT)
    application.logged("SIGINT again")
    assert application.exit_code() == 0
    assert (jobs.states(), jobs.outcomes()) == ({"pending": 1}, {"released": 1})


def test_a_third_signal_ends_the_process() -> None:
    script = (
        "import time\n"
        "from jobsync_orm.worker.signals import StopSignals\n"
        "with StopSignals(lambda: print('stop', flush=True), lambda: print('hurry', flush=True)):\n"
        "    print('go', flush=True)\n"
        "    while True:\n"
        "        time.sleep(0.1)\n"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        heard = []
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGINT):
            heard.append(process.stdout.readline().strip())
            process.send_signal(number)
        assert process.wait(60) == -signal.SIGINT
    assert heard == ["go", "stop", "hurry"]


def test_a_child_ends_with_a_worker_that_is_killed(run: Run, jobs: Jobs) -> None:
    enqueue(jobs, 60, "process")
    application = run()
    child = application.saw("process runs")["pid"]
    application.signal(signal.SIGKILL)
    wait_for(lambda: not lives(child), "the child is gone")


def test_in_an_event_loop_of_the_applications(run: Run, jobs: Jobs) -> None:
    enqueue(jobs, 1.5, "thread", "task")
    application = run(environment={"ASYNC": "1"})
    for kind in ("thread", "task"):
        application.saw(f"{kind} runs")
    application.signal(signal.SIGINT)
    assert application.exit_code() == 0
    assert not application.saw("run_async has ended")["cancelled"]
    assert application.saw("ended")["restored"]
    assert jobs.states() == {"completed": 2}
    events = [event["event"] for event in application.events]
    assert "tick" in events[events.index("thread runs") : events.index("run_async has ended")]


def test_cancelling_in_an_event_loop_stops_the_worker(run: Run, jobs: Jobs) -> None:
    application = run(environment={"ASYNC": "1", "CANCEL": "1"})
    assert application.exit_code() == 0
    assert application.saw("run_async has ended")["cancelled"]
    assert jobs.sql("SELECT count(*) FROM sync_job_worker") == [(0,)]


@pytest.fixture
def relay(database: URL) -> Iterator[Relay]:
    relay = Relay(database)
    yield relay
    relay.close()


# Its grace, a second that the end of a process may take after that, and one for a busy machine.
GRACE_SEC, EXIT_SEC = 2.0, 4.0


@pytest.mark.parametrize(
    ("how", "kind"), [("cut", "thread"), ("drop", "process"), ("drop", "thread"), ("drop", "stubborn")]
)
def test_sigterm_ends_a_worker_whose_database_is_gone(run: Run, jobs: Jobs, relay: Relay, how: str, kind: str) -> None:
    enqueue(jobs, 60, kind)
    application = run(relay.url, {"DEFAULTS": "1"}, grace_sec=GRACE_SEC)
    runner = application.saw(f"{kind} runs")["pid"]
    getattr(relay, how)()
    began = time.monotonic()
    application.signal(signal.SIGTERM)
    assert application.exit_code() == 0
    assert time.monotonic() - began < EXIT_SEC
    assert not lives(runner)
    assert "could not be written down" in "".join(application.log)


def test_sigterm_ends_a_worker_that_connects_to_a_database_that_is_gone(run: Run, jobs: Jobs, relay: Relay) -> None:
    enqueue(jobs, 60, "thread")
    application = run(relay.url, {"DEFAULTS": "1"}, grace_sec=GRACE_SEC)
    application.saw("thread runs")
    relay.drop()
    jobs.sql(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
        " WHERE datname = current_database() AND pid <> pg_backend_pid()"
    )
    relay.end_all()  # its connections are at their end, and new ones get no answer
    application.logged("the queue's connection: ")
    began = time.monotonic()
    application.signal(signal.SIGTERM)
    assert application.exit_code() == 0
    assert time.monotonic() - began < EXIT_SEC


def test_sigterm_ends_a_worker_with_nothing_to_do_whose_database_is_gone(run: Run, relay: Relay) -> None:
    application = run(relay.url, {"DEFAULTS": "1"}, grace_sec=GRACE_SEC)
    application.logged("runs jobs of")
    relay.drop()
    began = time.monotonic()
    application.signal(signal.SIGTERM)
    assert application.exit_code() == 0
    assert time.monotonic() - began < EXIT_SEC


def test_sigterm_ends_a_worker_that_waits_for_its_database(run: Run, relay: Relay) -> None:
    relay.cut()
    application = run(relay.url)
    application.logged("waiting for the database: cannot connect")
    application.signal(signal.SIGTERM)
    assert application.exit_code() == 0
    assert "Traceback" not in "".join(application.log)


@pytest.mark.parametrize("mode", ["", "ASYNC"])
def test_sigterm_ends_a_worker_whose_database_has_never_answered(run: Run, relay: Relay, mode: str) -> None:
    relay.drop()
    application = run(relay.url, {"DEFAULTS": "1", mode: "1"} if mode else {"DEFAULTS": "1"}, grace_sec=GRACE_SEC)
    application.saw("starts")
    wait_for(relay.is_asked, "it connects")
    began = time.monotonic()
    application.signal(signal.SIGTERM)
    assert application.exit_code() == 0
    assert time.monotonic() - began < EXIT_SEC
    assert "Traceback" not in "".join(application.log)
