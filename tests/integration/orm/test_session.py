"""Switching the whole-session filter on and off, and what it leaves behind. What it filters: test_filtering_page."""

from __future__ import annotations

import asyncio
import pickle
from typing import Any

import pytest
from sqlalchemy import Engine, event, select, text, update
from sqlalchemy.ext.asyncio import (
    AsyncEngine,
    AsyncSession,
    async_scoped_session,
    async_sessionmaker,
    create_async_engine,
)
from sqlalchemy.orm import Session, joinedload, scoped_session, selectinload, sessionmaker

from jobsync_orm.exceptions import ConfigurationError, FilterNotApplicable
from jobsync_orm.naming import Names
from jobsync_orm.orm import OwnedQuerySession, filter_session, unfilter_session
from tests.integration.orm.conftest import KEYS, MINE, own, stock
from tests.integration.orm.models import FakeJob, Item, Shop, Truck

OTHERS = tuple(key for key in KEYS if key not in MINE)


def seen(session: Session) -> tuple[str, ...]:
    return tuple(session.scalars(select(Item.sku).order_by(Item.sku)))


def test_a_session(stocked: Engine, job: FakeJob) -> None:
    with Session(stocked) as session, Session(stocked) as beside:
        filter_session(session, job)
        assert seen(session) == MINE
        assert seen(beside) == KEYS
        unfilter_session(session)
        assert seen(session) == KEYS


def test_a_sessionmaker(stocked: Engine, job: FakeJob) -> None:
    maker, other = sessionmaker(stocked, class_=OwnedQuerySession), sessionmaker(stocked, class_=OwnedQuerySession)
    with maker() as before:
        filter_session(maker, job)
        with maker() as session, other() as beside:
            assert seen(session) == MINE
            assert seen(before) == MINE
            assert seen(beside) == KEYS
            assert session.query(Item).owned_by(FakeJob("other")).all() == []
        unfilter_session(maker)
        assert seen(before) == KEYS


def test_a_scoped_session(stocked: Engine, job: FakeJob) -> None:
    registry = scoped_session(sessionmaker(stocked))
    filter_session(registry, job)
    assert tuple(registry.scalars(select(Item.sku).order_by(Item.sku))) == MINE
    unfilter_session(registry)
    assert tuple(registry.scalars(select(Item.sku).order_by(Item.sku))) == KEYS
    registry.remove()


def test_async_sessions_and_their_factories(stocked: Engine, job: FakeJob) -> None:
    class Mine(Session):
        pass

    async def seen_by(session: Any) -> tuple[str, ...]:
        try:
            return tuple(await session.scalars(select(Item.sku).order_by(Item.sku)))
        finally:
            await session.close()

    async def scenario(engine: AsyncEngine) -> None:
        session = AsyncSession(engine)
        filter_session(session, job)
        assert await seen_by(session) == MINE
        unfilter_session(session)
        assert await seen_by(session) == KEYS

        for maker in (async_sessionmaker(engine), async_sessionmaker(engine, sync_session_class=Mine)):
            for _ in range(2):
                filter_session(maker, job)
                own = maker()
                assert issubclass(type(own.sync_session), maker.kw["sync_session_class"])
                assert await seen_by(own) == MINE
                assert await seen_by(async_sessionmaker(engine)()) == KEYS
                assert await seen_by(async_sessionmaker(engine, sync_session_class=Mine)()) == KEYS
                unfilter_session(maker)
                assert await seen_by(maker()) == KEYS

        registry = async_scoped_session(async_sessionmaker(engine), scopefunc=lambda: 1)
        filter_session(registry, job)
        assert await seen_by(registry) == MINE
        await registry.remove()

    async def run() -> None:
        engine = create_async_engine(stocked.url)
        try:
            await scenario(engine)
        finally:
            await engine.dispose()

    asyncio.run(run())
    with Session(stocked) as session:
        assert seen(session) == KEYS


@pytest.mark.parametrize("make", [lambda: Session(), lambda: sessionmaker(), lambda: async_sessionmaker()])
def test_twice_on_or_off_is_refused(make: Any, job: FakeJob) -> None:
    target = make()
    with pytest.raises(ConfigurationError, match="is not filtered"):
        unfilter_session(target)
    filter_session(target, job)
    with pytest.raises(ConfigurationError, match="filtered already"):
        filter_session(target, job)
    unfilter_session(target)
    with pytest.raises(ConfigurationError, match="is not filtered"):
        unfilter_session(target)
    filter_session(target, job)


def test_what_is_no_session_is_refused(job: FakeJob, stocked: Engine) -> None:
    for target in (stocked, Item, "session", None, Session):
        with pytest.raises(ConfigurationError, match="is no session"):
            filter_session(target, job)  # type: ignore[arg-type]


def test_a_standalone_job_filters_nothing(stocked: Engine, standalone: FakeJob) -> None:
    with Session(stocked) as session:
        filter_session(session, standalone)
        assert seen(session) == KEYS
        session.execute(update(Truck).values(load=7))
        assert session.scalar(text("SELECT count(*) FROM truck WHERE load = 7")) == len(KEYS)


def test_sessions_of_two_jobs_share_compiled_statements_and_not_rows(stocked: Engine, job: FakeJob) -> None:
    statements = (
        select(Shop).options(joinedload(Shop.items).joinedload(Item.parts)),
        select(Shop).options(selectinload(Shop.items).selectinload(Item.parts)),
        select(Shop),
    )
    hits: list[str] = []

    @event.listens_for(stocked, "before_cursor_execute")
    def see(_c: Any, _cursor: Any, _sql: str, _parameters: Any, context: Any, _many: bool) -> None:
        hits.append(context.cache_hit.name)

    try:
        for statement in statements:
            for owner, keys in ((job, MINE), (FakeJob("other"), OTHERS), (job, MINE)):
                with Session(stocked) as session:
                    filter_session(session, owner)
                    hits.clear()
                    items = session.scalars(statement).unique().one().items
                    assert tuple(item.sku for item in items) == keys
                    assert tuple(part.serial for item in items for part in item.parts) == keys
            assert set(hits) == {"CACHE_HIT"}
    finally:
        event.remove(stocked, "before_cursor_execute", see)


def test_a_lazy_load_follows_the_tokens(shop_engine: Engine, job: FakeJob) -> None:
    stock(shop_engine)
    with Session(shop_engine) as session:
        shop = session.get_one(Shop, 1)
        filter_session(session, job)
        assert tuple(item.sku for item in shop.items) == MINE
        session.commit()
        own(shop_engine, "me", *KEYS)
        assert tuple(item.sku for item in shop.items) == KEYS


@pytest.mark.parametrize("load", [joinedload, selectinload, None])
def test_loaded_objects_can_be_pickled(stocked: Engine, job: FakeJob, load: Any) -> None:
    with Session(stocked) as session:
        filter_session(session, job)
        statement = select(Shop).options(load(Shop.items)) if load else select(Shop)
        shop = session.scalars(statement).unique().one()
        assert len(shop.items) == len(MINE)
        copy = pickle.loads(pickle.dumps(shop))
    assert [item.sku for item in copy.items] == list(MINE)


def test_the_remedy_for_joined_inheritance(stocked: Engine, job: FakeJob) -> None:
    with Session(stocked) as session:
        filter_session(session, job)
        with pytest.raises(FilterNotApplicable) as caught:
            session.execute(update(Truck).values(load=7))
        remedy = ".where(Truck.owned_by(job)).execution_options(all_tokens=True)"
        assert remedy in str(caught.value)
        names = {"statement": update(Truck).values(load=7), "Truck": Truck, "job": job}
        session.execute(eval(f"statement{remedy}", names))
        changed = session.scalars(text("SELECT plate FROM vehicle JOIN truck USING (id) WHERE load = 7"))
        assert set(changed) == set(MINE)


def test_a_model_of_another_cluster_is_refused(stocked: Engine) -> None:
    with Session(stocked) as session:
        filter_session(session, FakeJob(names=Names("billing_")))
        assert session.scalars(select(Shop.id)).all() == [1]
        for statement in (select(Item), select(Shop).join(Shop.items), update(Item).values(note="")):
            with pytest.raises(ConfigurationError, match="__token_appname__"):
                session.execute(statement)
        assert len(session.scalars(select(Item), execution_options={"all_tokens": True}).all()) == len(KEYS)
