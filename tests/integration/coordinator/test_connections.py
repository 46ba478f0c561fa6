"""What happens to ownership when the connection to the database breaks, in each of the ways it can."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from sqlalchemy import URL, Engine, text

from tests.integration.cluster import Cluster, wait_for
from tests.integration.relay import Relay


@pytest.fixture
def relay(database: URL) -> Iterator[Relay]:
    relay = Relay(database)
    yield relay
    relay.close()


def start_with_cut_off(cluster: Cluster, relay: Relay, *, leader: bool) -> None:
    """w1, w2, w3; the one behind the relay is w1 if ``leader``, else w3."""
    cluster.add("w1", url=relay.url if leader else None)
    wait_for(lambda: cluster.workers["w1"].seen("ready"), "w1 is ready")
    cluster.add("w2")
    cluster.add("w3", url=None if leader else relay.url)
    cluster.wait_shared("w1", "w2", "w3")


@pytest.mark.parametrize("leader", [False, True])
def test_packets_lost_without_a_word(cluster: Cluster, relay: Relay, leader: bool) -> None:
    start_with_cut_off(cluster, relay, leader=leader)
    victim = cluster.workers["w1" if leader else "w3"]
    others = [node for node in cluster.workers if node != victim.node]
    relay.drop()
    wait_for(lambda: not victim.held(), "it stops by itself when its lease has run out")
    wait_for(lambda: cluster.shared(*others), "the others have its tasks")
    relay.heal()
    cluster.wait_shared("w1", "w2", "w3")
    assert cluster.overlaps() == {}


@pytest.mark.parametrize("leader", [False, True])
def test_connection_reset_and_refused_for_one_worker(cluster: Cluster, relay: Relay, leader: bool) -> None:
    """The others see its lock freed at once, while it is told that there is no server."""
    start_with_cut_off(cluster, relay, leader=leader)
    victim = cluster.workers["w1" if leader else "w3"]
    others = [node for node in cluster.workers if node != victim.node]
    relay.cut()
    wait_for(lambda: cluster.shared(*others), "the others have its tasks")
    wait_for(lambda: not victim.held(), "it says no")
    relay.heal()
    cluster.wait_shared("w1", "w2", "w3")
    assert cluster.overlaps() == {}


def test_terminated_session_comes_back_and_nothing_moves(cluster: Cluster, engine: Engine) -> None:
    cluster.start("w1", "w2", "w3")
    before = {node: worker.held() for node, worker in cluster.workers.items()}
    with engine.connect() as connection:
        epoch = connection.execute(text("SELECT epoch FROM sync_cluster")).scalar()
        pids = dict(connection.execute(text("SELECT name, backend_pid FROM sync_node")).all())
        connection.execute(text("SELECT pg_terminate_backend(backend_pid) FROM sync_node"))

    def renewed() -> bool:
        with engine.connect() as connection:
            now = dict(connection.execute(text("SELECT name, backend_pid FROM sync_node")).all())
        return set(now) == set(pids) and all(now[name] != pids[name] for name in pids)

    wait_for(renewed, "each has a new session")
    cluster.wait_shared("w1", "w2", "w3")
    with engine.connect() as connection:
        assert connection.execute(text("SELECT epoch FROM sync_cluster")).scalar() == epoch
    assert {node: worker.held() for node, worker in cluster.workers.items()} == before
    assert cluster.overlaps() == {}
