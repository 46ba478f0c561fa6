"""Alembic makes the column, sees afterwards that nothing has changed, and says nothing."""

from __future__ import annotations

import uuid
from typing import Any

import pytest
from alembic.autogenerate import compare_metadata, produce_migrations, render_python_code
from alembic.migration import MigrationContext
from alembic.operations import Operations
from sqlalchemy import BigInteger, Connection, Engine, SmallInteger, String, Text, insert, select, text
from sqlalchemy.dialects.postgresql import CITEXT
from sqlalchemy.dialects.postgresql import UUID as PG_UUID
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from jobsync_orm import migrate
from jobsync_orm.hashing import task_to_token
from jobsync_orm.orm import TokenOwned


class Base(DeclarativeBase):
    pass


def model(name: str, type_: Any, **attributes: Any) -> Any:
    """A model with a key column of an awkward name."""
    key = mapped_column("Key of", type_, primary_key=True)
    attributes = {"__token_key__": "key", **attributes}
    return type(name, (TokenOwned, Base), {"__tablename__": name.lower(), "key": key, **attributes})


MODELS = {
    model("Texts", Text): "aé'%",
    model("Collated", Text(collation="C")): "a",
    model("Strings", String): "aé'%",
    model("Limited", String(20)): "a",
    model("Integers", SmallInteger): -7,
    model("Bigs", BigInteger): 2**40,
    model("Uuids", PG_UUID): uuid.UUID(int=7),
    model("Expressions", Text, __token_key__=None, __token_key_sql__='lower("Key of")'): "AB",
}


class Plain(TokenOwned, Base):
    __tablename__ = "plain"
    __token_key__ = "id"
    id: Mapped[uuid.UUID] = mapped_column(primary_key=True)


def context(connection: Connection) -> MigrationContext:
    options = {
        "compare_server_default": True,
        "include_name": migrate.include_name,
        "include_object": migrate.include_object,
    }
    return MigrationContext.configure(connection, opts={**options, "target_metadata": Base.metadata})


def test_create_all_then_compare(engine: Engine) -> None:
    with engine.begin() as connection:
        Base.metadata.create_all(connection)
        assert compare_metadata(context(connection), Base.metadata) == []


def test_the_rendered_migration_makes_the_column(engine: Engine) -> None:
    with engine.begin() as connection:
        migration = context(connection)
        code = render_python_code(produce_migrations(migration, Base.metadata).upgrade_ops, migration_context=migration)
        namespace: dict[str, Any] = {}
        exec(
            "import sqlalchemy as sa\nfrom sqlalchemy import Text\nfrom sqlalchemy.dialects import postgresql\n"
            f"def upgrade(op):\n    {code}\n",
            namespace,
        )
        namespace["upgrade"](Operations(migration))
        assert compare_metadata(context(connection), Base.metadata) == []
        for table, key in MODELS.items():
            connection.execute(insert(table).values(key=key))
            task = "ab" if table.__name__ == "Expressions" else key
            assert connection.scalar(select(table.token_id)) == task_to_token(task, 10_000), table


def test_a_key_of_type_citext(engine: Engine) -> None:
    class Other(DeclarativeBase):
        pass

    class Word(TokenOwned, Other):
        __tablename__ = "word"
        __token_key__ = "word"
        word: Mapped[str] = mapped_column(CITEXT, primary_key=True)

    with engine.begin() as connection:
        available = text("SELECT 1 FROM pg_available_extensions WHERE name = 'citext'")
        if connection.scalar(available) is None:
            pytest.skip("the server has no citext")
        connection.execute(text("CREATE EXTENSION citext"))
        Other.metadata.create_all(connection)
        connection.execute(insert(Word).values(word="aB"))
        assert connection.scalar(select(Word.token_id)) == task_to_token("aB", 10_000)
        assert compare_metadata(context(connection), Other.metadata) == []


def test_a_change_of_the_key_is_noticed(engine: Engine) -> None:
    class Other(DeclarativeBase):
        pass

    class Changed(TokenOwned, Other):
        __tablename__ = "plain"
        __token_key__ = "other"
        id: Mapped[uuid.UUID] = mapped_column(primary_key=True)
        other: Mapped[str]

    with engine.begin() as connection:
        Plain.__table__.create(connection)  # type: ignore[attr-defined]
        connection.execute(text("ALTER TABLE plain ADD other varchar NOT NULL"))
        with pytest.warns(UserWarning, match=r"Computed default on plain.token_id cannot be modified"):
            compare_metadata(context(connection), Other.metadata)


def test_another_schema_and_appname(engine: Engine) -> None:
    class Elsewhere(DeclarativeBase):
        __token_appname__ = "billing_"
        __token_schema__ = "Jobs"

    class Bill(TokenOwned, Elsewhere):
        __tablename__ = "bill"
        __token_key__ = "number"
        number: Mapped[int] = mapped_column(primary_key=True)

    migrate.upgrade(engine, appname="billing_", schema="Jobs", total_tokens=7)
    with engine.begin() as connection:
        Elsewhere.metadata.create_all(connection)
        connection.execute(insert(Bill).values(number=1))
        assert connection.scalar(select(Bill.token_id)) == task_to_token(1, 7)
        assert compare_metadata(context(connection), Elsewhere.metadata) == []
