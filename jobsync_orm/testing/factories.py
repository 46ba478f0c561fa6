"""Rows to begin a test with: jobs, attempts and nodes, by factory-boy. Needs the extra ``testing``.

::

    @pytest.fixture
    def make(session):
        return factories_for(session)

    def test_overview(make, client):
        make.QueuedJob(type="resize", state="failed", error="out of memory")
        make.QueuedJob.create_batch(3, key="customer:7")
        make.JobAttempt(job=make.QueuedJob(state="retrying"), outcome="timeout")
        make.Node(name="web-1", labels={"gpu": "yes"})

What is not said fits the rest: a job that is PROCESSING has a worker and a deadline, one that has COMPLETED has run
once and ended. The rows are flushed, so they have ids; committing is up to the test.

To have factories of your own, with other defaults, derive from those for the default tables and give them a session as
any SQLAlchemy factory gets one::

    class InvoiceJob(QueuedJobFactory):
        class Meta:
            sqlalchemy_session_factory = lambda: Session()

        type = "invoice"

These rows are for looking at. Jobs that are to run are enqueued as the application does it, and run by
:func:`~jobsync_orm.testing.drain`.
"""

from __future__ import annotations

import datetime
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sqlalchemy import func

from jobsync_orm.exceptions import ConfigurationError
from jobsync_orm.models import for_app
from jobsync_orm.models.states import FINISHED, AttemptOutcome, JobState
from jobsync_orm.naming import DEFAULT_APPNAME, Names

try:
    import factory
    from factory.alchemy import SQLAlchemyModelFactory
except ImportError as error:
    raise ConfigurationError(
        "jobsync_orm.testing.factories needs the extra 'testing': pip install 'jobsync-orm[testing]'"
    ) from error

if TYPE_CHECKING:
    from sqlalchemy.orm import Session, scoped_session

__all__ = ["Factories", "JobAttemptFactory", "NodeFactory", "QueuedJobFactory", "factories_for"]

DEFAULT = for_app(DEFAULT_APPNAME)

# States of jobs that have been run at least once.
RUN = (JobState.PROCESSING, JobState.RETRYING, JobState.COMPLETED, JobState.FAILED)


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)


def _later(seconds: float) -> datetime.datetime:
    return _now() + datetime.timedelta(seconds=seconds)


class QueuedJobFactory(SQLAlchemyModelFactory):  # type: ignore[misc]
    """A job. Any column can be given; ``state`` decides on those that are not."""

    class Meta:
        model = DEFAULT.QueuedJob
        sqlalchemy_session_persistence = "flush"

    class Params:
        names = Names()

    type = "test"
    state = JobState.PENDING
    payload = factory.LazyFunction(dict)
    key = None
    # The token of a key is known to the database.
    token_id = factory.LazyAttribute(lambda o: None if o.key is None else _token_of(o.names, o.key))
    attempt = factory.LazyAttribute(lambda o: 1 if o.state in RUN else 0)
    failures = factory.LazyAttribute(lambda o: 1 if o.state in (JobState.RETRYING, JobState.FAILED) else 0)
    worker = factory.LazyAttribute(lambda o: "worker-1" if o.state in RUN else None)
    error = factory.LazyAttribute(
        lambda o: "ValueError: of a test" if o.state in (JobState.RETRYING, JobState.FAILED) else None
    )
    run_at = factory.LazyAttribute(
        lambda o: _later(3600) if o.state in (JobState.SCHEDULED, JobState.RETRYING) else None
    )
    started_at = factory.LazyAttribute(lambda o: _now() if o.state in RUN else None)
    finished_at = factory.LazyAttribute(lambda o: _now() if o.state in FINISHED else None)
    incarnation = factory.LazyAttribute(lambda o: uuid.uuid4() if o.state == JobState.PROCESSING else None)
    deadline = factory.LazyAttribute(lambda o: _later(3600) if o.state == JobState.PROCESSING else None)


def _token_of(names: Names, key: str) -> Any:
    functions = func if names.schema is None else getattr(func, names.schema)
    return getattr(functions, names.token_function)(key)


class JobAttemptFactory(SQLAlchemyModelFactory):  # type: ignore[misc]
    """An attempt that has ended: of ``job``, or of a new one that has COMPLETED."""

    class Meta:
        model = DEFAULT.JobAttempt
        sqlalchemy_session_persistence = "flush"
        exclude = ("job",)

    job = factory.SubFactory(QueuedJobFactory, state=JobState.COMPLETED)
    job_id = factory.LazyAttribute(lambda o: o.job.id)
    attempt = factory.LazyAttribute(lambda o: max(1, o.job.attempt))
    worker = "worker-1"
    started_at = factory.LazyFunction(lambda: _later(-1))
    ended_at = factory.LazyFunction(_now)
    outcome = AttemptOutcome.COMPLETED
    error = factory.LazyAttribute(lambda o: None if o.outcome == AttemptOutcome.COMPLETED else "ValueError: of a test")


class NodeFactory(SQLAlchemyModelFactory):  # type: ignore[misc]
    """A node that is a member of its cluster, though no process stands behind it."""

    class Meta:
        model = DEFAULT.Node
        sqlalchemy_session_persistence = "flush"

    name = factory.Sequence(lambda n: f"node-{n}")
    incarnation = factory.LazyFunction(uuid.uuid4)
    state = "active"
    host = "test"


@dataclass(frozen=True)
class Factories:
    """The factories of one cluster's tables, on one session."""

    QueuedJob: type[Any]
    JobAttempt: type[Any]
    Node: type[Any]


def factories_for(
    session: Session | scoped_session[Any], *, appname: str = DEFAULT_APPNAME, schema: str | None = None
) -> Factories:
    """Factories whose rows are put into ``session``.

    Parameters
    ----------
    session : Session or scoped_session
        The test's.
    appname, schema : str
        Which tables, as for :class:`~jobsync_orm.CoordinationConfig`.
    """
    models = for_app(appname, schema)

    def bind(base: type[Any], model: type[Any], **attributes: Any) -> type[Any]:
        meta = type("Meta", (), {"model": model, "sqlalchemy_session": session})
        make: Any = type(base)
        made: type[Any] = make(base.__name__, (base,), {"Meta": meta, **attributes})
        return made

    params = type("Params", (), {"names": Names(appname, schema)})
    job = bind(QueuedJobFactory, models.QueuedJob, Params=params)
    attempt = bind(JobAttemptFactory, models.JobAttempt, job=factory.SubFactory(job, state=JobState.COMPLETED))
    return Factories(job, attempt, bind(NodeFactory, models.Node))
