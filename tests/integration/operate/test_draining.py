"""A drained node gives up its tokens and gets none."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import URL, Engine, create_engine, event

from jobsync_orm import CoordinationConfig, Job
from jobsync_orm.exceptions import OperationRefused
from jobsync_orm.naming import Names
from jobsync_orm.operate import Operations, drain, undrain, watch_drain
from tests.integration.cluster import QUICK, Cluster, wait_for
from tests.integration.coordinator.backstage import add_node

NAMES = Names()

# No node looks by itself as long as a test takes.
BLIND = {
    **QUICK,
    "heartbeat_interval_sec": 300,
    "heartbeat_timeout_sec": 900,
    "lock_watch_interval_sec": 300,
    "drain_timeout_sec": 300,
}


def owned(engine: Engine) -> dict[str, int]:
    return {node.node: node.owned for node in Operations(engine, NAMES).tokens().nodes}


@pytest.fixture
def settled(engine: Engine) -> Callable[..., None]:
    def wait(**wanted: int) -> None:
        def there() -> bool:
            tokens = Operations(engine, NAMES).tokens()
            return {node.node: node.owned for node in tokens.nodes} == wanted and not tokens.draining

        wait_for(there, f"{wanted}")

    return wait


def test_tokens_go_stay_away_and_come_back(engine: Engine, cluster: Cluster, settled: Callable[..., None]) -> None:
    cluster.start("w1", "w2")
    assert drain(engine, NAMES, "w1", by="me", reason="new disk") is True  # the leader itself
    seen = [left.tokens for left in watch_drain(engine, NAMES, "w1", 20)]
    assert seen[-1] == 0
    settled(w1=0, w2=10_000)
    cluster.wait_shared("w2")
    status = Operations(engine, NAMES).status()
    assert status.healthy, status.problems
    assert [(node.name, node.drained, node.leader) for node in status.nodes] == [
        ("w1", True, True),
        ("w2", False, False),
    ]
    (order,) = status.drained
    assert (order.node, order.by, order.reason, order.registered) == ("w1", "me", "new disk", True)
    assert status.last_rebalance is not None
    assert (status.last_rebalance.reason, status.last_rebalance.tokens_moved) == ("drain", 5000)
    assert drain(engine, NAMES, "w1", by="me") is False

    # A process that starts under the name gets nothing either, and starts all the same.
    cluster.workers["w1"].signal(signal.SIGTERM)
    wait_for(lambda: not cluster.workers["w1"].alive, "w1 has left")
    assert Operations(engine, NAMES).status().drained[0].registered is False
    cluster.workers["w1"].end()
    again = cluster.add("w1")
    ready = wait_for(lambda: again.seen("ready"), "w1 is ready")
    assert ready["tokens"] == 0
    settled(w1=0, w2=10_000)

    assert undrain(engine, NAMES, "w1") is True
    settled(w1=5000, w2=5000)
    cluster.wait_shared("w1", "w2")
    assert Operations(engine, NAMES).rebalances(1)[0].reason == "undrain"
    assert undrain(engine, NAMES, "w1") is False
    assert cluster.overlaps() == {}


def test_the_leader_is_told_and_need_not_look(database: URL, engine: Engine, settled: Callable[..., None]) -> None:
    with Job("w1", CoordinationConfig(url=database, **BLIND)), Job("w2", CoordinationConfig(url=database, **BLIND)):
        settled(w1=5000, w2=5000)
        began = time.monotonic()
        assert drain(engine, NAMES, "w2", by="me")
        settled(w1=10_000, w2=0)
        assert undrain(engine, NAMES, "w2")
        settled(w1=5000, w2=5000)
        assert time.monotonic() - began < 20, "the leader plans anew every 30 s in any case"


def test_an_open_claim_is_waited_for(
    database: URL, engine: Engine, cluster: Cluster, settled: Callable[..., None]
) -> None:
    with Job("w1", CoordinationConfig(url=database, **{**QUICK, "drain_timeout_sec": 60})) as job:
        cluster.add("w2")
        settled(w1=5000, w2=5000)
        task = next(n for n in range(1000) if job.can_claim_task(n))
        claim = job.claim_task(task)
        assert drain(engine, NAMES, "w1", by="me")
        wait_for(lambda: owned(engine) == {"w1": 1, "w2": 9999}, "all but one are handed over")
        (left,) = watch_drain(engine, NAMES, "w1", 0)
        assert (left.tokens, left.claims, left.done, left.registered) == (1, 1, False, True)
        claim.complete()
        settled(w1=0, w2=10_000)


def test_the_last_one_only_if_it_is_wanted(engine: Engine, job: Job, settled: Callable[..., None]) -> None:
    with pytest.raises(OperationRefused, match="'w1' is the last node that takes tokens"):
        drain(engine, NAMES, "w1", by="me")
    assert Operations(engine, NAMES).status().drained == ()
    assert drain(engine, NAMES, "w1", by="me", last_too=True)
    settled(w1=0)
    status = Operations(engine, NAMES).status()
    assert (status.tokens.unowned, status.tokens.parked) == (10_000, 10_000)
    assert status.problems == ("10000 tokens are parked: every live node is drained",)
    assert not job.can_claim_task(1)
    assert undrain(engine, NAMES, "w1")
    settled(w1=10_000)


@pytest.mark.parametrize(
    "other", [{"state": "away", "rejoin_grace_sec": 60}, {"silent_sec": 5, "heartbeat_timeout_sec": 4}]
)
def test_one_that_is_away_or_silent_does_not_take_what_the_last_one_has(engine: Engine, other: dict[str, Any]) -> None:
    with engine.begin() as connection:
        add_node(connection, "w1")
        add_node(connection, "w2", ordinal=1, **other)
    with pytest.raises(OperationRefused, match="'w1' is the last node that takes tokens"):
        drain(engine, NAMES, "w1", by="me")
    assert drain(engine, NAMES, "w2", by="me"), "w1 takes them"


def test_a_claim_whose_token_is_anothers_by_now_holds_nothing_up(engine: Engine) -> None:
    with engine.begin() as connection:
        incarnation = add_node(connection, "w1")
        connection.exec_driver_sql(
            "INSERT INTO sync_claim (task_id, token_id, node, incarnation, epoch) VALUES ('t', 1, 'w1', %s, 1)",
            (incarnation,),
        )
    (left,) = watch_drain(engine, NAMES, "w1", 60)
    assert (left.tokens, left.claims, left.done) == (0, 1, True)


def test_what_cannot_be_stored_changes_nothing(engine: Engine) -> None:
    with engine.begin() as connection:
        add_node(connection, "w1")
    for given in ({"by": "a\0"}, {"by": "me", "reason": "\ud800"}):
        with pytest.raises(OperationRefused):
            drain(engine, NAMES, "w1", last_too=True, **given)
    assert Operations(engine, NAMES).status().drained == ()


def test_nobody_of_that_name(engine: Engine, job: Job) -> None:
    with pytest.raises(OperationRefused, match="there is no node 'w9'; registered are w1"):
        drain(engine, NAMES, "w9", by="me")


def test_two_operators_do_not_drain_each_others_last_node(
    database: URL, engine: Engine, job: Job, settled: Callable[..., None]
) -> None:
    with Job("w2", CoordinationConfig(url=database, **QUICK)):
        settled(w1=5000, w2=5000)
        mine = create_engine(database)
        looked = []

        @event.listens_for(mine, "after_cursor_execute")
        def other_is_quicker(*arguments: object) -> None:
            if not looked:  # between the look and the order
                looked.append(True)
                assert drain(engine, NAMES, "w2", by="you")

        with pytest.raises(OperationRefused, match="'w1' is the last node"):
            drain(mine, NAMES, "w1", by="me")
        mine.dispose()
        assert [order.node for order in Operations(engine, NAMES).status().drained] == ["w2"]
        settled(w1=10_000, w2=0)


def test_a_pin_to_a_drained_node_falls_back_or_parks(
    database: URL, engine: Engine, job: Job, settled: Callable[..., None]
) -> None:
    with Job("w2", CoordinationConfig(url=database, **QUICK)):
        job.register_lock("a", ["w2", "%"])
        job.register_lock("b", "w2")
        assert drain(engine, NAMES, "w2", by="me")
        settled(w1=9999, w2=0)
        wait_for(lambda: job.can_claim_task("a"), "w1 knows that it has it")
        status = Operations(engine, NAMES).status()
        assert (status.tokens.unowned, status.tokens.parked) == (1, 1)
        undrain(engine, NAMES, "w2")
        settled(w1=5000, w2=5000)
        assert not job.can_claim_task("a")
