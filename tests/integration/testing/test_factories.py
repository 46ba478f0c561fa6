"""Rows of the library's tables, made by factories."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator

import pytest
from sqlalchemy import URL, Engine, create_engine, select, text
from sqlalchemy.orm import Session, scoped_session, sessionmaker

from jobsync_orm import JobQueue, migrate
from jobsync_orm.exceptions import ConfigurationError
from jobsync_orm.models import JobState, for_app
from jobsync_orm.testing import drain
from jobsync_orm.testing.factories import JobAttemptFactory, NodeFactory, QueuedJobFactory, factories_for

MODELS = for_app("sync_")


@pytest.fixture
def session(engine: Engine) -> Iterator[Session]:
    with Session(engine) as session:
        yield session


@pytest.mark.parametrize("key", [None, "customer:7"])
def test_a_job_of_each_state_fits_the_table(session: Session, key: str | None) -> None:
    make = factories_for(session)

    jobs = {
        state: make.QueuedJob(state=state, key=key and f"{key}:{state}", idempotency_key=str(state))
        for state in JobState
    }

    session.expire_all()
    assert session.scalars(select(MODELS.QueuedJob.state).order_by(MODELS.QueuedJob.id)).all() == list(JobState)
    assert {state for state, job in jobs.items() if job.finished_at} == {"completed", "failed", "cancelled"}
    assert {state for state, job in jobs.items() if job.deadline} == {"processing"}
    assert {state for state, job in jobs.items() if job.run_at} == {"scheduled", "retrying"}
    assert {state for state, job in jobs.items() if job.attempt} == {"processing", "retrying", "completed", "failed"}
    if key is not None:
        expected = session.scalar(text("SELECT sync_token_of('customer:7:pending')"))
        assert jobs[JobState.PENDING].token_id == expected


def test_what_is_given_is_taken(session: Session) -> None:
    make = factories_for(session)

    job = make.QueuedJob(type="resize", payload={"id": 1}, priority=5, state="failed", error="out of memory")

    assert (job.type, job.payload, job.priority, job.error, job.failures) == (
        "resize",
        {"id": 1},
        5,
        "out of memory",
        1,
    )
    assert job.id is not None
    assert len(make.QueuedJob.create_batch(3)) == 3
    assert make.QueuedJob.build().id is None


def test_attempts_have_a_job(session: Session) -> None:
    make = factories_for(session)
    job = make.QueuedJob(state="retrying", attempt=4)

    attempt = make.JobAttempt(job=job, outcome="timeout")
    alone = make.JobAttempt()

    assert (attempt.job_id, attempt.attempt, attempt.error) == (job.id, 4, "ValueError: of a test")
    assert (alone.attempt, alone.error) == (1, None)
    assert session.get(MODELS.QueuedJob, alone.job_id).state == "completed"


def test_nodes(session: Session) -> None:
    make = factories_for(session)

    first, second = make.Node(), make.Node(labels={"gpu": "yes"})

    assert first.name != second.name
    assert (second.state, second.labels) == ("active", {"gpu": "yes"})


def test_jobs_that_were_made_can_be_run(engine: Engine) -> None:
    queue = JobQueue(engine=engine)
    queue.register("test", lambda ctx, **payload: payload)
    with Session(engine) as session:
        factories_for(session).QueuedJob(payload={"n": 1}, key="k")
        session.commit()

    assert [run.result for run in drain(queue)] == [{"n": 1}]


def test_another_cluster_and_a_scoped_session(empty_database: URL) -> None:
    engine = create_engine(empty_database)
    migrate.upgrade(engine, appname="shop_", schema="my jobs")
    scoped = scoped_session(sessionmaker(engine))
    make = factories_for(scoped, appname="shop_", schema="my jobs")

    attempt = make.JobAttempt(job=make.QueuedJob(key="k", state="completed"))
    make.JobAttempt()
    make.Node()
    scoped.commit()

    models = for_app("shop_", "my jobs")
    assert isinstance(attempt, models.JobAttempt)
    assert len(scoped.scalars(select(models.QueuedJob)).all()) == 2
    scoped.remove()
    engine.dispose()


def test_factories_of_ones_own(session: Session) -> None:
    class InvoiceJob(QueuedJobFactory):  # type: ignore[misc]
        class Meta:
            sqlalchemy_session_factory = lambda: session  # noqa: E731

        type = "invoice"

    job = InvoiceJob(key="customer:7")

    assert (job.type, job.state) == ("invoice", "pending")
    assert session.get(MODELS.QueuedJob, job.id) is job
    assert JobAttemptFactory._meta.model is MODELS.JobAttempt
    assert NodeFactory._meta.model is MODELS.Node


def test_without_the_library_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "jobsync_orm.testing.factories"
    monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "factory", None)

    with pytest.raises(ConfigurationError, match=r"pip install 'jobsync-orm\[testing\]'"):
        importlib.import_module(name)
