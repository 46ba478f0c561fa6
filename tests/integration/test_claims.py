"""Claims outlive no life of a node: what a dead one left behind stops nobody."""

from __future__ import annotations

import uuid

import pytest
from sqlalchemy import URL, Engine, text

from jobsync_orm import CoordinationConfig, Job
from jobsync_orm.coordinator.statements import Statements
from jobsync_orm.naming import Names
from tests.integration.cluster import QUICK
from tests.integration.coordinator.backstage import add_node, open_session


@pytest.fixture
def config(database: URL) -> CoordinationConfig:
    return CoordinationConfig(url=database, **QUICK)


def claim(engine: Engine, task: str, token: int, node: str, incarnation: str) -> None:
    with engine.begin() as connection:
        connection.execute(
            text(
                "INSERT INTO sync_claim (task_id, token_id, node, incarnation, epoch, claimed_at)"
                " VALUES (:task, :token, :node, CAST(:incarnation AS uuid), 1, clock_timestamp())"
            ),
            {"task": task, "token": token, "node": node, "incarnation": incarnation},
        )


def claims(engine: Engine) -> list[tuple[str, str, str]]:
    with engine.connect() as connection:
        rows = connection.execute(text("SELECT task_id, node, incarnation::text FROM sync_claim ORDER BY 1"))
        return [tuple(row) for row in rows]


def test_claims_of_an_earlier_life_of_the_name_are_void(config: CoordinationConfig, engine: Engine) -> None:
    """Killed while it worked on a task, and started again before anybody evicted it."""
    with engine.begin() as connection:
        life = add_node(connection, "w1")
    job = Job("w1", config)
    claim(engine, "t", job.task_to_token("t"), "w1", life)
    with job:
        assert claims(engine) == []
        assert job.add_task("t")
        assert claims(engine) == [("t", "w1", job._coordinator.incarnation)]  # type: ignore[union-attr]


@pytest.mark.parametrize("node", ["w1", "ghost", "resting"])
def test_a_claim_that_arrives_after_its_node_has_gone_is_taken_over(
    config: CoordinationConfig, engine: Engine, node: str
) -> None:
    """The server goes on with a statement whose sender was killed and evicted meanwhile."""
    with Job("w1", config) as job:
        life = str(uuid.uuid4())
        if node == "resting":
            with engine.begin() as connection:
                life = add_node(connection, node, ordinal=99, state="away", rejoin_grace_sec=3600)
        for task in ("a", "b"):
            claim(engine, task, job.task_to_token(task), node, life)
        assert job.set_claim("a") == ["a"]
        assert job.add_task("b")
        mine = job._coordinator.incarnation  # type: ignore[union-attr]
        assert claims(engine) == [("a", "w1", mine), ("b", "w1", mine)]


def test_a_claim_of_a_live_node_is_respected(config: CoordinationConfig, engine: Engine) -> None:
    with Job("w1", config) as job:
        with engine.begin() as connection:
            life = add_node(connection, "w2", ordinal=99, heartbeat_timeout_sec=3600)
        claim(engine, "t", job.task_to_token("t"), "w2", life)
        assert job.set_claim("t") == []
        assert claims(engine) == [("t", "w2", life)]


@pytest.mark.parametrize("how", ["evict", "leave"])
@pytest.mark.parametrize("lock", ["UPDATE", "SHARE"])
def test_nobody_waits_for_an_applications_lock_on_a_claim(engine: Engine, database: URL, how: str, lock: str) -> None:
    statements = Statements(Names())
    with engine.begin() as connection:
        life = add_node(connection, "w1", silent_sec=3600)
        beat = connection.execute(text("SELECT last_heartbeat::text FROM sync_node")).scalar_one()
    claim(engine, "held", 1, "w1", life)
    claim(engine, "free", 2, "w1", life)
    with engine.connect() as application, open_session(database) as session:
        application.execute(text(f"SELECT 1 FROM sync_claim WHERE task_id = 'held' FOR {lock}"))
        if how == "evict":
            values = ["{w1}", f"{{{life}}}", f'{{"{beat}"}}', "{f}"]
            rows = session.execute(statements.evict, *values, timeout=3)
        else:
            rows = session.execute(statements.leave, "w1", life, timeout=3)
        assert len(rows) == 1
        assert [row[0] for row in claims(engine)] == ["held"], "it stops nobody; see above"
