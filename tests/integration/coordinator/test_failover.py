"""A standby is promoted that lacks the newest of what the cluster has done."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator

import pytest
from sqlalchemy import URL, create_engine

from jobsync_orm import CoordinationConfig, Job, migrate
from jobsync_orm.coordinator.history import History
from jobsync_orm.coordinator.session import SessionLost
from jobsync_orm.coordinator.statements import Statements
from jobsync_orm.naming import Names
from jobsync_orm.operate.doctor import Subject, read_only
from tests.integration.cluster import Cluster, wait_for
from tests.integration.coordinator.backstage import open_session
from tests.integration.postgres import Postgres, identity, open_folder, programs
from tests.integration.relay import Relay


@pytest.fixture
def pair() -> Iterator[tuple[Postgres, Postgres]]:
    """A primary with the library's tables, and a standby that streams from it, asynchronously."""
    bin = programs()
    with open_folder(identity()) as folder:
        primary, standby = Postgres(folder, "primary", bin), Postgres(folder, "standby", bin)
        try:
            primary.create()
            primary.start()
            engine = create_engine(primary.url)
            migrate.upgrade(engine)
            engine.dispose()
            standby.create_standby_of(primary)
            standby.start()
            yield primary, standby
        finally:
            standby.stop()
            primary.stop()


def either(*urls: URL) -> URL:
    """Whichever of them can be written to."""
    hosts = tuple(f"{url.host}:{url.port}" for url in urls)
    return URL.create(
        "postgresql+psycopg",
        "postgres",
        database="postgres",
        query={"host": hosts, "target_session_attrs": "read-write", "connect_timeout": "2"},
    )


def catch_up(primary: Postgres, standby: Postgres) -> None:
    ((position,),) = primary.execute("SELECT pg_current_wal_lsn()")
    reached = f"SELECT pg_last_wal_replay_lsn() >= '{position}'"
    wait_for(lambda: standby.execute(reached) == [(True,)], "the standby has caught up")


def stop_streaming(standby: Postgres) -> None:
    standby.execute("ALTER SYSTEM SET primary_conninfo = ''")
    standby.execute("SELECT pg_reload_conf()")
    wait_for(lambda: not standby.execute("SELECT 1 FROM pg_stat_wal_receiver"), "the standby receives nothing")


def highest_epoch(server: Postgres) -> int:
    ((epoch,),) = server.execute(
        "SELECT greatest(c.epoch, t.given, t.marked) FROM sync_cluster c,"
        " (SELECT max(epoch) AS given, max(next_epoch) AS marked FROM sync_token) AS t"
    )
    return int(epoch)


@pytest.mark.slow
@pytest.mark.parametrize("restarted", [pytest.param(False, marks=pytest.mark.chaos), True])
def test_workers_form_the_cluster_anew_on_the_standby(
    pair: tuple[Postgres, Postgres], make_cluster: Callable[..., Cluster], restarted: bool
) -> None:
    """``lost`` joined and ``left`` left in what the standby lacks; ``lost`` is told last that its server is gone.

    The others have seen the epochs that are lost, or are ``restarted`` meanwhile and know nothing of them.
    """
    primary, standby = pair
    relay = Relay(primary.url)
    try:
        # Long enough for two processes to start, on a busy machine too, while ``lost`` has its lease.
        lease = 12 if restarted else 4
        cluster = make_cluster(either(primary.url, standby.url), heartbeat_timeout_sec=lease)
        cluster.start("w1", "w2", "left")
        catch_up(primary, standby)
        stop_streaming(standby)
        before = highest_epoch(standby)
        with open_session(standby.url) as session, pytest.raises(SessionLost, match="has not been promoted"):
            History(Statements(Names()), "w1", 4, 5).identify(session)
        with pytest.raises(TimeoutError, match="during recovery"):
            Job("late", CoordinationConfig(url=standby.url), wait_on_enter=0.5).start()
        doctor = create_engine(standby.url)
        (finding,) = read_only.check(Subject(doctor, Names()))
        doctor.dispose()
        assert finding.what == "this server is a standby that has not been promoted"
        cluster.workers["left"].signal(signal.SIGTERM)
        cluster.add("lost", url=either(relay.url, standby.url))
        cluster.wait_shared("w1", "w2", "lost")
        highest = highest_epoch(primary)
        assert highest > before, "the standby lacks epochs"
        held = cluster.workers["lost"].held()
        ((history,),) = primary.execute("SELECT history FROM sync_cluster")

        if restarted:
            for node in ("w1", "w2"):
                cluster.workers[node].signal(signal.SIGKILL)
                cluster.workers[f"{node}, killed"] = cluster.workers[node]
        relay.drop()  # no end of the connection reaches it: it says yes until its lease ends
        primary.kill()
        standby.promote()
        if restarted:
            cluster.add("w1")
            cluster.add("w2")
        wait_for(
            lambda: standby.execute("SELECT 1 FROM sync_cluster WHERE epoch > 1000000"), "somebody has formed it anew"
        )
        assert cluster.workers["lost"].held() == held, "a node that knows nothing of it has not been waited for"
        wait_for(lambda: not cluster.workers["lost"].held(), "its lease has ended")
        relay.cut()
        cluster.wait_shared("w1", "w2", "lost")

        ((stored, names),) = standby.execute(
            "SELECT history, (SELECT array_agg(name ORDER BY name) FROM sync_node) FROM sync_cluster"
        )
        assert stored == history.replace("/00000001", "/00000002")
        assert names == ["lost", "w1", "w2"]
        ((lowest,),) = standby.execute("SELECT min(epoch) FROM sync_token")
        assert lowest > highest + 900_000
        assert cluster.overlaps() == {}
    finally:
        relay.close()
