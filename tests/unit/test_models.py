"""jobsync_orm.models: mixins for any base, models for any prefix."""

from __future__ import annotations

import pickle
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import pytest
from sqlalchemy import CheckConstraint, Index, MetaData, Text, UniqueConstraint, inspect, select
from sqlalchemy.dialects import postgresql
from sqlalchemy.orm import (
    DeclarativeBase,
    Mapped,
    MappedAsDataclass,
    configure_mappers,
    foreign,
    mapped_column,
    relationship,
)
from sqlalchemy.schema import Table

from jobsync_orm import models
from jobsync_orm.exceptions import ConfigurationError
from jobsync_orm.models import for_app
from jobsync_orm.naming import MAX_APPNAME, Names

MIXINS = {
    "cluster": models.ClusterMixin,
    "node": models.NodeMixin,
    "token": models.TokenMixin,
    "lock": models.LockMixin,
    "claim": models.ClaimMixin,
    "checkpoint": models.CheckpointMixin,
    "audit": models.AuditMixin,
    "rebalance": models.RebalanceMixin,
    "job": models.QueuedJobMixin,
    "job_attempt": models.JobAttemptMixin,
    "job_dependency": models.JobDependencyMixin,
    "job_pause": models.JobPauseMixin,
    "job_schedule": models.JobScheduleMixin,
    "job_worker": models.JobWorkerMixin,
}


def rules(table: Table) -> set[str]:
    """Names of the constraints and indexes, and what they cover."""
    found = {f"pk {table.primary_key.name} {[column.name for column in table.primary_key]}"}
    for constraint in table.constraints:
        if isinstance(constraint, CheckConstraint):
            found.add(f"check {constraint.name} {constraint.sqltext}")
        if isinstance(constraint, UniqueConstraint):
            found.add(f"unique {constraint.name} {[column.name for column in constraint.columns]}")
    return found | {f"index {index.name} {[column.name for column in index.columns]}" for index in table.indexes}


def shape(table: Table) -> set[tuple[str, str, bool]]:
    dialect = postgresql.dialect()
    return {(column.name, column.type.compile(dialect), bool(column.nullable)) for column in table.columns}


def every_name(metadata: MetaData) -> set[str]:
    names = set()
    for table in metadata.tables.values():
        names.add(table.name)
        names |= {str(constraint.name) for constraint in table.constraints}
        names |= {str(index.name) for index in table.indexes}
        names |= {f"{table.name}_{column.name}_seq" for column in table.columns if column.identity is not None}
    return names


def test_the_default_models_are_those_of_the_module() -> None:
    ready = for_app()
    assert ready is for_app("sync_") is for_app(appname="sync_", schema=None)
    assert ready.Node is models.Node
    assert ready.AuditRecord is models.AuditRecord
    assert ready.QueuedJob is models.QueuedJob
    assert ready.JobWorker is models.JobWorker
    assert ready.metadata is models.Base.metadata
    assert ready.names == Names()
    assert set(ready.metadata.tables) == {f"sync_{kind}" for kind in MIXINS}


def test_the_same_arguments_give_the_same_models_and_others_do_not() -> None:
    one = for_app("m1_", "s")
    assert one is for_app("m1_", "s")
    assert one.Node.__table__.fullname == "s.m1_node"  # type: ignore[attr-defined]
    assert for_app("m1_").Node is not one.Node
    assert for_app("m1_").metadata is not one.metadata
    configure_mappers()


def test_many_threads_get_one_object() -> None:
    start = Barrier(8)

    def ask(_: int) -> models.Models:
        start.wait()
        return for_app("threads_")

    with ThreadPoolExecutor(8) as pool:
        assert len(set(pool.map(ask, range(8)))) == 1


def test_a_bad_appname_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="'Bad-'"):
        for_app("Bad-")


def test_the_models_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        for_app().Node = models.Token  # type: ignore[misc, assignment]


def test_every_identifier_of_the_longest_appname_fits() -> None:
    names = Names("a" * MAX_APPNAME, "s" * 63)
    found = every_name(for_app(names.appname, names.schema).metadata)
    found |= {names.version_table, f"{names.version_table}_pkc", names.token_function}
    assert names.bare("node_ordinal_seq") in found
    assert len(found) > 20
    assert max(len(name.encode()) for name in found) <= 63


def test_no_constraint_is_left_to_a_name_of_the_servers_choice() -> None:
    for table in models.Base.metadata.tables.values():
        assert all(constraint.name for constraint in table.constraints), table.name


@pytest.mark.parametrize("dataclass", [False, True])
@pytest.mark.parametrize("kind", MIXINS)
def test_a_mixin_fits_a_base_of_the_applications_own(kind: str, dataclass: bool) -> None:
    class Plain(DeclarativeBase):
        metadata = MetaData(
            naming_convention={"ck": "ck_%(table_name)s_%(constraint_name)s", "pk": "pk_%(table_name)s"}
        )

    class Data(MappedAsDataclass, DeclarativeBase):
        pass

    base: Any = Data if dataclass else Plain
    made = type("Mine", (MIXINS[kind], base), {"__tablename__": f"sync_{kind}"})
    configure_mappers()
    reference = models.Base.metadata.tables[f"sync_{kind}"]
    assert shape(made.__table__) == shape(reference)  # type: ignore[attr-defined]
    assert rules(made.__table__) == rules(reference)  # type: ignore[attr-defined]


def test_table_args_of_the_model_leave_the_mixins_rules_in_place() -> None:
    class Base(DeclarativeBase):
        pass

    class Claim(models.ClaimMixin, Base):
        __tablename__ = "sync_claim"
        __table_args__ = (Index("of_mine", "claimed_at"), {"schema": "s"})

    table = Claim.__table__
    assert isinstance(table, Table)
    assert rules(table) == rules(models.Base.metadata.tables["sync_claim"]) | {"index of_mine ['claimed_at']"}
    assert table.schema == "s"


def test_siblings_in_one_table_share_the_columns() -> None:
    class Base(DeclarativeBase):
        pass

    class Node(models.NodeMixin, Base):
        __tablename__ = "sync_node"
        __mapper_args__ = {"polymorphic_on": "state"}  # noqa: RUF012

    class Active(Node):
        __mapper_args__ = {"polymorphic_identity": "active"}  # noqa: RUF012

    class Away(Node):
        __mapper_args__ = {"polymorphic_identity": "away"}  # noqa: RUF012

    configure_mappers()
    assert Active.__table__ is Away.__table__
    assert isinstance(Node.__table__, Table)
    assert rules(Node.__table__) == rules(models.Base.metadata.tables["sync_node"])


def test_a_dataclass_model_keeps_its_own_fields_for_the_constructor() -> None:
    class Base(MappedAsDataclass, DeclarativeBase):
        pass

    class Checkpoint(models.CheckpointMixin, Base):
        __tablename__ = "sync_checkpoint"
        note: Mapped[str] = mapped_column(Text())

    assert Checkpoint(note="n").note == "n"
    assert str(select(Checkpoint.note).where(Checkpoint.task_id == "t")).endswith(
        "WHERE sync_checkpoint.task_id = :task_id_1"
    )


@pytest.mark.parametrize("made", [for_app(), for_app("related_", "s")], ids=["default", "generated"])
def test_a_job_has_its_attempts_in_order(made: models.Models) -> None:
    configure_mappers()
    job, attempt = inspect(made.QueuedJob), inspect(made.JobAttempt)
    attempts = job.relationships["attempts"]
    assert attempts.mapper is attempt
    assert attempts.viewonly
    assert attempts.uselist
    assert [column.name for column in attempts.order_by] == ["attempt"]
    assert [(ours.name, theirs.name) for ours, theirs in attempts.local_remote_pairs] == [("id", "job_id")]


@pytest.mark.parametrize("base", [(), (MappedAsDataclass,)], ids=["plain", "dataclass"])
def test_an_application_relates_its_own_job_to_its_own_attempts(base: tuple[type[Any], ...]) -> None:
    class Base(*base, DeclarativeBase):  # type: ignore[misc]
        pass

    class Attempt(models.JobAttemptMixin, Base):
        __tablename__ = "sync_job_attempt"

    class Work(models.QueuedJobMixin, Base):
        __tablename__ = "sync_job"
        tries: Mapped[list[Attempt]] = relationship(
            primaryjoin=lambda: Work.id == foreign(Attempt.job_id), viewonly=True, **({"init": False} if base else {})
        )

    configure_mappers()
    assert "JOIN sync_job_attempt" in str(select(Work).join(Work.tries))


def test_generated_classes_and_their_instances_can_be_pickled() -> None:
    made = for_app("pickled_", 'od"d.schema')
    assert pickle.loads(pickle.dumps(made)) is made
    assert pickle.loads(pickle.dumps(made.Node)) is made.Node
    assert pickle.loads(pickle.dumps(made.Base)) is made.Base
    node = made.Node(name="a", labels={"zone": "x"})  # type: ignore[call-arg]
    copy = pickle.loads(pickle.dumps(node))
    assert type(copy) is made.Node
    assert (copy.name, copy.labels) == ("a", {"zone": "x"})


def test_a_pickled_instance_is_read_by_a_process_that_has_not_made_its_class() -> None:
    node = for_app("elsewhere_", "s").Node(name="a")  # type: ignore[call-arg]
    program = "import pickle, sys; node = pickle.load(sys.stdin.buffer); print(node.name, node.__table__.fullname)"
    done = subprocess.run([sys.executable, "-c", program], input=pickle.dumps(node), capture_output=True, check=True)
    assert done.stdout.decode().split() == ["a", "s.elsewhere_node"]


def test_a_subclass_of_a_generated_class_is_pickled_as_itself() -> None:
    assert pickle.loads(pickle.dumps(Nodes)) is Nodes


class Nodes(for_app("subclassed_").Node):  # type: ignore[misc]
    """In this module, where pickle finds it."""
