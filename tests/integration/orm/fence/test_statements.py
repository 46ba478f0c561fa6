"""Every statement that writes: the fence sees its tokens, and its caller sees the result it would see without."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import Engine, bindparam, delete, func, insert, select, text, update
from sqlalchemy.dialects.postgresql import insert as upsert
from sqlalchemy.orm import Session, aliased

from jobsync_orm.exceptions import OwnershipLost
from jobsync_orm.orm import OwnedSession
from tests.integration.orm.fence.conftest import HeldJob, restart_sequences, take, token
from tests.integration.orm.models import Document, Invoice, Item, Part, Truck, Vehicle

item, part, truck, vehicle = Item.__table__, Part.__table__, Truck.__table__, Vehicle.__table__

NEW = [{"id": 101, "sku": "k2", "note": "a"}, {"id": 102, "sku": "k4", "note": "b"}]
NOTES = [{"id": 2, "note": "a"}, {"id": 4, "note": "b"}]

Execute = Callable[[Session], Any]
# Each writes rows of the token of k2, and maybe of k4 and k6. Some are given in several ways of executing them.
WRITES: dict[str, Execute] = {}


def write(name: str) -> Callable[[Execute], Execute]:
    def note(function: Execute) -> Execute:
        assert name not in WRITES
        WRITES[name] = function
        return function

    return note


def both_ways(name: str, statement: Callable[[], Any], params: Any = None) -> None:
    """Through the session, and through its connection."""
    WRITES[f"session {name}"] = lambda s: s.execute(statement(), params)
    WRITES[f"connection {name}"] = lambda s: s.connection().execute(statement(), params)


def upserted(table: Any, **values: Any) -> Any:
    statement = upsert(table).values(id=2, sku="k2", note="new")
    return statement.on_conflict_do_update(index_elements=["id"], set_=values or {"note": statement.excluded.note})


for kind, entity in (("orm", Item), ("core", item)):
    both_ways(f"{kind} insert", lambda e=entity: insert(e).values(id=101, sku="k2"))
    both_ways(f"{kind} insert, generated key", lambda e=entity: insert(e).values(sku="k2"))
    both_ways(f"{kind} insert with parameters", lambda e=entity: insert(e), NEW[0])
    both_ways(f"{kind} insert many", lambda e=entity: insert(e), NEW)
    both_ways(f"{kind} insert values list", lambda e=entity: insert(e).values(NEW))
    both_ways(f"{kind} insert inline", lambda e=entity: insert(e).values(id=101, sku="k2").inline())
    both_ways(f"{kind} insert sql expression", lambda e=entity: insert(e).values(id=101, sku=func.lower("K2")))
    both_ways(f"{kind} insert returning", lambda e=entity: insert(e).values(NEW[0]).returning(e if e is Item else item))
    both_ways(f"{kind} insert returning one", lambda: insert(item).values(NEW[0]).returning(item.c.note))
    both_ways(f"{kind} insert many returning", lambda e=entity: insert(e).returning(item.c.id, item.c.note), NEW)
    both_ways(
        f"{kind} insert many returning sorted",
        lambda e=entity: insert(e).returning(item.c.id, sort_by_parameter_order=True),
        NEW,
    )
    both_ways(f"{kind} insert values list returning", lambda e=entity: insert(e).values(NEW).returning(item.c.id))
    both_ways(
        f"{kind} insert returning token",
        lambda e=entity: insert(e).values(NEW[0]).returning(item.c.token_id, item.c.id),
    )
    both_ways(
        f"{kind} insert return defaults", lambda e=entity: insert(e).values(sku="k2").return_defaults(item.c.shop_id)
    )
    both_ways(
        f"{kind} insert from select",
        lambda e=entity: insert(e).from_select(
            ["id", "sku", "note"], select(item.c.id + 100, item.c.sku, item.c.note).where(item.c.sku.in_(["k2", "k4"]))
        ),
    )
    both_ways(
        f"{kind} insert from select returning",
        lambda e=entity: (
            insert(e)
            .from_select(
                ["id", "sku", "note"], select(item.c.id + 100, item.c.sku, item.c.note).where(item.c.sku == "k2")
            )
            .returning(item.c.id)
        ),
    )
    both_ways(f"{kind} upsert", lambda e=entity: upserted(e))
    both_ways(f"{kind} upsert returning", lambda e=entity: upserted(e).returning(item.c.note))
    both_ways(
        f"{kind} insert or nothing",
        lambda e=entity: upsert(e).values(NEW[0]).on_conflict_do_nothing(),
    )
    both_ways(f"{kind} update", lambda e=entity: update(e).where(item.c.sku.in_(["k2", "k4"])).values(note="x"))
    both_ways(
        f"{kind} update ordered", lambda e=entity: update(e).where(item.c.id == 2).ordered_values((item.c.note, 1))
    )
    both_ways(
        f"{kind} update from",
        lambda e=entity: update(e).where(item.c.id == part.c.item_id, part.c.serial == "k2").values(note=part.c.serial),
    )
    both_ways(
        f"{kind} update returning",
        lambda e=entity: (
            update(e).where(item.c.sku.in_(["k2", "k4"])).values(note="x").returning(item.c.id, item.c.note)
        ),
    )
    both_ways(f"{kind} update key by primary key", lambda e=entity: update(e).where(item.c.id == 2).values(sku="k4"))
    both_ways(
        f"{kind} update key returning",
        lambda e=entity: update(e).where(item.c.id == 2).values(sku="k4").returning(item.c.sku),
    )
for kind, entity in (("orm", Part), ("core", part)):
    both_ways(f"{kind} delete", lambda e=entity: delete(e).where(part.c.serial.in_(["k2", "k4"])))
    both_ways(
        f"{kind} delete returning", lambda e=entity: delete(e).where(part.c.serial == "k2").returning(part.c.serial)
    )
    both_ways(f"{kind} delete using", lambda e=entity: delete(e).where(part.c.item_id == item.c.id, item.c.sku == "k2"))
both_ways(
    "core update many",
    lambda: update(item).where(item.c.id == bindparam("b")),
    [
        {"b": 2, "note": "a"},
        {"b": 4, "note": "b"},
    ],
)
both_ways("core delete many", lambda: delete(part).where(part.c.id == bindparam("b")), [{"b": 2}, {"b": 4}])
both_ways(
    "core update of the joined table",
    lambda: update(truck).where(truck.c.load == 0, truck.c.id.in_([2, 4])).values(load=truck.c.id),
)
both_ways("core update of the joined table by key", lambda: update(truck).where(truck.c.id == 2).values(load=7))
both_ways("core delete of the joined table", lambda: delete(truck).where(truck.c.id == 2))

WRITES["session update aliased"] = lambda s: s.execute(
    update(aliased(Item, name="i")).where(text("i.sku = 'k2'")).values(note="x"),
    execution_options={"synchronize_session": False},
)
WRITES["connection update aliased"] = lambda s: s.connection().execute(
    update(a := item.alias("i")).where(a.c.sku == "k2").values(note="x")
)
WRITES["session orm update by primary key"] = lambda s: s.execute(update(Item), NOTES)
WRITES["session orm update by one primary key"] = lambda s: s.execute(update(Item), NOTES[:1])
WRITES["session orm update by primary key of the key"] = lambda s: s.execute(
    update(Item), [{"id": 2, "sku": "k4"}, {"id": 4, "sku": "k4"}]
)
WRITES["session orm insert entities"] = lambda s: s.execute(insert(Item).returning(Item), NEW)
WRITES["session orm insert scalars"] = lambda s: s.scalars(insert(Item).returning(Item), NEW)
WRITES["session orm insert scalar"] = lambda s: s.scalar(insert(Item).values(NEW[0]).returning(Item.note))
WRITES["session orm update entities"] = lambda s: s.scalars(
    update(Item).where(Item.sku == "k2").values(note="x").returning(Item)
)
WRITES["session orm update fetch"] = lambda s: s.execute(
    update(Item).where(Item.sku == "k2").values(note="x"), execution_options={"synchronize_session": "fetch"}
)
WRITES["session orm update fetch returning"] = lambda s: s.execute(
    update(Item).where(Item.sku == "k2").values(note="x").returning(Item.note),
    execution_options={"synchronize_session": "fetch"},
)
WRITES["session orm delete entities"] = lambda s: s.scalars(
    delete(Part).where(Part.serial == "k2").returning(Part.serial)
)
WRITES["session orm delete fetch"] = lambda s: s.execute(
    delete(Part).where(Part.serial == "k2"), execution_options={"synchronize_session": "fetch"}
)
WRITES["session orm upsert many"] = lambda s: s.execute(
    (u := upsert(Item)).on_conflict_do_update(index_elements=["id"], set_={"note": u.excluded.note}),
    [{"id": 2, "sku": "x", "note": "a"}, {"id": 4, "sku": "y", "note": "b"}],
)
WRITES["session orm upsert entities"] = lambda s: s.scalars(
    (u := upsert(Item)).on_conflict_do_update(index_elements=["id"], set_={"note": u.excluded.note}).returning(Item),
    [{"id": 2, "sku": "x", "note": "a"}],
    execution_options={"populate_existing": True},
)
WRITES["session orm insert raw"] = lambda s: s.execute(
    insert(Item).values(NEW[0]).returning(Item.id), execution_options={"dml_strategy": "raw"}
)
WRITES["session orm insert of joined inheritance"] = lambda s: s.execute(
    insert(Truck), [{"plate": "k2"}, {"plate": "k4"}]
)
WRITES["session orm insert of joined inheritance returning"] = lambda s: s.execute(
    insert(Truck).returning(Truck.plate, Truck.load), [{"plate": "k2", "load": 3}]
)
WRITES["session orm update of joined inheritance"] = lambda s: s.execute(
    update(Truck).where(Truck.id == Vehicle.id, Vehicle.__table__.c.plate == "k2").values(load=5),
    execution_options={"synchronize_session": False},
)
WRITES["session orm update of joined inheritance returning"] = lambda s: s.execute(
    update(Truck).where(Truck.load == 0, Truck.id.in_([2, 4])).values(load=5).returning(Truck.load),
)
WRITES["session orm update by primary key of joined inheritance"] = lambda s: s.execute(
    update(Truck), [{"id": 2, "load": 3}, {"id": 4, "load": 3}]
)
WRITES["session orm update of a parent without tokens"] = lambda s: s.execute(
    update(Document).where(Document.id.in_([2, 4])).values(title="x")
)
WRITES["session orm update by primary key of a parent"] = lambda s: s.execute(
    update(Invoice), [{"id": 2, "title": "x"}, {"id": 4, "title": "y"}]
)
WRITES["query update"] = lambda s: s.query(Item).filter(Item.sku == "k2").update({"note": "x"})
WRITES["query delete"] = lambda s: s.query(Part).filter(Part.serial == "k2").delete()
WRITES["bulk_insert_mappings"] = lambda s: s.bulk_insert_mappings(Item, NEW)
WRITES["bulk_insert_mappings with defaults"] = lambda s: s.bulk_insert_mappings(
    Item, [{"sku": "k2"}, {"sku": "k4"}], return_defaults=True
)
WRITES["bulk_update_mappings"] = lambda s: s.bulk_update_mappings(Item, NOTES)
WRITES["bulk_save_objects"] = lambda s: s.bulk_save_objects([Item(**NEW[0]), Item(**NEW[1])])
WRITES["bulk_save_objects changed"] = lambda s: _bulk_save_changed(s)
WRITES["merge"] = lambda s: s.merge(Item(id=2, sku="k2", note="merged")) and s.flush()


def _bulk_save_changed(session: Session) -> None:
    items = session.scalars(select(Item).where(Item.sku.in_(["k2", "k4"]))).all()
    for one in items:
        one.note = "changed"
    session.bulk_save_objects(items)


def facts(outcome: Any) -> Any:
    """What a caller can see of a result."""
    if not hasattr(outcome, "fetchall") and not hasattr(outcome, "all"):
        return outcome if isinstance(outcome, int | str | None) else type(outcome)
    seen: dict[str, Any] = {}
    for name in ("returns_rows", "rowcount", "inserted_primary_key_rows", "is_insert"):
        try:
            value = getattr(outcome, name)
        except Exception as error:
            value = type(error).__name__
        seen[name] = [tuple(row) for row in value] if name.startswith("inserted") and isinstance(value, list) else value
    try:
        keys = list(outcome.keys()) if hasattr(outcome, "keys") else None
        rows = outcome.all()
        seen["keys"] = keys if rows else None
        seen["rows"] = [
            tuple(one.sku if isinstance(one, Item) else one for one in row)
            if hasattr(row, "_fields")
            else getattr(row, "sku", row)
            for row in rows
        ]
    except Exception as error:
        seen["rows"] = type(error).__name__
    return seen


def contents(session: Session) -> Any:
    session.expire_all()
    return [
        sorted(tuple(row) for row in session.execute(select(table.c).order_by(*table.primary_key)))
        for table in (item, part, vehicle, truck, Document.__table__, Invoice.__table__)
    ]


@pytest.mark.parametrize("name", WRITES)
def test_the_write(name: str, stocked_engine: Engine, job: HeldJob) -> None:
    with stocked_engine.connect() as connection, connection.begin() as transaction:
        with Session(connection, join_transaction_mode="create_savepoint") as plain:
            expected = facts(WRITES[name](plain))
            plain.flush()
            after = contents(plain)
        transaction.rollback()
    restart_sequences(stocked_engine)
    with OwnedSession(stocked_engine, job=job) as session:
        assert facts(WRITES[name](session)) == expected
        session.flush()
        assert contents(session) == after
        take(stocked_engine, "k2")
        with pytest.raises(OwnershipLost) as caught:
            session.commit()
        assert caught.value.tokens == (token("k2"),)
        session.rollback()
