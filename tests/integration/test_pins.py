"""Pins and the cluster: neither may disturb the other."""

from __future__ import annotations

import logging
import threading
from typing import Any

import pytest
from sqlalchemy import URL, Engine, create_engine, event, text

from jobsync_orm import ClusterMismatch, CoordinationConfig, Job, SchemaNotReady
from jobsync_orm.coordinator import leadership
from jobsync_orm.coordinator.leadership import Leadership
from jobsync_orm.exceptions import ConfigurationError
from jobsync_orm.naming import Names
from jobsync_orm.operate import add_pin, list_pins
from tests.integration.cluster import QUICK, wait_for


@pytest.fixture
def config(database: URL) -> CoordinationConfig:
    return CoordinationConfig(url=database, **QUICK)


def owner(engine: Engine, token: int) -> str | None:
    with engine.connect() as connection:
        return connection.execute(text("SELECT node FROM sync_token WHERE token_id = :t"), {"t": token}).scalar_one()


def pins(engine: Engine) -> list[str]:
    with engine.connect() as connection:
        return list(connection.execute(text("SELECT task_id FROM sync_lock ORDER BY 1")).scalars())


def test_pins_of_a_node_with_other_settings_are_refused_before_anything_is_written(
    config: CoordinationConfig, engine: Engine
) -> None:
    earlier = Job("w2", config)
    earlier.register_lock("old", "w2")
    earlier.stop()
    other = CoordinationConfig(url=config.url, total_tokens=500, **QUICK)
    called: list[Job] = []
    with pytest.raises(ClusterMismatch, match="total_tokens is 500"):
        Job("w2", other, lock_provider=called.append, clear_existing_locks=True).start()
    assert called == []
    assert pins(engine) == ["old"]


def test_lock_provider_without_tables(empty_database: URL) -> None:
    config = CoordinationConfig(url=empty_database, **QUICK)
    with pytest.raises(SchemaNotReady, match="jobsync-orm db upgrade"):
        Job("w1", config, lock_provider=lambda job: job.register_lock("t", "w1")).start()


@pytest.mark.parametrize("call", ["clear_all_locks", "clear_locks_by_creator", "register_lock"])
def test_a_process_paused_at_the_end_of_a_pin_transaction_stops_nobody(
    config: CoordinationConfig, database: URL, call: str
) -> None:
    """Whatever it has locked by then stays locked for as long as it sleeps."""
    paused, go_on = threading.Event(), threading.Event()
    engine = create_engine(database)

    def pause(connection: object) -> None:
        paused.set()
        go_on.wait(60)

    pinner = Job("pinner", CoordinationConfig(engine=engine, **QUICK))
    arguments: dict[str, tuple[str, ...]] = {"clear_locks_by_creator": ("pinner",), "register_lock": ("b", "w%")}
    calling = threading.Thread(target=getattr(pinner, call), args=arguments.get(call, ()), daemon=True)
    with Job("w1", config) as one:
        pinner.register_lock("a", "w%")
        event.listen(engine, "commit", pause)
        event.listen(engine, "rollback", pause)
        try:
            calling.start()
            assert paused.wait(60)
            with Job("w2", config, wait_on_enter=4) as two:
                wait_for(lambda: len(one.my_tokens) == len(two.my_tokens) == 5000, "they share")
                assert calling.is_alive()
        finally:
            go_on.set()
            calling.join(60)
            pinner.stop()
            engine.dispose()
        assert len(one.list_locks()) == (2 if call == "register_lock" else 0)


def test_a_stream_of_pins_does_not_keep_a_node_from_joining(
    config: CoordinationConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worst of streams: before each plan is published, another pin has come."""
    pinner, count = Job("pinner", config), [0]
    publish = Leadership._publish

    def overtaken(self: Leadership, *arguments: Any) -> Any:
        count[0] += 1
        pinner.register_lock(f"t{count[0]}", "w%")
        return publish(self, *arguments)

    try:
        with Job("w1", config) as one:
            monkeypatch.setattr(Leadership, "_publish", overtaken)
            with Job("w2", config, wait_on_enter=5) as two:
                wait_for(lambda: len(one.my_tokens) == len(two.my_tokens) == 5000, "they share", 5)
    finally:
        pinner.stop()
    assert 0 < count[0] < 20


def test_a_malformed_pattern_matches_nobody_and_coordination_goes_on(
    config: CoordinationConfig, engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    with Job("w1", config) as one:
        pid = one._coordinator._session.pid  # type: ignore[union-attr]
        with Job("w2", config), caplog.at_level(logging.WARNING):
            with engine.begin() as connection:
                connection.execute(
                    text(
                        "INSERT INTO sync_lock (task_id, token_id, node_patterns, created_at, created_by, ephemeral)"
                        r""" VALUES ('x', 5, '["w\\"]', clock_timestamp(), 'dba', false)"""
                    )
                )
            one.register_lock("y", "w%")  # has it looked at
            wait_for(lambda: owner(engine, 5) is None, "its token is parked", 15)
        wait_for(lambda: len(one.my_tokens) == 9_999, "w1 has the rest", 15)
        assert one._coordinator._session.pid == pid  # type: ignore[union-attr]
    assert "a pin matches no node: pattern 'w\\\\'" in caplog.text


def test_repairs_go_on_while_a_pin_waits_for_a_far_expiry(
    config: CoordinationConfig, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leadership, "RECONCILE_SEC", 0.5)
    # A mark makes a plan due when it is overdue; that one must not do the repair.
    patient = CoordinationConfig(url=config.url, **{**QUICK, "drain_timeout_sec": 60})
    with Job("w1", patient) as job:
        job.register_lock("p", "nobody", expires_in_days=30)
        wait_for(lambda: owner(engine, job.task_to_token("p")) is None, "the pin has been planned for")
        token = (job.task_to_token("p") + 1) % 10_000
        with engine.begin() as connection:
            connection.execute(text("UPDATE sync_token SET node = 'nobody' WHERE token_id = :t"), {"t": token})
        wait_for(lambda: owner(engine, token) == "w1", "the token has an owner again", 5)


def test_an_expiry_that_nobody_could_read_is_refused(engine: Engine) -> None:
    """A moment past the year 9999 is one for PostgreSQL, and for no driver: the lists of pins could not be read."""
    add_pin(engine, Names(), "far", "%", created_by="me", expires_in_days=36_600)
    for days in (36_601, 5_000_000, float("inf"), float("nan"), -1):
        with pytest.raises(ConfigurationError, match=r"expires_in_days=.* at most 36600"):
            add_pin(engine, Names(), "farther", "%", created_by="me", expires_in_days=days)
    assert [pin.task_id for pin in list_pins(engine, Names())] == ["far"]


def test_ephemeral_pins_of_a_node_that_never_joined_are_dropped(
    config: CoordinationConfig, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leadership, "RECONCILE_SEC", 0.5)
    never = Job("never", config)
    with Job("w1", config) as job:
        job.register_lock("mine", "w1", ephemeral=True)
        never.register_lock("kept", "w1")
        never.register_lock("new", "w1", ephemeral=True)
        never.register_lock("gpu", "never", ephemeral=True)
        never.stop()
        wait_for(lambda: len(job.my_tokens) == 9_999, "its token waits for the node")
        with engine.begin() as connection:
            connection.execute(
                text("UPDATE sync_lock SET created_at = created_at - interval '2 minutes' WHERE task_id <> 'new'")
            )
        wait_for(lambda: pins(engine) == ["kept", "mine", "new"], "it is gone", 5)
        wait_for(lambda: len(job.my_tokens) == 10_000, "its token is not tied down any more", 5)
