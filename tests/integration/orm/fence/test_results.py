"""What the caller gets of a write is what he gets of it in a session that is not bound."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import Engine, Table, func, insert, select, update
from sqlalchemy.orm import Session

from jobsync_orm.orm import OwnedSession
from tests.integration.orm.fence.conftest import HeldJob, restart_sequences
from tests.integration.orm.models import Item, Shop

item: Table = Item.__table__  # type: ignore[assignment]
shop: Table = Shop.__table__  # type: ignore[assignment]
ROWS = [{"sku": "k2"}, {"sku": "k4"}, {"sku": "k6"}]
CHANGE = update(item).where(item.c.shop_id == shop.c.id, item.c.id == 2).values(note="x")


def everything(result: Any) -> Any:
    return list(result.keys()), [(row, dict(row._mapping), row._asdict()) for row in result]


def objects(session: Session, change: Callable[[], Any]) -> Any:
    loaded = session.scalars(select(Item).order_by(Item.id)).all()
    change()
    return [(one.__dict__.get("token_id"), one.token_id, one.sku, one.note) for one in loaded]


CASES: dict[str, Callable[[Session], Any]] = {
    "names of expressions": lambda s: everything(
        s.execute(CHANGE.returning(shop.c.id, item.c.id, func.lower(item.c.sku), item.c.sku.label("mine")))
    ),
    "one of several": lambda s: s.execute(CHANGE.returning(shop.c.id, item.c.id)).mappings().one()["id_1"],
    "names, many sets": lambda s: everything(
        s.execute(insert(item).returning(item.c.id, func.upper(item.c.sku), sort_by_parameter_order=True), ROWS)
    ),
    "no rows, many sets": lambda s: s.execute(insert(item), ROWS).returns_rows,
    "tokens of changed keys": lambda s: objects(
        s, lambda: s.execute(update(Item).where(Item.id == 2).values(sku="k4"))
    ),
    "tokens of changed keys, fetched": lambda s: objects(
        s,
        lambda: s.execute(
            update(Item).where(Item.id == 2).values(sku="k4"), execution_options={"synchronize_session": "fetch"}
        ),
    ),
    "tokens of changed keys, by primary key": lambda s: objects(
        s, lambda: s.execute(update(Item), [{"id": 2, "sku": "k4"}, {"id": 4, "sku": "k2"}])
    ),
    "legacy query": lambda s: objects(s, lambda: s.query(Item).filter(Item.id == 2).update({"sku": "k6"})),
}


@pytest.mark.parametrize("name", CASES)
def test_the_same(stocked_engine: Engine, job: HeldJob, name: str) -> None:
    got = []
    for make in (Session, lambda engine: OwnedSession(engine, job=job)):
        restart_sequences(stocked_engine)
        with make(stocked_engine) as session:
            got.append(CASES[name](session))
            session.rollback()
    assert got[1] == got[0]
