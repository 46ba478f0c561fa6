"""Checkpoints: read by whoever goes on, written only by the owner."""

from __future__ import annotations

import asyncio
import json
import re
import signal
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import URL, Engine, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session, async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session, scoped_session, sessionmaker

from jobsync_orm import ConfigurationError, CoordinationConfig, InvalidPosition, Job, NotRunning, OwnershipLost, Task
from jobsync_orm.checkpoints import CheckpointBook
from jobsync_orm.naming import Names
from tests.integration.claiming import answer_lost, counted, give_away, run
from tests.integration.cluster import QUICK, Cluster, wait_for
from tests.integration.coordinator.backstage import add_node

TEXT = st.text(st.characters(blacklist_categories=("Cs",), blacklist_characters="\0"))
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner) | st.dictionaries(TEXT, inner),
)


def stored(engine: Engine) -> list[tuple[Any, ...]]:
    with engine.connect() as connection:
        return [tuple(row) for row in connection.execute(text("SELECT task_id, epoch, position FROM sync_checkpoint"))]


def test_what_is_stored_is_read(job: Job, own_engine: Engine, engine: Engine) -> None:
    assert job.last_checkpoint("t") is None
    with counted(own_engine) as sent:
        job.checkpoint(Task("t"), {"page": 3})
    assert len(sent) == 1
    assert job.last_checkpoint("t") == {"page": 3}
    job.checkpoint("t", [4, "x"])
    assert job.last_checkpoint(Task("t")) == [4, "x"]
    with engine.connect() as connection:
        token_epoch = text("SELECT epoch FROM sync_token WHERE token_id = :t")
        epoch = connection.execute(token_epoch, {"t": job.task_to_token("t")}).scalar_one()
    assert stored(engine) == [("t", epoch, [4, "x"])]
    assert job.clear_checkpoint("t") is True
    assert job.clear_checkpoint("t") is False
    assert job.last_checkpoint("t") is None


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(JSON.filter(lambda position: position is not None))
def test_a_position_comes_back_equal_and_of_the_same_type(job: Job, position: Any) -> None:
    job.checkpoint("t", position)
    stored = re.sub(r"-0\.0(?!\d)", "0.0", json.dumps(position, sort_keys=True))  # JSON has one zero
    assert json.dumps(job.last_checkpoint("t"), sort_keys=True) == stored


def test_what_cannot_be_stored_is_not_sent(job: Job, own_engine: Engine) -> None:
    with counted(own_engine) as sent, pytest.raises(InvalidPosition, match="NUL"):
        job.checkpoint("t", {"name": "a\0b"})
    assert sent == []


def test_a_write_whose_answer_was_lost_is_repeated(job: Job, own_engine: Engine) -> None:
    with answer_lost(own_engine):
        job.checkpoint("t", 1)
    assert job.last_checkpoint("t") == 1


@pytest.mark.parametrize("call", ["checkpoint", "clear"])
def test_only_the_owner_writes(job: Job, engine: Engine, call: str) -> None:
    job.checkpoint("t", 1)
    token = job.task_to_token("t")
    give_away(engine, token, "w9")
    with pytest.raises(OwnershipLost) as info:
        job.checkpoint("t", 2) if call == "checkpoint" else job.clear_checkpoint("t")
    assert (info.value.tokens, info.value.owners) == ((token,), {token: "w9"})
    assert job.last_checkpoint("t") == 1, "anyone reads"


def test_a_claim_remembers_that_its_token_was_away(job: Job, engine: Engine) -> None:
    token, version = job.task_to_token("t"), job.token_version
    claim = job.claim_task("t")
    give_away(engine, token, "w9")
    give_away(engine, token, "w1")
    wait_for(lambda: job.token_version > version, "this node knows that it owns the token again")
    with pytest.raises(OwnershipLost):
        job.checkpoint("t", "old")
    with pytest.raises(OwnershipLost):
        claim.complete()
    assert stored(engine) == []
    job.checkpoint("t", "new")
    assert job.last_checkpoint("t") == "new"


def test_a_token_that_is_asked_for_may_still_be_checkpointed(job: Job, engine: Engine) -> None:
    """As ``on_revoke`` would."""
    marking = "UPDATE sync_token SET next_node = 'w9', next_epoch = 99 WHERE token_id = :token"
    run(engine, marking, token=job.task_to_token("t"))
    job.checkpoint("t", 1)
    assert job.last_checkpoint("t") == 1


def test_an_earlier_life_or_epoch_writes_nothing(engine: Engine) -> None:
    with engine.begin() as connection:
        life = add_node(connection, "a")
    run(engine, "UPDATE sync_token SET node = 'a', epoch = 5 WHERE token_id = 7")
    book = CheckpointBook(engine, Names(), "a")
    book.write("t", 7, "1", life, 5, None, fenced=False)
    run(engine, "UPDATE sync_checkpoint SET epoch = 6")  # a later owner's
    for known, by in ((4, life), (9, "00000000-0000-0000-0000-000000000000"), (9, life)):
        with pytest.raises(OwnershipLost):
            book.write("t", 7, "2", by, known, None, fenced=False)
    assert book.clear("t", 7, life, 9, None, fenced=False) is False
    assert stored(engine) == [("t", 6, 1)]


def test_before_and_after(database: URL) -> None:
    job = Job("w1", CoordinationConfig(url=database, **QUICK))
    for call in (lambda: job.checkpoint("t", 1), lambda: job.clear_checkpoint("t")):
        with pytest.raises(NotRunning):
            call()
    with job:
        job.checkpoint("t", 1)
    with pytest.raises(NotRunning):
        job.checkpoint("t", 2)


# -- in a transaction of the application -----------------------------------------------------------------------


@pytest.mark.parametrize("bound", [False, True])
def test_part_of_a_transaction(job: Job, engine: Engine, bound: bool) -> None:
    sessions = scoped_session(sessionmaker(engine))
    if bound:
        job.bind(sessions)
    job.checkpoint("t", 1, sessions)
    assert job.last_checkpoint("t") is None
    assert job.last_checkpoint("t", sessions) == 1
    sessions.rollback()
    assert job.last_checkpoint("t", sessions) is None
    job.checkpoint("t", 2, sessions)
    sessions.commit()
    assert job.last_checkpoint("t") == 2
    assert job.clear_checkpoint("t", sessions) is True
    sessions.commit()
    assert job.last_checkpoint("t") is None
    sessions.remove()


def test_an_unbound_transaction_holds_the_token(job: Job, engine: Engine) -> None:
    moving = text("SELECT 1 FROM sync_token WHERE token_id = :token FOR UPDATE SKIP LOCKED")
    for bound in (False, True):
        with Session(engine) as session, engine.connect() as mover:
            if bound:
                job.bind(session)
            job.checkpoint("t", 1, session)
            assert len(mover.execute(moving, {"token": job.task_to_token("t")}).all()) == (1 if bound else 0)


def test_a_bound_transaction_is_refused_if_the_token_moves_before_it_commits(job: Job, engine: Engine) -> None:
    with Session(engine) as session:
        job.bind(session)
        job.checkpoint("t", 1, session)
        give_away(engine, job.task_to_token("t"), "w9")
        with pytest.raises(OwnershipLost):
            session.commit()
    assert stored(engine) == []


def test_a_session_of_another_job(job: Job, engine: Engine, database: URL) -> None:
    with Session(engine) as session:
        Job("w2", CoordinationConfig(url=database, **QUICK)).bind(session)
        with pytest.raises(ConfigurationError, match="bound to the job w2"):
            job.checkpoint("t", 1, session)


@pytest.mark.parametrize("to", ["w9", "w1"])
def test_a_token_that_moved_since_the_snapshot(job: Job, engine: Engine, to: str) -> None:
    token = job.task_to_token("t")
    with Session(engine.execution_options(isolation_level="REPEATABLE READ")) as session:
        session.execute(text("SELECT 1"))
        if to == "w9":
            give_away(engine, token, to)
        else:
            run(engine, "UPDATE sync_token SET assigned_at = now() WHERE token_id = :token", token=token)
        with pytest.raises(OwnershipLost if to == "w9" else DBAPIError):
            job.checkpoint("t", 1, session)


def test_async(job: Job, database: URL) -> None:
    async def main() -> None:
        pool = create_async_engine(database)
        await job.checkpoint_async("t", 1)
        assert await job.last_checkpoint_async("t") == 1
        sessions = async_scoped_session(async_sessionmaker(pool), asyncio.current_task)
        with pytest.raises(ConfigurationError, match=r"await checkpoint_async\(task, position, session\)"):
            job.checkpoint("t", 2, sessions)  # type: ignore[arg-type]
        await job.checkpoint_async("t", 2, sessions)
        await sessions.rollback()
        assert await job.last_checkpoint_async("t", sessions) == 1
        await sessions.remove()
        async with AsyncSession(pool) as session:
            job.bind(session)
            await job.checkpoint_async("t", 3, session)
            await session.commit()
            assert await job.last_checkpoint_async("t", session) == 3
            assert await job.clear_checkpoint_async("t", session) is True
            await session.commit()
        assert await job.clear_checkpoint_async("t") is False
        with pytest.raises(ConfigurationError, match="give an AsyncSession"):
            await job.checkpoint_async("t", 2, "session")  # type: ignore[arg-type]
        await pool.dispose()

    asyncio.run(main())


# -- going on where another stopped ----------------------------------------------------------------------------


def test_the_next_owner_goes_on_where_a_killed_one_stopped(cluster: Cluster, database: URL, engine: Engine) -> None:
    with Job("w1", CoordinationConfig(url=database, **QUICK)) as job:
        worker = cluster.add("w2", CHECKPOINT="100")
        wait_for(lambda: worker.seen("checkpoint"), "the worker counts")
        task = (worker.seen("checkpoint") or {})["task"]
        with pytest.raises(OwnershipLost):
            job.checkpoint(task, 0)
        wait_for(lambda: (job.last_checkpoint(task) or 0) > 20, "it goes on")
        worker.signal(signal.SIGKILL)
        wait_for(lambda: job.can_claim_task(task), "its task is taken over")
        position = job.last_checkpoint(task)
        assert position > 20
        job.checkpoint(task, position + 1)
        assert job.last_checkpoint(task) == position + 1


def test_a_paused_owner_sets_nothing_back(make_cluster: Callable[..., Cluster], database: URL) -> None:
    """Stopped for longer than its lease, in the middle of counting; then it goes on and tries to."""
    cluster = make_cluster(heartbeat_timeout_sec=2, heartbeat_interval_sec=0.3)
    with Job("w1", CoordinationConfig(url=database, **{**QUICK, "heartbeat_timeout_sec": 2})) as job:
        worker = cluster.add("w2", CHECKPOINT="1000000")
        wait_for(lambda: worker.seen("checkpoint"), "the worker counts")
        task = (worker.seen("checkpoint") or {})["task"]
        worker.signal(signal.SIGSTOP)
        wait_for(lambda: job.can_claim_task(task), "its task is taken over")
        job.checkpoint(task, "mine")
        worker.signal(signal.SIGCONT)
        refusal = wait_for(lambda: worker.seen("checkpoint refused"), "it hears that it is too late")
        assert refusal["owners"] == {str(job.task_to_token(task)): "w1"}
        assert job.last_checkpoint(task) == "mine"
