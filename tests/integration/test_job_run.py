"""job.run and job.bind, with two real jobs: the second one joins while the first one works."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from sqlalchemy import Engine, func, select
from sqlalchemy.exc import IntegrityError
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
