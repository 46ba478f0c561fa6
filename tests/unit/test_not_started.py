"""A job that was never started says no, and says once that it does."""

from __future__ import annotations

import pytest

from jobsync_orm import CoordinationConfig, Job


def test_it_is_said_once_for_each_job(caplog: pytest.LogCaptureFixture) -> None:
    config = CoordinationConfig(url="postgresql://nowhere/nothing")
    for name in ("one", "two"):
        job = Job(name, coordination_config=config)
        assert not any(job.can_claim_task(task) for task in range(100))
    said = [(record.event, record.node, record.levelname) for record in caplog.records]  # type: ignore[attr-defined]
    assert said == [("not_started", "one", "WARNING"), ("not_started", "two", "WARNING")]
    assert "one was never started; it says no to everything" in caplog.text


def test_a_standalone_job_needs_no_start(caplog: pytest.LogCaptureFixture) -> None:
    assert Job("one").can_claim_task(1)
    assert not caplog.records
