"""With ``rejoin_grace_sec`` a restart under the same name moves nothing for anyone else."""

from __future__ import annotations

import signal

from sqlalchemy import Engine, text

from tests.integration.cluster import Cluster, wait_for


def owners(engine: Engine) -> dict[str, int]:
    with engine.connect() as connection:
        return dict(connection.execute(text("SELECT node, count(*) FROM sync_token GROUP BY 1")).all())


def state_of(engine: Engine, node: str) -> str | None:
    with engine.connect() as connection:
        return connection.execute(text("SELECT state FROM sync_node WHERE name = :n"), {"n": node}).scalar()


def moves(engine: Engine) -> int:
    with engine.connect() as connection:
        return connection.execute(text("SELECT count(*) FROM sync_rebalance")).scalar_one()


def test_stop_or_crash_and_return_within_the_grace(cluster: Cluster, engine: Engine) -> None:
    cluster.config["rejoin_grace_sec"] = 60
    cluster.start("w1", "w2", "w3")
    before = {node: worker.held() for node, worker in cluster.workers.items()}
    moved = moves(engine)
    for node, number in (("w3", signal.SIGTERM), ("w2", signal.SIGKILL), ("w1", signal.SIGTERM)):
        gone = cluster.workers.pop(node)
        gone.signal(number)
        gone.process.wait(60)
        wait_for(lambda node=node: state_of(engine, node) == "away", f"{node} is away")
        assert {n: w.held() for n, w in cluster.workers.items()} == {n: before[n] for n in cluster.workers}
        cluster.add(node)
        cluster.wait_shared("w1", "w2", "w3")
        gone.end()
    assert {node: worker.held() for node, worker in cluster.workers.items()} == before
    assert moves(engine) == moved, "no plan moved a token"


def test_grace_that_has_passed_hands_the_tokens_over(cluster: Cluster, engine: Engine) -> None:
    cluster.config["rejoin_grace_sec"] = 2
    cluster.start("w1", "w2", "w3")
    cluster.workers["w3"].signal(signal.SIGKILL)
    wait_for(lambda: state_of(engine, "w3") == "away", "w3 is away")
    assert owners(engine)["w3"] == 3333, "its tokens rest"
    cluster.wait_shared("w1", "w2")
    assert set(owners(engine)) == {"w1", "w2"}
    assert cluster.overlaps() == {}


def test_tokens_taken_up_again_have_a_newer_epoch(cluster: Cluster, engine: Engine) -> None:
    """So that what an earlier life of the name still does under the old epoch can be told apart."""
    cluster.config["rejoin_grace_sec"] = 60
    cluster.start("w1", "w2")

    def epochs() -> set[int]:
        with engine.connect() as connection:
            return set(connection.execute(text("SELECT DISTINCT epoch FROM sync_token WHERE node = 'w2'")).scalars())

    before = epochs()
    gone = cluster.workers.pop("w2")
    gone.signal(signal.SIGKILL)
    gone.process.wait(60)
    cluster.add("w2")
    cluster.wait_shared("w1", "w2")
    assert min(epochs()) > max(before)
    gone.end()
