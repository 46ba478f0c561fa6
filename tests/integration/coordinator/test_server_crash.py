"""A backend of the server is killed: the server ends all sessions and goes on, as the process that it was."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator

import psycopg
import pytest
from sqlalchemy import create_engine

from jobsync_orm import migrate
from tests.integration.cluster import Cluster, wait_for
from tests.integration.postgres import Postgres, identity, open_folder, programs
from tests.integration.relay import Relay


@pytest.fixture
def own() -> Iterator[Postgres]:
    """One with the library's tables, of this test alone."""
    with open_folder(identity()) as folder:
        server = Postgres(folder, "server", programs())
        try:
            server.create()
            server.start()
            engine = create_engine(server.url)
            migrate.upgrade(engine)
            engine.dispose()
            yield server
        finally:
            server.stop()


def crash(server: Postgres) -> None:
    """As the out-of-memory killer does it."""
    ((started,),) = server.execute("SELECT pg_postmaster_start_time()")
    with psycopg.connect(server.dsn) as connection:
        os.kill(connection.info.backend_pid, signal.SIGKILL)
        wait_for(lambda: _is_broken(connection), "the session has ended")
    wait_for(lambda: _answers(server), "the server has recovered")
    assert server.execute("SELECT pg_postmaster_start_time()") == [(started,)]


def _is_broken(connection: psycopg.Connection) -> bool:
    try:
        connection.execute("SELECT 1")
    except psycopg.Error:
        return True
    return False


def _answers(server: Postgres) -> bool:
    try:
        return server.execute("SELECT 1") == [(1,)]
    except psycopg.OperationalError:
        return False


@pytest.mark.parametrize("newcomer", ["w1", "w2"])
def test_a_node_that_has_not_heard_of_it_is_waited_for(
    own: Postgres, make_cluster: Callable[..., Cluster], newcomer: str
) -> None:
    """Its lock is free and its heartbeat is younger than the server: but the one has lost it, not the other."""
    relay = Relay(own.url)
    try:
        cluster = make_cluster(own.url, heartbeat_timeout_sec=8, heartbeat_interval_sec=2, tasks=50)
        cluster.add("w1", url=relay.url)
        cluster.wait_shared("w1")
        relay.drop()
        crash(own)
        cut_off = cluster.workers["w1, cut off"] = cluster.workers.pop("w1")
        cut_off.node = "w1, cut off"
        cluster.add(newcomer)
        wait_for(lambda: len(cluster.workers[newcomer].held()) == 50, "the newcomer has all")
        wait_for(lambda: not cut_off.held(), "the lease has ended")
        assert cluster.overlaps() == {}
    finally:
        relay.close()
