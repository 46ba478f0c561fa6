"""Whoever watches a cluster tells its leader of a session that has ended."""

from __future__ import annotations

import signal
from collections.abc import Callable

import pytest
from sqlalchemy import Engine, create_engine, event, text

from jobsync_orm.naming import Names
from jobsync_orm.operate import Alarm, Operations
from jobsync_orm.operate.watching import Watch
from jobsync_orm.web import dashboard
from tests.integration.cluster import Cluster, wait_for
from tests.integration.coordinator.backstage import add_node
from tests.integration.web.conftest import Client

# No worker looks by itself as long as a test takes.
BLIND = {"heartbeat_interval_sec": 300, "heartbeat_timeout_sec": 900, "lock_watch_interval_sec": 300}


def by_top(engine: Engine) -> Callable[[], object]:
    watch = Watch(engine, Names())
    return watch.look


def by_the_dashboard(engine: Engine) -> Callable[[], object]:
    client = Client(dashboard(engine))
    return lambda: client.get("api/cluster")


@pytest.mark.parametrize("way", [by_top, by_the_dashboard])
@pytest.mark.parametrize("victim", ["w1", "w2"])  # the leader, and who does not lead
def test_who_watches_has_a_killed_worker_replaced_at_once(
    engine: Engine, make_cluster: Callable[..., Cluster], way: Callable[[Engine], Callable[[], object]], victim: str
) -> None:
    cluster = make_cluster(tasks=40, **BLIND)
    cluster.start("w1", "w2")
    operations, look = Operations(engine, Names()), way(engine)
    look()
    cluster.workers[victim].signal(signal.SIGKILL)
    left = "w2" if victim == "w1" else "w1"

    def replaced() -> bool:
        look()
        tokens = {node.name: node.tokens.owned for node in operations.status().nodes}
        return tokens == {left: 10_000}

    wait_for(replaced, f"{left} has all tokens", 60)


def test_it_is_told_once_for_each_session(engine: Engine) -> None:
    told: list[str] = []

    @event.listens_for(engine, "before_cursor_execute")
    def count(connection: object, cursor: object, statement: str, *more: object) -> None:
        if "pg_notify" in statement:
            told.append(statement)

    operations, alarm = Operations(engine, Names()), Alarm(engine, Names())
    for number in (1, 2):
        alarm.heed(operations.status())
        assert len(told) == number - 1
        with engine.begin() as connection:
            add_node(connection, "w1")  # nobody holds its lock
        for _ in range(5):
            alarm.heed(operations.status())
        assert len(told) == number
        with engine.begin() as connection:
            connection.execute(text("DELETE FROM sync_node"))


def test_a_server_that_tells_nobody_is_no_error(engine: Engine) -> None:
    with engine.begin() as connection:
        add_node(connection, "w1")
    status = Operations(engine, Names()).status()
    assert status.nodes[0].condition == "cut off"
    nowhere = create_engine(engine.url.set(port=1))
    Alarm(nowhere, Names()).heed(status)
    nowhere.dispose()
