"""Workers come, go, die and sleep: at any time each task has one worker at most, and soon it has one again."""

from __future__ import annotations

import signal
import time

from tests.integration.cluster import Cluster, wait_for


def test_join_shares_anew_without_a_double_yes(cluster: Cluster) -> None:
    cluster.start("w1", "w2")
    cluster.add("w3")
    cluster.wait_shared("w1", "w2", "w3")
    assert cluster.overlaps() == {}


def test_killed_follower_is_replaced_long_before_its_heartbeat_is_missed(cluster: Cluster) -> None:
    cluster.config["heartbeat_timeout_sec"] = 60
    cluster.start("w1", "w2", "w3")
    cluster.workers["w3"].signal(signal.SIGKILL)
    cluster.wait_shared("w1", "w2")
    assert cluster.overlaps() == {}


def test_killed_leader_is_replaced_long_before_its_heartbeat_is_missed(cluster: Cluster) -> None:
    cluster.config["heartbeat_timeout_sec"] = 60
    cluster.start("w1", "w2", "w3")
    cluster.workers["w1"].signal(signal.SIGKILL)
    cluster.wait_shared("w2", "w3")
    assert cluster.overlaps() == {}


def test_leader_and_its_successor_killed_together(cluster: Cluster) -> None:
    cluster.start("w1", "w2", "w3")
    cluster.workers["w1"].signal(signal.SIGKILL)
    cluster.workers["w2"].signal(signal.SIGKILL)
    cluster.wait_shared("w3")
    assert cluster.overlaps() == {}


def test_graceful_leave_of_leader_and_follower(cluster: Cluster) -> None:
    cluster.config["heartbeat_timeout_sec"] = 60
    cluster.start("w1", "w2", "w3")
    cluster.workers["w1"].signal(signal.SIGTERM)
    cluster.wait_shared("w2", "w3")
    cluster.workers["w3"].signal(signal.SIGTERM)
    cluster.wait_shared("w2")
    assert cluster.workers["w1"].process.wait(60) == 0
    assert cluster.workers["w3"].process.wait(60) == 0
    assert cluster.overlaps() == {}


def test_paused_follower_is_replaced_and_says_nothing_when_it_wakes(cluster: Cluster) -> None:
    cluster.start("w1", "w2", "w3")
    sleeper = cluster.workers["w3"]
    sleeper.signal(signal.SIGSTOP)
    cluster.wait_shared("w1", "w2")
    sleeper.signal(signal.SIGCONT)
    cluster.wait_shared("w1", "w2", "w3")
    assert sleeper.alive
    assert cluster.overlaps() == {}


def test_paused_leader_is_replaced_and_comes_back_as_follower(cluster: Cluster) -> None:
    cluster.start("w1", "w2", "w3")
    sleeper = cluster.workers["w1"]
    sleeper.signal(signal.SIGSTOP)
    cluster.wait_shared("w2", "w3")
    sleeper.signal(signal.SIGCONT)
    cluster.wait_shared("w1", "w2", "w3")
    assert cluster.overlaps() == {}


def test_short_pause_moves_nothing(cluster: Cluster) -> None:
    cluster.config["heartbeat_timeout_sec"] = 20
    cluster.start("w1", "w2", "w3")
    before = {node: worker.held() for node, worker in cluster.workers.items()}
    sleeper = cluster.workers["w3"]
    sleeper.signal(signal.SIGSTOP)
    time.sleep(2.5)  # the pause itself: longer than the connection grace, much shorter than the timeout
    sleeper.signal(signal.SIGCONT)
    wait_for(lambda: sleeper.seen("pause"), "the sleeper asks again")
    assert {node: worker.held() for node, worker in cluster.workers.items()} == before
    assert cluster.overlaps() == {}
