"""What a type checker knows of the ORM surface. Checked by mypy --strict, never run."""

from __future__ import annotations

from typing import assert_type

from sqlalchemy import ColumnElement, Engine, delete, func, select, update
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker
from sqlalchemy.orm import DeclarativeBase, Mapped, MappedAsDataclass, Session, aliased, mapped_column, sessionmaker

from jobsync_orm import Job
from jobsync_orm.orm import (
    OwnedQuerySession,
    OwnedSession,
    Owner,
    ShardedQuery,
    TokenOwned,
    enable_sqlite,
    filter_session,
    owned_by,
    unfilter_session,
)


class Base(DeclarativeBase):
    __token_appname__ = "billing_"


class Item(TokenOwned, Base):
    __tablename__ = "item"
    __token_key__ = "sku"
    id: Mapped[int] = mapped_column(primary_key=True)
    sku: Mapped[str]


class DataBase(MappedAsDataclass, DeclarativeBase):
    pass


class Thing(TokenOwned, DataBase):
    __tablename__ = "thing"
    __token_key_sql__ = "lower(name)"
    id: Mapped[int] = mapped_column(primary_key=True, init=False)
    name: Mapped[str]


def owner_of(job: Job) -> Owner:
    return job


def criterion(job: Owner, session: Session) -> None:
    assert_type(Item.owned_by(job), ColumnElement[bool])
    assert_type(owned_by(aliased(Item), job), ColumnElement[bool])
    assert_type(aliased(Item).owned_by(job), ColumnElement[bool])
    assert_type(Item(sku="a").token_id, int)
    assert_type(Thing(name="a").token_id, int)
    items = session.scalars(select(Item).where(Item.owned_by(job) & (Item.token_id > 1))).all()
    assert_type(items[0], Item)
    session.execute(update(Item).where(Item.owned_by(job)))
    session.execute(delete(Item).where(Item.owned_by(job)))


def queries(job: Owner, engine: Engine) -> None:
    maker = sessionmaker(engine, class_=OwnedQuerySession)
    assert_type(maker, sessionmaker[OwnedQuerySession])
    with maker() as session:
        assert_type(session.query(Item).owned_by(job), ShardedQuery[Item])
        assert_type(session.query(Item).filter(Item.id > 1).owned_by(job).order_by(Item.id).all(), list[Item])
        assert_type(session.query(Item).select_from(Item).owned_by(job).first(), Item | None)
        assert_type(session.query(aliased(Item)).owned_by(job), ShardedQuery[Item])
        session.query(Item.id, Item.sku).owned_by(job).all()
        session.query(func.count()).select_from(Item).owned_by(job).scalar()


def sessions(job: Owner, engine: Engine, one: AsyncSession, factory: async_sessionmaker[AsyncSession]) -> None:
    for target in (Session(engine), sessionmaker(engine), sessionmaker(engine, class_=OwnedQuerySession)):
        filter_session(target, job)
        unfilter_session(target)
    filter_session(one, job)
    filter_session(factory, job)
    assert_type(enable_sqlite(engine), Engine)
    filter_session(engine, job)  # type: ignore[arg-type]
    Item.owned_by("me")  # type: ignore[arg-type]
    Session(engine).query(Item).owned_by(job)  # type: ignore[attr-defined]


async def fenced(job: Job, engine: Engine, one: AsyncSession, factory: async_sessionmaker[AsyncSession]) -> None:
    async def work(session: AsyncSession) -> str:
        return str(session)

    assert_type(job.bind(Session(engine)), Session)
    assert_type(job.bind(one), AsyncSession)
    assert_type(OwnedSession(engine, job=job), OwnedSession)
    assert_type(job.run(sessionmaker(engine), lambda session: len(session.new)), int)
    assert_type(job.run(sessionmaker(engine, class_=OwnedSession, job=job), lambda session: None), None)
    assert_type(await job.run_async(factory, work), str)
    job.bind(sessionmaker(engine))  # type: ignore[type-var]
    OwnedSession(engine)  # type: ignore[call-arg]
