"""The audit, for operators."""

from __future__ import annotations

import datetime

import pytest
from sqlalchemy import Engine

from jobsync_orm import Job
from jobsync_orm.exceptions import ConfigurationError
from jobsync_orm.naming import Names
from jobsync_orm.operate import read_audit

NAMES = Names()


def test_each_filter(engine: Engine, job: Job) -> None:
    assert read_audit(engine, NAMES) == []
    for task in (1, 2, 3):
        with job.claim_task(task):
            pass
    newest, middle, oldest = read_audit(engine, NAMES)
    assert [entry.task_id for entry in (newest, middle, oldest)] == ["3", "2", "1"]
    assert (newest.node, newest.epoch is not None) == ("w1", True)
    assert read_audit(engine, NAMES, task_id=2) == [middle]
    assert read_audit(engine, NAMES, node="w1", limit=2) == [newest, middle]
    assert read_audit(engine, NAMES, node="other") == []
    assert read_audit(engine, NAMES, before=middle.id) == [oldest]
    assert read_audit(engine, NAMES, since=middle.created_on) == [newest, middle]
    assert read_audit(engine, NAMES, since=newest.created_on + datetime.timedelta(seconds=1)) == []


def test_what_cannot_be_asked(engine: Engine) -> None:
    with pytest.raises(ConfigurationError, match="limit=0"):
        read_audit(engine, NAMES, limit=0)
    with pytest.raises(ConfigurationError, match="time zone"):
        read_audit(engine, NAMES, since=datetime.datetime(2026, 1, 1))
