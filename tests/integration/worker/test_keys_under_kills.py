"""A short trial of what ``make queue-chaos`` does for minutes, and what its checker finds."""

from __future__ import annotations

from pathlib import Path

import pytest
from sqlalchemy import URL

from tests.chaos.keys.trial import Trial, trial
from tests.integration.cluster import wait_for


def at_work(run: Trial, *names: str) -> None:
    wait_for(lambda: run.members() >= set(names), f"{', '.join(names)} are at work", 60)


@pytest.mark.slow
def test_order_is_kept_while_workers_are_killed(database: URL, tmp_path: Path) -> None:
    with trial(database, tmp_path, keys=12, seed=1) as run:
        run.add("w1")
        run.add("w2")
        run.produce(100, most=150)
        at_work(run, "w1", "w2")
        for victim, heir in (("w1", "w3"), ("w2", "w1")):
            run.add(heir)
            done = run.done()
            wait_for(lambda done=done: run.done() > done + 30, "jobs are done", 60)
            run.kill(victim)
        at_work(run, "w1")
        verdict = run.finish()
    assert verdict.good, verdict
    assert verdict.figures["jobs"] > 60


def test_the_checker_finds_what_must_not_be(database: URL, tmp_path: Path) -> None:
    with trial(database, tmp_path, keys=2, seed=1) as run:
        run.enqueue(3, fails=0)
        jobs = run.rows("SELECT id, key, (payload->>'n')::int FROM sync_job ORDER BY id")
        for id, key, n in reversed(jobs):
            run.execute("INSERT INTO effect (key, n, value) VALUES (%s, %s, %s)", key, n, n + 1)
            run.execute(
                "INSERT INTO span (key, n, job, attempt, ended_at) VALUES ('x', %s, %s, 1, now() + interval '1 s')",
                n,
                id,
            )
        verdict = run.finish(timeout=0)
    assert not verdict.good
    assert all(verdict.violations.values()), verdict
