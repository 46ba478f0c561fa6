"""Each row of the table in docs/filtering.md is a test: what the whole-session filter filters, and what it does not.

The rows are read from the page. A row without a case, a case without a row, and a row that says something else than
SQLAlchemy does, all fail.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import sqlalchemy
from sqlalchemy import (
    Engine,
    delete,
    exists,
    func,
    insert,
    lambda_stmt,
    select,
    text,
    union_all,
    update,
)
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import (
    Session,
    aliased,
    contains_eager,
    joinedload,
    selectinload,
    subqueryload,
    with_polymorphic,
)

from jobsync_orm.exceptions import FilterNotApplicable
from jobsync_orm.orm import filter_session
from tests.integration.orm.conftest import KEYS, MINE
from tests.integration.orm.models import (
    Document,
    FakeJob,
    Invoice,
    Item,
    Part,
    Shop,
    Tag,
    Tagging,
    Truck,
    Vehicle,
)

PAGE = Path(__file__).parents[3] / "docs" / "filtering.md"
ROW = re.compile(r"^\| `(?P<id>[a-z0-9-]+)` \|.*\| (?P<new>[a-z]+) \| (?P<old>[a-z]+) \|$", re.MULTILINE)
NEW = tuple(int(part) for part in sqlalchemy.__version__.split(".")[:2]) >= (2, 1)
ROWS = {match["id"]: match["new" if NEW else "old"] for match in ROW.finditer(PAGE.read_text(encoding="utf-8"))}

ALL = {"all_tokens": True}

# What a case saw or changed: the keys, or how many.
Seen = set[str] | int
CASES: dict[str, Callable[[Session], Seen]] = {}


def case(function: Callable[[Session], Seen]) -> Callable[[Session], Seen]:
    CASES[function.__name__.replace("_", "-")] = function
    return function


def test_the_page_has_a_table() -> None:
    assert len(ROWS) > 50
    assert set(ROWS.values()) == {"yes", "no", "refused", "fails"}


def test_each_case_has_its_row() -> None:
    assert set(CASES) == set(ROWS)


@pytest.mark.filterwarnings("ignore:UPDATE statement has a cartesian product")
@pytest.mark.parametrize("row", ROWS)
def test_row(row: str, stocked: Engine) -> None:
    with Session(stocked) as session:
        filter_session(session, FakeJob())
        try:
            seen = CASES[row](session)
        except FilterNotApplicable:
            said = "refused"
        except IntegrityError:
            said = "fails"
        else:
            mine, every = (set(MINE), set(KEYS)) if isinstance(seen, set) else (len(MINE), len(KEYS))
            assert seen in (mine, every)
            said = "yes" if seen == mine else "no"
    assert said == ROWS[row]


def skus(rows: object) -> set[str]:
    return {row.sku for row in rows}  # type: ignore[attr-defined]


def noted(session: Session) -> set[str]:
    """Keys of the items that a case has written to, seen past the ORM."""
    return set(session.connection().scalars(text("SELECT sku FROM item WHERE note = 'changed'")))


# SELECT


@case
def select_entity(session: Session) -> Seen:
    return skus(session.scalars(select(Item)))


@case
def select_columns(session: Session) -> Seen:
    return set(session.scalars(select(func.lower(Item.sku))))


@case
def select_count(session: Session) -> Seen:
    return session.scalar(select(func.count()).select_from(Item)) or 0


@case
def select_alias(session: Session) -> Seen:
    return skus(session.scalars(select(aliased(Item))))


@case
def select_join(session: Session) -> Seen:
    return set(session.scalars(select(Item.sku).select_from(Shop).join(Shop.items)))


@case
def select_outer_join(session: Session) -> Seen:
    found = session.scalars(select(Item.sku).select_from(Tagging).outerjoin(Tagging.item)).all()
    assert len(found) == len(KEYS)
    return {sku for sku in found if sku is not None}


@case
def select_subquery(session: Session) -> Seen:
    return set(session.scalars(select(select(Item).subquery().c.sku)))


@case
def select_cte(session: Session) -> Seen:
    return set(session.scalars(select(select(Item).cte().c.sku)))


@case
def select_scalar_subquery(session: Session) -> Seen:
    count = select(func.count(Item.id)).where(Item.shop_id == Shop.id).scalar_subquery()
    return session.scalar(select(count).select_from(Shop)) or 0


@case
def select_exists(session: Session) -> Seen:
    inner = select(Item).where(Item.id == Tagging.item_id).exists()
    return len(session.scalars(select(Tagging).where(inner)).all())


@case
def select_bare_exists(session: Session) -> Seen:
    return len(session.scalars(select(Tagging).where(exists().where(Item.id == Tagging.item_id))).all())


@case
def select_any_has(session: Session) -> Seen:
    return len(session.scalars(select(Tagging).where(Tagging.item.has())).all())


@case
def select_from_where_only(session: Session) -> Seen:
    return session.scalar(select(func.count()).where(Item.sku >= "")) or 0


@case
def select_union(session: Session) -> Seen:
    half = Item.sku < "k4"
    return set(session.scalars(union_all(select(Item.sku).where(half), select(Item.sku).where(~half))))


@case
def select_lambda(session: Session) -> Seen:
    return skus(session.scalars(lambda_stmt(lambda: select(Item))))


@case
def select_joined_inheritance(session: Session) -> Seen:
    return {row.plate for row in session.scalars(select(Truck))}


@case
def select_polymorphic(session: Session) -> Seen:
    return {row.plate for row in session.scalars(select(Vehicle))}


@case
def select_subclass_with_the_mixin(session: Session) -> Seen:
    return {row.number for row in session.scalars(select(Invoice))}


@case
def select_base_without_the_mixin(session: Session) -> Seen:
    return {row.number for row in session.scalars(select(with_polymorphic(Document, [Invoice])))}


@case
def yield_per(session: Session) -> Seen:
    return skus(session.scalars(select(Item).execution_options(yield_per=2)))


@case
def for_update(session: Session) -> Seen:
    return skus(session.scalars(select(Item).with_for_update(skip_locked=True)))


@case
def query_api(session: Session) -> Seen:
    return skus(session.query(Item))


@case
def async_stream(session: Session) -> Seen:
    async def scenario() -> set[str]:
        engine = create_async_engine(session.get_bind().url)  # type: ignore[union-attr]
        try:
            async with AsyncSession(engine) as own:
                filter_session(own, FakeJob())
                return {item.sku async for item in await own.stream_scalars(select(Item))}
        finally:
            await engine.dispose()

    return asyncio.run(scenario())


@case
def get(session: Session) -> Seen:
    found = [session.get(Item, number) for number in range(1, len(KEYS) + 1)]
    return skus(item for item in found if item is not None)


# Relationships


@case
def lazy_one_to_many(session: Session) -> Seen:
    return skus(session.get_one(Shop, 1).items)


@case
def lazy_many_to_many(session: Session) -> Seen:
    return skus(session.get_one(Tag, 1).items)


@case
def lazy_many_to_one(session: Session) -> Seen:
    found = [tagging.item for tagging in session.scalars(select(Tagging))]
    return skus(item for item in found if item is not None)


@case
def lazy_from_an_object_of_this_session(session: Session) -> Seen:
    shop = Shop(id=2)
    session.add(shop)
    session.flush()
    session.connection().execute(text("UPDATE item SET shop_id = 2"))
    return skus(shop.items)


@case
def joined_load(session: Session) -> Seen:
    return skus(session.scalars(select(Shop).options(joinedload(Shop.items))).unique().one().items)


@case
def selectin_load(session: Session) -> Seen:
    return skus(session.scalars(select(Shop).options(selectinload(Shop.items))).one().items)


@case
def subquery_load(session: Session) -> Seen:
    return skus(session.scalars(select(Shop).options(subqueryload(Shop.items))).one().items)


@case
def contains_eager_load(session: Session) -> Seen:
    statement = select(Shop).join(Shop.items).options(contains_eager(Shop.items))
    return skus(session.scalars(statement).unique().one().items)


@case
def dynamic_relationship(session: Session) -> Seen:
    return skus(session.get_one(Shop, 1).dynamic_items)


@case
def write_only_relationship(session: Session) -> Seen:
    return skus(session.scalars(session.get_one(Shop, 1).write_only_items.select()))


# UPDATE and DELETE


@case
def update_statement(session: Session) -> Seen:
    session.execute(update(Item).values(note="changed"))
    return noted(session)


@case
def update_returning(session: Session) -> Seen:
    return set(session.scalars(update(Item).values(note="changed").returning(Item.sku)))


@case
def update_by_query(session: Session) -> Seen:
    session.query(Item).update({"note": "changed"})
    return noted(session)


@case
def update_with_subquery(session: Session) -> Seen:
    statement = update(Tagging).where(Tagging.item_id.in_(select(Item.id))).values(tag_id=1)
    statement = statement.execution_options(synchronize_session=False)
    return len(session.scalars(statement.returning(Tagging.item_id)).all())


@case
def delete_statement(session: Session) -> Seen:
    session.execute(delete(Part))
    return set(KEYS) - set(session.connection().scalars(text("SELECT serial FROM part")))


@case
def update_subclass_with_the_mixin(session: Session) -> Seen:
    session.execute(update(Invoice).values(paid=True))
    return set(session.connection().scalars(text("SELECT number FROM invoice WHERE paid")))


@case
def update_joined_inheritance(session: Session) -> Seen:
    session.execute(update(Truck).values(load=7))
    return session.connection().scalar(text("SELECT count(*) FROM truck WHERE load = 7")) or 0


@case
def delete_joined_inheritance(session: Session) -> Seen:
    session.execute(delete(Truck))
    return len(KEYS) - (session.connection().scalar(text("SELECT count(*) FROM truck")) or 0)


@case
def update_from(session: Session) -> Seen:
    statement = update(Tagging).where(Tagging.item_id == Item.id).values(tag_id=1)
    statement = statement.execution_options(synchronize_session=False)
    return len(session.scalars(statement.returning(Tagging.item_id)).all())


@case
def delete_using(session: Session) -> Seen:
    statement = delete(Tagging).where(Tagging.item_id == Item.id)
    return len(session.scalars(statement.returning(Tagging.item_id)).all())


@case
def update_by_primary_key(session: Session) -> Seen:
    session.execute(update(Item), [{"id": number, "note": "changed"} for number in range(1, len(KEYS) + 1)])
    return noted(session)


@case
def bulk_update_mappings(session: Session) -> Seen:
    rows = [{"id": number, "note": "changed"} for number in range(1, len(KEYS) + 1)]
    session.bulk_update_mappings(Item, rows)
    return noted(session)


# The unit of work


@case
def flush_of_changed_objects(session: Session) -> Seen:
    for item in session.scalars(select(Item).execution_options(**ALL)):
        item.note = "changed"
    session.flush()
    return noted(session)


@case
def delete_of_objects(session: Session) -> Seen:
    for part in session.scalars(select(Part).execution_options(**ALL)):
        session.delete(part)
    session.flush()
    return set(KEYS) - set(session.connection().scalars(text("SELECT serial FROM part")))


@case
def get_of_an_object_in_the_session(session: Session) -> Seen:
    held = session.scalars(select(Item).execution_options(**ALL)).all()
    return skus(session.get_one(Item, item.id) for item in held)


@case
def many_to_one_of_an_object_in_the_session(session: Session) -> Seen:
    held = session.scalars(select(Item).execution_options(**ALL)).all()
    assert len(held) == len(KEYS)
    return skus(tagging.item for tagging in session.scalars(select(Tagging)))


@case
def refresh(session: Session) -> Seen:
    held = session.scalars(select(Item).execution_options(**ALL)).all()
    for item in held:
        session.refresh(item)
    return skus(held)


@case
def expired_attributes(session: Session) -> Seen:
    held = session.scalars(select(Item).execution_options(**ALL)).all()
    session.expire_all()
    return skus(held)


@case
def merge_of_an_unowned_row(session: Session) -> Seen:
    session.merge(Item(id=1, sku=KEYS[0], note="changed"))
    session.flush()
    return noted(session)


# Beside the ORM


@case
def text_sql(session: Session) -> Seen:
    return set(session.scalars(text("SELECT sku FROM item")))


@case
def entities_from_text(session: Session) -> Seen:
    return skus(session.scalars(select(Item).from_statement(text("SELECT * FROM item"))))


@case
def core_table(session: Session) -> Seen:
    return set(session.scalars(select(Item.__table__.c.sku)))


@case
def connection(session: Session) -> Seen:
    return set(session.connection().scalars(select(Item.sku)))


@case
def insert_from_select(session: Session) -> Seen:
    statement = insert(Shop).from_select(["id"], select(Item.id + 100)).returning(Shop.id)
    return len(session.scalars(statement).all())


# On request


@case
def option_all_tokens(session: Session) -> Seen:
    return skus(session.scalars(select(Item), execution_options=ALL))


@case
def option_all_tokens_eager_load(session: Session) -> Seen:
    statement = select(Shop).options(selectinload(Shop.items)).execution_options(**ALL)
    return skus(session.scalars(statement).one().items)


@case
def option_all_tokens_lazy_load(session: Session) -> Seen:
    return skus(session.scalars(select(Shop).execution_options(**ALL)).one().items)
