"""Writes whose tokens cannot be known are refused, before they are sent; and sessions that cannot be fenced."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from sqlalchemy import (
    Column,
    Computed,
    Engine,
    Integer,
    String,
    Table,
    bindparam,
    create_engine,
    delete,
    event,
    func,
    insert,
    select,
    text,
    update,
)
from sqlalchemy.dialects.postgresql import insert as upsert
from sqlalchemy.ext.hybrid import hybrid_property
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from jobsync_orm.exceptions import ConfigurationError, FenceNotApplicable, NotRunning, OwnershipLost
from jobsync_orm.naming import Names
from jobsync_orm.orm import OwnedSession, TokenOwned, enable_sqlite
from tests.conftest import Server
from tests.integration.orm.fence.conftest import HeldJob, Statements, take, token
from tests.integration.orm.models import Item, Part, Truck

item, part, truck = Item.__table__, Part.__table__, Truck.__table__

REMEDY = r"flush them|once for each|leave the column|of its own|session\.delete"

UNKNOWN: dict[str, Callable[[Session], Any]] = {
    "update of the key": lambda s: s.execute(update(Item).where(Item.note == "").values(sku="k4")),
    "update of the key, core": lambda s: s.execute(update(item).values({item.c.sku: "k4"})),
    "update of the key, parameters": lambda s: s.connection().execute(update(item), {"sku": "k4"}),
    "update of the key, ordered": lambda s: s.execute(update(item).ordered_values((item.c.sku, "k4"))),
    "update of the key, one of two keys": lambda s: s.execute(
        update(Item).where((Item.id == 2) | (Item.id == 4)).values(sku="k4")
    ),
    "query update of the key": lambda s: s.query(Item).update({Item.sku: "k4"}),
    "upsert that sets the key": lambda s: s.execute(
        upsert(Item).values(id=2, sku="k2").on_conflict_do_update(index_elements=["id"], set_={"sku": "k4"})
    ),
    "many updates not by primary key": lambda s: s.connection().execute(
        update(item).where(item.c.sku == bindparam("b")), [{"b": "k2", "note": "a"}, {"b": "k4", "note": "b"}]
    ),
    "many deletes not by primary key": lambda s: s.connection().execute(
        delete(part).where(part.c.serial == bindparam("b")), [{"b": "k2"}, {"b": "k4"}]
    ),
    "delete of the joined table alone": lambda s: s.execute(delete(truck).where(truck.c.load == 0)),
    "write in a CTE": lambda s: s.execute(
        select(update(item).values(note="x").where(item.c.id == 2).returning(item.c.id).cte("w").c.id)
    ),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_not_sent(name: str, stocked_engine: Engine, job: HeldJob) -> None:
    with OwnedSession(stocked_engine, job=job) as session:
        session.connection()
        statements = Statements(stocked_engine)  # behind the fence
        with pytest.raises(
            FenceNotApplicable,
            match=REMEDY,
        ):
            UNKNOWN[name](session)
        assert not statements.sent
        session.add(Part(serial="k2", item_id=2))
        session.rollback()


def test_a_row_that_appears_between_lock_and_update(stocked_engine: Engine, job: HeldJob) -> None:
    """Its token before the UPDATE is not known: nothing of the transaction may be stored."""
    with OwnedSession(stocked_engine, job=job) as session:
        connection = session.connection()
        done: list[bool] = []

        def insert_between(*arguments: Any) -> None:
            if arguments[2].startswith("UPDATE") and not done:
                done.append(True)
                with stocked_engine.begin() as other:
                    other.execute(text("INSERT INTO item (id, sku, note) VALUES (100, 'k1', '')"))

        event.listen(connection, "before_cursor_execute", insert_between)
        with pytest.raises(FenceNotApplicable, match="Roll back and repeat"):
            session.execute(update(item).where(item.c.id == 100).values(sku="k2"))
        with pytest.raises(FenceNotApplicable, match="must be rolled back"):
            session.commit()
        session.rollback()
    with stocked_engine.connect() as connection:
        assert connection.scalar(text("SELECT sku FROM item WHERE id = 100")) == "k1"


def test_autocommit(stocked_engine: Engine, job: HeldJob) -> None:
    for engine in (
        stocked_engine.execution_options(isolation_level="AUTOCOMMIT"),
        create_engine(stocked_engine.url, isolation_level="AUTOCOMMIT"),
    ):
        with OwnedSession(engine, job=job) as session:
            assert session.scalar(select(func.count(Item.id))) == 6
            session.add(Item(id=100, sku="k2"))
            with pytest.raises(ConfigurationError, match="AUTOCOMMIT"):
                session.commit()
            session.rollback()
            assert session.scalar(select(func.count(Item.id))) == 6
        engine.dispose()


def test_two_phase(stocked_engine: Engine, job: HeldJob) -> None:
    with OwnedSession(stocked_engine, twophase=True, job=job) as session:
        session.add(Item(id=100, sku="k2"))
        with pytest.raises(ConfigurationError, match="two-phase"):
            session.flush()
        session.rollback()
        assert session.scalar(select(func.count(Item.id))) == 6


def test_a_job_that_does_not_run(stocked_engine: Engine, job: HeldJob) -> None:
    job.is_running, job.view = False, None
    with OwnedSession(stocked_engine, job=job) as session:
        assert session.scalar(select(func.count(Item.id))) == 6
        session.add(Item(id=100, sku="k2"))
        with pytest.raises(NotRunning, match="me"):
            session.commit()
        session.rollback()
        job.is_running = True
        session.add(Item(id=100, sku="k2"))
        with pytest.raises(NotRunning, match="when this transaction began"):
            session.commit()


def test_a_model_of_another_cluster(stocked_engine: Engine, job: HeldJob) -> None:
    job.names = Names("billing_")
    with OwnedSession(stocked_engine, job=job) as session:
        session.add(Item(id=100, sku="k2"))
        with pytest.raises(ConfigurationError, match=r"'sync_'.*'billing_'"):
            session.commit()
        session.rollback()
        assert session.scalar(select(func.count(Item.id))) == 6


def test_another_database_system(job: HeldJob) -> None:
    engine = enable_sqlite(create_engine("sqlite://"))
    Part.metadata.create_all(engine)
    with OwnedSession(engine, job=job) as session:
        session.add(Item(id=100, sku="k2"))
        with pytest.raises(ConfigurationError, match="PostgreSQL"):
            session.commit()
    engine.dispose()


class Base(DeclarativeBase):
    pass


class Odd(TokenOwned, Base):
    """Names of columns and attributes differ, and the key is SQL."""

    __tablename__ = "odd"
    __token_key_sql__ = "lower(email)"
    number: Mapped[int] = mapped_column("id", primary_key=True)
    address: Mapped[str] = mapped_column("email")
    remark: Mapped[str] = mapped_column("note", default="")

    @hybrid_property
    def loud(self) -> str:
        return self.address.upper()

    @loud.inplace.expression
    @classmethod
    def _loud(cls) -> Any:
        return func.upper(cls.address)

    @loud.inplace.update_expression
    @classmethod
    def _set_loud(cls, value: str) -> list[tuple[Any, Any]]:
        return [(cls.address, func.upper(value))]


class Reflected(TokenOwned, Base):
    """A table that says itself how its token is computed."""

    __table__ = Table(
        "reflected",
        Base.metadata,
        Column("id", Integer, primary_key=True),
        Column("sku", String, nullable=False),
        Column("note", String),
        Column("token_id", Integer, Computed("sync_token_of((sku)::text)", persisted=True), nullable=False),
    )


class Keyed(TokenOwned, Base):
    """The key is the primary key, and there are two of them."""

    __tablename__ = "keyed"
    __token_key__ = "sku"
    sku: Mapped[str] = mapped_column(primary_key=True)
    part: Mapped[int] = mapped_column(primary_key=True)
    note: Mapped[str] = mapped_column(default="")


class Quiet(TokenOwned, Base):
    """A table for which SQLAlchemy must not use RETURNING by itself."""

    __tablename__ = "quiet"
    __token_key__ = "sku"
    id: Mapped[int] = mapped_column(primary_key=True)
    sku: Mapped[str]
    note: Mapped[str] = mapped_column(default="")
    __table_args__ = {"implicit_returning": False}  # noqa: RUF012


class Versioned(TokenOwned, Base):
    __tablename__ = "versioned"
    __token_key__ = "sku"
    id: Mapped[int] = mapped_column(primary_key=True)
    sku: Mapped[str]
    note: Mapped[str] = mapped_column(default="")
    version: Mapped[int] = mapped_column()
    __mapper_args__ = {"version_id_col": version}  # noqa: RUF012


@pytest.fixture(scope="module")
def odd_database(server: Server, orm_template: str) -> Iterator[Engine]:
    url = server.create_database(orm_template)
    engine = create_engine(url.update_query_dict({"options": "-c synchronous_commit=off"}))
    Base.metadata.create_all(engine)
    yield engine
    engine.dispose()
    server.drop_database(url)


@pytest.fixture
def odd_engine(odd_database: Engine) -> Engine:
    """A database with these models' tables, empty."""
    with odd_database.begin() as connection:
        for table in Base.metadata.tables.values():
            connection.execute(table.delete())
    take(odd_database, "k2", node="me", epoch=0)
    return odd_database


@pytest.mark.parametrize(
    "statement",
    [
        lambda: update(Odd).values(address="k4"),
        lambda: update(Odd).values({Odd.address: "k4"}),
        lambda: update(Odd).values(loud="k4"),
        lambda: update(Odd).values({Odd.loud: "k4"}),
        lambda: update(Odd.__table__).values(email="k4"),
        lambda: update(Reflected).values(sku="k4"),
        lambda: update(Keyed).where(Keyed.part == 1).values(sku="k4"),
        lambda: update(Quiet).values(note="x"),
        lambda: delete(Quiet),
    ],
)
def test_what_cannot_be_known(odd_engine: Engine, job: HeldJob, statement: Callable[[], Any]) -> None:
    with OwnedSession(odd_engine, job=job) as session, pytest.raises(FenceNotApplicable):
        session.execute(statement(), execution_options={"synchronize_session": False})


@pytest.mark.parametrize(
    "statement",
    [
        lambda: update(Odd).values(remark="x"),
        lambda: update(Odd.__table__).values(note="x"),
        lambda: update(Reflected).values(note="x"),
        lambda: update(Keyed).where(Keyed.part == 1).values(note="x"),
        lambda: update(Quiet.__table__).values(note="x"),
        lambda: insert(Quiet).values(sku="k2"),
        lambda: delete(Quiet.__table__),
        lambda: update(Versioned).values(note="x"),
    ],
)
def test_what_does_not(odd_engine: Engine, job: HeldJob, statement: Callable[[], Any]) -> None:
    with OwnedSession(odd_engine, job=job) as session:
        session.add_all([Odd(number=1, address="K2"), Reflected(id=1, sku="k2"), Keyed(sku="k2", part=1)])
        session.add_all([Quiet(id=100, sku="k2"), Versioned(id=1, sku="k2")])
        session.commit()
        session.execute(statement())
        take(odd_engine, "k2")
        with pytest.raises(OwnershipLost) as caught:
            session.commit()
        assert caught.value.tokens == (token("k2"),)


@pytest.mark.parametrize("model", [Odd, Reflected, Keyed, Quiet, Versioned])
def test_flush_of_odd_models(odd_engine: Engine, job: HeldJob, model: Any) -> None:
    key, note = {Odd: ("address", "remark")}.get(model, ("sku", "note"))
    extra = {"part": 1} if model is Keyed else {}
    with OwnedSession(odd_engine, job=job) as session:
        things = [model(**{key: name}, **extra) for name in ("k2", "k4")]
        for number, thing in enumerate(things, 1):
            if model is not Keyed:
                setattr(thing, "number" if model is Odd else "id", number)
        session.add_all(things)
        session.commit()
        for action in ("note", "key", "delete"):
            for thing in reversed(things):
                if action == "delete":
                    session.delete(thing)
                elif action == "note":
                    setattr(thing, note, "late")
                else:
                    setattr(thing, key, {"k2": "k4", "k4": "k6"}[getattr(thing, key)])
            session.flush()
            take(odd_engine, "k2")
            with pytest.raises(OwnershipLost) as caught:
                session.commit()
            assert caught.value.tokens == (token("k2"),)
            session.rollback()
            take(odd_engine, "k2", node="me", epoch=0)
