"""Observers are told of what the fence refuses, and of rows that were claimed."""

from __future__ import annotations

import pytest
from sqlalchemy import Engine, select, text
from sqlalchemy.orm import Session

from jobsync_orm import observe
from jobsync_orm.exceptions import OwnershipLost
from jobsync_orm.migrate.fence import create_ownership_fence, drop_ownership_fence
from jobsync_orm.observe import Event, FenceRejected, RowsClaimed
from jobsync_orm.orm.claiming import claim
from tests.integration.orm.fence.conftest import HeldJob, take
from tests.integration.orm.models import Item


@pytest.fixture
def heard(job: HeldJob) -> list[Event]:
    heard: list[Event] = []
    job.audience.add(heard.append)
    return heard


def test_refusals(stocked_engine: Engine, session: Session, heard: list[Event]) -> None:
    session.get_one(Item, 2).note = "mine"
    take(stocked_engine, "k2")
    with pytest.raises(OwnershipLost):
        session.commit()
    session.rollback()
    session.add(Item(id=99, sku="k1"))
    with pytest.raises(OwnershipLost):  # it never was this node's, so that is known before anything is committed
        session.commit()
    session.rollback()
    assert observe.flush(10)
    assert heard == [FenceRejected("me", "commit"), FenceRejected("me", "write")]


def test_refusal_of_the_trigger_is_one(stocked_engine: Engine, session: Session, heard: list[Event]) -> None:
    create_ownership_fence(stocked_engine, "item", undeclared="refuse")
    try:
        session.execute(text("UPDATE item SET note = 'raw' WHERE sku = 'k4'"))
        take(stocked_engine, "k4")
        with pytest.raises(OwnershipLost):
            session.commit()
        session.rollback()
    finally:
        drop_ownership_fence(stocked_engine, "item")
    assert observe.flush(10)
    assert heard == [FenceRejected("me", "trigger")]


def test_claimed_rows(session: Session, job: HeldJob, heard: list[Event]) -> None:
    rows = claim(session, job, select(Item), 2)
    assert isinstance(rows, list)
    assert len(rows) == 2
    assert observe.flush(10)
    assert heard == [RowsClaimed("me", 2)]
