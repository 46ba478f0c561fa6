"""owned_by returns the rows whose tokens the database gives to the node, at the time of the statement."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from sqlalchemy import Engine, create_engine, delete, event, func, select, text, true, update
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, aliased, mapped_column, with_polymorphic

from jobsync_orm.exceptions import ConfigurationError, FilterNotApplicable
from jobsync_orm.models import Token
from jobsync_orm.naming import Names
from jobsync_orm.orm import TokenOwned, enable_sqlite, owned_by
from tests.integration.orm.conftest import KEYS, MINE, own, stock
from tests.integration.orm.models import FakeJob, Invoice, Item, Part, Shop, Truck, Vehicle


@pytest.fixture
def session(stocked: Engine) -> Iterator[Session]:
    with Session(stocked) as session:
        yield session


def test_only_rows_of_the_nodes_tokens(session: Session, job: FakeJob) -> None:
    assert sorted(session.scalars(select(Item.sku).where(Item.owned_by(job)))) == list(MINE)
    other = FakeJob("other")
    assert set(session.scalars(select(Item.sku).where(owned_by(Item, other)))) == set(KEYS) - set(MINE)
    assert session.scalars(select(Item).where(Item.owned_by(FakeJob("nobody")))).all() == []


def test_a_token_that_is_being_handed_over_is_not_owned(session: Session, job: FakeJob) -> None:
    token = session.scalar(select(Item.token_id).where(Item.sku == MINE[0]))
    session.execute(
        text("UPDATE sync_token SET next_node = 'other', next_epoch = 1 WHERE token_id = :token"),
        {"token": token},
    )
    assert sorted(session.scalars(select(Item.sku).where(Item.owned_by(job)))) == list(MINE[1:])
    assert MINE[0] not in session.scalars(select(Item.sku).where(Item.owned_by(FakeJob("other")))).all()


def test_the_same_statement_follows_the_tokens(job: FakeJob, shop_engine: Engine) -> None:
    stock(shop_engine)
    statement = select(Item.sku).where(Item.owned_by(job)).order_by(Item.sku)
    with Session(shop_engine) as session:
        assert session.scalars(statement).all() == list(MINE)
        own(shop_engine, "other", *KEYS)
        assert session.scalars(statement).all() == []
        own(shop_engine, "me", *KEYS)
        assert session.scalars(statement).all() == list(KEYS)


def test_a_standalone_job_owns_everything(session: Session, standalone: FakeJob) -> None:
    assert sorted(session.scalars(select(Item.sku).where(Item.owned_by(standalone)))) == list(KEYS)


def test_an_alias_is_filtered_and_not_the_class_beside_it(session: Session, job: FakeJob) -> None:
    one = aliased(Item)
    for criterion in (one.owned_by(job), owned_by(one, job)):
        rows = session.execute(select(one.sku, Item.sku).join(Item, true()).where(criterion)).all()
        assert {row[0] for row in rows} == set(MINE)
        assert {row[1] for row in rows} == set(KEYS)


def test_update_and_delete_change_owned_rows_only(session: Session, job: FakeJob) -> None:
    session.execute(update(Item).where(Item.owned_by(job)).values(note="seen"))
    assert set(session.scalars(select(Item.sku).where(Item.note == "seen"))) == set(MINE)
    session.execute(delete(Part).where(Part.owned_by(job)))
    assert set(session.scalars(select(Part.serial))) == set(KEYS) - set(MINE)


def test_update_and_delete_of_a_joined_inheritance_class_change_owned_rows_only(session: Session, job: FakeJob) -> None:
    session.execute(update(Truck).where(Truck.owned_by(job)).values(load=7))
    assert set(session.scalars(select(Truck.plate).where(Truck.load == 7))) == set(MINE)
    session.execute(delete(Truck).where(Truck.owned_by(job)))
    assert session.scalar(text("SELECT count(*) FROM truck")) == len(KEYS) - len(MINE)
    session.execute(update(Invoice).where(Invoice.owned_by(job)).values(paid=True))
    assert set(session.scalars(select(Invoice.number).where(Invoice.paid))) == set(MINE)


@pytest.mark.parametrize("entity", [Vehicle, Truck, aliased(Truck), with_polymorphic(Vehicle, [Truck])])
def test_classes_of_a_hierarchy(session: Session, job: FakeJob, entity: type[Vehicle]) -> None:
    assert sorted(session.scalars(select(entity.plate).where(owned_by(entity, job)))) == list(MINE)


def test_in_joins_subqueries_and_relationship_criteria(session: Session, job: FakeJob) -> None:
    joined = select(Item.sku).join(Part, (Part.item_id == Item.id) & Part.owned_by(job))
    assert sorted(session.scalars(joined)) == list(MINE)
    inner = select(Item.id).where(Item.owned_by(job)).subquery()
    assert session.scalar(select(func.count()).select_from(inner)) == len(MINE)
    assert session.scalars(select(Shop.id).where(Shop.items.any(Item.owned_by(job)))).all() == [1]
    assert session.scalars(select(Shop.id).where(Shop.items.any(Item.owned_by(FakeJob("nobody"))))).all() == []


def test_beside_the_token_table_itself(session: Session, job: FakeJob) -> None:
    statement = (
        select(Item.sku, Token.node)
        .join(Token, Token.token_id == Item.token_id)
        .where(Item.owned_by(job), Token.node == "other")
    )
    assert session.execute(statement).all() == []


def test_one_compiled_statement_serves_all_jobs(session: Session) -> None:
    sent: list[tuple[str, object]] = []
    hits: list[str] = []

    @event.listens_for(session.get_bind(), "before_cursor_execute")
    def see(_c: object, _cursor: object, sql: str, parameters: object, context: object, _many: bool) -> None:
        sent.append((sql, parameters))
        hits.append(context.cache_hit.name)  # type: ignore[attr-defined]

    try:
        for name in ("me", "other", "somebody else"):
            session.execute(select(Item.sku).where(Item.owned_by(FakeJob(name))))
    finally:
        event.remove(session.get_bind(), "before_cursor_execute", see)
    assert len({sql for sql, _ in sent}) == 1
    assert [list(parameters.values()) for _, parameters in sent] == [["me"], ["other"], ["somebody else"]]
    assert hits[1:] == ["CACHE_HIT", "CACHE_HIT"]


def test_the_sql(job: FakeJob) -> None:
    sql = str(select(Item.sku).where(Item.owned_by(job))).replace("\n", "")
    assert sql == (
        "SELECT item.sku FROM item WHERE item.token_id IN (SELECT sync_token.token_id FROM sync_token "
        "WHERE sync_token.node = :node_1 AND sync_token.next_node IS NULL)"
    )


class Elsewhere(DeclarativeBase):
    __token_appname__ = "billing_"
    __token_schema__ = "jobs"


class Bill(TokenOwned, Elsewhere):
    __tablename__ = "bill"
    __token_key__ = "id"
    id: Mapped[int] = mapped_column(primary_key=True)


def test_another_cluster(job: FakeJob) -> None:
    there = FakeJob(names=Names("billing_", "jobs"))
    assert "FROM jobs.billing_token WHERE" in str(Bill.owned_by(there)).replace("\n", "")
    for wrong in (job, FakeJob(names=Names("billing_"))):
        with pytest.raises(ConfigurationError) as caught:
            Bill.owned_by(wrong)
        for part in ("Bill", "'billing_'", "'jobs'", wrong.names.bare("token"), "__token_appname__"):  # type: ignore[union-attr]
            assert part in str(caught.value)


@pytest.mark.parametrize("entity", [Shop, aliased(Shop), Item.sku, Item.__table__, "item", None])
def test_what_has_no_token_is_refused(entity: object, job: FakeJob, standalone: FakeJob) -> None:
    for owner in (job, standalone):
        with pytest.raises(FilterNotApplicable, match="TokenOwned mixin"):
            owned_by(entity, owner)


def test_a_standalone_job_on_sqlite(standalone: FakeJob) -> None:
    engine = enable_sqlite(create_engine("sqlite://"))
    Item.metadata.create_all(engine)
    with Session(engine) as session:
        session.add_all([Item(sku=key) for key in KEYS])
        session.flush()
        assert sorted(session.scalars(select(Item.sku).where(Item.owned_by(standalone)))) == list(KEYS)
        session.execute(update(Item).where(Item.owned_by(standalone)).values(note="seen"))
        assert session.scalars(select(Item.note).distinct()).all() == ["seen"]
    engine.dispose()
