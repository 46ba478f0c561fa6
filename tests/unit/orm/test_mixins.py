"""Declaring a TokenOwned class: what is accepted, what is refused, what the table then looks like."""

from __future__ import annotations

import enum
import subprocess
import sys
import uuid
from typing import Any

import pytest
from sqlalchemy import (
    CHAR,
    BigInteger,
    Boolean,
    Column,
    Computed,
    Dialect,
    Enum,
    Float,
    ForeignKey,
    Integer,
    LargeBinary,
    MetaData,
    Numeric,
    SmallInteger,
    String,
    Table,
    Text,
    TypeDecorator,
    Uuid,
    create_engine,
    func,
    insert,
    select,
    update,
)
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.orm import (
    DeclarativeBase,
    Mapped,
    MappedAsDataclass,
    Session,
    mapped_column,
    registry,
)
from sqlalchemy.schema import CreateTable
from sqlalchemy.types import NullType

from jobsync_orm.exceptions import ConfigurationError
from jobsync_orm.hashing import task_to_token
from jobsync_orm.orm import TokenOwned, enable_sqlite


class Shouting(TypeDecorator[str]):
    impl = String
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: Dialect) -> str | None:
        return value and value.upper()


class Named(TypeDecorator[str]):
    """Changes nothing, as that of SQLModel."""

    impl = String
    cache_ok = True


class Padded(TypeDecorator[str]):
    impl = CHAR
    cache_ok = True


class Color(enum.Enum):
    RED = 1


def base() -> type[DeclarativeBase]:
    class Base(DeclarativeBase):
        pass

    return Base


def declare(key: Any, **attributes: Any) -> Any:
    """A model with ``key`` as the column of its key."""
    attributes = {"__token_key__": "key", **attributes}
    body = {"__tablename__": "thing", "id": mapped_column(Integer, primary_key=True), "key": key, **attributes}
    return type("Thing", (TokenOwned, base()), body)


def ddl(model: Any, dialect: Any = None) -> str:
    """The line of ``token_id`` in CREATE TABLE."""
    text = str(CreateTable(model.__table__).compile(dialect=dialect or postgresql.dialect()))
    return next(line.strip().rstrip(",") for line in text.splitlines() if "token_id" in line)


@pytest.mark.parametrize(
    ("type_", "argument"),
    [
        (Text(), "key"),
        (String(), "(key)::text"),
        (String(20), "(key)::text"),
        (Integer(), "(key)::text"),
        (BigInteger(), "(key)::text"),
        (SmallInteger(), "(key)::text"),
        (BigInteger().with_variant(Integer(), "sqlite"), "(key)::text"),
        (Uuid(), "(key)::text"),
        (Uuid(as_uuid=False), "(key)::text"),
        (postgresql.UUID(), "(key)::text"),
        (postgresql.CITEXT(), "(key)::text"),
    ],
    ids=repr,
)
def test_token_id_is_a_stored_generated_column(type_: Any, argument: str) -> None:
    model = declare(mapped_column(type_, nullable=False))
    assert ddl(model) == f"token_id INTEGER GENERATED ALWAYS AS (sync_token_of({argument})) STORED NOT NULL"


def test_token_id_comes_last() -> None:
    class Noted:
        note: Mapped[str]

    class Thing(TokenOwned, Noted, base()):  # type: ignore[misc]
        __tablename__ = "thing"
        __token_key__ = "id"
        id: Mapped[int] = mapped_column(primary_key=True)

    assert [c.name for c in Thing.__table__.columns][-1] == "token_id"


def test_the_column_of_the_key_may_have_another_name_than_the_attribute() -> None:
    model = declare(mapped_column("Key Of", String, nullable=False))
    assert 'sync_token_of(("Key Of")::text)' in ddl(model)


def test_names_of_another_cluster() -> None:
    model = declare(mapped_column(Text, nullable=False), __token_appname__="billing_", __token_schema__="Jobs")
    assert '"Jobs".billing_token_of(key)' in ddl(model)
    assert 'billing_token_of(CAST("key" AS TEXT))' in ddl(model, sqlite.dialect())
    assert "Jobs" not in ddl(model, sqlite.dialect())


def test_names_may_be_set_once_on_the_base() -> None:
    class Base(DeclarativeBase):
        __token_appname__ = "billing_"

    class Thing(Base, TokenOwned):
        __tablename__ = "thing"
        __token_key__ = "id"
        id: Mapped[int] = mapped_column(primary_key=True)

    assert "billing_token_of((id)::text)" in ddl(Thing)


def test_names_on_the_base_count_with_the_mixin_in_front() -> None:
    class Base(DeclarativeBase):
        __token_appname__ = "billing_"

    class Thing(TokenOwned, Base):
        __tablename__ = "thing"
        __token_key__ = "id"
        id: Mapped[int] = mapped_column(primary_key=True)

    assert "billing_token_of((id)::text)" in ddl(Thing)


def test_sql_as_the_key() -> None:
    model = declare(mapped_column(Float), __token_key__=None, __token_key_sql__="to_hex((id + 16)) || '%:x'::text")
    assert "(sync_token_of(to_hex((id + 16)) || '%%:x'::text)) STORED" in ddl(model)


@pytest.mark.parametrize(
    ("type_", "said"),
    [
        (Float(), "Float()"),
        (Numeric(), "Numeric()"),
        (LargeBinary(), "LargeBinary()"),
        (Boolean(), "Boolean()"),
        (CHAR(3), "pads its value"),
        (Enum(Color), "label is not its value"),
        (Shouting(), "Shouting()"),
        (Padded(3), "pads its value"),
        (Uuid(native_uuid=False), "native_uuid"),
        (NullType(), "type is not known"),
    ],
    ids=repr,
)
def test_a_key_whose_text_differs_between_python_and_the_database_is_refused(type_: Any, said: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        declare(Column(type_, nullable=False))
    for part in ("Thing", "'key'", said, "__token_key_sql__"):
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("attributes", "said"),
    [
        ({"__token_key__": None}, "needs one of __token_key__"),
        ({"__token_key_sql__": "key"}, "needs one of __token_key__"),
        ({"__token_key__": "kee"}, "'kee' is no mapped column of table 'thing'"),
        ({"__token_appname__": "Bad-Name"}, "'Bad-Name'"),
        ({"token_id": mapped_column(Integer)}, "not the generated column"),
    ],
)
def test_a_declaration_without_a_usable_key_is_refused(attributes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        declare(mapped_column(Text, nullable=False), **attributes)


def test_a_key_that_may_be_null_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"'key' may be NULL.*nullable=False"):
        declare(mapped_column(Text))


def test_a_key_in_the_parents_table_is_refused() -> None:
    class Parent(base()):  # type: ignore[misc]
        __tablename__ = "parent"
        id: Mapped[int] = mapped_column(primary_key=True)
        key: Mapped[str]

    with pytest.raises(ConfigurationError, match="'key' is no mapped column of table 'child'"):

        class Child(TokenOwned, Parent):
            __tablename__ = "child"
            __token_key__ = "key"
            id: Mapped[int] = mapped_column(ForeignKey("parent.id"), primary_key=True)


def test_a_foreign_key_takes_its_type_from_a_class_declared_later() -> None:
    class Base(DeclarativeBase):
        pass

    class Order(TokenOwned, Base):
        __tablename__ = "order"
        __token_key__ = "customer_id"
        id: Mapped[int] = mapped_column(primary_key=True)
        customer_id: Mapped[str] = mapped_column(ForeignKey("customer.id"))

    class Customer(Base):
        __tablename__ = "customer"
        id: Mapped[str] = mapped_column(Text, primary_key=True)

    Base.registry.configure()
    assert "sync_token_of(customer_id)" in ddl(Order)


def test_a_foreign_key_to_an_unfit_column_is_refused_when_mappers_are_configured() -> None:
    class Base(DeclarativeBase):
        pass

    class Order(TokenOwned, Base):
        __tablename__ = "order"
        __token_key__ = "customer_id"
        id: Mapped[int] = mapped_column(primary_key=True)
        customer_id: Mapped[float] = mapped_column(ForeignKey("customer.id"))

    class Customer(Base):
        __tablename__ = "customer"
        id: Mapped[float] = mapped_column(Float, primary_key=True)

    with pytest.raises(ConfigurationError, match=r"Order: key column 'customer_id' is of type Float"):
        Base.registry.configure()
    Base.registry.dispose()


def test_a_dataclass_base() -> None:
    class Base(MappedAsDataclass, DeclarativeBase):
        pass

    class Thing(TokenOwned, Base):
        __tablename__ = "thing"
        __token_key__ = "key"
        id: Mapped[int] = mapped_column(primary_key=True, init=False)
        key: Mapped[str]

    assert Thing("k") == Thing(key="k")
    with pytest.raises(TypeError, match="token_id"):
        Thing(key="k", token_id=1)  # type: ignore[call-arg]
    assert "sync_token_of((key)::text)" in ddl(Thing)


def test_an_abstract_base() -> None:
    class Abstract(TokenOwned, base()):  # type: ignore[misc]
        __abstract__ = True
        __token_key__ = "key"
        key: Mapped[str]

    class One(Abstract):
        __tablename__ = "one"
        id: Mapped[int] = mapped_column(primary_key=True)

    class Two(Abstract):
        __tablename__ = "two"
        key: Mapped[uuid.UUID] = mapped_column(primary_key=True)

    assert "sync_token_of((key)::text)" in ddl(One)
    assert One.__table__.c.token_id.computed.sqltext.source is One.__table__.c.key
    assert Two.__table__.c.token_id.computed.sqltext.source is Two.__table__.c.key


def test_single_table_inheritance_with_the_mixin_on_the_siblings() -> None:
    class Parent(base()):  # type: ignore[misc]
        __tablename__ = "parent"
        id: Mapped[int] = mapped_column(primary_key=True)
        kind: Mapped[str]
        __mapper_args__ = {"polymorphic_on": "kind"}  # noqa: RUF012

    class One(TokenOwned, Parent):
        __token_key__ = "id"
        __mapper_args__ = {"polymorphic_identity": "one"}  # noqa: RUF012

    class Two(TokenOwned, Parent):
        __token_key__ = "id"
        __mapper_args__ = {"polymorphic_identity": "two"}  # noqa: RUF012

    assert [c.name for c in Parent.__table__.columns].count("token_id") == 1
    with pytest.raises(ConfigurationError, match="one column has one key"):

        class Three(TokenOwned, Parent):
            __token_key__ = "kind"
            __mapper_args__ = {"polymorphic_identity": "three"}  # noqa: RUF012


def test_single_table_inheritance_with_the_mixin_on_the_parent() -> None:
    class Parent(TokenOwned, base()):  # type: ignore[misc]
        __tablename__ = "parent"
        __token_key__ = "id"
        id: Mapped[int] = mapped_column(primary_key=True)
        kind: Mapped[str]
        __mapper_args__ = {"polymorphic_on": "kind"}  # noqa: RUF012

    class One(Parent):
        __mapper_args__ = {"polymorphic_identity": "one"}  # noqa: RUF012

    assert [c.name for c in Parent.__table__.columns].count("token_id") == 1
    assert One.token_id.property.columns == [Parent.__table__.c.token_id]


def test_a_table_whose_class_was_refused_cannot_be_created() -> None:
    class Base(DeclarativeBase):
        pass

    with pytest.raises(ConfigurationError):

        class Thing(TokenOwned, Base):
            __tablename__ = "thing"
            id: Mapped[int] = mapped_column(primary_key=True)

    with pytest.raises(ConfigurationError, match="token_id has no key"):
        str(CreateTable(Base.metadata.tables["thing"]).compile(dialect=postgresql.dialect()))


def test_a_table_of_the_users_own() -> None:
    class Thing(TokenOwned, base()):  # type: ignore[misc]
        __table__ = Table(
            "thing",
            MetaData(),
            Column("id", Integer, primary_key=True),
            Column("token_id", Integer, Computed("sync_token_of((id)::text)", persisted=True), nullable=False),
        )

    assert "AS (sync_token_of((id)::text)) STORED" in ddl(Thing)


def test_an_imperative_mapping_without_the_column_is_refused() -> None:
    class Thing(TokenOwned):
        pass

    with pytest.raises(ConfigurationError, match="not the generated column"):
        registry().map_imperatively(Thing, Table("thing", MetaData(), Column("id", Integer, primary_key=True)))


def test_a_copy_of_the_table_computes_the_same() -> None:
    model = declare(mapped_column(Text, nullable=False))
    copy = model.__table__.to_metadata(MetaData())
    assert "AS (sync_token_of(key)) STORED" in str(CreateTable(copy).compile(dialect=postgresql.dialect()))


def test_sqlite_gives_the_tokens_of_postgresql() -> None:
    class Base(DeclarativeBase):
        pass

    class Number(TokenOwned, Base):
        __tablename__ = "number"
        __token_key__ = "id"
        id: Mapped[int] = mapped_column(primary_key=True)

    class Word(TokenOwned, Base):
        __tablename__ = "word"
        __token_key__ = "word"
        word: Mapped[str] = mapped_column(primary_key=True)

    class Thing(TokenOwned, Base):
        __tablename__ = "thing"
        __token_key__ = "id"
        id: Mapped[uuid.UUID] = mapped_column(primary_key=True)

    engine = enable_sqlite(create_engine("sqlite://"))
    Base.metadata.create_all(engine)
    key = uuid.uuid4()
    with Session(engine) as session:
        rows = [Number(), Number(id=-7), Word(word="é中"), Thing(id=key)]
        session.add_all(rows)
        session.flush()
        assert rows[0].id is not None
        tokens = [row.token_id for row in rows]
        assert tokens == [task_to_token(k, 10_000) for k in (rows[0].id, -7, "é中", key)]
        session.execute(update(Word).values(word=func.lower("ABC")))
        assert session.scalar(select(Word.token_id)) == task_to_token("abc", 10_000)
    engine.dispose()


def test_sqlite_with_other_settings() -> None:
    model = declare(mapped_column(Text, nullable=False), __token_appname__="x_")
    engine = enable_sqlite(create_engine("sqlite://"), "x_", 7, "md5")
    model.metadata.create_all(engine)
    with engine.begin() as connection:
        connection.execute(insert(model), [{"key": k} for k in "abcdef"])
        found = dict(map(tuple, connection.execute(select(model.key, model.token_id))))
    assert found == {key: task_to_token(key, 7, "md5") for key in "abcdef"}
    engine.dispose()


@pytest.mark.parametrize("engine", [create_engine("postgresql+psycopg://"), "sqlite://"])
def test_enable_sqlite_refuses_other_engines(engine: Any) -> None:
    with pytest.raises(ConfigurationError, match="no SQLite engine"):
        enable_sqlite(engine)


def test_enable_sqlite_refuses_bad_settings_at_once() -> None:
    engine = create_engine("sqlite://")
    with pytest.raises(ConfigurationError, match="total_tokens=0"):
        enable_sqlite(engine, total_tokens=0)
    with pytest.raises(ConfigurationError, match="crc32"):
        enable_sqlite(engine, hash_function="crc32")


def test_importing_the_package_is_cheap() -> None:
    code = "import sys, jobsync_orm.orm; print([m for m in ('alembic', 'sqlalchemy.ext.asyncio') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
