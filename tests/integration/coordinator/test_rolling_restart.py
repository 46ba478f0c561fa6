"""Every worker of four replaced, one after the other: what that moves for the others."""

from __future__ import annotations

import signal

import pytest
from sqlalchemy import Engine, text

from tests.integration.cluster import Cluster, Worker

NAMES = [f"w{i}" for i in range(1, 5)]
TOKENS = 10_000


def assignment(engine: Engine, without: str) -> dict[int, tuple[str, int, str | None]]:
    """Owner, epoch and mark of each token that does not belong to ``without``."""
    with engine.connect() as connection:
        rows = connection.execute(text("SELECT token_id, node, epoch, next_node FROM sync_token"))
        return {token: (node, epoch, mark) for token, node, epoch, mark in rows if node != without}


def moved(engine: Engine) -> int:
    with engine.connect() as connection:
        return connection.execute(text("SELECT coalesce(sum(tokens_moved), 0) FROM sync_rebalance")).scalar_one()


def stop(worker: Worker) -> None:
    worker.signal(signal.SIGTERM)
    assert worker.process.wait(60) == 0


@pytest.mark.slow
def test_under_the_same_names_nothing_moves_for_the_others(cluster: Cluster, engine: Engine) -> None:
    cluster.config["rejoin_grace_sec"] = 60
    cluster.start(*NAMES)
    before = {name: worker.held() for name, worker in cluster.workers.items()}
    plans = moved(engine)
    for name in NAMES:
        others = assignment(engine, without=name)
        gone = cluster.workers.pop(name)
        stop(gone)
        cluster.add(name)
        cluster.wait_shared(*NAMES)
        assert assignment(engine, without=name) == others, f"{name}: owners and epochs of all other tokens"
        gone.end()
    assert {name: cluster.workers[name].held() for name in NAMES} == before
    assert moved(engine) == plans


@pytest.mark.slow
def test_under_new_names_each_replacement_moves_two_shares_at_most(cluster: Cluster, engine: Engine) -> None:
    cluster.start(*NAMES)
    names = list(NAMES)
    share = -(-TOKENS // len(NAMES))
    for old, new in zip(NAMES, (f"{name}-new" for name in NAMES), strict=True):
        before = moved(engine)
        gone = cluster.workers.pop(old)
        stop(gone)
        names = [new if name == old else name for name in names]
        cluster.add(new)
        cluster.wait_shared(*names)
        assert 0 < moved(engine) - before <= 2 * share, f"{old} replaced by {new}"
        gone.end()
    assert cluster.overlaps() == {}
