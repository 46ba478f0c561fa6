"""What one look shows of a real cluster."""

from __future__ import annotations

import datetime
import signal

import pytest
from sqlalchemy import URL, Engine, create_engine, text

from jobsync_orm import Job
from jobsync_orm.exceptions import ConfigurationError, SchemaNotReady
from jobsync_orm.naming import Names
from jobsync_orm.operate import NodeTokens, Operations
from tests.integration.cluster import Cluster, wait_for


@pytest.fixture
def operations(engine: Engine) -> Operations:
    return Operations(engine, Names())


def test_a_cluster_nobody_has_joined(operations: Operations) -> None:
    found = operations.status()
    assert (found.nodes, found.leader, found.epoch, found.last_rebalance) == ((), None, 0, None)
    assert (found.tokens.total, found.tokens.owned, found.tokens.unowned, found.tokens.parked) == (10_000, 0, 10_000, 0)
    assert not found.healthy
    assert found.problems == ("no node is live: nobody works on any token", "10000 tokens have no owner yet")


def test_missing_tables_name_the_command(empty_database: URL) -> None:
    engine = create_engine(empty_database)
    with pytest.raises(SchemaNotReady, match="jobsync-orm db upgrade"):
        Operations(engine, Names("other_", "nowhere")).status()
    engine.dispose()


def test_two_workers_and_a_pin_nobody_matches(cluster: Cluster, operations: Operations, job: Job) -> None:
    cluster.add("w2")
    even = (NodeTokens("w1", 5000, 0, 0), NodeTokens("w2", 5000, 0, 0))
    found = wait_for(lambda: (s := operations.status()).healthy and s.tokens.nodes == even and s, "two share all")
    assert [(node.name, node.condition, node.leader, node.session_open) for node in found.nodes] == [
        ("w1", "live", True, True),
        ("w2", "live", False, True),
    ]
    assert found.tokens.owned == 10_000
    first = found.nodes[0]
    assert 0 <= first.heartbeat_age_sec < first.heartbeat_timeout_sec == 4
    assert first.lease_left_sec == pytest.approx(4 - first.heartbeat_age_sec)
    latest, *_ = operations.rebalances(1)
    assert latest == found.last_rebalance
    assert (latest.reason, latest.leader, latest.tokens_moved, latest.nodes_after) == ("join", "w1", 5000, 2)
    assert operations.rebalances(since=latest.triggered_at)[-1] == latest
    assert operations.rebalances(since=latest.triggered_at + datetime.timedelta(microseconds=1)) == []

    job.register_lock("task", "gpu-%")
    parked = wait_for(lambda: (s := operations.status()).tokens.parked and s, "the token is parked")
    assert (parked.tokens.unowned, parked.tokens.owned) == (1, 9999)
    assert parked.problems == ("1 token is parked: their pins match no live node",)


def test_a_worker_that_is_killed_is_cut_off_then_gone(cluster: Cluster, operations: Operations, job: Job) -> None:
    worker = cluster.add("w2")
    wait_for(lambda: worker.seen("ready"), "w2 is ready")
    worker.signal(signal.SIGKILL)
    seen = wait_for(lambda: (s := operations.status()).nodes[1].condition == "cut off" and s, "w2 is cut off")
    assert seen.nodes[1].session_open is False
    assert any(problem.startswith("w2 is cut off") for problem in seen.problems)
    wait_for(lambda: [node.name for node in operations.nodes()] == ["w1"], "w2 is evicted")
    wait_for(lambda: operations.tokens().nodes == (NodeTokens("w1", 10_000, 0, 0),), "w1 has all")


def test_looking_again_counts_tokens_only_if_some_may_have_moved(engine: Engine, job: Job) -> None:
    operations = Operations(engine, Names())
    before = wait_for(lambda: (s := operations.status()).healthy and s, "w1 has all")

    def count(where: str) -> None:
        with engine.begin() as connection:
            connection.execute(text(f"UPDATE sync_token SET node = 'nobody' WHERE {where}"))

    count("token_id < 10")  # behind the library's back, so that it shows who counts
    again = operations.again(before)
    assert again.tokens == before.tokens
    assert again.at > before.at
    assert [node.tokens for node in again.nodes] == [node.tokens for node in before.nodes]
    with engine.begin() as connection:
        connection.execute(text("UPDATE sync_cluster SET epoch = epoch + 1"))
    counted = operations.again(before)
    assert counted.tokens.unowned == 10
    # While something is nobody's or on its way, it is counted each time.
    count("token_id < 20")
    assert operations.again(counted).tokens.unowned == 20
    with engine.begin() as connection:
        connection.execute(
            text("INSERT INTO sync_node (name, incarnation, state) VALUES ('w9', gen_random_uuid(), 'active')")
        )
        connection.execute(text("UPDATE sync_cluster SET epoch = epoch - 1"))
    assert operations.again(before).tokens.unowned == 20


def test_silence_rest_and_overdue_marks_are_told(engine: Engine, operations: Operations, job: Job) -> None:
    with engine.begin() as connection:
        connection.execute(
            text(
                "INSERT INTO sync_node (name, incarnation, state, last_heartbeat, host, pid) VALUES"
                " ('w0', gen_random_uuid(), 'away', now(), 'h', 7),"
                " ('w9', gen_random_uuid(), 'active', now() - interval '1 minute', 'h', 8)"
            )
        )
        connection.execute(text("UPDATE sync_cluster SET rest_until = now() + interval '1 minute'"))
        connection.execute(
            text(
                "UPDATE sync_token SET next_node = 'w1', next_epoch = epoch, drain_deadline = now() WHERE token_id < 3"
            )
        )
        connection.execute(text("UPDATE sync_token SET node = 'w9' WHERE token_id < 3"))
    found = operations.status()
    assert {node.name: node.condition for node in found.nodes} == {"w1": "live", "w0": "away", "w9": "silent"}
    assert {node.node: (node.leaving, node.coming) for node in found.tokens.nodes} == {
        "w0": (0, 0),
        "w1": (0, 3),
        "w9": (3, 0),
    }
    assert found.tokens.overdue == found.tokens.draining == 3
    assert found.resting_sec == pytest.approx(60, abs=5)
    assert [problem[:17] for problem in found.problems] == [
        "w9 is silent for ",
        "the cluster has b",
        "3 tokens should h",
    ]


def test_what_cannot_be_asked(operations: Operations) -> None:
    with pytest.raises(ConfigurationError, match="limit=0"):
        operations.rebalances(0)
    with pytest.raises(ConfigurationError, match="time zone"):
        operations.rebalances(since=datetime.datetime(2026, 1, 1))
