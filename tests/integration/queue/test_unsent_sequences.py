"""Whatever a session does, and in whatever order: with jobs that wait, the outcome is that of jobs sent at once."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import Engine, event, text
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

from jobsync_orm.exceptions import JobsyncError
from jobsync_orm.queue import Enqueued, JobQueue
from tests.integration.queue.stored import jobs, run


class Play:
    """One session, in which steps are taken by their names."""

    def __init__(self, queue: JobQueue, engine: Engine, at_once: bool) -> None:
        self.queue = queue
        self.session = Session(engine)
        self.made: list[Enqueued] = []
        self.savepoints: list[Any] = []
        self.waited = False
        if at_once:
            event.listen(self.session, "after_begin", lambda *_: None)  # who might have something to say to it

    def take(self, step: str, number: int) -> Any:
        """What has come of it, be it an error."""
        try:
            return getattr(self, step)(number)
        except (SQLAlchemyError, JobsyncError) as error:
            return type(error).__name__

    def enqueue(self, number: int) -> None:
        self.made.append(self.queue.enqueue(self.session, f"t{number}", {"n": number}))
        self.waited = self.waited or "not sent" in repr(self.made[-1])

    def enqueue_of_a_key(self, number: int) -> None:
        self.made.append(self.queue.enqueue(self.session, f"t{number}", key="k", priority=number))

    def enqueue_once(self, number: int) -> bool:
        return self.queue.enqueue(self.session, "once", idempotency_key="i").created

    def enqueue_many(self, number: int) -> None:
        self.queue.enqueue_many(self.session, f"t{number}", [{}, {}])

    def count(self, number: int) -> Any:
        return self.session.scalar(text("SELECT count(*) FROM sync_job"))

    def fail(self, number: int) -> None:
        self.session.execute(text("SELECT 1 / 0"))

    def add(self, number: int) -> None:
        self.session.add(self.queue.models.QueuedJob(type=f"added{number}", payload={}))

    def add_bad(self, number: int) -> None:
        self.session.add(self.queue.models.QueuedJob(type="added", payload={}, state="no such state"))

    def flush(self, number: int) -> None:
        self.session.flush()

    def savepoint(self, number: int) -> None:
        self.savepoints.append(self.session.begin_nested())

    def release(self, number: int) -> None:
        if self.savepoints:
            self.savepoints.pop().commit()

    def roll_back_to(self, number: int) -> None:
        if self.savepoints:
            self.savepoints.pop().rollback()

    def commit(self, number: int) -> None:
        self.session.commit()

    def commit_all(self, number: int) -> None:
        root = self.session.get_transaction()
        if root is not None:
            root.commit()

    def roll_back(self, number: int) -> None:
        self.session.rollback()

    def close(self, number: int) -> None:
        self.session.close()

    def take_connection(self, number: int) -> None:
        self.session.connection()


STEPS = [name for name in vars(Play) if not name.startswith("_") and name != "take"]

steps = st.lists(st.sampled_from([*STEPS, "enqueue", "enqueue", "commit"]), min_size=2, max_size=12)


@pytest.fixture
def seen(queue: JobQueue, store: Engine) -> None:
    """The engine has been seen to have transactions."""
    with Session(store) as session:
        queue.enqueue(session, "first")


@pytest.mark.filterwarnings("ignore::sqlalchemy.exc.SAWarning")  # of savepoints that went with their transaction
@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(taken=steps)
def test_waiting_or_not(queue: JobQueue, store: Engine, seen: None, taken: list[str]) -> None:
    outcomes = []
    for at_once in (False, True):
        run(store, "TRUNCATE sync_job, sync_job_dependency RESTART IDENTITY")
        play = Play(queue, store, at_once)
        with play.session:
            came = [play.take(step, number) for number, step in enumerate([*taken, "commit"])]
        outcomes.append((came, jobs(store, "type, payload, key, priority, state")))
        assert play.waited == (not at_once) or taken[0] != "enqueue"
    assert outcomes[0] == outcomes[1]
