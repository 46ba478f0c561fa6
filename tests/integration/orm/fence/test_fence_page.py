"""Each row of the table in docs/fence.md is a test: a row without a case, and a case without a row, fail too."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, bindparam, column, delete, insert, select, table, text, update
from sqlalchemy.dialects.postgresql import insert as upsert
from sqlalchemy.orm import Session

from jobsync_orm.exceptions import ConfigurationError, FenceNotApplicable, OwnershipLost
from jobsync_orm.orm import OwnedSession
from tests.integration.orm.fence.conftest import HeldJob, take
from tests.integration.orm.models import Invoice, Item, Part, Shop, Truck

PAGE = Path(__file__).parents[4] / "docs" / "fence.md"
ROW = re.compile(r"^\| `(?P<id>[a-z-]+)` \|.*\| (?P<fenced>[a-z]+) \|$", re.MULTILINE)
ROWS = {match["id"]: match["fenced"] for match in ROW.finditer(PAGE.read_text(encoding="utf-8"))}

# Each writes rows of the token of k2 and of no other that is not this node's; several ways of it one after the other.
CASES: dict[str, list[Callable[[Session], Any]]] = {}
OPTIONS: dict[str, dict[str, Any]] = {"two-phase": {"twophase": True}}

item, part, truck = Item.__table__, Part.__table__, Truck.__table__
SET = {"note": "new"}


def case(function: Callable[[Session], Any]) -> Callable[[Session], Any]:
    name = re.sub(r"_\d+$", "", function.__name__).replace("_", "-")
    CASES.setdefault(name, []).append(function)
    return function


def one(session: Session, model: Any, key: Any) -> Any:
    return session.scalars(select(model).where(key == "k2")).one()


@case
def flush_added_1(session: Session) -> None:
    session.add_all([Item(sku="k2")])


@case
def flush_added_2(session: Session) -> None:
    session.merge(Item(sku="k2"))


@case
def flush_changed(session: Session) -> None:
    one(session, Item, Item.sku).note = "new"


@case
def flush_deleted(session: Session) -> None:
    session.delete(one(session, Part, Part.serial))


@case
def flush_of_the_key_1(session: Session) -> None:
    one(session, Item, Item.sku).sku = "k4"


@case
def flush_of_the_key_2(session: Session) -> None:
    session.scalars(select(Item).where(Item.sku == "k4")).one().sku = "k2"


@case
def flush_of_joined_inheritance_1(session: Session) -> None:
    one(session, Truck, Truck.plate).load = 5


@case
def flush_of_joined_inheritance_2(session: Session) -> None:
    one(session, Invoice, Invoice.number).title = "new"


@case
def insert_statement_1(session: Session) -> None:
    session.execute(insert(Item).values(sku="k2"))


@case
def insert_statement_2(session: Session) -> None:
    session.execute(insert(Item), [{"sku": "k2"}, {"sku": "k4"}])


@case
def insert_values_list(session: Session) -> None:
    session.execute(insert(Item).values([{"sku": "k2"}, {"sku": "k4"}]))


@case
def insert_from_select(session: Session) -> None:
    session.execute(insert(Item).from_select(["sku", "note"], select(item.c.sku, item.c.note).where(item.c.id == 2)))


@case
def insert_on_conflict_1(session: Session) -> None:
    row = upsert(Item).values(id=2, sku="k4")
    session.execute(row.on_conflict_do_update(index_elements=["id"], set_=SET))


@case
def insert_on_conflict_2(session: Session) -> None:
    session.execute(upsert(Item).values(sku="k2").on_conflict_do_nothing())


@case
def insert_on_conflict_sets_the_key(session: Session) -> None:
    row = upsert(Item).values(id=2, sku="k2")
    session.execute(row.on_conflict_do_update(index_elements=["id"], set_={"sku": "k4"}))


@case
def update_statement(session: Session) -> None:
    session.execute(update(Item).where(Item.sku == "k2").values(SET))


@case
def update_by_primary_key(session: Session) -> None:
    session.execute(update(Item), [{"id": 2, "note": "a"}, {"id": 4, "note": "b"}])


@case
def update_of_the_key(session: Session) -> None:
    session.execute(update(Item).where(Item.sku == "k2").values(sku="k4"))


@case
def update_of_the_key_by_primary_key(session: Session) -> None:
    session.execute(update(Item).where(Item.id == 2).values(sku="k4"))


@case
def update_returning_1(session: Session) -> None:
    assert session.scalars(update(Item).where(Item.sku == "k2").values(SET).returning(Item)).one().note == "new"


@case
def update_returning_2(session: Session) -> None:
    assert session.execute(insert(Item).returning(Item.sku), [{"sku": "k2"}]).all() == [("k2",)]


@case
def update_returning_3(session: Session) -> None:
    assert session.execute(delete(part).where(part.c.serial == "k2").returning(part.c.serial)).all() == [("k2",)]


@case
def delete_statement(session: Session) -> None:
    session.execute(delete(Part).where(Part.serial == "k2"))


@case
def query_update_1(session: Session) -> None:
    session.query(Item).where(Item.sku == "k2").update({"note": "new"})


@case
def query_update_2(session: Session) -> None:
    session.query(Part).where(Part.serial == "k2").delete()


@case
def bulk_methods_1(session: Session) -> None:
    session.bulk_insert_mappings(Item, [{"sku": "k2"}, {"sku": "k4"}])  # type: ignore[arg-type]


@case
def bulk_methods_2(session: Session) -> None:
    session.bulk_update_mappings(Item, [{"id": 2, "note": "a"}, {"id": 4, "note": "b"}])  # type: ignore[arg-type]


@case
def bulk_methods_3(session: Session) -> None:
    session.bulk_save_objects([Item(sku="k2"), Item(sku="k4")])


@case
def core_table_1(session: Session) -> None:
    session.execute(insert(item).values(sku="k2"))


@case
def core_table_2(session: Session) -> None:
    session.execute(update(item).where(item.c.sku == "k2").values(SET))


@case
def connection_1(session: Session) -> None:
    session.connection().execute(insert(item), [{"sku": "k2"}, {"sku": "k4"}])


@case
def connection_2(session: Session) -> None:
    session.connection().execute(delete(part).where(part.c.serial == "k2"))


@case
def connection_commit(session: Session) -> None:
    session.connection().execute(insert(item).values(sku="k2"))


@case
def connection_many_updates_1(session: Session) -> None:
    values = [{"number": 2, "note": "a"}, {"number": 4, "note": "b"}]
    session.connection().execute(update(item).where(item.c.id == bindparam("number")), values)


@case
def connection_many_updates_2(session: Session) -> None:
    session.connection().execute(delete(part).where(part.c.id == bindparam("number")), [{"number": 2}, {"number": 4}])


@case
def connection_many_updates_otherwise(session: Session) -> None:
    values = [{"key": "k2", "note": "a"}, {"key": "k4", "note": "b"}]
    session.connection().execute(update(item).where(item.c.sku == bindparam("key")), values)


@case
def delete_of_the_joined_table(session: Session) -> None:
    session.execute(delete(truck).where(truck.c.load == 0))


@case
def cte(session: Session) -> None:
    written = update(item).where(item.c.id == 2).values(SET).returning(item.c.id).cte()
    session.execute(select(written.c.id))


@case
def savepoint(session: Session) -> None:
    with session.begin_nested():
        session.add(Item(sku="k2"))


@case
def autocommit(session: Session) -> None:
    session.connection(execution_options={"isolation_level": "AUTOCOMMIT"})
    session.add(Item(sku="k2"))
    session.flush()


@case
def two_phase(session: Session) -> None:
    session.add(Item(sku="k2"))
    session.flush()


@case
def text_sql_1(session: Session) -> None:
    session.execute(text("UPDATE item SET note = 'new' WHERE sku = 'k2'"))


@case
def text_sql_2(session: Session) -> None:
    session.connection().exec_driver_sql("DELETE FROM part WHERE serial = 'k2'")


@case
def another_table_object(session: Session) -> None:
    session.execute(update(table("item", column("sku"), column("note"))).where(text("sku = 'k2'")).values(note="x"))


@case
def foreign_key_cascade(session: Session) -> None:
    session.execute(delete(Shop))


@pytest.fixture
def cascading(stocked_engine: Engine) -> Iterator[Engine]:
    """Deleting a shop changes its items."""
    change = "ALTER TABLE item DROP CONSTRAINT item_shop_id_fkey, ADD FOREIGN KEY (shop_id) REFERENCES shop"
    with stocked_engine.begin() as connection:
        connection.execute(text(f"{change} ON DELETE SET NULL"))
    yield stocked_engine
    with stocked_engine.begin() as connection:
        connection.execute(text(change))


def test_the_page_has_a_table() -> None:
    assert len(ROWS) > 25
    assert set(ROWS.values()) == {"yes", "no", "refused"}


def test_each_case_has_its_row() -> None:
    assert set(CASES) | {"before-the-session"} == set(ROWS)


@pytest.mark.parametrize(("name", "way"), [(name, way) for name, ways in CASES.items() for way in range(len(ways))])
def test_the_row_is_right(cascading: Engine, job: HeldJob, name: str, way: int) -> None:
    with OwnedSession(cascading, job=job, **OPTIONS.get(name, {})) as session:
        if ROWS[name] == "refused":
            with pytest.raises((FenceNotApplicable, ConfigurationError)):
                CASES[name][way](session)
            return
        CASES[name][way](session)
        session.flush()
        take(cascading, "k2")
        commit = session.connection().commit if name == "connection-commit" else session.commit
        if ROWS[name] == "no":
            commit()
            return
        with pytest.raises(OwnershipLost):
            commit()


def test_before_the_session(cascading: Engine, job: HeldJob) -> None:
    assert ROWS["before-the-session"] == "no"
    with cascading.connect() as connection, connection.begin():
        connection.execute(insert(item).values(sku="k2"))
        with OwnedSession(connection, job=job) as session:
            session.add(Item(sku="k4"))
            session.commit()
        take(cascading, "k2")
