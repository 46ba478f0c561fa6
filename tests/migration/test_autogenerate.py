"""The hooks keep the application's autogenerate away from the library's tables, and from nothing else."""

from __future__ import annotations

from typing import Any

import pytest
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from sqlalchemy import Engine, text
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from jobsync_orm import migrate
from jobsync_orm.models import NodeMixin


class Base(DeclarativeBase):
    pass


class Invoice(Base):
    __tablename__ = "invoice"
    id: Mapped[int] = mapped_column(primary_key=True)


class Node(NodeMixin, Base):
    __tablename__ = "sync_node"


@pytest.fixture
def application(engine: Engine) -> Engine:
    """The library's tables twice, and a table the application has forgotten."""
    migrate.upgrade(engine, appname="billing_", schema="jobs", total_tokens=2)
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE forgotten (id int)"))
        connection.execute(text("CREATE TABLE jobs.forgotten_too (id int)"))
    return engine


def differences(engine: Engine, **options: Any) -> set[tuple[str, str]]:
    with engine.connect() as connection:
        context = MigrationContext.configure(connection, opts=options)
        return {(change[0], change[1].name) for change in compare_metadata(context, Base.metadata) if len(change) > 1}


WANTED = {("add_table", "invoice"), ("remove_table", "forgotten")}


def test_without_hooks_the_tables_would_be_dropped(application: Engine) -> None:
    assert ("remove_table", "sync_token") in differences(application)


def test_the_default_hooks(application: Engine) -> None:
    hooks = {"include_name": migrate.include_name, "include_object": migrate.include_object}
    assert differences(application, **hooks) == WANTED
    # Each is asked at a different moment, and one alone must not drop a table either.
    assert differences(application, include_object=migrate.include_object) == WANTED


def test_hooks_of_two_clusters_one_in_a_schema(application: Engine) -> None:
    first = migrate.hooks()
    both = migrate.hooks("billing_", "jobs", include_name=first.include_name, include_object=first.include_object)
    assert differences(application, include_schemas=True, **both._asdict()) == WANTED | {
        ("remove_table", "forgotten_too")
    }


def test_a_schema_that_comes_first_on_the_search_path(application: Engine) -> None:
    # There Alembic reports the tables without a schema.
    hooks = migrate.hooks("billing_", "jobs")
    with application.connect() as connection:
        connection.execute(text("SET search_path TO jobs"))
        application.dialect.default_schema_name = "jobs"
        context = MigrationContext.configure(connection, opts=hooks._asdict())
        found = {change[1].name for change in compare_metadata(context, Base.metadata) if change[0] == "remove_table"}
    assert found == {"forgotten_too"}


def test_the_applications_own_hooks_are_asked_about_everything_else(application: Engine) -> None:
    asked: set[str] = set()

    def own_name(name: Any, type_: str, parents: Any) -> bool:
        asked.add(name)
        return name != "forgotten"

    def own_object(object: Any, name: Any, type_: str, reflected: bool, compare_to: Any) -> bool:
        asked.add(name)
        return name != "invoice"

    hooks = migrate.hooks(include_name=own_name, include_object=own_object)
    assert differences(application, **hooks._asdict()) == set()
    assert {"forgotten", "invoice"} <= asked
    assert not {name for name in asked if name and name.startswith("sync_")}


def test_a_table_of_the_same_name_in_another_schema_is_the_applications() -> None:
    hooks = migrate.hooks("sync_", "jobs")
    assert hooks.include_name("sync_node", "table", {"schema_name": "other"})
    assert not hooks.include_name("sync_node", "table", {"schema_name": "jobs"})
    assert hooks.include_name("sync_nodes", "table", {"schema_name": "jobs"})
    assert hooks.include_name("sync_node", "column", {"schema_name": "jobs"})
