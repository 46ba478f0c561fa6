"""owned_by of a real job: its criterion is made once for each class, and asks anew at each execution."""

from __future__ import annotations

import gc
from weakref import ref

import pytest
from sqlalchemy import Engine, select, union
from sqlalchemy.exc import StatementError
from sqlalchemy.orm import Session, aliased

from jobsync_orm import CoordinationConfig, Job
from jobsync_orm.orm import owned_by
from tests.integration.orm.conftest import stock
from tests.integration.orm.models import Item, Part


def test_made_once_and_asked_at_each_execution(shop_engine: Engine) -> None:
    stock(shop_engine)
    config = CoordinationConfig(engine=shop_engine)
    with Job("w1", config) as job, Session(shop_engine) as session:
        criterion = Item.owned_by(job)
        assert owned_by(Item, job) is criterion
        assert Part.owned_by(job) is not criterion
        other = aliased(Item)
        twice = select(Item.id).join(other, other.id == Item.id).where(Item.owned_by(job), other.owned_by(job))
        both = union(select(Item.id).where(Item.owned_by(job)), select(Item.id).where(Item.owned_by(job)))
        assert len(session.scalars(twice).all()) == len(session.scalars(both).all()) == 6
        statement = select(Item).where(criterion)
        assert len(session.scalars(statement).all()) == 6
    with Session(shop_engine) as session, pytest.raises(StatementError, match="not running"):
        session.scalars(statement)
    gone = ref(job)
    del job, criterion, statement, twice, both
    shop_engine.clear_compiled_cache()
    gc.collect()
    assert gone() is None


def test_of_two_jobs_each_gets_its_own_rows(shop_engine: Engine) -> None:
    stock(shop_engine)
    config = CoordinationConfig(engine=shop_engine)
    with Job("w1", config) as one, Job("w2", config) as two, Session(shop_engine) as session:
        mine = [set(session.scalars(select(Item.id).where(Item.owned_by(job)))) for job in (one, two, one)]
    assert mine[0] == mine[2]
    assert mine[0].isdisjoint(mine[1])
    assert len(mine[0] | mine[1]) == 6
