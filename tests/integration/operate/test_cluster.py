"""What one look shows of a real cluster."""

from __future__ import annotations

import datetime
import itertools
import signal
from dataclasses import replace

import pytest
from sqlalchemy import URL, Engine, create_engine, text

from jobsync_orm import Job
from jobsync_orm.exceptions import ConfigurationError, SchemaNotReady
from jobsync_orm.naming import Names
from jobsync_orm.operate import NodeTokens, Operations, TokenTally, drain
from jobsync_orm.operate.counting import AT_ONCE, STRETCH
from tests.conftest import Server
from tests.integration.cluster import Cluster, wait_for
from tests.integration.coordinator.backstage import add_node


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
    operations, tally = Operations(engine, Names()), TokenTally()
    before = wait_for(lambda: (s := operations.again(tally)).healthy and s, "w1 has all")

    def write(sql: str) -> None:
        with engine.begin() as connection:
            connection.execute(text(sql))

    write("UPDATE sync_token SET node = NULL WHERE token_id < 10")  # behind its back, so that it shows who counts
    again = operations.again(tally)
    assert again.tokens == replace(before.tokens, at=again.at)
    assert again.at > before.at
    assert [node.tokens for node in again.nodes] == [node.tokens for node in before.nodes]
    write("UPDATE sync_cluster SET epoch = epoch + 1")
    assert operations.again(tally).tokens.unowned == 10
    # What nobody has stays so without another epoch; what is marked is counted each time.
    write("UPDATE sync_token SET node = NULL WHERE token_id < 20")
    assert operations.again(tally).tokens.unowned == 10
    write("UPDATE sync_token SET next_node = 'w1', next_epoch = epoch WHERE token_id = 100")
    write("UPDATE sync_cluster SET epoch = epoch + 1")
    found = operations.again(tally).tokens
    assert (found.unowned, found.draining) == (20, 1)
    write("UPDATE sync_token SET next_node = NULL, next_epoch = NULL WHERE token_id = 100")
    assert operations.again(tally).tokens.draining == 0


def test_looking_again_tells_what_the_table_has(engine: Engine, cluster: Cluster) -> None:
    """A join, a kill, a leave: always as who counts all."""
    operations, tally = Operations(engine, Names()), TokenTally()

    def same(what: str, *nodes: str) -> None:
        def agree() -> bool:
            seen, counted = operations.again(tally), operations.status()
            # Nothing has come in between, and all have their place.
            if operations.again(tally).epoch != seen.epoch or [node.name for node in seen.nodes] != list(nodes):
                return False
            if any(one.tokens.draining or one.tokens.unowned > one.tokens.parked for one in (seen, counted)):
                return False
            assert replace(seen.tokens, at=counted.at) == replace(counted.tokens, at=counted.at)
            return all(node.owned for node in seen.tokens.nodes)

        wait_for(agree, what)

    first = cluster.add("w1")
    same("w1 has all", "w1")
    second = cluster.add("w2")
    same("w2 has joined", "w1", "w2")
    second.signal(signal.SIGKILL)
    same("w2 has died", "w1")
    cluster.add("w3")
    same("w3 has joined", "w1", "w3")
    first.signal(signal.SIGTERM)
    same("w1 has left", "w3")


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
        "the cluster has b",
        "3 tokens should h",
        "w9 is silent for ",
    ]


def test_who_leads_is_the_oldest_that_is_there_and_may(engine: Engine, operations: Operations) -> None:
    with engine.begin() as connection:
        add_node(connection, "rests", ordinal=1, state="away", rejoin_grace_sec=600)
        add_node(connection, "may not", ordinal=2)
        add_node(connection, "leads", ordinal=3, applied_epoch=4)
        add_node(connection, "next", ordinal=4, applied_epoch=9)
        connection.execute(text("UPDATE sync_node SET can_lead = false WHERE name = 'may not'"))
        connection.execute(text("UPDATE sync_cluster SET epoch = 7"))
    found = operations.status()
    assert found.leader == "leads"
    assert {node.name: node.leader for node in found.nodes} == {
        "rests": False,
        "may not": False,
        "leads": True,
        "next": False,
    }
    assert [node.behind_epochs for node in found.nodes] == [7, 7, 3, 0]
    assert [node.lease_left_sec > 0 for node in found.nodes] == [False, True, True, True]


def test_where_none_may_lead_that_is_the_problem(engine: Engine, operations: Operations, job: Job) -> None:
    with engine.begin() as connection:
        connection.execute(text("UPDATE sync_node SET can_lead = false"))
    found = operations.status()
    assert (found.leader, found.healthy) == (None, False)
    assert found.problems[0].startswith("no live node may lead (can_lead=False everywhere)")


def test_one_that_has_no_tokens_yet_is_joining_and_no_problem(engine: Engine, operations: Operations, job: Job) -> None:
    wait_for(lambda: operations.status().healthy, "w1 has all")
    with engine.begin() as connection:
        connection.execute(text("UPDATE sync_node SET state = 'joining'"))
    found = operations.status()
    assert ([node.condition for node in found.nodes], found.problems) == (["joining"], ())


def test_a_connection_that_broke_in_the_pool_is_made_anew(
    server: Server, engine: Engine, operations: Operations
) -> None:
    operations.status()
    with server.connect() as admin:
        admin.execute(
            "SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity WHERE datname = %s", [engine.url.database]
        )
    assert operations.status().tokens.total == 10_000


def test_orders_to_drain_are_told_by_name_those_for_others_too(engine: Engine, operations: Operations) -> None:
    with engine.begin() as connection:
        for n, name in enumerate(("w2", "w10")):
            add_node(connection, name, ordinal=n)
    for name in ("w2", "w10"):
        assert drain(engine, Names(), name, by=f"who drains {name}", last_too=True)
    with engine.begin() as connection:
        connection.execute(text("DELETE FROM sync_node WHERE name = 'w10'"))
    assert [(order.node, order.by, order.registered) for order in operations.status().drained] == [
        ("w10", "who drains w10", False),
        ("w2", "who drains w2", True),
    ]


def test_what_cannot_be_asked(operations: Operations) -> None:
    with pytest.raises(ConfigurationError, match="limit=0"):
        operations.rebalances(0)
    with pytest.raises(ConfigurationError, match="time zone"):
        operations.rebalances(since=datetime.datetime(2026, 1, 1))


def test_a_large_table_is_counted_a_few_stretches_at_a_time(engine: Engine) -> None:
    """As many tokens as take three looks; what is told adds up at any time."""
    total = (2 * AT_ONCE + 1) * STRETCH
    operations, tally = Operations(engine, Names()), TokenTally(clock=map((0.001).__mul__, itertools.count()).__next__)

    def write(*statements: str) -> None:
        with engine.begin() as connection:
            for sql in statements:
                connection.execute(text(sql))

    write(
        f"INSERT INTO sync_token (token_id, node) SELECT n, 'a' FROM generate_series(10000, {total - 1}) n",
        "UPDATE sync_token SET node = 'a'",
        f"UPDATE sync_cluster SET total_tokens = {total}, epoch = 7",
        "INSERT INTO sync_node (name, incarnation, state) VALUES"
        " ('a', gen_random_uuid(), 'active'), ('b', gen_random_uuid(), 'active')",
        "ANALYZE sync_token",
    )

    def looks() -> list[tuple[int, int, int, bool]]:
        found = []
        for _ in range(3):
            seen = operations.again(tally)
            a, b = seen.nodes
            assert a.tokens.owned + b.tokens.owned + seen.tokens.unowned == seen.tokens.total
            found.append((a.tokens.owned, b.tokens.owned, seen.tokens.draining, seen.tokens.at == seen.at))
        return found

    assert looks() == [(total, 0, 0, True)] * 3
    # A plan gives some away at once and marks others, far apart.
    far = 2 * AT_ONCE * STRETCH - 1
    given, marked = f"token_id >= {total - 5}", f"token_id < 3 OR token_id = {far}"
    write(
        f"UPDATE sync_token SET node = 'b', epoch = 8 WHERE {given}",
        f"UPDATE sync_token SET next_node = 'b', next_epoch = 8 WHERE {marked}",
        "UPDATE sync_cluster SET epoch = 8",
    )
    # The look that finds another epoch counts the first stretches; others are as they were before until they are.
    assert looks() == [(total, 0, 3, False), (total, 0, 4, False), (total - 5, 5, 4, True)]
    assert looks() == [(total - 5, 5, 4, True)] * 3
    # The owner releases one: no other epoch, and it is seen with the next look.
    write(f"UPDATE sync_token SET node = 'b', next_node = NULL, next_epoch = NULL WHERE token_id = {far}")
    assert looks() == [(total - 6, 6, 3, True)] * 3
    # A cluster formed anew has another incarnation, and an epoch that may be any.
    write(
        "UPDATE sync_token SET node = 'a', next_node = NULL, next_epoch = NULL",
        "UPDATE sync_cluster SET incarnation = gen_random_uuid()",
    )
    looks()
    assert looks() == [(total, 0, 0, True)] * 3
    # Another number of tokens.
    write(
        "DELETE FROM sync_token WHERE token_id >= 100",
        "UPDATE sync_cluster SET total_tokens = 100, epoch = epoch + 1",
        "UPDATE sync_token SET node = NULL",
    )
    found = operations.again(tally)
    assert (found.tokens.total, found.tokens.unowned, found.tokens.at) == (100, 100, found.at)
