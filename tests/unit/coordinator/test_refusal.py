"""What is said of a database that refuses a node for good."""

from __future__ import annotations

from jobsync_orm import CoordinationConfig
from jobsync_orm.coordinator.admission import refusal
from jobsync_orm.coordinator.session import SessionLost

LOST = SessionLost('FATAL:  database "jobsync" does not exist')


def test_that_the_database_is_the_default_is_said() -> None:
    told = refusal(LOST, CoordinationConfig(url=None))
    assert "localhost:5432/jobsync (the defaults, since no url was given): " in str(told)


def test_of_a_database_that_was_named_it_is_not() -> None:
    for config in (
        CoordinationConfig(dbname="shop"),
        CoordinationConfig(url="postgresql://postgres@localhost/jobsync"),
    ):
        assert "defaults" not in str(refusal(LOST, config))
