"""The library's tables as SQLAlchemy models, to look at with your own queries.

The tables are made by :mod:`jobsync_orm.migrate`, never by ``metadata.create_all()``: the SQL function and
the token rows are part of them. The library alone writes to them; an application reads.

For the default prefix the models are ready::

    from jobsync_orm.models import Node
    session.scalars(select(Node).order_by(Node.ordinal))

For another prefix or schema ask :func:`for_app` for them::

    models = for_app("billing_", schema="jobs")
    session.scalars(select(models.Token).where(models.Token.node.is_(None)))

Each call with the same names returns the same object, from any thread. Its classes and their instances can be
pickled.

On a Base of your own
---------------------
To have a model on the application's own declarative base, with relationships or methods of your own, put the
mixin there. It fits a plain ``DeclarativeBase`` and one with ``MappedAsDataclass`` (where the columns are no
constructor arguments). Constraints and indexes get the names the migration gives them, whatever
``__table_args__`` or naming convention the class has::

    class Node(NodeMixin, Base):
        __tablename__ = "sync_node"

Then the application's metadata has a table that its own migrations must leave alone; see
:func:`jobsync_orm.migrate.hooks`.
"""

from __future__ import annotations

import copyreg
import threading
from dataclasses import dataclass
from typing import Any, cast

from sqlalchemy import MetaData
from sqlalchemy.orm import DeclarativeBase, foreign, relationship
from sqlalchemy.orm.decl_api import DeclarativeAttributeIntercept

from jobsync_orm.models.mixins import (
    AuditMixin,
    CheckpointMixin,
    ClaimMixin,
    ClusterMixin,
    LockMixin,
    NodeMixin,
    RebalanceMixin,
    TokenMixin,
)
from jobsync_orm.models.queue import (
    JobAttemptMixin,
    JobDependencyMixin,
    JobPauseMixin,
    JobScheduleMixin,
    JobWorkerMixin,
    QueuedJobMixin,
)
from jobsync_orm.models.states import AttemptOutcome, JobPriority, JobState
from jobsync_orm.naming import DEFAULT_APPNAME, Names

__all__ = [
    "AttemptOutcome",
    "AuditMixin",
    "AuditRecord",
    "Base",
    "Checkpoint",
    "CheckpointMixin",
    "Claim",
    "ClaimMixin",
    "Cluster",
    "ClusterMixin",
    "JobAttempt",
    "JobAttemptMixin",
    "JobDependency",
    "JobDependencyMixin",
    "JobPause",
    "JobPauseMixin",
    "JobPriority",
    "JobSchedule",
    "JobScheduleMixin",
    "JobState",
    "JobWorker",
    "JobWorkerMixin",
    "Lock",
    "LockMixin",
    "Models",
    "Node",
    "NodeMixin",
    "QueuedJob",
    "QueuedJobMixin",
    "Rebalance",
    "RebalanceMixin",
    "Token",
    "TokenMixin",
    "for_app",
]

_DEFAULT = Names()


class Base(DeclarativeBase):
    """Declarative base of the models for the default prefix."""


class Cluster(ClusterMixin, Base):
    """See :class:`ClusterMixin`."""

    __tablename__ = _DEFAULT.bare("cluster")


class Node(NodeMixin, Base):
    """See :class:`NodeMixin`."""

    __tablename__ = _DEFAULT.bare("node")


class Token(TokenMixin, Base):
    """See :class:`TokenMixin`."""

    __tablename__ = _DEFAULT.bare("token")


class Lock(LockMixin, Base):
    """See :class:`LockMixin`."""

    __tablename__ = _DEFAULT.bare("lock")


class Claim(ClaimMixin, Base):
    """See :class:`ClaimMixin`."""

    __tablename__ = _DEFAULT.bare("claim")


class Checkpoint(CheckpointMixin, Base):
    """See :class:`CheckpointMixin`."""

    __tablename__ = _DEFAULT.bare("checkpoint")


class AuditRecord(AuditMixin, Base):
    """See :class:`AuditMixin`."""

    __tablename__ = _DEFAULT.bare("audit")


class Rebalance(RebalanceMixin, Base):
    """See :class:`RebalanceMixin`."""

    __tablename__ = _DEFAULT.bare("rebalance")


class QueuedJob(QueuedJobMixin, Base):
    """See :class:`QueuedJobMixin`. ``attempts`` are its :class:`JobAttempt` rows, first to last."""

    __tablename__ = _DEFAULT.bare("job")


class JobAttempt(JobAttemptMixin, Base):
    """See :class:`JobAttemptMixin`."""

    __tablename__ = _DEFAULT.bare("job_attempt")


class JobDependency(JobDependencyMixin, Base):
    """See :class:`JobDependencyMixin`."""

    __tablename__ = _DEFAULT.bare("job_dependency")


class JobPause(JobPauseMixin, Base):
    """See :class:`JobPauseMixin`."""

    __tablename__ = _DEFAULT.bare("job_pause")


class JobSchedule(JobScheduleMixin, Base):
    """See :class:`JobScheduleMixin`."""

    __tablename__ = _DEFAULT.bare("job_schedule")


class JobWorker(JobWorkerMixin, Base):
    """See :class:`JobWorkerMixin`."""

    __tablename__ = _DEFAULT.bare("job_worker")


def _relate(job: type[QueuedJobMixin], attempt: type[JobAttemptMixin]) -> None:
    """Give jobs their attempts. There is no foreign key: checking it would cost each completion more than the row."""
    ours, theirs = cast("Any", job), cast("Any", attempt)
    ours.attempts = relationship(
        theirs,
        primaryjoin=ours.id == foreign(theirs.job_id),
        order_by=theirs.attempt,
        viewonly=True,
    )


_relate(QueuedJob, JobAttempt)


@dataclass(frozen=True, eq=False)
class Models:
    """The models of one cluster.

    Attributes
    ----------
    names : Names
        Prefix and schema of the tables.
    Base : type[DeclarativeBase]
        What the models derive from.
    Cluster, Node, Token, Lock, Claim, Checkpoint, AuditRecord, Rebalance : type
    QueuedJob, JobAttempt, JobDependency, JobPause, JobSchedule, JobWorker : type
        The mapped classes.
    """

    names: Names
    Base: type[DeclarativeBase]
    Cluster: type[ClusterMixin]
    Node: type[NodeMixin]
    Token: type[TokenMixin]
    Lock: type[LockMixin]
    Claim: type[ClaimMixin]
    Checkpoint: type[CheckpointMixin]
    AuditRecord: type[AuditMixin]
    Rebalance: type[RebalanceMixin]
    QueuedJob: type[QueuedJobMixin]
    JobAttempt: type[JobAttemptMixin]
    JobDependency: type[JobDependencyMixin]
    JobPause: type[JobPauseMixin]
    JobSchedule: type[JobScheduleMixin]
    JobWorker: type[JobWorkerMixin]

    @property
    def metadata(self) -> MetaData:
        """The ``MetaData`` that holds these tables and no others."""
        return self.Base.metadata

    def __reduce__(self) -> tuple[Any, ...]:
        return for_app, (self.names.appname, self.names.schema)


_PARTS: dict[str, tuple[str, type[Any]]] = {
    "Cluster": ("cluster", ClusterMixin),
    "Node": ("node", NodeMixin),
    "Token": ("token", TokenMixin),
    "Lock": ("lock", LockMixin),
    "Claim": ("claim", ClaimMixin),
    "Checkpoint": ("checkpoint", CheckpointMixin),
    "AuditRecord": ("audit", AuditMixin),
    "Rebalance": ("rebalance", RebalanceMixin),
    "QueuedJob": ("job", QueuedJobMixin),
    "JobAttempt": ("job_attempt", JobAttemptMixin),
    "JobDependency": ("job_dependency", JobDependencyMixin),
    "JobPause": ("job_pause", JobPauseMixin),
    "JobSchedule": ("job_schedule", JobScheduleMixin),
    "JobWorker": ("job_worker", JobWorkerMixin),
}

_guard = threading.Lock()
_known: dict[Names, Models] = {
    _DEFAULT: Models(
        _DEFAULT,
        Base,
        Cluster,
        Node,
        Token,
        Lock,
        Claim,
        Checkpoint,
        AuditRecord,
        Rebalance,
        QueuedJob,
        JobAttempt,
        JobDependency,
        JobPause,
        JobSchedule,
        JobWorker,
    )
}


def for_app(appname: str = DEFAULT_APPNAME, schema: str | None = None) -> Models:
    """The models for a prefix and schema: the same object for the same arguments.

    Parameters
    ----------
    appname : str
        Prefix of each table. The default gives the models of this module.
    schema : str, optional
        Schema of the tables. None leaves it to ``search_path``.

    Raises
    ------
    ConfigurationError
        A name PostgreSQL could not keep as it is.
    """
    names = Names(appname, schema)
    with _guard:
        if names not in _known:
            _known[names] = _generate(names)
        return _known[names]


class _Generated(DeclarativeAttributeIntercept):
    """Type of the generated classes. They stand in no module by name, so pickle is told how to find them."""


def _reduce(class_: _Generated) -> str | tuple[Any, ...]:
    origin = class_.__dict__.get("_jobsync_origin")
    return class_.__qualname__ if origin is None else (_lookup, origin)


def _lookup(attribute: str, appname: str, schema: str | None) -> Any:
    return getattr(for_app(appname, schema), attribute)


copyreg.pickle(_Generated, _reduce)


def _generate(names: Names) -> Models:
    def make(attribute: str, bases: tuple[type[Any], ...], **namespace: Any) -> type[Any]:
        origin = (attribute, names.appname, names.schema)
        return _Generated(attribute, bases, {"__module__": __name__, "_jobsync_origin": origin, **namespace})

    base = make("Base", (DeclarativeBase,))
    models = Models(
        names,
        base,
        **{
            attribute: make(
                attribute,
                (mixin, base),
                __doc__=f"See :class:`{mixin.__name__}`.",
                __tablename__=names.bare(kind),
                __table_args__={"schema": names.schema},
            )
            for attribute, (kind, mixin) in _PARTS.items()
        },
    )
    _relate(models.QueuedJob, models.JobAttempt)
    return models
