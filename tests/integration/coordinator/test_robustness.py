"""Starting, waiting and stopping when something is not as it should be: bounded, quiet, and without leftovers."""

from __future__ import annotations

import asyncio
import gc
import os
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import URL, Engine, text

from jobsync_orm import CoordinationConfig, Job, migrate
from jobsync_orm.coordinator import service, steps
from jobsync_orm.coordinator.session import Session
from tests.integration.cluster import QUICK, wait_for
from tests.integration.relay import Relay

DESCRIPTORS = Path("/proc/self/fd")


@pytest.fixture
def config(database: URL) -> CoordinationConfig:
    return CoordinationConfig(url=database, **QUICK)


def nodes(engine: Engine) -> list[str]:
    with engine.connect() as connection:
        return list(connection.execute(text("SELECT name FROM sync_node ORDER BY 1")).scalars())


def test_a_server_that_accepts_and_says_nothing_holds_up_no_start() -> None:
    errors: list[BaseException] = []
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = URL.create("postgresql+psycopg", "nobody", host="127.0.0.1", port=silent.getsockname()[1], database="x")
        job = Job("w1", CoordinationConfig(url=url, **{**QUICK, "heartbeat_timeout_sec": 2}), wait_on_enter=1)

        def start() -> None:
            try:
                job.start()
            except TimeoutError as error:
                errors.append(error)

        starting = threading.Thread(target=start, daemon=True)
        starting.start()
        wait_for(lambda: not starting.is_alive(), "start() ends", 10)
    assert ["the database could not be reached" in str(error) for error in errors] == [True]


def test_waiting_for_other_nodes_keeps_nobody_busy(config: CoordinationConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    waits = [0]
    wait = Session.wait

    def counted(self: Session, timeout: float) -> set[str]:
        waits[0] += 1
        return wait(self, timeout)

    monkeypatch.setattr(Session, "wait", counted)
    alone = CoordinationConfig(url=config.url, minimum_nodes=2, **QUICK)
    with pytest.raises(TimeoutError, match="minimum_nodes=2"):
        Job("w1", alone, wait_on_enter=2).start()
    assert 0 < waits[0] < 60


def test_stop_with_tasks_in_the_book_and_no_database(
    config: CoordinationConfig, database: URL, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(service, "LEAVE_SEC", 0.1)
    relay = Relay(database)
    limits = {**QUICK, "heartbeat_timeout_sec": 2, "callback_timeout_sec": 0.2, "connection_grace_sec": 0.2}
    job = Job("w1", CoordinationConfig(url=relay.url, **limits)).start()
    stopping = threading.Thread(target=job.stop, daemon=True)
    try:
        assert job.add_task("t")
        relay.drop()
        stopping.start()
        wait_for(lambda: not stopping.is_alive(), "stop() ends", 10)
        assert not job.am_i_healthy()
        assert not job.can_claim_task("t")
        assert "the audit has not been written in time" in caplog.text
    finally:
        relay.close()
        for thread in threading.enumerate():
            if thread.name == "jobsync-audit":
                thread.join(60)


def test_an_error_in_the_audit_does_not_keep_the_node_a_member(
    config: CoordinationConfig, engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    job = Job("w1", config).start()
    assert job.add_task("t")

    def broken(written: object) -> None:
        raise RuntimeError("hook of the application")

    job._audit.write = broken  # type: ignore[union-attr, method-assign]
    job.stop()
    assert not job.can_claim_task("t")
    assert nodes(engine) == []
    assert "hook of the application" in caplog.text


def test_cancelled_while_the_tables_are_made(
    config: CoordinationConfig, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered, go_on = threading.Event(), threading.Event()
    upgrade = migrate.upgrade

    def slow(*arguments: Any, **named: Any) -> Any:
        entered.set()
        go_on.wait(60)
        return upgrade(*arguments, **named)

    monkeypatch.setattr(migrate, "upgrade", slow)
    job = Job("w1", CoordinationConfig(url=config.url, create_tables=True, **QUICK), wait_on_enter=5)

    async def main() -> None:
        entering = asyncio.create_task(job.__aenter__())
        await asyncio.to_thread(entered.wait, 10)
        entering.cancel()
        await asyncio.sleep(0)  # the cancellation is delivered
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await entering

    try:
        asyncio.run(main())
        assert nodes(engine) == []
        assert not job.can_claim_task(1)
        running = [t.name for t in threading.enumerate() if t.name.startswith("jobsync")]
        assert [name for name in running if name != "jobsync-observers"] == []  # that one serves the whole process
    finally:
        job.stop()


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_stop_in_a_forked_child_returns_at_once_and_leaves_the_parent_alone(
    config: CoordinationConfig, engine: Engine
) -> None:
    with Job("w1", config) as job:
        tokens, session = job.my_tokens, job._coordinator._session  # type: ignore[union-attr]
        pid = session.pid
        child = os.fork()
        if child == 0:
            began = time.monotonic()
            job.stop()
            os._exit(0 if time.monotonic() - began < 1 else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        beat = job.get_coordination_status()["last_heartbeat"]
        wait_for(lambda: job.get_coordination_status()["last_heartbeat"] > beat, "the parent's heart beats on")
        assert (job.my_tokens, session.pid, nodes(engine)) == (tokens, pid, ["w1"])
        assert job.add_task("t")


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_job_made_before_a_fork_and_run_in_the_child_leaves_the_cluster(
    config: CoordinationConfig, engine: Engine
) -> None:
    """As a server that forks its workers does."""
    job = Job("w1", config, wait_on_enter=10)
    child = os.fork()
    if child == 0:
        try:
            with job:
                owned = len(job.my_tokens)
            os._exit(0 if owned == 10_000 and not job.am_i_healthy() else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert nodes(engine) == []


def test_cancelled_while_entering_with_no_thread_to_spare(config: CoordinationConfig, engine: Engine) -> None:
    """All threads of the loop's executor may be in start(): leaving cannot wait for one of them."""
    alone = CoordinationConfig(url=config.url, minimum_nodes=2, **QUICK)
    job = Job("w1", alone, wait_on_enter=60)

    async def main() -> float:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
        entering = asyncio.create_task(job.__aenter__())
        while nodes(engine) != ["w1"]:
            await asyncio.sleep(0.02)
        began = time.monotonic()
        entering.cancel()
        with pytest.raises(asyncio.CancelledError):
            await entering
        return time.monotonic() - began

    assert asyncio.run(main()) < 30
    assert nodes(engine) == []


@pytest.mark.skipif(not DESCRIPTORS.exists(), reason="no /proc to count descriptors in")
def test_failed_starts_leave_no_descriptors_behind(config: CoordinationConfig) -> None:
    def provider(job: Job) -> None:
        raise RuntimeError("on purpose")

    counts = []
    jobs = []  # kept: nothing is to be left to the garbage collector
    for _ in range(3):
        for _ in range(3):
            jobs.append(Job("w1", config, lock_provider=provider))
            with pytest.raises(RuntimeError, match="on purpose"):
                jobs[-1].start()
        gc.collect()
        counts.append(len(list(DESCRIPTORS.iterdir())))
    assert max(counts) == counts[0], counts


def test_a_large_plan_is_published_in_batches(
    config: CoordinationConfig, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steps, "BATCH_TOKENS", 1000)

    def moved(reason: str) -> tuple[int, int]:
        with engine.connect() as connection:
            rows = connection.execute(
                text("SELECT count(*), coalesce(sum(tokens_moved), 0) FROM sync_rebalance WHERE trigger_reason = :r"),
                {"r": reason},
            )
            return tuple(map(int, rows.one()))  # type: ignore[return-value]

    with Job("w1", config) as one:
        assert len(one.my_tokens) == 10_000
        assert moved("initial") == (10, 10_000)
        with Job("w3", config) as three:
            wait_for(lambda: len(one.my_tokens) == len(three.my_tokens) == 5000, "two share")
            with Job("w2", config) as two:
                wait_for(
                    lambda: sorted(len(job.my_tokens) for job in (one, two, three)) == [3333, 3333, 3334], "they share"
                )
                assert len(one.my_tokens | two.my_tokens | three.my_tokens) == 10_000
                assert moved("join") == (5 + 4, 5000 + 3333)
                has = len(two.my_tokens)
            wait_for(lambda: len(one.my_tokens) == len(three.my_tokens) == 5000, "the two share again")
            assert not one.my_tokens & three.my_tokens
            assert moved("leave") == (4, has)
