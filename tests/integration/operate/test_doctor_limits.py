"""From where on each check of the doctor tells something, what it says then, and what it leaves alone."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest
from sqlalchemy import Engine, create_engine, text

from jobsync_orm import Job
from jobsync_orm.migrate import online
from jobsync_orm.naming import Names
from jobsync_orm.operate import drain
from jobsync_orm.operate.doctor import (
    Finding,
    Limits,
    Severity,
    Subject,
    chains,
    clocks,
    connections,
    examine,
    examining,
    fences,
    indexes,
    listening,
    members,
    pauses,
    pins,
    releases,
    tables,
    tokens,
    transactions,
    unserved,
    vacuum,
)
from tests.conftest import Server
from tests.integration.cluster import wait_for
from tests.integration.coordinator.backstage import add_node
from tests.integration.queue.rows import SQL, depend, put
from tests.integration.relay import Relay

Check = Callable[[Subject], Any]
Found = Callable[..., list[Finding]]
OLD = SQL("now() - interval '10 minutes'")


@pytest.fixture
def found(engine: Engine) -> Found:
    """What one check finds, with these limits or other parts of its subject."""

    def find(check: Check, *, subject: Engine | None = None, role: str | None = None, **limits: Any) -> list[Finding]:
        return list(check(Subject(subject or engine, Names(), role=role, limits=Limits(**limits))))

    return find


@pytest.fixture
def do(engine: Engine) -> Callable[..., None]:
    def do(*statements: str) -> None:
        with engine.begin() as connection:
            for statement in statements:
                connection.exec_driver_sql(statement)

    return do


Do = Callable[..., None]


def told(findings: list[Finding]) -> list[tuple[Severity, str]]:
    return [(finding.severity, finding.what) for finding in findings]


class TestClocks:
    def by(self, engine: Engine, clock: Callable[[], float], skew_sec: float = 2.0) -> list[Finding]:
        return list(clocks.check(Subject(engine, Names(), limits=Limits(skew_sec=skew_sec), clock=clock)))

    def test_which_one_is_ahead(self, engine: Engine) -> None:
        for offset, said in ((-120, "120 s ahead of this host's"), (120, "120 s behind this host's")):
            findings = self.by(engine, lambda offset=offset: time.time() + offset)
            assert told(findings) == [(Severity.WARNING, f"the database's clock is {said}")]

    def test_up_to_the_limit_nothing(self, engine: Engine) -> None:
        assert self.by(engine, lambda: time.time() - 5, skew_sec=6) == []
        assert self.by(engine, lambda: time.time() - 5, skew_sec=4) != []

    def test_a_slow_answer_is_no_difference(self, engine: Engine) -> None:
        """Between the two looks at this host's clock 20 seconds pass: the database's moment may be any of them."""
        steps = itertools.count(0, 20)
        began = time.time()
        assert self.by(engine, lambda: began + next(steps)) == []


class TestConnections:
    def test_of_the_server_without_those_that_are_kept_for_superusers(self, found: Found, engine: Engine) -> None:
        with engine.connect() as connection:
            setting = (
                "SELECT current_setting('max_connections')::int, current_setting('superuser_reserved_connections')"
            )
            most, reserved = connection.exec_driver_sql(setting).one()
        (server,) = found(connections.check, connections=0.0)
        assert server.severity is Severity.WARNING, "some are left"
        assert f" of the {most - int(reserved)} connections of the server are in use" in server.what
        assert "max_connections in postgresql.conf" in server.remedy

    def test_from_the_share_on_a_warning_and_an_error_when_none_is_left(
        self, found: Found, server: Server, engine: Engine
    ) -> None:
        def limit(many: int) -> list[tuple[Severity, str]]:
            with server.connect() as connection:
                connection.execute(f"ALTER DATABASE {engine.url.database} CONNECTION LIMIT {many}")
            findings = found(connections.check, connections=0.5)
            assert all(f"DATABASE {engine.url.database} CONNECTION LIMIT -1" in f.remedy for f in findings)
            return told(findings)

        database = f"database {engine.url.database}"
        with engine.connect(), engine.connect():  # two are open from now on, and the check has one of them
            pass
        assert limit(5) == []
        assert limit(4) == [(Severity.WARNING, f"2 of the 4 connections of {database} are in use")]
        assert limit(2) == [(Severity.ERROR, f"2 of the 2 connections of {database} are in use")]

    def test_of_the_role_that_is_asked_about(self, found: Found, server: Server) -> None:
        with server.connect() as connection:
            connection.execute('CREATE ROLE "jobsync few" CONNECTION LIMIT 0')
        try:
            (few,) = found(connections.check, role="jobsync few")
            assert found(connections.check) == []
        finally:
            with server.connect() as connection:
                connection.execute('DROP ROLE "jobsync few"')
        assert few.what == '0 of the 0 connections of role "jobsync few" are in use'
        assert 'ALTER ROLE "jobsync few" CONNECTION LIMIT -1' in few.remedy


class TestFences:
    def test_a_trigger_that_only_a_replica_fires_is_off_too(self, found: Found, do: Do) -> None:
        do(
            "CREATE TABLE item (id int)",
            "CREATE FUNCTION nothing() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NEW; END'",
            "CREATE TRIGGER sync_fence_item BEFORE UPDATE ON item FOR EACH ROW EXECUTE FUNCTION nothing()",
            "CREATE TRIGGER mine BEFORE UPDATE ON item FOR EACH ROW EXECUTE FUNCTION nothing()",
            "ALTER TABLE item DISABLE TRIGGER mine",
        )
        assert found(fences.check) == []
        do("ALTER TABLE item ENABLE ALWAYS TRIGGER sync_fence_item")
        assert found(fences.check) == []
        do("ALTER TABLE item ENABLE REPLICA TRIGGER sync_fence_item")
        (off,) = found(fences.check)
        assert (off.severity, off.what) == (Severity.ERROR, "the trigger sync_fence_item of table public.item is off")
        assert "commits of stale owners are not refused" in off.why

    def test_one_that_fills_tokens(self, found: Found, do: Do, engine: Engine) -> None:
        do("CREATE TABLE item (id int PRIMARY KEY, sku text NOT NULL)")
        online.add_token_column(engine, "item", key="sku")
        assert found(fences.check) == []
        do("ALTER TABLE item DISABLE TRIGGER USER")
        (off,) = found(fences.check)
        assert "it fills token_id" in off.why


class TestIndexes:
    TABLE = "CREATE TABLE item (id int, token_id int GENERATED ALWAYS AS (sync_token_of(id::text)) STORED)"

    def test_a_large_table_is_a_warning(self, found: Found, do: Do) -> None:
        do(self.TABLE, "INSERT INTO item SELECT 1")
        assert [f.severity for f in found(indexes.check, large_bytes=8192)] == [Severity.WARNING]
        assert [f.severity for f in found(indexes.check, large_bytes=8193)] == [Severity.NOTE]

    def test_one_of_the_token_alone_or_that_is_not_valid_does_not_count(self, found: Found, do: Do) -> None:
        do(self.TABLE, "CREATE INDEX ON item (id, token_id)", "CREATE INDEX alone ON item (token_id)")
        (missing,) = found(indexes.check)
        assert missing.what == "table public.item has no index on (token_id, ...)"
        do("CREATE INDEX whole ON item (token_id, id)")
        assert found(indexes.check) == []
        do("UPDATE pg_index SET indisvalid = false WHERE indexrelid = 'whole'::regclass")
        assert told(found(indexes.check)) == told([missing])

    def test_a_partitioned_table_is_told_of_once_with_all_of_its_size(self, found: Found, do: Do) -> None:
        do(
            self.TABLE.replace("id int,", "id int PRIMARY KEY,") + " PARTITION BY HASH (id)",
            "CREATE TABLE item_0 PARTITION OF item FOR VALUES WITH (MODULUS 2, REMAINDER 0)",
            "CREATE TABLE item_1 PARTITION OF item FOR VALUES WITH (MODULUS 2, REMAINDER 1)",
            "INSERT INTO item SELECT n FROM generate_series(1, 100) n",
        )
        (one,) = found(indexes.check, large_bytes=2 * 8192)
        assert one.severity is Severity.WARNING
        # PostgreSQL makes none concurrently on such a table.
        assert one.remedy.startswith(
            'CREATE INDEX ON public.item ("token_id", "id"); CREATE INDEX ON public.item ("id", "token_id") -- '
        )


class TestListening:
    def test_a_notification_that_does_not_come_back(
        self, found: Found, engine: Engine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(listening, "ANSWER_SEC", 0.2)
        with closing(Relay(engine.url, lambda said: said.replace(b"jobsync_doctor_", b"jobsync_nobody_"))) as relay:
            muffled = create_engine(relay.url.set(query={"sslmode": "disable"}))
            (finding,) = found(listening.check, subject=muffled)
            muffled.dispose()
        assert finding.severity is Severity.ERROR
        assert finding.what.startswith("a notification did not come back")

    def test_a_queue_of_notifications_that_is_full(self, found: Found, monkeypatch: pytest.MonkeyPatch) -> None:
        assert found(listening.check) == []
        monkeypatch.setattr(listening, "FULL", -1)
        (finding,) = found(listening.check)
        assert (finding.severity, finding.what) == (
            Severity.ERROR,
            "the server's queue of notifications is 0% full",
        )
        assert "pg_terminate_backend" in finding.remedy


class TestMembers:
    def add(self, engine: Engine, name: str, **columns: Any) -> None:
        with engine.begin() as connection:
            add_node(connection, name, **columns)

    def test_nobody_is_there(self, found: Found) -> None:
        assert told(found(members.check)) == [(Severity.NOTE, "no node is registered")]

    def test_nobody_lives(self, found: Found, engine: Engine) -> None:
        self.add(engine, "w8", state="away", rejoin_grace_sec=60)
        assert told(found(members.check)) == [(Severity.ERROR, "none of the 1 registered nodes is live")]

    def test_who_has_been_cut_off_just_now_is_the_leaders_to_take_out(
        self, found: Found, engine: Engine, job: Job, do: Do
    ) -> None:
        self.add(engine, "w7", silent_sec=3, heartbeat_timeout_sec=60, ordinal=-7)
        self.add(engine, "w8", silent_sec=30, heartbeat_timeout_sec=60, ordinal=-8)
        self.add(engine, "w9", silent_sec=5, heartbeat_timeout_sec=4, ordinal=-9)
        do("UPDATE sync_token SET node = 'w8' WHERE token_id = 7")
        eight, nine = sorted(found(members.check), key=lambda finding: finding.what)
        assert eight.severity is nine.severity is Severity.ERROR
        assert eight.what.startswith("w8 (process 1 on h) is dead or hangs: no heartbeat for 3")
        assert eight.why == "its 1 token and the jobs it had wait"
        assert nine.what.startswith("w9 ")
        assert nine.remedy.startswith("jobsync-orm evict w9;")

    def test_one_that_is_only_joining_is_there(self, found: Found, job: Job, do: Do) -> None:
        do("UPDATE sync_node SET state = 'joining'")
        assert found(members.check) == []

    def test_an_order_for_a_node_that_is_there_is_meant(self, found: Found, engine: Engine, job: Job) -> None:
        assert drain(engine, Names(), "w1", by="me", last_too=True)
        assert found(members.check) == []


class TestPauses:
    HOURS = "INSERT INTO sync_job_pause (type, since, reason) VALUES (%s, now() - %s * interval '1 hour', %s)"

    def pause(self, engine: Engine, type: str, hours: float, reason: str | None = None) -> None:
        with engine.begin() as connection:
            connection.exec_driver_sql(self.HOURS, (type, hours, reason))

    def test_an_old_one_behind_which_jobs_wait(self, found: Found, engine: Engine) -> None:
        self.pause(engine, "my mail", 2.5, "the disk")
        assert found(pauses.check) == [], "nothing waits behind it"
        put(engine, type="other")
        put(engine, "completed", type="my mail")
        assert found(pauses.check) == [], "nor does what is of another type, or done"
        put(engine, type="my mail")
        (finding,) = found(pauses.check)
        assert finding.what == "type 'my mail' has been paused for 2.5 h (the disk)"
        assert finding.remedy == "jobsync-orm queue resume 'my mail'"

    def test_a_new_one_is_not_forgotten(self, found: Found, engine: Engine) -> None:
        put(engine)
        self.pause(engine, "", 0.5)
        assert found(pauses.check) == []
        assert [f.what for f in found(pauses.check, pause_sec=1700)] == ["the whole queue has been paused for 0.5 h"]


class TestPins:
    def pin(self, do: Do, task: str, patterns: str, expires: str = "NULL") -> None:
        do(
            "INSERT INTO sync_lock (task_id, token_id, node_patterns, created_by, expires_at)"
            f" VALUES ('{task}', sync_token_of('{task}'), '{patterns}', 'me', {expires})"
        )

    def test_where_nobody_lives_no_pin_is_to_blame(self, found: Found, do: Do, engine: Engine) -> None:
        self.pin(do, "a", '["gpu-%%"]')
        assert found(pins.check) == []
        with engine.begin() as connection:
            add_node(connection, "gpu-1", state="away")
        assert found(pins.check) == [], "who is away is not there"

    def test_any_pattern_and_any_node_will_do(self, found: Found, do: Do, engine: Engine) -> None:
        with engine.begin() as connection:
            add_node(connection, "w1")
            add_node(connection, "w2", ordinal=1)
            add_node(connection, "gpu-1", ordinal=2, state="away")
        self.pin(do, "second pattern", '["gpu-%%", "w2"]')
        self.pin(do, "over", '["gpu-%%"]', "now() - interval '1 hour'")
        (over,) = found(pins.check)
        assert (over.severity, over.what) == (Severity.NOTE, "1 pin has expired and is still stored")
        for n in range(6):
            self.pin(do, f"task {n}", '["gpu-%%"]')
        orphaned, _ = found(pins.check)
        assert orphaned.severity is Severity.WARNING
        assert orphaned.what.startswith("6 pins match no live node: "), "who is away is not there"
        assert orphaned.what.count("task ") == orphaned.remedy.count("'task ") == 5
        assert orphaned.what.endswith(" (gpu-%), ...")


class TestReleases:
    def test_those_that_are_fewest_are_to_be_updated(self, found: Found, engine: Engine, do: Do) -> None:
        with engine.begin() as connection:
            for n in range(4):
                add_node(connection, f"w{n}", ordinal=n, heartbeat_timeout_sec=(30, 4, 4, 90)[n])
        do(
            "UPDATE sync_node SET version = '2' WHERE name IN ('w1', 'w2')",
            "UPDATE sync_node SET state = 'away', version = '1' WHERE name = 'w3'",
        )
        version, timeout = found(releases.check)
        assert "0 (w0); 2 (w1, w2)" in version.what
        assert version.remedy.endswith("start again w0")
        assert "4 s (w1, w2); 30 s (w0)" in timeout.what
        assert timeout.remedy == "give all nodes heartbeat_timeout_sec=30"
        do("DELETE FROM sync_node WHERE name = 'w0'")
        assert found(releases.check) == [], "who is away runs nothing"


class TestTokens:
    def test_where_all_nodes_are_drained_nobody_is_to_be_pinned_anew(
        self, found: Found, engine: Engine, job: Job
    ) -> None:
        assert drain(engine, Names(), "w1", by="me", last_too=True)
        (parked,) = wait_for(lambda: found(tokens.check), "they are parked")
        assert parked.severity is Severity.WARNING
        assert parked.what.endswith(" parked: all nodes are drained")
        assert parked.remedy == "jobsync-orm undrain w1"

    def test_late_handovers_and_a_rest(self, found: Found, engine: Engine, do: Do) -> None:
        with engine.begin() as connection:
            add_node(connection, "w1")
        do(
            "UPDATE sync_token SET node = 'w1', next_node = 'w2', next_epoch = 2,"
            " drain_deadline = now() + (token_id - 2) * interval '1 minute' WHERE token_id < 9",
            "UPDATE sync_cluster SET rest_until = now() + interval '50 seconds'",
        )
        late, rest = found(tokens.check)
        assert (late.severity, late.what) == (Severity.WARNING, "3 tokens should have been handed over by now")
        assert (rest.severity, rest.remedy) == (Severity.NOTE, "wait")
        assert rest.what.startswith("the cluster has been formed anew and rests for ")
        do("UPDATE sync_cluster SET rest_until = now() - interval '1 second'")
        assert told(found(tokens.check)) == told([late])


class TestTransactions:
    def test_only_old_ones_and_only_of_this_database(self, found: Found, server: Server, engine: Engine) -> None:
        with server.connect() as elsewhere, engine.connect() as here:
            elsewhere.execute("BEGIN")
            pid = here.exec_driver_sql("SELECT pg_backend_pid()").scalar_one()
            assert found(transactions.check) == []
            time.sleep(0.05)
            assert [f.remedy for f in found(transactions.check, transaction_sec=0.05)] == [
                f"SELECT pg_terminate_backend({pid})"
            ]
            elsewhere.execute("ROLLBACK")


class TestUnserved:
    def test_what_has_not_waited_for_long_is_paused_or_served(self, found: Found, engine: Engine, do: Do) -> None:
        put(engine, count=2, ready_at=OLD, created_at=OLD)
        (finding,) = found(unserved.check)
        assert finding.severity is Severity.ERROR
        assert finding.what.startswith("2 jobs of type 't' are ready, since 6")
        assert found(unserved.check, unserved_sec=700) == []
        for type in ("t", ""):
            do(f"INSERT INTO sync_job_pause (type) VALUES ('{type}')")
            assert found(unserved.check) == []
            do("DELETE FROM sync_job_pause")
        do("INSERT INTO sync_job_pause (type) VALUES ('another')")
        assert len(found(unserved.check)) == 1
        with engine.begin() as connection:
            incarnation = add_node(connection, "w1")
        do(
            "INSERT INTO sync_job_worker (node, incarnation, types, concurrency)"
            f" VALUES ('w1', '{incarnation}', '{{t}}', 1)"
        )
        assert found(unserved.check) == []


class TestVacuum:
    def dead(self, engine: Engine, do: Do, dead: int, live: int) -> None:
        do("ALTER TABLE sync_job SET (autovacuum_enabled = false)")
        put(engine, count=dead)
        do("DELETE FROM sync_job")
        if live:
            put(engine, count=live)
        ask = text("SELECT n_dead_tup, n_live_tup FROM pg_stat_user_tables WHERE relid = CAST('sync_job' AS regclass)")

        def counted() -> bool:
            with engine.connect() as connection:
                connection.execute(text("SELECT pg_stat_force_next_flush()"))
                return tuple(connection.execute(ask).one()) == (dead, live)

        wait_for(counted, "the statistics know")
        do("ALTER TABLE sync_job RESET (autovacuum_enabled)")

    def found(self, found: Found, dead_rows: int) -> list[str]:
        return [f.what for f in found(vacuum.check, dead_rows=dead_rows) if "the server runs with" not in f.what]

    def test_many_dead_rows_that_are_more_than_the_live_ones(self, found: Found, engine: Engine, do: Do) -> None:
        self.dead(engine, do, 30, 20)
        assert self.found(found, 30) == ['table "sync_job" has 30 dead rows and 20 live ones']
        assert self.found(found, 31) == []
        put(engine, count=10)
        wait_for(lambda: self.found(found, 30) == [], "as many live as dead is no reason")

    @pytest.mark.parametrize("off", ["off", "no", "0", "FALSE"])
    def test_autovacuum_that_is_off_however_it_is_written(self, found: Found, do: Do, off: str) -> None:
        do(f"ALTER TABLE sync_token SET (autovacuum_enabled = {off})")
        assert self.found(found, 10**6) == ['autovacuum is off for table "sync_token"']


class TestChains:
    def test_the_oldest_that_will_not_complete_is_named(self, found: Found, engine: Engine) -> None:
        (done,), (failed,), (cancelled,) = put(engine, "completed"), put(engine, "failed"), put(engine, "cancelled")
        first, second, third = put(engine, "blocked", count=3)
        depend(engine, first, done)
        assert found(chains.check) == []
        depend(engine, second, failed, cancelled)
        depend(engine, third, cancelled)
        (finding,) = found(chains.check)
        assert (finding.severity, finding.what) == (
            Severity.WARNING,
            f"2 jobs are blocked behind 2 that failed or were cancelled, such as job {failed}",
        )
        assert finding.remedy.startswith(f"jobsync-orm queue retry {failed}, or ")


class TestTables:
    def test_another_hash_function_is_told_of_as_a_setting(self, engine: Engine) -> None:
        (finding,) = tables.check(Subject(engine, Names(), hash_function="md5"))
        assert (finding.check, finding.severity) == ("settings", Severity.ERROR)


def test_notes_are_no_illness_and_come_last(engine: Engine, do: Do, monkeypatch: pytest.MonkeyPatch) -> None:
    do("CREATE TABLE item (id int, token_id int GENERATED ALWAYS AS (sync_token_of(id::text)) STORED)")
    # Of the cluster these only: the tests' own server may be set up without vacuum, which is an error.
    monkeypatch.setattr(examining, "CLUSTER", {"indexes": indexes.check, "members": members.check})
    well = examine(Subject(engine, Names()))
    assert {finding.severity for finding in well.findings} == {Severity.NOTE}
    assert well.healthy
    with engine.begin() as connection:
        add_node(connection, "w1", silent_sec=60)
    ill = examine(Subject(engine, Names(), clock=lambda: 0))
    assert not ill.healthy
    assert [f.severity for f in ill.findings if f.check in ("indexes", "members", "clocks")] == [
        *(Severity.ERROR, Severity.ERROR),  # nobody lives, and w1 is dead
        Severity.WARNING,
        Severity.NOTE,
    ]
