"""token_id is right whatever way a row is written."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from sqlalchemy import Engine, func, insert, literal, select, text, update
from sqlalchemy.dialects.postgresql import insert as pg_insert
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from jobsync_orm.hashing import task_to_token
from tests.integration.orm.models import Invoice, Item, Truck


def add(session: Session) -> None:
    session.add(Item(id=1, sku="a"))
    session.add(Item(id=2, sku="b"))


def add_all(session: Session) -> None:
    session.add_all([Item(id=1, sku="a"), Item(id=2, sku="b")])


def merge(session: Session) -> None:
    session.add(Item(id=1, sku="before"))
    session.flush()
    session.merge(Item(id=1, sku="a"))
    session.merge(Item(id=2, sku="b"))


def bulk_save_objects(session: Session) -> None:
    session.bulk_save_objects([Item(id=1, sku="a"), Item(id=2, sku="b")])


def bulk_insert_mappings(session: Session) -> None:
    session.bulk_insert_mappings(Item, [{"id": 1, "sku": "a"}, {"id": 2, "sku": "b"}])


def insert_list(session: Session) -> None:
    session.execute(insert(Item), [{"id": 1, "sku": "a"}, {"id": 2, "sku": "b"}])


def core(session: Session) -> None:
    session.connection().execute(
        insert(Item.__table__), [{"id": 1, "sku": "a", "note": ""}, {"id": 2, "sku": "b", "note": ""}]
    )


def on_conflict(session: Session) -> None:
    session.execute(insert(Item).values(id=1, sku="before"))
    statement = pg_insert(Item).values([{"id": 1, "sku": "a"}, {"id": 2, "sku": "b"}])
    session.execute(statement.on_conflict_do_update(index_elements=["id"], set_={"sku": statement.excluded.sku}))


def insert_values_list(session: Session) -> None:
    session.execute(insert(Item).values([{"id": 1, "sku": "a"}, {"id": 2, "sku": "b"}]))


def from_select(session: Session) -> None:
    numbers = func.generate_series(1, 2).column_valued("n")
    sku = func.chr(numbers + 96)
    session.execute(insert(Item).from_select(["id", "sku", "note"], select(numbers, sku, literal(""))))


def sql_expression_key(session: Session) -> None:
    session.add(Item(id=1, sku=func.lower("A")))
    session.execute(insert(Item).values(id=2, sku=func.lower("B")))


def raw_text(session: Session) -> None:
    session.execute(text("INSERT INTO item (id, sku, note) VALUES (1, 'a', ''), (2, 'b', '')"))


def copy(session: Session) -> None:
    driver = session.connection().connection.driver_connection
    with driver.cursor() as cursor, cursor.copy("COPY item (id, sku, note) FROM STDIN") as stream:
        stream.write_row((1, "a", ""))
        stream.write_row((2, "b", ""))


def update_of_key(session: Session) -> None:
    one, two = Item(id=1, sku="before"), Item(id=2, sku="before")
    session.add_all([one, two])
    session.flush()
    one.sku = "a"
    session.flush()
    session.execute(update(Item).where(Item.id == 2).values(sku="b"))


def update_of_key_by_primary_key(session: Session) -> None:
    session.add_all([Item(id=1, sku="before"), Item(id=2, sku="before")])
    session.flush()
    session.execute(update(Item), [{"id": 1, "sku": "a"}, {"id": 2, "sku": "b"}])


@pytest.mark.parametrize(
    "write",
    [
        add,
        add_all,
        merge,
        bulk_save_objects,
        bulk_insert_mappings,
        insert_list,
        core,
        on_conflict,
        insert_values_list,
        from_select,
        sql_expression_key,
        raw_text,
        copy,
        update_of_key,
        update_of_key_by_primary_key,
    ],
)
def test_each_way_to_write_a_row_gives_it_the_token_of_its_key(
    shop_engine: Engine, write: Callable[[Session], None]
) -> None:
    with Session(shop_engine) as session, session.begin():
        write(session)
    with shop_engine.connect() as connection:
        rows = connection.execute(select(Item.id, Item.sku, Item.token_id).order_by(Item.id)).all()
    assert [tuple(row) for row in rows] == [
        (1, "a", task_to_token("a", 10_000)),
        (2, "b", task_to_token("b", 10_000)),
    ]


@pytest.mark.parametrize("key", ["", "é中😀", "a'b%c:d", "x" * 10_000])
def test_the_token_of_any_text_is_that_of_python(shop_engine: Engine, key: str) -> None:
    with Session(shop_engine) as session:
        item = Item(sku=key)
        session.add(item)
        session.flush()
        assert item.token_id == task_to_token(key, 10_000)


def test_async_code_reads_the_token_after_an_update_of_the_key(shop_engine: Engine) -> None:
    async def scenario() -> tuple[int, int]:
        engine = create_async_engine(shop_engine.url)
        try:
            async with AsyncSession(engine) as session:
                item, truck = Item(sku="a"), Truck(plate="p")
                session.add_all([item, truck])
                await session.flush()
                item.sku, truck.plate = "b", "q"
                await session.flush()
                return item.token_id, truck.token_id
        finally:
            await engine.dispose()

    assert asyncio.run(scenario()) == (task_to_token("b", 10_000), task_to_token("q", 10_000))


def test_inherited_classes_have_the_token_of_their_hierarchy(shop_engine: Engine) -> None:
    with Session(shop_engine) as session:
        truck, invoice = Truck(plate="p"), Invoice(number="n")
        session.add_all([truck, invoice])
        session.flush()
        assert truck.token_id == task_to_token("p", 10_000)
        assert invoice.token_id == task_to_token("n", 10_000)
        assert "token_id" not in Truck.__table__.columns
        invoice.number = "m"
        session.flush()
        assert invoice.token_id == task_to_token("m", 10_000)


def test_the_database_refuses_a_token_written_by_hand(shop_engine: Engine) -> None:
    with shop_engine.connect() as connection, pytest.raises(Exception, match="token_id"):
        connection.execute(text("INSERT INTO item (sku, note, token_id) VALUES ('a', '', 1)"))
