"""A job that runs when its process forks: in the child it owns nothing, and each call says why and what to do."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import Engine, select, text
from sqlalchemy.orm import Session, sessionmaker

from jobsync_orm import Job, JobQueue, JobWorker, OwnedSession
from jobsync_orm.integrations.hosted import Host
from tests.integration.orm.models import Base, Item

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


def in_child(call: Callable[[], Any]) -> str:
    """What ``call`` returned or raised in a fork of this process, as text."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            try:
                said = f"returned {call()!r}"
            except BaseException as error:
                said = f"{type(error).__name__}: {error}"
            os.write(writing, said.encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        said = pipe.read()
    os.waitpid(child, 0)
    return said


@pytest.mark.parametrize(
    "call",
    [
        lambda job: job.start(),
        lambda job: job.can_claim_task("t"),
        lambda job: job.my_tokens,
        lambda job: job.claim_task("t"),
        lambda job: job.claim_tasks(["t"]),
        lambda job: job.set_claim("t"),
        lambda job: job.checkpoint("t", {"at": 1}),
        lambda job: job.add_task("t"),
        lambda job: job.register_lock("t", "%"),
        lambda job: job.get_active_nodes(),
        lambda job: job.get_coordination_status(),
        lambda job: Item.owned_by(job),
    ],
)
def test_calls_name_the_remedy(job: Job, call: Callable[[Job], Any]) -> None:
    said = in_child(lambda: call(job))
    assert said.startswith(f"ForkedJob: w1 was started by process {os.getpid()}"), said
    assert "post_worker_init" in said
    assert job.can_claim_task("t")


def test_probes_and_stopping_do_not_raise(job: Job) -> None:
    assert in_child(lambda: (job.is_running, job.am_i_healthy(), job.am_i_leader(), job.stop())) == (
        "returned (False, False, False, None)"
    )
    assert job.can_claim_task("t")


def test_rows_and_commits(job: Job, own_engine: Engine) -> None:
    Base.metadata.create_all(own_engine)
    with Session(own_engine) as session, session.begin():
        session.add(Item(sku="a"))
    statement = select(Item).where(Item.owned_by(job))  # made before the fork

    def fresh() -> Engine:
        own_engine.dispose(close=False)
        return own_engine

    assert "(jobsync_orm.exceptions.ForkedJob) w1 was" in in_child(lambda: Session(fresh()).scalars(statement).all())
    assert in_child(lambda: job.claim(Session(fresh()), select(Item))).startswith("ForkedJob")

    def write() -> None:
        with sessionmaker(fresh(), class_=OwnedSession, job=job).begin() as session:
            session.scalars(select(Item)).one().sku = "b"

    assert in_child(write).startswith("ForkedJob")
    with own_engine.connect() as connection:
        assert connection.scalar(text("SELECT sku FROM item")) == "a"


def test_a_worker(job: Job, own_engine: Engine) -> None:
    queue = JobQueue(engine=own_engine)
    queue.register("nothing", lambda ctx: None)
    with JobWorker(queue, job=job) as worker:
        assert in_child(worker.start).startswith("ForkedJob: this worker was started by process")
        assert in_child(worker.stop) == "returned None"
        assert in_child(lambda: JobWorker(queue, job=job).start()).startswith("ForkedJob: w1 was started by")
        assert worker.is_running


def test_probes_of_a_host(job: Job) -> None:
    host = Host(job.coordination_config, {}, "web")
    host.start_job()
    try:
        assert "fork of the one that started the job" in in_child(host.live)
        assert host.live().ok
    finally:
        host.stop_job()
