"""The database refuses how attempts ended: all, until somebody has mended it, or one for what it holds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from jobsync_orm import JobQueue, JobWorker
from tests.integration.cluster import wait_for
from tests.integration.worker.conftest import Jobs

Start = Callable[..., JobWorker]


def test_what_nobody_can_write_is_kept_until_it_can_be_written(
    queue: JobQueue, jobs: Jobs, start_worker: Start, caplog: pytest.LogCaptureFixture
) -> None:
    ran: Counter[int] = Counter()

    def work(ctx: Any, i: int) -> dict[str, int]:
        if not ran:
            jobs.sql("ALTER TABLE sync_job_attempt RENAME TO gone")
        ran[i] += 1
        return {"i": i}

    queue.register("t", work)
    jobs.add("t", 5)
    start_worker(concurrency=1)
    wait_for(lambda: len(ran) == 5 and "42P01" in caplog.text, "all have run, and nothing can be written")
    assert jobs.states() == {"processing": 5}
    jobs.sql("ALTER TABLE gone RENAME TO sync_job_attempt")
    jobs.wait(completed=5)
    assert ran == dict.fromkeys(range(1, 6), 1)
    assert jobs.sql("SELECT count(*) FROM sync_job WHERE result = payload AND failures = 0") == [(5,)]
    assert jobs.outcomes() == {"completed": 5}


def test_a_mistake_in_a_trigger_is_that_of_the_job_that_comes_to_it(
    queue: JobQueue, jobs: Jobs, start_worker: Start
) -> None:
    queue.register("t", lambda ctx, i: None)
    jobs.sql(
        "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN IF NEW.state = 'completed' AND"
        " NEW.payload = '{\"i\": 2}' THEN PERFORM NEW.no_such_column; END IF; RETURN NEW; END $$"
    )
    jobs.sql("CREATE TRIGGER refuse BEFORE UPDATE ON sync_job FOR EACH ROW EXECUTE FUNCTION refuse()")
    jobs.add("t", 3)
    start_worker()
    jobs.wait(completed=2, failed=1)
    ((error,),) = jobs.sql("SELECT error FROM sync_job WHERE state = 'failed'")
    assert "could not be stored" in error
    assert "no_such_column" in error
