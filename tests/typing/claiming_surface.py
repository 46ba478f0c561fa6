"""What a type checker knows of ``job.claim``. Checked by mypy --strict, never run."""

from __future__ import annotations

from typing import Any, assert_type

from sqlalchemy import Connection, Select, select
from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, aliased, mapped_column, scoped_session

from jobsync_orm import Job
from jobsync_orm.migrate.fence import create_ownership_fence, drop_ownership_fence
from jobsync_orm.orm import OwnedSession, TokenOwned


class Base(DeclarativeBase):
    pass


class Item(TokenOwned, Base):
    __tablename__ = "item"
    __token_key__ = "sku"
    id: Mapped[int] = mapped_column(primary_key=True)
    sku: Mapped[str]


def rows(job: Job, session: Session, registry: scoped_session[Session], owned: OwnedSession) -> None:
    pending = select(Item).where(Item.id > 1).order_by(Item.id)
    assert_type(job.claim(session, pending, limit=10), list[Item])
    assert_type(job.claim(registry, pending), list[Item])
    assert_type(job.claim(owned, select(aliased(Item)), 10), list[Item])
    assert_type(job.claim(session, select(Item.sku)), list[str])
    for number, sku in job.claim(session, select(Item.id, Item.sku)):
        assert_type(number, int)
        assert_type(sku, str)
    for item, number, sku in job.claim(session, select(Item, Item.id, Item.sku)):
        assert_type((item, number, sku), tuple[Item, int, str])
    job.claim(session, "item")  # type: ignore[call-overload]
    job.claim(session, pending, limit="10")  # type: ignore[call-overload]
    job.claim("session", pending)  # type: ignore[call-overload]


async def async_rows(job: Job, session: AsyncSession, registry: async_scoped_session[AsyncSession]) -> None:
    assert_type(await job.claim(session, select(Item), limit=10), list[Item])
    assert_type(await job.claim(registry, select(Item)), list[Item])
    for number, sku in await job.claim(session, select(Item.id, Item.sku)):
        assert_type(number, int)
        assert_type(sku, str)


def any_statement(job: Job, session: Session, statement: Select[Any]) -> list[Any]:
    return job.claim(session, statement)


def fence(connection: Connection) -> None:
    create_ownership_fence(connection, "item", schema="shop", appname="x_", token_schema="jobs", undeclared="refuse")
    drop_ownership_fence(connection, "item")
    create_ownership_fence(connection, "item", undeclared="maybe")  # type: ignore[arg-type]
