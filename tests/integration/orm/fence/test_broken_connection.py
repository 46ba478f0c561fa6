"""A connection that breaks while the fence is looking who has the tokens now."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from sqlalchemy import Engine, select, text

from jobsync_orm import OwnershipLost
from jobsync_orm.naming import Names
from jobsync_orm.orm import OwnedSession, fence
from tests.integration.orm.conftest import MINE
from tests.integration.orm.fence.conftest import HeldJob, take
from tests.integration.orm.models import Item


@pytest.mark.parametrize("isolation", ["READ COMMITTED", "REPEATABLE READ"])
def test_the_refusal_is_what_is_seen(
    stocked_engine: Engine, job: HeldJob, monkeypatch: pytest.MonkeyPatch, isolation: str
) -> None:
    key = MINE[0]
    look = fence._owners_sql

    def end_the_session_first(names: Names, tokens: Iterable[int]) -> str:
        with stocked_engine.connect() as other:
            other.execute(text("SELECT pg_terminate_backend(:pid, 5000)"), {"pid": backend})
        return look(names, tokens)

    with OwnedSession(stocked_engine, job=job) as session:
        session.connection(execution_options={"isolation_level": isolation})
        backend = session.scalars(text("SELECT pg_backend_pid()")).one()
        session.scalars(select(Item).where(Item.sku == key)).one().note = "late"
        take(stocked_engine, key)
        monkeypatch.setattr(fence, "_owners_sql", end_the_session_first)
        with pytest.raises(OwnershipLost, match="owner unknown"):
            session.commit()
    monkeypatch.undo()
    with OwnedSession(stocked_engine, job=job) as session:
        assert session.scalars(select(Item.note).where(Item.sku == key)).one() != "late"
