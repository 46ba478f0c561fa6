"""job.run and job.bind, with two real jobs: the second one joins while the first one works."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from sqlalchemy import Engine, create_engine, func, select, text
from sqlalchemy.exc import DBAPIError, IntegrityError
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker

from jobsync_orm import ConfigurationError, CoordinationConfig, Job, NotRunning, OwnedSession, OwnershipLost, TokenOwned
from tests.integration.cluster import QUICK, wait_for

ROWS = 200


class Base(DeclarativeBase):
    pass


class Item(TokenOwned, Base):
    __tablename__ = "item"
    __token_key__ = "id"
    id: Mapped[int] = mapped_column(primary_key=True)
    done_by: Mapped[str | None]


class Pair:
    """Job a, and b, which takes half of its tokens when it is asked to."""

    def __init__(self, engine: Engine, stack: ExitStack) -> None:
        self.engine = engine
        self._stack = stack
        self._config = CoordinationConfig(engine=engine, **QUICK)
        self.a = stack.enter_context(Job("a", self._config))
        wait_for(lambda: len(self.a.my_tokens) == 10_000, "a owns everything")
        self.attempts = 0

    def join(self) -> None:
        b = self._stack.enter_context(Job("b", self._config))
        wait_for(lambda: len(b.my_tokens) == 5000 == len(self.a.my_tokens), "a and b share")

    def stored(self) -> int:
        with Session(self.engine) as session:
            return session.scalar(select(func.count()).where(Item.done_by == "a")) or 0


@pytest.fixture
def pair(engine: Engine) -> Iterator[Pair]:
    Base.metadata.create_all(engine)
    with Session(engine) as session, session.begin():
        session.add_all([Item(id=number) for number in range(ROWS)])
    with ExitStack() as stack:
        yield Pair(engine, stack)


def finish(pair: Pair, session: Session) -> int:
    pair.attempts += 1
    items = session.scalars(select(Item).where(Item.owned_by(pair.a))).all()
    for item in items:
        item.done_by = "a"
    session.flush()
    if pair.attempts == 1:
        pair.join()
    return len(items)


def test_the_work_is_repeated_on_what_is_still_owned(pair: Pair) -> None:
    done = pair.a.run(sessionmaker(pair.engine), lambda session: finish(pair, session))
    assert pair.attempts == 2
    assert 0 < done < ROWS
    assert pair.stored() == done


def test_after_the_last_attempt_it_is_raised(pair: Pair) -> None:
    with pytest.raises(OwnershipLost) as caught:
        pair.a.run(sessionmaker(pair.engine), lambda session: finish(pair, session), attempts=1)
    assert set(caught.value.owners.values()) == {"b"}
    assert set(caught.value.tokens).isdisjoint(pair.a.my_tokens)
    assert pair.stored() == 0


def test_a_bound_session(pair: Pair) -> None:
    with Session(pair.engine) as session:
        assert pair.a.bind(session) is session
        finish(pair, session)
        with pytest.raises(OwnershipLost, match="now b's"):
            session.commit()
    assert pair.stored() == 0


def test_other_errors_are_not_repeated(pair: Pair) -> None:
    def fail(session: Session) -> None:
        pair.attempts += 1
        session.add(Item(id=1))

    factory = sessionmaker(pair.engine, class_=OwnedSession, job=pair.a)
    with pytest.raises(IntegrityError):
        pair.a.run(factory, fail)
    assert pair.attempts == 1
    with pytest.raises(ConfigurationError, match="attempts=0"):
        pair.a.run(factory, fail, attempts=0)


IDLE = {"options": "-c idle_in_transaction_session_timeout=100"}


def stand_still(pair: Pair, session: Session) -> None:
    """Return when the server has ended the session because its transaction was idle."""
    pid = session.scalar(select(func.pg_backend_pid()))
    alive = text("SELECT count(*) FROM pg_stat_activity WHERE pid = :pid")
    # Within one transaction the view does not change.
    with pair.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        wait_for(lambda: connection.scalar(alive, {"pid": pid}) == 0, "the server ends the session")


@pytest.mark.parametrize("goes_on", [True, False], ids=["then works on", "then commits"])
def test_a_session_that_stood_still_for_too_long(pair: Pair, goes_on: bool) -> None:
    def work(session: Session) -> int:
        pair.attempts += 1
        items = session.scalars(select(Item).where(Item.owned_by(pair.a), Item.done_by.is_(None)).limit(10)).all()
        for item in items:
            item.done_by = "a"
        session.flush()
        if pair.attempts == 1:
            stand_still(pair, session)
            if goes_on:
                session.scalars(select(Item)).all()
        return len(items)

    engine = create_engine(pair.engine.url, connect_args=IDLE)
    try:
        assert pair.a.run(sessionmaker(engine), work) == 10
        assert (pair.attempts, pair.stored()) == (2, 10)
        pair.attempts = 0
        with pytest.raises(DBAPIError) as caught:
            pair.a.run(sessionmaker(engine), work, attempts=1)
        assert getattr(caught.value.orig, "sqlstate", None) == "25P03"
    finally:
        engine.dispose()
    assert pair.stored() == 10


@pytest.mark.asyncio
@pytest.mark.parametrize("goes_on", [True, False], ids=["then works on", "then commits"])
async def test_an_async_session_that_stood_still_for_too_long(pair: Pair, goes_on: bool) -> None:
    async def work(session: AsyncSession) -> None:
        pair.attempts += 1
        (await session.scalars(select(Item).where(Item.owned_by(pair.a)).limit(10))).first().done_by = "a"
        await session.flush()
        if pair.attempts == 1:
            await session.run_sync(lambda sync: stand_still(pair, sync))
            if goes_on:
                (await session.scalars(select(Item))).all()

    engine = create_async_engine(pair.engine.url, connect_args=IDLE)
    try:
        await pair.a.run_async(async_sessionmaker(engine), work)
    finally:
        await engine.dispose()
    assert (pair.attempts, pair.stored()) == (2, 1)


def test_a_stopped_job(pair: Pair) -> None:
    pair.a.stop()
    with pytest.raises(NotRunning):
        pair.a.run(sessionmaker(pair.engine), lambda session: session.add(Item(id=1000)))


@pytest.mark.asyncio
async def test_async(pair: Pair) -> None:
    async def work(session: AsyncSession) -> int:
        return await session.run_sync(lambda sync: finish(pair, sync))

    engine = create_async_engine(pair.engine.url)
    try:
        done = await pair.a.run_async(async_sessionmaker(engine), work)
    finally:
        await engine.dispose()
    assert pair.attempts == 2
    assert pair.stored() == done > 0


def test_standalone() -> None:
    job = Job("alone")
    calls: list[Session] = []
    assert job.run(Session, lambda session: calls.append(session) or 3) == 3
    assert len(calls) == 1
