"""A web server that does not import the handlers, and a worker that does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sqlalchemy import URL

from jobsync_orm import JobQueue, JobWorker
from jobsync_orm.config import CoordinationConfig
from tests.integration.cluster import QUICK
from tests.integration.worker.conftest import Jobs


def test_the_workers_handler_decides(
    database: URL, queue: JobQueue, jobs: Jobs, start_worker: Callable[..., JobWorker]
) -> None:
    ran: list[tuple[str, int, float]] = []

    @queue.handler("charge", max_retries=1, timeout=44, backoff=lambda failures, error: 0.05, retry_blocks_key=False)
    def charge(ctx: Any, name: str) -> None:
        ran.append((name, ctx.max_retries, ctx.job.timeout))
        if name.startswith("bad"):
            raise ValueError("no")

    web = JobQueue(CoordinationConfig(url=database, **QUICK))
    try:
        for key in (None, "k"):
            web.submit("charge", {"name": f"bad {key}"}, key=key)
            web.submit("charge", {"name": f"given {key}"}, key=key, max_retries=3, timeout=3600)
    finally:
        web.dispose()
    start_worker()
    jobs.wait(completed=2, failed=2)
    assert sorted(set(ran)) == [
        ("bad None", 1, 44.0),
        ("bad k", 1, 44.0),
        ("given None", 3, 3600.0),
        ("given k", 3, 3600.0),
    ]
    assert len(ran) == 6
    assert jobs.sql("SELECT DISTINCT retry_blocks_key FROM sync_job") == [(False,)]
