"""session.query(...).owned_by(job)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from sqlalchemy import Engine, func, literal, select, text, true
from sqlalchemy.orm import Bundle, Query, Session, aliased, sessionmaker

from jobsync_orm.exceptions import ConfigurationError, FilterNotApplicable
from jobsync_orm.naming import Names
from jobsync_orm.orm import OwnedQuerySession, ShardedQuery
from tests.integration.orm.conftest import KEYS, MINE
from tests.integration.orm.models import FakeJob, Item, Part, Shop, Truck


@pytest.fixture
def session(stocked: Engine) -> Iterator[OwnedQuerySession]:
    with sessionmaker(stocked, class_=OwnedQuerySession)() as session:
        yield session


def test_an_entity(session: OwnedQuerySession, job: FakeJob) -> None:
    query = session.query(Item).owned_by(job).order_by(Item.sku)
    assert isinstance(query, ShardedQuery)
    assert [item.sku for item in query] == list(MINE)
    assert query.count() == len(MINE)
    assert [item.sku for item in query.limit(2)] == list(MINE[:2])


def test_the_query_class_of_an_ordinary_sessionmaker(session: Session, job: FakeJob) -> None:
    with sessionmaker(session.get_bind(), query_cls=ShardedQuery)() as ordinary:
        assert [row.sku for row in ordinary.query(Item).owned_by(job).order_by(Item.sku)] == list(MINE)  # type: ignore[attr-defined]


def test_a_query_class_of_ones_own(session: Session, job: FakeJob) -> None:
    class Mine(ShardedQuery[object]):
        pass

    with OwnedQuerySession(session.get_bind(), query_cls=Mine) as own:
        assert isinstance(own.query(Item).owned_by(job), Mine)


def test_other_shapes_of_query(session: OwnedQuerySession, job: FakeJob) -> None:
    alias = aliased(Item)
    shapes = [
        session.query(Item.sku),
        session.query(alias.sku),
        session.query(literal(1), Item.sku.label("x")).with_entities(Item.sku),
        session.query(Bundle("b", Item.sku)).with_entities(Item.sku),
        session.query(func.upper(Item.sku)).with_entities(Item.sku),
        session.query(Shop.id).select_from(Item).join(Shop).with_entities(Item.sku),
        session.query(Truck.plate),
    ]
    for query in shapes:
        assert sorted(value for (value,) in query.owned_by(job)) == list(MINE)


def test_expressions_over_an_entity(session: OwnedQuerySession, job: FakeJob) -> None:
    assert session.query(func.count(Item.id)).owned_by(job).scalar() == len(MINE)
    assert session.query(func.count()).select_from(Item).owned_by(job).scalar() == len(MINE)
    assert session.query(func.count()).select_from(aliased(Item)).owned_by(job).scalar() == len(MINE)
    assert session.query(func.count()).select_from(Item).filter(true()).owned_by(job).scalar() == len(MINE)
    assert session.query(Shop.id).select_from(Item).join(Shop).owned_by(job).count() == len(MINE)


def test_an_entity_is_filtered_once_however_often_it_is_named(session: OwnedQuerySession, job: FakeJob) -> None:
    query = session.query(Item.sku, Item.note, Item).select_from(Item).owned_by(job)
    assert str(query).count("sync_token.node =") == 1


def test_two_entities_are_both_filtered(session: OwnedQuerySession, job: FakeJob) -> None:
    other = aliased(Item)
    query = session.query(Item.sku, Part.serial, other.sku).select_from(Item).join(Part, true()).join(other, true())
    rows = query.owned_by(job).all()
    assert len(rows) == len(MINE) ** 3
    assert {value for row in rows for value in row} == set(MINE)


def test_a_joined_entity_is_not_filtered_unless_asked(session: OwnedQuerySession, job: FakeJob) -> None:
    other = aliased(Item)
    query = session.query(Item.sku).join(other, true()).owned_by(job)
    assert query.count() == len(MINE) * len(KEYS)
    assert query.filter(other.owned_by(job)).count() == len(MINE) ** 2


def test_union(session: OwnedQuerySession, job: FakeJob) -> None:
    both = session.query(Item).filter(Item.sku < "k4").union(session.query(Item).filter(Item.sku >= "k4"))
    assert sorted(item.sku for item in both.owned_by(job)) == list(MINE)
    columns = session.query(Item.sku).union(session.query(Item.sku))
    with pytest.raises(FilterNotApplicable, match="each part of a union"):
        columns.owned_by(job)
    parts = session.query(Item.sku).owned_by(job).union(session.query(Item.sku).owned_by(job))
    assert sorted(value for (value,) in parts) == list(MINE)


def test_a_standalone_job_changes_nothing(session: OwnedQuerySession, standalone: FakeJob) -> None:
    assert session.query(Item).owned_by(standalone).count() == len(KEYS)
    assert session.query(func.count()).select_from(Item).owned_by(standalone).scalar() == len(KEYS)


@pytest.mark.parametrize("names", [None, Names()])
def test_what_cannot_be_filtered_is_refused(session: OwnedQuerySession, names: Names | None) -> None:
    job = FakeJob(names=names)
    for query in (
        session.query(Shop),
        session.query(func.count()),
        session.query(literal(1)),
        session.query(Item.__table__),
        session.query(func.count()).select_from(Item.__table__),
        session.query(func.count()).select_from(select(Item).subquery()),
        session.query(Shop).join(Item),
    ):
        with pytest.raises(FilterNotApplicable, match=r"select_from\(Item\)"):
            query.owned_by(job)
    for late in (
        session.query(Item).limit(1),
        session.query(Item).offset(1),
        session.query(Item).order_by(Item.id).limit(3).offset(1),
        session.query(Item).from_statement(text("SELECT * FROM item")),
    ):
        with pytest.raises(FilterNotApplicable, match=r"before limit\(\)"):
            late.owned_by(job)


def test_a_job_of_another_cluster_is_refused(session: OwnedQuerySession) -> None:
    with pytest.raises(ConfigurationError, match="__token_appname__"):
        session.query(Item).owned_by(FakeJob(names=Names("other_")))


def test_the_plain_query_class_is_untouched() -> None:
    assert not hasattr(Query, "owned_by")
