"""Jobs of a type that nobody runs are told of."""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from jobsync_orm import JobQueue, JobWorker
from jobsync_orm.coordinator.session import Session
from jobsync_orm.queue.statements import SESSION
from jobsync_orm.worker import unserved
from jobsync_orm.worker.unserved import Unserved
from tests.integration.cluster import wait_for
from tests.integration.worker.conftest import Jobs

AGO = "UPDATE sync_job SET ready_at = now() - interval '61 s'"


@pytest.fixture
def session(queue: JobQueue) -> Iterator[Session]:
    wake, end = os.pipe()
    made = Session(queue.config.connection_pool(), wake, lambda at: None, 1.0, SESSION)
    made.open()
    yield made
    made.close()
    os.close(wake)
    os.close(end)


def add_worker(jobs: Jobs, name: str, *types: str, alive: bool = True) -> None:
    life = str(uuid.uuid4())
    row = "INSERT INTO sync_job_worker (node, incarnation, types, concurrency) VALUES (%s, %s, %s, 1)"
    jobs.sql(row, name, life, [*types])
    if alive:
        jobs.sql("INSERT INTO sync_node (name, incarnation, state) VALUES (%s, %s, 'active')", name, life)


def test_each_is_told_once_and_by_one_worker(
    queue: JobQueue, jobs: Jobs, session: Session, caplog: pytest.LogCaptureFixture
) -> None:
    add_worker(jobs, "a", "known", "paused")
    add_worker(jobs, "b", "other")
    add_worker(jobs, "c", "of the dead", alive=False)
    for type in ("known", "mistyped", "of the dead", "other", "paused"):
        jobs.add(type, 3)
    jobs.add("mistyped too", 2, key="k", token_id=1)
    jobs.add("mistyped three", 2, key="l", token_id=1, priority=7)
    jobs.add("urgent", 2, priority=-3)
    jobs.sql(AGO)
    jobs.add("new")
    first, second = Unserved(queue.statements, "a"), Unserved(queue.statements, "b")
    second.run(session)
    assert not caplog.records
    for _ in range(2):
        first.run(session)
    told = [record.args[1] for record in caplog.records]  # type: ignore[index]
    assert told == ["mistyped", "mistyped three", "mistyped too", "of the dead", "urgent"]
    assert "jobs of type 'mistyped' have been ready for 61 s, and no live worker runs this type" in caplog.text
    # Served meanwhile, it is told of again when it is not any more.
    caplog.clear()
    jobs.sql("UPDATE sync_job_worker SET types = types || '{mistyped}' WHERE node = 'b'")
    first.run(session)
    jobs.sql("UPDATE sync_job_worker SET types = '{other}' WHERE node = 'b'")
    first.run(session)
    assert [record.args[1] for record in caplog.records] == ["mistyped"]  # type: ignore[index]


def test_it_leaps_from_lane_to_lane(queue: JobQueue, jobs: Jobs, session: Session) -> None:
    add_worker(jobs, "a")
    jobs.add("many", 2000)
    jobs.add("more", 2000, priority=3)
    jobs.add("keyed", 2000, key="k", token_id=1)
    jobs.sql(AGO)
    ((plan,),) = session.execute("EXPLAIN (ANALYZE, FORMAT JSON) " + queue.statements.unserved, 60, "a", timeout=30)

    def rows(node: dict[str, Any]) -> int:
        own = node["Actual Rows"] * node["Actual Loops"] if node.get("Relation Name") == "sync_job" else 0
        return round(own) + sum(rows(child) for child in node.get("Plans", ()))

    assert rows(json.loads(plan or "")[0]["Plan"]) < 120


def test_a_worker_does_it(
    queue: JobQueue,
    jobs: Jobs,
    start_worker: Callable[..., JobWorker],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(unserved, "LOOK_SEC", 0.1)
    queue.register("mail", print)
    wrong, late = queue.submit("mial"), queue.submit("mail", delay=600)
    jobs.sql(AGO)
    start_worker()
    wait_for(lambda: "'mial'" in caplog.text, "the warning")
    assert (queue.status(wrong).workers, queue.status(late).workers) == (0, 1)
    stats = queue.stats()
    assert (stats.workers, stats.by_type["mial"].workers, queue.stats("mail").workers) == (None, 0, 1)
    queue.cancel(wrong)
    assert queue.status(wrong).workers is None
