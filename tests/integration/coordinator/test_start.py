"""Starting: what is waited for, what is refused, and what is left behind."""

from __future__ import annotations

import asyncio
import socket
import threading
import time

import pytest
from sqlalchemy import URL, Engine, create_engine, text

from jobsync_orm import ConfigurationError, CoordinationConfig, Job, NotRunning, SchemaNotReady
from jobsync_orm.coordinator import service
from jobsync_orm.exceptions import PooledConnection
from tests.integration.cluster import QUICK, Cluster, wait_for
from tests.integration.relay import Relay


@pytest.fixture
def config(database: URL) -> CoordinationConfig:
    return CoordinationConfig(url=database, **QUICK)


def nodes(engine: Engine) -> list[str]:
    with engine.connect() as connection:
        return list(connection.execute(text("SELECT name FROM sync_node ORDER BY 1")).scalars())


def test_no_tables(empty_database: URL) -> None:
    with pytest.raises(SchemaNotReady, match="jobsync-orm db upgrade --appname sync_"):
        Job("w1", CoordinationConfig(url=empty_database, **QUICK)).start()


def test_no_such_database_is_said_at_once(database: URL) -> None:
    config = CoordinationConfig(url=database.set(database="no_such_database", password="s3cret"), **QUICK)
    with pytest.raises(ConfigurationError, match=r"/no_such_database.* does not exist") as caught:
        Job("w1", config, wait_on_enter=60).start()
    assert "s3cret" not in str(caught.value)


def test_nobody_listens(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(service, "SAY_SEC", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    config = CoordinationConfig(host="127.0.0.1", port=port, **QUICK)
    with caplog.at_level("WARNING", "jobsync_orm"), pytest.raises(TimeoutError, match="could not be reached"):
        Job("w1", config, wait_on_enter=1).start()
    assert len([r for r in caplog.records if "trying again for up to" in r.message]) >= 2


def test_a_pooler_in_between_is_refused(database: URL, engine: Engine) -> None:
    """A pooler tells its client a process number that is not the server's."""

    def other_key(data: bytes) -> bytes:
        head, mark, rest = data.partition(b"K\0\0\0\x0c")
        return head + mark + b"\x7f\xff\xff\xff" + rest[4:] if mark else data

    relay = Relay(database, other_key)
    try:
        with pytest.raises(PooledConnection, match="reaches PostgreSQL directly"):
            Job("w1", CoordinationConfig(url=relay.url, **QUICK)).start()
    finally:
        relay.close()
    assert nodes(engine) == []


def test_nobody_may_lead(config: CoordinationConfig, engine: Engine) -> None:
    shy = CoordinationConfig(url=config.url, can_lead=False, **QUICK)
    with pytest.raises(TimeoutError, match="can_lead=True"):
        Job("w1", shy, wait_on_enter=1).start()
    assert nodes(engine) == []


def test_one_that_may_not_lead_follows(config: CoordinationConfig) -> None:
    shy = CoordinationConfig(url=config.url, can_lead=False, **QUICK)
    waiting = Job("w0", shy, wait_on_enter=30)
    thread = threading.Thread(target=waiting.start)
    thread.start()
    try:
        with Job("w1", config) as leader:
            thread.join(60)
            assert leader.am_i_leader()
            assert not waiting.am_i_leader()
            wait_for(lambda: len(waiting.my_tokens) == len(leader.my_tokens) == 5000, "both work")
    finally:
        waiting.stop()


def test_minimum_nodes_are_waited_for(database: URL) -> None:
    config = CoordinationConfig(url=database, minimum_nodes=3, **QUICK)
    jobs = [Job(f"w{i}", config, wait_on_enter=30) for i in range(3)]
    threads = [threading.Thread(target=job.start) for job in jobs]
    for thread in threads[:2]:
        thread.start()
    engine = create_engine(database)
    try:
        wait_for(lambda: nodes(engine) == ["w0", "w1"], "two have registered")
        assert all(thread.is_alive() for thread in threads[:2]), "they wait"
        threads[2].start()
        for thread in threads:
            thread.join(60)
        wait_for(lambda: sorted(len(job.my_tokens) for job in jobs) == [3333, 3333, 3334], "all share")
    finally:
        engine.dispose()
        for job in jobs:
            job.stop()


def test_failing_lock_provider_leaves_nothing(config: CoordinationConfig, engine: Engine) -> None:
    def provider(job: Job) -> None:
        raise RuntimeError("on purpose")

    before = set(threading.enumerate())
    with pytest.raises(RuntimeError, match="on purpose"):
        Job("w1", config, lock_provider=provider).start()
    assert nodes(engine) == []
    assert not [t for t in threading.enumerate() if t.name.startswith("jobsync") and t not in before]


def test_lock_provider_and_clearing_run_before_joining(config: CoordinationConfig) -> None:
    def first(job: Job) -> None:
        job.register_lock("old", "w1")

    with Job("w1", config, lock_provider=first):
        pass

    def second(job: Job) -> None:
        assert job.list_locks() == []
        job.register_locks_bulk([("new", "w1", "why")])

    with Job("w1", config, lock_provider=second, clear_existing_locks=True) as job:
        assert [lock["task_id"] for lock in job.list_locks()] == ["new"]


def test_a_job_starts_once(config: CoordinationConfig) -> None:
    job = Job("w1", config)
    with job:
        pass
    with pytest.raises(NotRunning, match="make a new Job"):
        job.start()
    job.stop()


def test_stop_without_start(config: CoordinationConfig) -> None:
    Job("w1", config).stop()


def test_after_the_end_nothing_is_owned_and_nothing_runs(config: CoordinationConfig, engine: Engine) -> None:
    before = set(threading.enumerate())  # one that tells observers serves the whole process
    with Job("w1", config) as job:
        assert job.can_claim_task(1)
    assert not job.can_claim_task(1)
    assert job.my_tokens == set()
    assert not job.am_i_healthy()
    assert nodes(engine) == []
    assert not [t for t in threading.enumerate() if t.name.startswith("jobsync") and t not in before]


def test_restart_after_a_kill_takes_over_its_own_row(cluster: Cluster, config: CoordinationConfig) -> None:
    """The only worker, killed and started again at once: nobody is there to evict its row."""
    cluster.config["heartbeat_timeout_sec"] = 60
    cluster.start("w1")
    cluster.workers["w1"].signal(9)
    cluster.workers["w1"].process.wait(60)
    with Job("w1", config, wait_on_enter=30) as job:
        assert len(job.my_tokens) == 10_000
    assert cluster.overlaps() == {}


def test_async(config: CoordinationConfig) -> None:
    async def main() -> None:
        async with Job("w1", config) as job:
            assert job.can_claim_task(1)
            async with Job("w2", config) as other:
                assert len(other.my_tokens) == 5000

    asyncio.run(main())


def test_cancelled_while_entering(database: URL, engine: Engine) -> None:
    config = CoordinationConfig(url=database, minimum_nodes=2, **QUICK)

    async def main() -> None:
        async def enter() -> None:
            async with Job("w1", config, wait_on_enter=60):
                raise AssertionError("never entered")

        entering = asyncio.create_task(enter())
        while nodes(engine) != ["w1"]:
            await asyncio.sleep(0.02)
        entering.cancel()
        with pytest.raises(asyncio.CancelledError):
            await entering

    asyncio.run(main())
    assert nodes(engine) == []


def test_engine_of_the_application(engine: Engine) -> None:
    """The coordinator connects as the engine does, and not from its pool."""
    small = create_engine(engine.url, pool_size=1, max_overflow=0)
    held = small.connect()
    try:
        with Job("w1", CoordinationConfig(engine=small, **QUICK)) as job:
            assert len(job.my_tokens) == 10_000
            assert job.am_i_healthy()
    finally:
        held.close()
        small.dispose()


def test_other_appname_and_schema_is_another_cluster(database: URL) -> None:
    other = CoordinationConfig(url=database, appname="o_", schema="Odd Schema", create_tables=True, **QUICK)
    with Job("w1", CoordinationConfig(url=database, **QUICK)) as one, Job("w1", other) as same_name:
        assert len(one.my_tokens) == len(same_name.my_tokens) == 10_000
        same_name.register_lock("t", "w1")
        assert one.list_locks() == []
        assert same_name.add_task("t")


def test_wait_on_exit_stays_a_member(config: CoordinationConfig, engine: Engine) -> None:
    began = time.monotonic()
    with Job("w1", config, wait_on_exit=0.5):
        pass
    assert time.monotonic() - began >= 0.5
    assert nodes(engine) == []
