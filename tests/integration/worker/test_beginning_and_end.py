"""A worker that cannot start, or is stopped in unusual ways, leaves nothing behind."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import URL

from jobsync_orm import ConfigurationError, CoordinationConfig, Job, JobContext, JobQueue, JobWorker
from jobsync_orm.exceptions import NotRunning, SchemaNotReady
from jobsync_orm.worker import joining
from jobsync_orm.worker.pump import Pump
from tests.integration.cluster import QUICK, wait_for
from tests.integration.worker.conftest import Jobs

Start = Callable[..., JobWorker]


def nodes(jobs: Jobs) -> int:
    ((many,),) = jobs.sql("SELECT count(*) FROM sync_node")
    return int(many)


def test_a_job_has_one_worker_however_often_another_is_tried(queue: JobQueue, job: Job, start_worker: Start) -> None:
    queue.register("nothing", lambda ctx, i: None)
    start_worker(job=job)
    for _ in range(3):
        with pytest.raises(ConfigurationError, match="has a JobWorker already"):
            start_worker(job=job)


@pytest.mark.parametrize("kind", ["thread", "async"])
def test_a_handler_may_stop_its_worker(queue: JobQueue, jobs: Jobs, start_worker: Start, kind: str) -> None:
    returned = threading.Event()

    def stop(ctx: JobContext) -> str:
        worker.stop(20)
        returned.set()
        return "done"

    async def stop_async(ctx: JobContext) -> str:
        return stop(ctx)

    queue.register("stop", stop if kind == "thread" else stop_async)
    worker = start_worker()
    queue.submit("stop", {})
    assert returned.wait(60)
    jobs.wait(completed=1)
    wait_for(lambda: nodes(jobs) == 0, "it has left the cluster")
    assert worker.health().state == "stopped"


def test_a_worker_that_cannot_start_its_threads_leaves_the_cluster(
    queue: JobQueue, jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue.register("nothing", lambda ctx, i: None)
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name.startswith("jobsync-w7-3"):
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    errors: list[BaseException] = []

    def run() -> None:
        try:
            JobWorker(queue, node_name="w7", grace_sec=3600).run()
        except RuntimeError as error:
            errors.append(error)

    running = threading.Thread(target=run, daemon=True)
    running.start()
    running.join(60)
    assert [str(error) for error in errors] == ["can't start new thread"], "nothing runs that a grace could be for"
    wait_for(lambda: nodes(jobs) == 0, "it has left the cluster")
    wait_for(lambda: not [t for t in threading.enumerate() if "w7" in t.name], "its threads have ended")


@pytest.mark.parametrize("node_name", [None, "w7"])
@pytest.mark.parametrize(
    "wrong", [{"database": "no_such_database"}, {"username": "no_such_role"}, {"host": "no-such-host.invalid"}]
)
def test_a_database_that_will_not_be_another_one_is_refused_at_once(
    database: URL, wrong: dict[str, str], node_name: str | None
) -> None:
    url = database.set(password="s3cret", **wrong) if "host" not in wrong else database.set(**wrong, query={})
    queue = JobQueue(CoordinationConfig(url=url, **QUICK))
    queue.register("nothing", lambda ctx, i: None)
    with pytest.raises(ConfigurationError, match=next(iter(wrong.values()))) as caught:
        JobWorker(queue, node_name=node_name).run()
    assert url.render_as_string() in str(caught.value)
    assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize("node_name", [None, "w7"])
def test_a_database_that_does_not_answer_is_waited_for_and_the_log_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, node_name: str | None
) -> None:
    for name, seconds in (("ENTER_SEC", 0.6), ("TRY_SEC", 0.05), ("SAY_SEC", 0.2)):
        monkeypatch.setattr(joining, name, seconds)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    queue = JobQueue(CoordinationConfig(host="127.0.0.1", port=port, **QUICK))
    queue.register("nothing", lambda ctx, i: None)
    with caplog.at_level("WARNING", "jobsync_orm"), pytest.raises(TimeoutError, match="could not be reached"):
        JobWorker(queue, node_name=node_name).run()
    said = [record.message for record in caplog.records if "waiting for the database" in record.message]
    assert 2 <= len(said) <= 4
    assert all("refused" in line and "more" in line for line in said)


def test_a_database_without_the_queues_tables_is_refused(queue: JobQueue, jobs: Jobs, start_worker: Start) -> None:
    queue.register("nothing", lambda ctx, i: None)
    jobs.sql("DROP TABLE sync_job CASCADE")
    with pytest.raises(SchemaNotReady, match="jobsync-orm db upgrade --appname"):
        start_worker()
    assert nodes(jobs) == 0
    with pytest.raises(SchemaNotReady):
        start_worker(node_name="w7")
    assert nodes(jobs) == 0


def test_a_worker_stopped_in_the_middle_of_its_start_does_not_run(
    queue: JobQueue, jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a signal handler of the application's, which runs in the thread that starts."""
    queue.register("nothing", lambda ctx, i: None)
    worker = JobWorker(queue, node_name="w7")
    make_pump: Any = worker._make_pump

    def interrupted(*arguments: Any) -> Any:
        worker.stop(0)
        return make_pump(*arguments)

    monkeypatch.setattr(worker, "_make_pump", interrupted)
    with pytest.raises(Exception, match="stopped while it was starting"):
        worker.start()
    assert nodes(jobs) == 0
    wait_for(lambda: not [t for t in threading.enumerate() if "w7" in t.name], "its threads have ended")


def test_a_process_whose_loop_has_failed_does_not_stay(
    queue: JobQueue, jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue.register("nothing", lambda ctx, i: None)

    def fail(pump: Pump) -> None:
        raise SystemExit

    monkeypatch.setattr(Pump, "_turn", fail)
    errors: list[BaseException] = []

    def run() -> None:
        try:
            JobWorker(queue).run()
        except NotRunning as error:
            errors.append(error)

    running = threading.Thread(target=run, daemon=True)
    running.start()
    running.join(60)
    assert "the queue's loop has failed" in str(errors[0])
    wait_for(lambda: nodes(jobs) == 0, "it has left the cluster")
