"""Misconfigurations, each prepared in a healthy cluster: the doctor finds it, and names the remedy."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
from sqlalchemy import URL, Engine, NullPool, create_engine, event, text

from jobsync_orm import CoordinationConfig, Job, migrate
from jobsync_orm.exceptions import ConfigurationError
from jobsync_orm.migrate import online
from jobsync_orm.migrate.fence import create_ownership_fence
from jobsync_orm.naming import Names
from jobsync_orm.operate.doctor import Finding, Limits, Subject, examine
from tests.conftest import Server
from tests.integration.cli.commands import run
from tests.integration.cluster import QUICK, wait_for
from tests.integration.pooler import needs_pgbouncer, pooled
from tests.integration.queue.rows import SQL, depend, put

LIMITS = Limits(large_bytes=0, connections=1.0)

# A server that is there for tests only may be set up so.
GIVEN = ("the server runs with autovacuum = off",)

TABLE = """
    CREATE TABLE item (id int PRIMARY KEY, sku text NOT NULL, made timestamptz,
        token_id int GENERATED ALWAYS AS (sync_token_of(sku)) STORED NOT NULL);
    CREATE INDEX by_age ON item (made, token_id) WHERE made > '2020-01-01';
    CREATE INDEX by_token ON item (token_id, made) WHERE made > '2020-01-01'"""


@dataclass
class Healthy:
    """A cluster in which nothing is wrong, and an engine to spoil it with."""

    server: Server
    url: URL
    engine: Engine
    job: Job

    @property
    def subject(self) -> Subject:
        # With new connections, which have the settings of the database as they are by then.
        return Subject(create_engine(self.url, poolclass=NullPool), Names(), limits=LIMITS)

    def do(self, *statements: str) -> None:
        with self.engine.begin() as connection:
            for statement in statements:
                connection.execute(text(statement))

    def from_outside(self, statement: str) -> None:
        with self.server.connect() as connection:
            connection.execute(statement)


@pytest.fixture(scope="module")
def healthy(server: Server, template: str) -> Iterator[Healthy]:
    url = server.create_database(template)
    with server.connect() as connection:
        connection.execute(f"ALTER DATABASE {url.database} SET idle_in_transaction_session_timeout = '15s'")
    engine, own = create_engine(url), create_engine(url)
    with Job("w1", CoordinationConfig(engine=own, **QUICK)) as job:
        made = Healthy(server, url, engine, job)
        made.do(*TABLE.split(";"))
        create_ownership_fence(engine, "item")
        yield made
    engine.dispose()
    own.dispose()
    server.drop_database(url)


Spoil = Callable[[Healthy], Any]


@dataclass
class Case:
    """What is prepared, by which check it is found, and what is part of the remedy."""

    check: str
    remedy: str
    spoil: Spoil
    repair: Spoil
    subject: dict[str, Any] = dataclasses.field(default_factory=dict)


def sql(*statements: str) -> Spoil:
    return lambda healthy: healthy.do(*statements)


def nothing(healthy: Healthy) -> None:
    pass


def database(what: str) -> Spoil:
    return lambda healthy: healthy.from_outside(f"ALTER DATABASE {healthy.url.database} {what}")


NODE = """
    INSERT INTO sync_node (name, incarnation, host, pid, heartbeat_timeout_sec, state, last_heartbeat, version)
    SELECT 'w9', gen_random_uuid(), 'h', 7, heartbeat_timeout_sec,"""
FORGET = sql("DELETE FROM sync_node WHERE name = 'w9'")
EMPTY = sql("DELETE FROM sync_job_dependency", "DELETE FROM sync_job", "DELETE FROM sync_job_pause")
OLD = SQL("now() - interval '1 day'")


def blocked(healthy: Healthy) -> None:
    (failed,), (waiting,) = put(healthy.engine, "failed"), put(healthy.engine, "blocked")
    depend(healthy.engine, waiting, failed)


def parked(healthy: Healthy) -> None:
    healthy.job.register_lock("task", "gpu-%")
    wait_for(lambda: healthy.job.get_coordination_status()["parked_tokens"], "parked")


def unparked(healthy: Healthy) -> None:
    healthy.job.clear_lock("task")
    wait_for(lambda: not healthy.job.get_coordination_status()["parked_tokens"], "given out")


def dead_rows(healthy: Healthy) -> None:
    put(healthy.engine, count=50)
    healthy.do("DELETE FROM sync_job")
    ask = text("SELECT n_dead_tup > n_live_tup FROM pg_stat_user_tables WHERE relid = CAST('sync_job' AS regclass)")

    def counted() -> bool:
        with healthy.engine.connect() as connection:
            connection.execute(text("SELECT pg_stat_force_next_flush()"))
            return bool(connection.execute(ask).scalar_one())

    wait_for(counted, "the statistics know")


def half_way(healthy: Healthy) -> None:
    """Giving a table its column was interrupted before the CHECK was validated."""
    healthy.do("CREATE TABLE late (id int PRIMARY KEY, sku text NOT NULL)")
    cut = create_engine(healthy.url)

    @event.listens_for(cut, "before_cursor_execute")
    def interrupt(connection: Any, cursor: Any, statement: str, *_: Any) -> None:
        if "VALIDATE CONSTRAINT" in statement:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        online.add_token_column(cut, "late", key="sku")
    cut.dispose()
    healthy.do("CREATE INDEX ON late (token_id, id)", "CREATE INDEX ON late (id, token_id)")


def nearly(healthy: Healthy) -> None:
    half_way(healthy)
    online.add_token_column(healthy.engine, "late", key="sku")
    healthy.do("ALTER TABLE late ALTER COLUMN token_id DROP NOT NULL")


NEWEST = sql(f"UPDATE sync_alembic_version SET version_num = '{migrate.head()}'")

CASES = {
    "older tables": Case(
        "tables",
        "jobsync-orm db upgrade",
        sql("UPDATE sync_alembic_version SET version_num = '0003'"),
        NEWEST,
    ),
    "newer tables": Case(
        "tables",
        "install a newer one",
        sql("UPDATE sync_alembic_version SET version_num = '9999'"),
        NEWEST,
    ),
    "another number of tokens": Case("settings", "set total_tokens to 10000", nothing, nothing, {"total_tokens": 500}),
    "a worker without rights": Case(
        "permissions",
        'GRANT SELECT, INSERT, UPDATE, DELETE ON "sync_node" TO "jobsync doctor"',
        lambda healthy: healthy.from_outside('CREATE ROLE "jobsync doctor"'),
        lambda healthy: healthy.from_outside('DROP ROLE "jobsync doctor"'),
        {"role": "jobsync doctor"},
    ),
    "a clock two minutes off": Case(
        "clocks", "timedatectl set-ntp true", nothing, nothing, {"clock": lambda: time.time() - 120}
    ),
    "a read-only database": Case(
        "read only",
        "RESET default_transaction_read_only",
        database("SET default_transaction_read_only = on"),
        database("RESET default_transaction_read_only"),
    ),
    "no limit for idle transactions": Case(
        "idle limit",
        "SET idle_in_transaction_session_timeout = '15s'",
        database("RESET idle_in_transaction_session_timeout"),
        database("SET idle_in_transaction_session_timeout = '15s'"),
    ),
    "few connections left": Case(
        "connections", "CONNECTION LIMIT -1", database("CONNECTION LIMIT 2"), database("CONNECTION LIMIT -1")
    ),
    "no index that begins with the token": Case(
        "indexes",
        'CREATE INDEX CONCURRENTLY ON public.item ("token_id", "id")',
        sql("DROP INDEX by_token"),
        sql(TABLE.split(";")[2]),
    ),
    "no index that ends with it": Case(
        "indexes",
        'CREATE INDEX CONCURRENTLY ON public.item ("id", "token_id")',
        sql("DROP INDEX by_age", "CREATE INDEX alone ON item (token_id)"),
        sql("DROP INDEX alone", TABLE.split(";")[1]),
    ),
    "a token column whose migration has stopped": Case(
        "unfinished",
        "it goes on where it stopped: op.add_token_column('late', schema='public'",
        half_way,
        sql("DROP TABLE late; DROP FUNCTION sync_token_id_late"),
    ),
    "one that is only not NOT NULL yet": Case(
        "unfinished",
        "run the migration that adds it again",
        nearly,
        sql("DROP TABLE late; DROP FUNCTION sync_token_id_late"),
    ),
    "an index that is not valid": Case(
        "unfinished",
        "DROP INDEX CONCURRENTLY public.spare; CREATE INDEX CONCURRENTLY spare ON public.item USING btree (token_id)",
        sql(
            "CREATE INDEX spare ON item (token_id)",
            "UPDATE pg_index SET indisvalid = false WHERE indexrelid = 'spare'::regclass",
        ),
        sql("DROP INDEX spare"),
    ),
    "a fence that is off": Case(
        "fences",
        "ALTER TABLE public.item ENABLE TRIGGER sync_fence_item",
        sql("ALTER TABLE item DISABLE TRIGGER sync_fence_item"),
        sql("ALTER TABLE item ENABLE TRIGGER sync_fence_item"),
    ),
    "a pin that nobody matches": Case("pins", "jobsync-orm locks clear task", parked, unparked),
    "parked tokens": Case("tokens", "jobsync-orm locks list", parked, unparked),
    "an expired pin": Case(
        "pins",
        'DELETE FROM "sync_lock"',
        sql(
            "INSERT INTO sync_lock (task_id, token_id, node_patterns, created_by, expires_at)"
            " VALUES ('t', 1, '[\"w1\"]', 'me', now() - interval '1 day')"
        ),
        sql("DELETE FROM sync_lock"),
    ),
    "a dead node": Case(
        "members",
        "jobsync-orm evict w9",
        sql(
            f"{NODE} 'away', now(), version FROM sync_node",
            "UPDATE sync_node SET state = 'active', last_heartbeat = now() - interval '1 hour' WHERE name = 'w9'",
        ),
        FORGET,
    ),
    "nobody may lead": Case(
        "members",
        "can_lead=True",
        sql("UPDATE sync_node SET can_lead = false"),
        sql("UPDATE sync_node SET can_lead = true"),
    ),
    "an order for a node that is gone": Case(
        "members",
        "jobsync-orm undrain w8",
        sql(
            "UPDATE sync_cluster SET drained ="
            """ '{"w8"\\: {"since"\\: "2026-01-01T00\\:00\\:00+00\\:00", "by"\\: "me", "reason"\\: null}}'"""
        ),
        sql("UPDATE sync_cluster SET drained = '{}'"),
    ),
    "two releases": Case(
        "releases",
        "install the same release",
        sql(f"{NODE} 'joining', now() + interval '1 day', '0.0.1' FROM sync_node"),
        FORGET,
    ),
    "two timeouts": Case(
        "releases",
        "heartbeat_timeout_sec=60",
        sql(
            f"{NODE} 'joining', now() + interval '1 day', version FROM sync_node",
            "UPDATE sync_node SET heartbeat_timeout_sec = 60 WHERE name = 'w9'",
        ),
        FORGET,
    ),
    "tables without vacuum": Case(
        "vacuum",
        'ALTER TABLE "sync_job" RESET (autovacuum_enabled)',
        sql("ALTER TABLE sync_job SET (autovacuum_enabled = false)"),
        sql("ALTER TABLE sync_job RESET (autovacuum_enabled)"),
    ),
    "dead rows": Case(
        "vacuum",
        'VACUUM (ANALYZE) "sync_job"',
        dead_rows,
        nothing,
        {"limits": dataclasses.replace(LIMITS, dead_rows=1)},
    ),
    "a type that nobody runs": Case(
        "unserved types",
        "--types 'my mail'",
        lambda healthy: put(healthy.engine, type="my mail", ready_at=OLD, created_at=OLD),
        EMPTY,
    ),
    "a pause that was forgotten": Case(
        "pauses",
        "jobsync-orm queue resume --all",
        lambda healthy: (
            put(healthy.engine),
            healthy.do("INSERT INTO sync_job_pause (type, since) VALUES ('', now() - interval '2 hours')"),
        ),
        EMPTY,
    ),
    "a chain that does not go on": Case("chains", "jobsync-orm queue retry", blocked, EMPTY),
}


def found(healthy: Healthy, **changes: Any) -> list[Finding]:
    """All but what is wrong with the server of the tests."""
    findings = examine(dataclasses.replace(healthy.subject, **changes)).findings
    return [finding for finding in findings if finding.what not in GIVEN]


def test_nothing_is_found_in_a_healthy_cluster(healthy: Healthy) -> None:
    assert found(healthy) == []
    diagnosis = examine(healthy.subject)
    assert diagnosis.healthy is (diagnosis.findings == ())
    assert len(diagnosis.checks) == 18
    assert diagnosis.skipped == ()


@pytest.mark.parametrize("name", CASES)
def test_what_was_prepared_is_found_with_its_remedy(healthy: Healthy, name: str) -> None:
    case = CASES[name]
    case.spoil(healthy)
    try:
        findings = found(healthy, **case.subject)
    finally:
        case.repair(healthy)
    fitting = [f for f in findings if f.check == case.check and case.remedy in f.remedy]
    assert len(fitting) == 1, findings
    assert fitting[0].what
    assert fitting[0].why
    allowed = {case.check} | ({"pins", "tokens"} if case.spoil is parked else set())
    assert {f.check for f in findings} <= allowed, findings


@contextmanager
def old_transaction(healthy: Healthy) -> Iterator[int]:
    with healthy.engine.connect() as connection:
        yield connection.execute(text("SELECT pg_backend_pid() FROM sync_cluster")).scalar_one()


def test_an_old_transaction_is_named_by_its_process(healthy: Healthy) -> None:
    limits = dataclasses.replace(LIMITS, transaction_sec=0.3)
    with old_transaction(healthy) as pid:
        findings = wait_for(lambda: found(healthy, limits=limits), "it is old")
    assert [(f.check, f.remedy) for f in findings] == [("transactions", f"SELECT pg_terminate_backend({pid})")]


@needs_pgbouncer
def test_a_pooler_is_noticed(healthy: Healthy) -> None:
    with pooled(healthy.url, "transaction") as url:
        engine = create_engine(url, connect_args={"prepare_threshold": None})
        findings = found(healthy, engine=engine)
        engine.dispose()
    assert [f.check for f in findings] == ["listening"]
    assert "a URL that reaches PostgreSQL directly" in findings[0].remedy


def test_what_cannot_be_read_is_a_finding_and_does_not_end_the_examination(healthy: Healthy) -> None:
    healthy.from_outside("CREATE ROLE jobsync_doctor LOGIN PASSWORD 'x'")
    healthy.do(
        "GRANT USAGE ON SCHEMA public TO jobsync_doctor", "GRANT SELECT ON sync_alembic_version TO jobsync_doctor"
    )
    engine = create_engine(healthy.url, connect_args={"options": "-c role=jobsync_doctor"})
    try:
        findings = found(healthy, engine=engine)
    finally:
        engine.dispose()
        healthy.do("DROP OWNED BY jobsync_doctor")
        healthy.from_outside("DROP ROLE jobsync_doctor")
    assert sum(f.check == "permissions" for f in findings) > 10
    (pins,) = [f for f in findings if f.check == "pins"]
    assert pins.what == "this could not be checked: permission denied for table sync_lock"


def test_tables_that_are_not_there(empty_database: URL) -> None:
    engine = create_engine(empty_database)
    diagnosis = examine(Subject(engine, Names("x_", "nowhere")))
    engine.dispose()
    (finding, *_) = diagnosis.findings
    assert finding.remedy == "run `jobsync-orm db upgrade --appname x_ --schema nowhere`"
    assert "pins" in diagnosis.skipped
    assert "pins" not in diagnosis.checks


def test_a_role_that_is_not_there(healthy: Healthy) -> None:
    with pytest.raises(ConfigurationError, match="role='nobody there' cannot be checked"):
        found(healthy, role="nobody there")


def test_the_command(healthy: Healthy) -> None:
    with ExitStack() as repairs:
        for name in ("a fence that is off", "no index that begins with the token", "tables without vacuum"):
            CASES[name].spoil(healthy)
            repairs.callback(CASES[name].repair, healthy)
        ill = run("doctor", url=healthy.url)
        as_json = run("doctor", "--json", "--total-tokens", "5", url=healthy.url)
    assert ill.exit_code == as_json.exit_code == 1
    lines = ill.stdout.splitlines()
    first = lines.index("error    fences: the trigger sync_fence_item of table public.item is off")
    assert lines[first + 1].startswith("         why  commits of stale owners are not refused")
    assert lines[first + 2] == "         do   ALTER TABLE public.item ENABLE TRIGGER sync_fence_item"
    assert lines[-1].startswith("18 checks: ")
    assert lines[-1].endswith(" errors, 1 note")
    answer = json.loads(as_json.stdout)
    assert answer["healthy"] is False
    assert [(f["severity"], f["check"]) for f in answer["findings"] if f["what"] not in GIVEN] == [
        ("error", "settings"),
        ("error", "fences"),
        ("error", "vacuum"),
        ("note", "indexes"),
    ]
    well = run("doctor", url=healthy.url)
    if examine(healthy.subject).findings == ():
        assert (well.exit_code, well.stdout) == (0, "18 checks: nothing found\n")
    assert run("doctor", "--transactions-older-than", "10", url=healthy.url).exit_code == 2
