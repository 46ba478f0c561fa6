"""Taking up a name again: after a crash, after a half-open connection, with an application on the tokens."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from sqlalchemy import URL, Engine, text

from jobsync_orm import CoordinationConfig, Job
from jobsync_orm.coordinator.clock import Clock
from jobsync_orm.coordinator.handoff import Handoff
from jobsync_orm.coordinator.membership import LOOK_SEC, Membership
from jobsync_orm.coordinator.observation import FREED_GRACES
from jobsync_orm.coordinator.session import SessionLost
from jobsync_orm.coordinator.statements import Statements
from tests.integration.cluster import QUICK, wait_for
from tests.integration.coordinator.backstage import add_node, open_session


@pytest.fixture
def config(database: URL) -> CoordinationConfig:
    return CoordinationConfig(url=database, **QUICK)


class Hands(Clock):
    """A clock that this test moves on."""

    at = 1000.0

    def now(self) -> float:
        return self.at


def test_stillness_counts_only_from_when_the_lock_was_had(
    config: CoordinationConfig, engine: Engine, database: URL, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before that, the old process held a session, and with it may have said yes until just now."""
    statements, clock, looks = Statements(config.names), Hands(), [0]
    grace, freed_at = 2.0, []
    with engine.begin() as connection:
        life = add_node(connection, "w1", heartbeat_timeout_sec=60, connection_grace_sec=grace)
    with open_session(database) as old, open_session(database) as new:
        assert old.execute(statements.lock_node, "w1", timeout=10) == [("t",)]

        def wait(timeout: float) -> set[str]:
            looks[0] += 1
            clock.at += LOOK_SEC
            if looks[0] == 40:  # far more than the grace, during which the row stands still
                old.execute("SELECT pg_advisory_unlock_all()", timeout=10)
                freed_at.append(clock.at)
            return set()

        monkeypatch.setattr(new, "wait", wait)
        member = Membership(config, "w1", statements, clock)
        assert member.register(new, 2000.0, lambda: looks[0] > 100, known_history=True)
        assert member.incarnation != life
    assert clock.at - freed_at[0] > FREED_GRACES * grace


@pytest.mark.parametrize(("known_history", "beat"), [(True, "2000-01-01"), (False, None)])
def test_a_lock_that_a_server_has_lost_proves_nothing(
    config: CoordinationConfig,
    engine: Engine,
    database: URL,
    monkeypatch: pytest.MonkeyPatch,
    known_history: bool,
    beat: str | None,
) -> None:
    """After a restart, or on another server, every lock is free, also that of a process whose packets are lost."""
    statements, clock, timeout = Statements(config.names), Hands(), 60
    with engine.begin() as connection:
        life = add_node(connection, "w1", heartbeat_timeout_sec=timeout, connection_grace_sec=1)
        before = text("UPDATE sync_node SET last_heartbeat = coalesce(CAST(:beat AS timestamptz), last_heartbeat)")
        connection.execute(before, {"beat": beat})

    with open_session(database) as new:

        def wait(seconds: float) -> set[str]:
            clock.at += LOOK_SEC
            if clock.at > 1000 + timeout:  # as much by the database's clock
                with engine.begin() as connection:
                    connection.execute(text("UPDATE sync_node SET heartbeat_timeout_sec = 0"))
            return set()

        monkeypatch.setattr(new, "wait", wait)
        member = Membership(config, "w1", statements, clock)
        assert member.register(new, 2000.0, lambda: clock.at > 1100, known_history=known_history)
        assert member.incarnation != life
    assert timeout < clock.at - 1000 < timeout + 2


def test_the_name_is_had_while_an_application_holds_one_of_its_tokens(
    config: CoordinationConfig, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    resting = CoordinationConfig(url=config.url, rejoin_grace_sec=60, **QUICK)
    with Job("w1", resting):
        pass
    refreshes = [0]
    refresh = Handoff.refresh

    def counted(self: Handoff, *arguments: Any) -> Any:
        refreshes[0] += 1
        return refresh(self, *arguments)

    monkeypatch.setattr(Handoff, "refresh", counted)
    job, other = Job("w1", resting, wait_on_enter=5), Job("w2", config, wait_on_enter=5)
    starting = threading.Thread(target=job.start, daemon=True)
    with engine.connect() as application:
        application.execute(text("SELECT 1 FROM sync_token WHERE token_id = 7 FOR SHARE"))
        try:
            starting.start()
            wait_for(lambda: not starting.is_alive(), "start() returns", 8)
            assert len(job.my_tokens) == 9_999
            other.start()  # w1 goes on leading
            wait_for(lambda: len(job.my_tokens | other.my_tokens) == 9_999, "they share the rest")
            assert refreshes[0] < 60, "it tries again now and then, not all the time"
            application.rollback()
            wait_for(lambda: len(job.my_tokens | other.my_tokens) == 10_000, "the last one is taken up", 10)
        finally:
            application.rollback()
            starting.join(60)
            other.stop()
            job.stop()


def test_the_lock_is_regained_from_a_half_open_session_after_a_failed_attempt(
    config: CoordinationConfig, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server has not heard of the end of the old session, which holds the lock; a session in between did not."""
    half_open: list[Any] = []
    with Job("w1", config) as job:
        coordinator: Any = job._coordinator
        session, life, first_pid = coordinator._session, coordinator.incarnation, coordinator._session.pid
        close, check = session.close, coordinator._admission.check

        def lose(timeout: float) -> set[str]:
            del session.wait
            raise SessionLost("on purpose")

        def forget() -> None:
            if not half_open:
                half_open.append(session._connection)
                session._connection = None
            close()

        def refuse(*arguments: Any) -> None:
            coordinator._admission.check = check
            refused_pids.append(session.pid)
            raise SessionLost("on purpose")

        refused_pids: list[int] = []
        session.close, coordinator._admission.check, session.wait = forget, refuse, lose
        coordinator.wake()
        try:
            wait_for(lambda: refused_pids and session.pid not in (first_pid, *refused_pids), "a third session")
            wait_for(job.am_i_healthy, "it says yes again", 15)
            assert coordinator.incarnation == life
            with engine.connect() as connection:
                pids = connection.execute(
                    text(
                        "SELECT pid FROM pg_locks WHERE locktype = 'advisory' AND database ="
                        " (SELECT oid FROM pg_database WHERE datname = current_database())"
                    )
                ).scalars()
                assert list(pids) == [session.pid]
            assert job.get_coordination_status()["state"] == "active"
        finally:
            for connection in half_open:
                connection.close()


def test_active_again_after_a_reconnect(config: CoordinationConfig, engine: Engine) -> None:
    with Job("w1", config) as job:
        session = job._coordinator._session  # type: ignore[union-attr]
        pid = session.pid
        with engine.connect() as connection:
            connection.execute(text("SELECT pg_terminate_backend(:pid)"), {"pid": pid})
        wait_for(lambda: session.pid != pid and job.am_i_healthy(), "it has a new session")
        assert job.get_coordination_status()["state"] == "active"
