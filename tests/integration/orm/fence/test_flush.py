"""The unit of work: objects added, changed and deleted."""

from __future__ import annotations

import pytest
from sqlalchemy import Engine, select, text
from sqlalchemy.orm import Session

from jobsync_orm.exceptions import OwnershipLost
from jobsync_orm.orm import OwnedSession
from tests.integration.orm.fence.conftest import HeldJob, Statements, take, token, view_of
from tests.integration.orm.models import Document, Invoice, Item, Part, Shop, Truck, Vehicle


def skus(engine: Engine) -> list[str]:
    with engine.connect() as connection:
        return list(connection.scalars(text("SELECT sku FROM item ORDER BY id")))


def test_what_is_still_owned_is_stored(session: Session, stocked_engine: Engine) -> None:
    statements = Statements(stocked_engine)
    session.add(Item(id=100, sku="k2"))
    session.commit()
    assert skus(stocked_engine)[-1] == "k2"
    assert len(statements.fences) == 1


@pytest.mark.parametrize("action", ["add", "change", "delete", "key"])
def test_what_was_taken_meanwhile_is_not(session: Session, stocked_engine: Engine, action: str) -> None:
    before = skus(stocked_engine)
    part = session.scalars(select(Part).where(Part.serial == "k2")).one()
    if action == "add":
        session.add(Part(serial="k2", item_id=1))
    elif action == "change":
        part.item_id = 3
    elif action == "delete":
        session.delete(part)
    else:
        part.serial = "k4"
    session.flush()
    take(stocked_engine, "k2")
    with pytest.raises(OwnershipLost) as caught:
        session.commit()
    assert caught.value.tokens == (token("k2"),)
    assert caught.value.owners == {token("k2"): "other"}
    assert "now other's" in str(caught.value)
    session.rollback()
    assert skus(stocked_engine) == before
    with stocked_engine.connect() as connection:
        rows = connection.execute(text("SELECT serial, item_id FROM part ORDER BY id")).all()
    assert rows == [(f"k{number}", number) for number in range(1, 7)]


def test_of_a_changed_key_both_tokens_count(session: Session, stocked_engine: Engine) -> None:
    for lost in ("k2", "k4"):
        session.scalars(select(Item).where(Item.sku == "k2")).one().sku = "k4"
        session.flush()
        take(stocked_engine, lost)
        with pytest.raises(OwnershipLost) as caught:
            session.commit()
        assert caught.value.tokens == (token(lost),)
        session.rollback()
        take(stocked_engine, lost, node="me", epoch=0)
    session.scalars(select(Item).where(Item.sku == "k2")).one().sku = "k4"
    session.commit()
    assert skus(stocked_engine)[1] == "k4"


def test_a_key_changed_by_another_transaction_since_it_was_read(session: Session, stocked_engine: Engine) -> None:
    """The token that the row had is the database's, not the one in the object."""
    item = session.scalars(select(Item).where(Item.sku == "k2")).one()
    with stocked_engine.begin() as connection:
        connection.execute(text("UPDATE item SET sku = 'k1' WHERE id = 2"))
    item.sku = "k4"
    with pytest.raises(OwnershipLost) as caught:
        session.commit()
    assert caught.value.tokens == (token("k1"),)


def test_not_owned_at_the_begin_is_refused_at_the_flush(session: Session, stocked_engine: Engine) -> None:
    session.add(Item(id=100, sku="k1"))
    with pytest.raises(OwnershipLost) as caught:
        session.flush()
    assert caught.value.owners == {token("k1"): "other"}
    session.rollback()
    assert len(skus(stocked_engine)) == 6


def test_and_cannot_be_committed_all_the_same(session: Session, stocked_engine: Engine) -> None:
    session.connection()
    with pytest.raises(OwnershipLost):
        session.connection().execute(text("SELECT 1")) and session.execute(
            Item.__table__.insert().values(id=100, sku="k1")
        )
    with pytest.raises(OwnershipLost):
        session.commit()
    session.rollback()
    assert len(skus(stocked_engine)) == 6


def test_a_token_that_went_away_and_came_back(session: Session, job: HeldJob, stocked_engine: Engine) -> None:
    session.scalars(select(Item).where(Item.sku == "k2")).one().note = "late"
    session.flush()
    take(stocked_engine, "k2", epoch=8)
    take(stocked_engine, "k2", node="me", epoch=9)
    job.view = view_of(["k2"], 9)
    with pytest.raises(OwnershipLost) as caught:
        session.commit()
    assert caught.value.owners == {token("k2"): "me"}
    session.rollback()
    session.scalars(select(Item).where(Item.sku == "k2")).one().note = "anew"
    session.commit()


def test_a_token_got_after_the_begin(session: Session, job: HeldJob, stocked_engine: Engine) -> None:
    session.connection()
    take(stocked_engine, "k1", node="me", epoch=7)
    job.view = view_of(["k1", "k2"], 8)
    session.add(Item(id=100, sku="k1"))
    with pytest.raises(OwnershipLost):
        session.commit()


def test_the_view_is_that_of_each_transaction(session: Session, job: HeldJob, stocked_engine: Engine) -> None:
    for number, key in enumerate(["k2", "k1", "k3"]):
        take(stocked_engine, key, node="me", epoch=number)
        job.view = view_of([key], 10 + number)
        session.add(Item(id=100 + number, sku=key))
        session.commit()
    assert skus(stocked_engine)[6:] == ["k2", "k1", "k3"]


def test_nobody_owns_it_now(session: Session, stocked_engine: Engine) -> None:
    session.add(Item(id=100, sku="k2"))
    session.flush()
    take(stocked_engine, "k2", node=None)
    with pytest.raises(OwnershipLost, match="nobody's") as caught:
        session.commit()
    assert caught.value.owners == {token("k2"): None}


@pytest.mark.parametrize("action", ["add", "change parent", "change own", "delete"])
@pytest.mark.parametrize("kind", ["token in the parent", "token in the subclass"])
def test_joined_inheritance(stocked_engine: Engine, job: HeldJob, action: str, kind: str) -> None:
    with OwnedSession(stocked_engine, job=job) as session:
        if kind == "token in the parent":
            truck = session.scalars(select(Truck).where(Truck.plate == "k2")).one()
            thing: object = truck
            if action == "add":
                session.add(Truck(plate="k2"))
            elif action == "change parent":
                truck.plate = "k4"
            else:
                truck.load = 5
        else:
            invoice = session.scalars(select(Invoice).where(Invoice.number == "k2")).one()
            thing = invoice
            if action == "add":
                session.add(Invoice(number="k2"))
            elif action == "change parent":
                invoice.title = "late"
            else:
                invoice.paid = True
        if action == "delete":
            session.delete(thing)
        session.flush()
        take(stocked_engine, "k2")
        with pytest.raises(OwnershipLost) as caught:
            session.commit()
        assert caught.value.tokens == (token("k2"),)
    with Session(stocked_engine) as session:
        assert [truck.plate for truck in session.scalars(select(Vehicle).order_by(Vehicle.id))] == [
            f"k{number}" for number in range(1, 7)
        ]
        assert {truck.load for truck in session.scalars(select(Truck))} == {0}
        assert {document.title for document in session.scalars(select(Document))} == {""}
        assert len(session.scalars(select(Invoice).where(Invoice.paid.is_(False))).all()) == 6


def test_many_of_each(session: Session, stocked_engine: Engine) -> None:
    """The unit of work sends one statement for several rows; every one counts."""
    for action in ("add", "change", "delete", "post-update"):
        items = session.scalars(select(Item).where(Item.sku.in_(["k2", "k4", "k6"])).order_by(Item.id)).all()
        if action == "add":
            session.add_all([Item(id=200 + n, sku=f"k{n}") for n in (2, 4, 6)])
        elif action == "change":
            for item in items:
                item.note = "changed"
        elif action == "post-update":
            for item in items:
                item.shop = None
        else:
            for part in session.scalars(select(Part).where(Part.serial.in_(["k2", "k4", "k6"]))):
                session.delete(part)
        session.flush()
        take(stocked_engine, "k6")
        with pytest.raises(OwnershipLost) as caught:
            session.commit()
        assert caught.value.tokens == (token("k6"),)
        session.rollback()
        take(stocked_engine, "k6", node="me", epoch=0)


def test_rows_without_tokens_cost_no_round_trip(session: Session, stocked_engine: Engine) -> None:
    """What else the database changes with them is for the trigger, which must know who commits."""
    statements = Statements(stocked_engine)
    session.add(Shop(id=2))
    session.commit()
    assert len(statements.sent) == 2
    assert statements.sent[1].endswith("; COMMIT")


def test_reading_costs_nothing(session: Session, stocked_engine: Engine) -> None:
    session.scalars(select(Item)).all()
    session.commit()
    statements = Statements(stocked_engine)
    session.scalars(select(Item)).all()
    session.commit()
    assert len(statements.sent) == 1
