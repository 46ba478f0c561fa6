"""The product's main job: three workers share an application's table, and keep sharing it as they come and go."""

from __future__ import annotations

import asyncio

import pytest
from sqlalchemy import URL, Engine, select
from sqlalchemy.exc import StatementError
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column, sessionmaker

from jobsync_orm import (
    ConfigurationError,
    CoordinationConfig,
    Job,
    NotRunning,
    ShardedQuery,
    Task,
    TokenOwned,
    filter_session,
)
from tests.integration.cluster import QUICK, wait_for

ROWS = 600


class Base(DeclarativeBase):
    pass


class Item(TokenOwned, Base):
    __tablename__ = "item"
    __token_key__ = "sku"
    id: Mapped[int] = mapped_column(primary_key=True)
    sku: Mapped[str]
    done: Mapped[bool] = mapped_column(default=False)


@pytest.fixture
def sessions(engine: Engine) -> sessionmaker:
    Base.metadata.create_all(engine)
    factory = sessionmaker(engine, query_cls=ShardedQuery)
    with factory.begin() as session:
        session.add_all(Item(sku=f"A{number}") for number in range(ROWS))
    return factory


@pytest.fixture
def config(database: URL) -> CoordinationConfig:
    return CoordinationConfig(url=database, **QUICK)


def share(sessions: sessionmaker, job: Job) -> set[str]:
    with sessions() as session:
        return {item.sku for item in session.query(Item).owned_by(job).filter(Item.done.is_(False))}


def is_split(sessions: sessionmaker, *jobs: Job) -> bool:
    shares = [share(sessions, job) for job in jobs]
    return all(shares) and sum(map(len, shares)) == ROWS == len(set().union(*shares))


def test_three_workers_share_the_rows_and_share_them_anew(sessions: sessionmaker, config: CoordinationConfig) -> None:
    with Job("w1", config) as one, Job("w2", config) as two:
        with Job("w3", config) as three:
            wait_for(lambda: is_split(sessions, one, two, three), "each row has one of three owners")
            for job in (one, two, three):
                with sessions() as session:
                    new_style = session.scalars(select(Item).where(Item.owned_by(job))).all()
                mine = share(sessions, job)
                assert {item.sku for item in new_style} == mine
                assert all(job.can_claim_task(Task(sku)) for sku in mine), "rows and tasks agree"
                assert not any(job.can_claim_task(f"A{n}") for n in range(ROWS) if f"A{n}" not in mine)
        wait_for(lambda: is_split(sessions, one, two), "two share them again")


def test_async_session_and_filtered_session(sessions: sessionmaker, config: CoordinationConfig, database: URL) -> None:
    with Job("w1", config) as one, Job("w2", config) as two:
        wait_for(lambda: is_split(sessions, one, two), "each row has one of two owners")

        async def read() -> tuple[set[str], set[str]]:
            engine = create_async_engine(database)
            async with AsyncSession(engine) as session:
                by_criterion = {item.sku for item in await session.scalars(select(Item).where(Item.owned_by(two)))}
            async with AsyncSession(engine) as session:
                filter_session(session, two)
                by_session = {item.sku for item in await session.scalars(select(Item))}
            await engine.dispose()
            return by_criterion, by_session

        assert asyncio.run(read()) == (share(sessions, two), share(sessions, two))


def test_pinned_rows_follow_their_pin(sessions: sessionmaker, config: CoordinationConfig) -> None:
    with Job("cpu-1", config) as cpu, Job("gpu-1", config) as gpu:
        cpu.register_locks_bulk([(f"A{number}", ["gpu-%", "%"], "needs a gpu") for number in range(100)])
        pinned = {f"A{number}" for number in range(100)}
        wait_for(lambda: pinned <= share(sessions, gpu), "they are where they belong")
        gpu.stop()
        wait_for(lambda: pinned <= share(sessions, cpu), "the second pattern takes over")


def test_standalone_owns_every_row(sessions: sessionmaker) -> None:
    with Job("alone") as job:
        assert len(share(sessions, job)) == ROWS
        assert job.can_claim_task("anything")
        assert job.my_tokens == set(range(10_000))
        assert job.nodes == [{"name": "alone"}]
        assert job.get_coordination_status() == {"coordination_enabled": False}
        assert (job.am_i_healthy(), job.am_i_leader(), job.token_version) == (True, False, 0)
        assert (job.add_task(1), job.set_claim([1]), job.get_audit(), job.list_locks()) == (False, [], [], [])
        job.register_lock(1, "w1")
        job.write_audit()
        assert (job.clear_all_locks(), job.clear_locks_by_creator("alone")) == (0, 0)


def test_a_job_that_does_not_run_filters_nothing_in_silence(sessions: sessionmaker, config: CoordinationConfig) -> None:
    job = Job("w1", config)
    with sessions() as session, pytest.raises(NotRunning, match="w1 is not running and owns nothing"):
        session.query(Item).owned_by(job)
    with job:
        early = select(Item).where(Item.owned_by(job))
        with sessions() as session:
            assert len(session.scalars(early).all()) == ROWS
    with sessions() as session, pytest.raises((NotRunning, StatementError), match="w1 is not running"):
        session.scalars(early)
    filtered = sessionmaker(sessions.kw["bind"])
    filter_session(filtered, job)
    with filtered() as session, pytest.raises(NotRunning, match="w1 is not running"):
        session.scalars(select(Item))


def test_what_is_no_job_is_refused(sessions: sessionmaker) -> None:
    with pytest.raises(ConfigurationError, match="owned_by needs a Job, not 'w1'"):
        Item.owned_by("w1")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="Job needs a CoordinationConfig, not str"):
        Job("w1", "postgresql://localhost")  # type: ignore[arg-type]
