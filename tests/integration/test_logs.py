"""What a cluster says at INFO: nothing while nothing happens, and one line for what does."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from sqlalchemy import URL

from jobsync_orm import CoordinationConfig, Job, JobQueue, JobWorker
from jobsync_orm.observe import Heartbeat
from tests.integration.cluster import QUICK, wait_for


def test_steady_state_is_silent_and_a_join_is_two_lines(database: URL, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "jobsync_orm")
    config = CoordinationConfig(url=database, **QUICK)
    queue = JobQueue(config)
    queue.register("work", lambda ctx: None)
    beats = {"w1": 0, "w2": 0}

    def count(event: Any) -> None:
        if isinstance(event, Heartbeat):
            beats[event.node] += 1

    one, two = Job("w1", config), Job("w2", config)
    for job in (one, two):
        job.audience.add(count)
    try:
        with one, JobWorker(queue, job=one) as worker:
            said: dict[str, list[Any]] = {}
            for record in caplog.records:
                said.setdefault(record.event, []).append(record)  # type: ignore[attr-defined]
            assert sorted(said) == ["joined", "rebalanced", "worker_started"]
            caplog.clear()
            with two:
                wait_for(lambda: len(one.my_tokens) == len(two.my_tokens) == 5_000, "they share the tokens")
                records: list[Any] = list(caplog.records)
                assert sorted((r.event, r.node, r.levelname) for r in records) == [
                    ("joined", "w2", "INFO"),
                    ("rebalanced", "w1", "INFO"),
                ]
                assert [r.epoch for r in records if r.event == "rebalanced"] == [two.token_version]
                caplog.clear()
                from_here = dict(beats)
                for _ in range(3):
                    queue.submit("work")
                wait_for(lambda: worker.health().completed == 3, "the jobs have run")
                wait_for(lambda: all(beats[node] >= from_here[node] + 5 for node in beats), "heartbeats go on")
                assert [record.getMessage() for record in caplog.records] == []
            wait_for(lambda: len(one.my_tokens) == 10_000, "w1 has all")
            assert {record.event for record in caplog.records} == {"left", "rebalanced"}  # type: ignore[attr-defined]
    finally:
        queue.dispose()
    for record in caplog.records:
        for name in ("event", "node", "epoch", "job_id", "job_type"):
            assert hasattr(record, name), record
