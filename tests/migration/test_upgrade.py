"""migrate.upgrade, downgrade, current, head: what they make, accept and refuse."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
import time
from typing import Any

import alembic.context
import alembic.op
import pytest
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.operations import Operations
from alembic.runtime.environment import EnvironmentContext
from alembic.script import ScriptDirectory
from sqlalchemy import URL, Engine, NullPool, create_engine, func, select, text
from sqlalchemy.exc import DBAPIError, ProgrammingError
from sqlalchemy.ext.asyncio import create_async_engine

from jobsync_orm import migrate
from jobsync_orm.config import CoordinationConfig
from jobsync_orm.exceptions import ClusterMismatch, ConfigurationError, LockNotAcquired, SchemaNotReady
from jobsync_orm.hashing import HASH_FUNCTIONS, task_to_token
from jobsync_orm.migrate import roles
from jobsync_orm.models import Cluster, Token, for_app
from jobsync_orm.naming import MAX_APPNAME, Names
from tests.migration.conftest import Role

AWKWARD_SCHEMA = "od\"d :x%s y'"


OBJECTS = """
SELECT 'schema ' || nspname FROM pg_namespace WHERE nspname !~ '^(pg_|information_schema)'
UNION ALL
SELECT CAST(relkind AS text) || ' ' || relname FROM pg_class
WHERE CAST(CAST(relnamespace AS regnamespace) AS text) !~ '^(pg_|information_schema)'
UNION ALL
SELECT 'function ' || proname FROM pg_proc
WHERE CAST(CAST(pronamespace AS regnamespace) AS text) !~ '^(pg_|information_schema)'
"""


def objects(engine: Engine) -> set[str]:
    """Everything in the database that is not PostgreSQL's own."""
    with engine.connect() as connection:
        return set(connection.scalars(text(OBJECTS)))


@pytest.mark.parametrize("hash_function", sorted(HASH_FUNCTIONS))
@pytest.mark.parametrize("names", [Names(), Names("x_", AWKWARD_SCHEMA), Names("a" * MAX_APPNAME, "s" * 63)], ids=str)
def test_upgrade_makes_the_cluster_its_tokens_and_the_function(empty: Engine, names: Names, hash_function: str) -> None:
    migrate.upgrade(empty, appname=names.appname, schema=names.schema, total_tokens=97, hash_function=hash_function)
    models = for_app(names.appname, names.schema)
    with empty.connect() as connection:
        cluster = connection.execute(select(models.Cluster)).one()
        assert (cluster.id, cluster.total_tokens, cluster.hash_function) == (1, 97, hash_function)
        assert (cluster.epoch, cluster.revision, cluster.protocol_version) == (0, 0, 1)
        assert connection.scalars(select(models.Token.token_id).order_by(models.Token.token_id)).all() == [*range(97)]
        owners = select(func.count()).select_from(models.Token).where(models.Token.node.is_not(None))
        assert connection.scalar(owners) == 0
        function = names.sql("token_of").replace(":", r"\:")
        for key in ("", "1", "naïve ☃", "x" * 1000):
            answer = connection.scalar(text(f"SELECT {function}(:key)"), {"key": key})
            assert answer == task_to_token(key, 97, hash_function)
    assert migrate.current(empty, appname=names.appname, schema=names.schema) == migrate.head()


def test_defaults_are_ten_thousand_tokens_and_double_sha256(engine: Engine) -> None:
    with engine.connect() as connection:
        assert connection.execute(select(Cluster.total_tokens, Cluster.hash_function)).one() == (
            10_000,
            "double_sha256",
        )
        assert connection.execute(select(func.count(), func.max(Token.token_id))).one() == (10_000, 9_999)


def test_each_cluster_gets_an_incarnation_of_its_own(empty: Engine) -> None:
    for appname in ("a_", "b_"):
        migrate.upgrade(empty, appname=appname, total_tokens=1)
    with empty.connect() as connection:
        incarnations = {connection.scalar(select(for_app(name).Cluster.incarnation)) for name in ("a_", "b_")}
    assert len(incarnations) == 2


def test_token_pages_leave_room_for_updates(engine: Engine) -> None:
    with engine.connect() as connection:
        options = connection.scalar(text("SELECT reloptions FROM pg_class WHERE relname = 'sync_token'"))
    assert options == ["fillfactor=70"]


def test_a_million_tokens(empty: Engine) -> None:
    migrate.upgrade(empty, total_tokens=1_000_000)
    assert migrate.check(empty, total_tokens=1_000_000) == []


@pytest.mark.parametrize("schema", [None, AWKWARD_SCHEMA])
def test_downgrade_removes_all_of_it(empty: Engine, schema: str | None) -> None:
    before = objects(empty)
    migrate.upgrade(empty, appname="x_", schema=schema, total_tokens=10)
    assert len(objects(empty)) > len(before) + 10
    migrate.downgrade(empty, appname="x_", schema=schema)
    assert objects(empty) == before
    assert migrate.current(empty, appname="x_", schema=schema) is None
    migrate.upgrade(empty, appname="x_", schema=schema, total_tokens=11)
    assert migrate.check(empty, appname="x_", schema=schema, total_tokens=11) == []


def test_downgrade_keeps_a_schema_that_was_there(empty: Engine) -> None:
    with empty.begin() as connection:
        connection.execute(text("CREATE SCHEMA theirs"))
    migrate.upgrade(empty, schema="theirs", total_tokens=1)
    migrate.downgrade(empty, schema="theirs")
    assert objects(empty) == {"schema public", "schema theirs"}


def test_downgrade_keeps_a_schema_that_something_else_is_in(empty: Engine) -> None:
    for appname in ("a_", "b_"):
        migrate.upgrade(empty, appname=appname, schema="ours", total_tokens=1)
    migrate.downgrade(empty, appname="a_", schema="ours")
    assert migrate.check(empty, appname="b_", schema="ours") == []
    migrate.downgrade(empty, appname="b_", schema="ours")
    assert objects(empty) == {"schema public"}


def test_downgrade_of_nothing_leaves_nothing(empty: Engine) -> None:
    migrate.downgrade(empty)
    migrate.downgrade(empty, schema="none")
    assert objects(empty) == {"schema public"}


def test_downgrade_is_refused_whole_while_a_table_uses_the_function(engine: Engine) -> None:
    with engine.begin() as connection:
        connection.execute(
            text("CREATE TABLE item (k text, token_id int GENERATED ALWAYS AS (sync_token_of(k)) STORED)")
        )
    with pytest.raises(DBAPIError, match="item"):
        migrate.downgrade(engine)
    assert migrate.check(engine) == []


@pytest.mark.parametrize("level", ["READ COMMITTED", "AUTOCOMMIT"])
def test_a_failed_upgrade_leaves_nothing_behind(empty_database: URL, empty: Engine, level: Any) -> None:
    with empty.begin() as connection:
        connection.execute(text("CREATE TABLE sync_rebalance (theirs int)"))
    before = objects(empty)
    engine = create_engine(empty_database, poolclass=NullPool, isolation_level=level)
    with pytest.raises(ProgrammingError, match="already exists"):
        migrate.upgrade(engine)
    assert objects(empty) == before


def test_a_second_upgrade_changes_nothing(engine: Engine) -> None:
    with engine.begin() as connection:
        connection.execute(text("UPDATE sync_token SET node = 'a', epoch = 3 WHERE token_id = 5"))
    migrate.upgrade(engine, total_tokens=10_000, hash_function="double_sha256")
    with engine.connect() as connection:
        assert connection.execute(select(Token.node, Token.epoch).where(Token.token_id == 5)).one() == ("a", 3)


@pytest.mark.parametrize(
    ("wanted", "there"),
    [({"total_tokens": 500}, "10000"), ({"hash_function": "md5"}, "'double_sha256'")],
)
def test_other_settings_than_the_clusters_are_refused_with_both_values_and_the_remedy(
    engine: Engine, wanted: dict[str, Any], there: str
) -> None:
    with pytest.raises(ClusterMismatch) as caught:
        migrate.upgrade(engine, **wanted)
    message = str(caught.value)
    (value,) = wanted.values()
    assert repr(value) in message
    assert there in message
    assert "another appname" in message
    assert "downgrade to base and upgrade again" in message
    assert migrate.check(engine) == []


def test_settings_that_are_not_given_are_the_clusters(empty: Engine) -> None:
    migrate.upgrade(empty, total_tokens=7, hash_function="md5")
    migrate.upgrade(empty)
    assert migrate.check(empty, total_tokens=7, hash_function="md5") == []


@pytest.mark.parametrize(
    ("keywords", "named"),
    [
        ({"total_tokens": 0}, "total_tokens=0"),
        ({"total_tokens": 2**31}, "total_tokens=2147483648"),
        ({"total_tokens": "9"}, "total_tokens='9'"),
        ({"hash_function": "sha1"}, "hash_function='sha1'"),
        ({"appname": "Bad-"}, "'Bad-'"),
        ({"schema": ""}, "schema ''"),
        ({"revision": "0999"}, "revision='0999'"),
    ],
)
def test_bad_values_are_refused_by_name_before_anything_is_made(
    empty: Engine, keywords: dict[str, Any], named: str
) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(named)):
        migrate.upgrade(empty, **keywords)
    assert objects(empty) == {"schema public"}


def test_a_revision_of_a_newer_library_is_refused(engine: Engine) -> None:
    with engine.begin() as connection:
        connection.execute(text("UPDATE sync_alembic_version SET version_num = '7777'"))
    for command in (migrate.upgrade, migrate.downgrade):
        with pytest.raises(SchemaNotReady, match=r"'7777'.*install a newer one"):
            command(engine)
    assert migrate.current(engine) == "7777"


def test_a_configuration_brings_its_settings(empty_database: URL, empty: Engine) -> None:
    config = CoordinationConfig(url=empty_database, appname="c_", schema="s", total_tokens=12, hash_function="sha256")
    migrate.upgrade(config)
    assert migrate.check(config) == []
    assert migrate.check(empty, appname="c_", schema="s", total_tokens=12, hash_function="sha256") == []
    assert migrate.current(config) == migrate.head()
    migrate.downgrade(config)
    assert objects(empty) == {"schema public"}


def test_a_configuration_with_an_engine_uses_it(empty: Engine) -> None:
    migrate.upgrade(CoordinationConfig(engine=empty, total_tokens=12))
    assert migrate.check(empty, total_tokens=12) == []


@pytest.mark.parametrize(
    "keywords", [{"appname": "sync_"}, {"schema": "s"}, {"total_tokens": 1}, {"hash_function": "md5"}]
)
def test_a_keyword_beside_a_configuration_is_refused(empty_database: URL, keywords: dict[str, Any]) -> None:
    (name,) = keywords
    with pytest.raises(ConfigurationError, match=f"{name}=.* beside a CoordinationConfig"):
        migrate.upgrade(CoordinationConfig(url=empty_database), **keywords)


def test_an_async_engine_is_taken_by_its_url(empty_database: URL, empty: Engine) -> None:
    engine = create_async_engine(empty_database)
    migrate.upgrade(engine, total_tokens=3)
    assert migrate.check(engine) == []
    assert migrate.check(empty, total_tokens=3) == []


@pytest.mark.asyncio
async def test_an_async_connection_by_run_sync(empty_database: URL, empty: Engine) -> None:
    engine = create_async_engine(empty_database)
    async with engine.begin() as connection:
        await connection.run_sync(migrate.upgrade)
    await engine.dispose()
    assert migrate.check(empty) == []


def test_on_a_connection_in_a_transaction_the_caller_commits(empty: Engine) -> None:
    with empty.connect() as connection:
        connection.begin()
        migrate.upgrade(connection, total_tokens=3)
        assert migrate.check(connection, total_tokens=3) == []
        connection.rollback()
        assert migrate.current(connection) is None
    with empty.begin() as connection:
        migrate.upgrade(connection, total_tokens=3)
    assert migrate.check(empty, total_tokens=3) == []


def test_on_an_idle_connection_the_upgrade_is_committed(empty: Engine) -> None:
    with empty.connect() as connection:
        migrate.upgrade(connection, total_tokens=3)
        assert not connection.in_transaction()
    assert migrate.check(empty, total_tokens=3) == []


def test_a_connection_without_transactions_is_refused(empty: Engine) -> None:
    plain = empty.execution_options(isolation_level="AUTOCOMMIT")
    with plain.connect() as connection, pytest.raises(ConfigurationError, match="AUTOCOMMIT"):
        migrate.upgrade(connection)


def test_one_connection_is_enough(empty_database: URL) -> None:
    engine = create_engine(empty_database, pool_size=1, max_overflow=0, pool_timeout=0.1)
    migrate.upgrade(engine, schema="s", total_tokens=3)
    assert migrate.check(engine, schema="s") == []
    migrate.downgrade(engine, schema="s")
    assert engine.pool.checkedout() == 0  # type: ignore[attr-defined]
    engine.dispose()


@pytest.mark.parametrize("bind", ["postgresql://h/d", None, 3])
def test_something_else_than_a_database_is_refused(bind: Any) -> None:
    with pytest.raises(ConfigurationError, match="give an Engine"):
        migrate.upgrade(bind)


def test_another_database_is_refused() -> None:
    engine = create_engine("sqlite://")
    with pytest.raises(ConfigurationError, match="'sqlite' is not PostgreSQL"):
        migrate.upgrade(engine)
    with engine.connect() as connection, pytest.raises(ConfigurationError, match="'sqlite' is not PostgreSQL"):
        migrate.check(connection)
    engine.dispose()


def test_at_head_the_documented_rights_are_enough_and_nothing_is_written(engine: Engine, role: Role) -> None:
    with engine.begin() as connection:
        connection.execute(text("REVOKE ALL ON SCHEMA public FROM PUBLIC"))
        connection.execute(text(f"GRANT USAGE ON SCHEMA public TO {role.name}"))
        for statement in roles.grants(worker=role.name).split("\n"):
            if statement.startswith("GRANT"):
                connection.execute(text(statement))
    with role.engine.connect() as connection:
        assert connection.scalar(text("SELECT has_schema_privilege('public', 'CREATE')")) is False
        # Any write would be an error.
        connection.execute(text("SET SESSION CHARACTERISTICS AS TRANSACTION READ ONLY"))
        connection.commit()
        migrate.upgrade(connection, total_tokens=10_000)
        assert migrate.check(connection) == []


def test_upgrade_without_the_right_to_create_says_so(empty: Engine, role: Role) -> None:
    engine = create_engine(empty.url.set(username=role.name, password="pw"), poolclass=NullPool)
    with pytest.raises(ProgrammingError, match="permission denied for"):
        migrate.upgrade(engine, schema="mine")


def test_within_the_applications_environment(empty: Engine) -> None:
    config = Config()
    config.set_main_option("script_location", str(migrate.migrations_path()))
    with EnvironmentContext(config, ScriptDirectory.from_config(config)):
        migrate.upgrade(empty)
        assert alembic.context.config is config
        with pytest.raises(ConfigurationError, match="Known are"):
            migrate.upgrade(empty, revision="none")
        assert alembic.context.config is config
        with empty.connect() as connection:
            alembic.context.configure(connection=connection)
    assert not hasattr(alembic.context, "config")


def test_within_a_migration_of_the_application(empty: Engine) -> None:
    with empty.connect() as connection, Operations.context(MigrationContext.configure(connection)):
        migrate.upgrade(empty)
        assert alembic.op.get_bind() is connection


def test_the_applications_own_version_is_not_touched(empty: Engine) -> None:
    with empty.begin() as connection:
        connection.execute(text("CREATE TABLE alembic_version (version_num varchar(32) NOT NULL)"))
        connection.execute(text("INSERT INTO alembic_version VALUES ('theirs')"))
    migrate.upgrade(empty, total_tokens=1)
    migrate.downgrade(empty)
    with empty.connect() as connection:
        assert connection.scalars(text("SELECT version_num FROM alembic_version")).all() == ["theirs"]


def test_alembic_is_imported_only_when_it_is_used() -> None:
    program = "import sys, jobsync_orm.migrate; print([name for name in sys.modules if 'alembic' in name.split('.')])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_missing_migrations_are_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    # As in a site-packages where another project has left a folder of that name.
    (tmp_path / "migrations").mkdir()
    (tmp_path / "migrations" / "env.py").touch()
    monkeypatch.setattr(migrate, "__file__", str(tmp_path / "jobsync_orm" / "migrate" / "__init__.py"))
    with pytest.raises(SchemaNotReady, match="install jobsync-orm again"):
        migrate.migrations_path()


def test_head_is_known_without_alembic() -> None:
    assert migrate.head() == migrate.HEAD


def test_nothing_to_do_does_not_wait_for_another_upgrade(engine: Engine) -> None:
    """A crowd of workers that start on ready tables do not take turns."""
    key = Names().advisory_key("migrate")
    with engine.connect() as other:
        other.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": key})
        migrate.upgrade(engine)
        with pytest.raises(ClusterMismatch):
            migrate.upgrade(engine, total_tokens=5)


def test_jobs_of_a_version_before_keep_their_own_retries_and_timeout(empty: Engine) -> None:
    job = "INSERT INTO sync_job (type, max_retries, timeout) VALUES ('t', 0, 5)"
    migrate.upgrade(empty, total_tokens=3, revision="0003")
    with empty.begin() as connection:
        connection.execute(text(job))
        before = connection.scalar(text("SELECT pg_relation_filenode('sync_job')"))
    migrate.upgrade(empty)
    with empty.begin() as connection:
        connection.execute(text(job))  # by one that goes on running
        found = connection.execute(text("SELECT max_retries_given, timeout_given FROM sync_job")).all()
        assert found == [(True, True)] * 2
        assert connection.scalar(text("SELECT pg_relation_filenode('sync_job')")) == before  # nothing was rewritten
        connection.execute(text("UPDATE sync_job SET max_retries_given = false, max_retries = 7"))
    migrate.downgrade(empty, revision="0003")
    with empty.connect() as connection:
        assert connection.execute(text("SELECT max_retries, timeout FROM sync_job")).all() == [(7, 5.0)] * 2


def test_traces_of_jobs_come_and_go_with_their_column(empty: Engine) -> None:
    job = "INSERT INTO sync_job (type) VALUES ('t')"
    node = "SELECT pg_relation_filenode('sync_job')"
    migrate.upgrade(empty, total_tokens=3, revision="0005")
    with empty.begin() as connection:
        connection.execute(text(job))
        before = connection.scalar(text(node))
    migrate.upgrade(empty)
    with empty.begin() as connection:
        connection.execute(text(job))  # by one that goes on running
        assert connection.execute(text("SELECT trace FROM sync_job")).all() == [(None,)] * 2
        assert connection.scalar(text(node)) == before  # nothing was rewritten
        connection.execute(text("UPDATE sync_job SET trace = 'x'"))
    migrate.downgrade(empty, revision="0005")
    assert migrate.current(empty) == "0005"
    assert "behind 0006" in migrate.check(empty)[0]
    migrate.upgrade(empty)
    with empty.connect() as connection:
        assert connection.execute(text("SELECT type, trace FROM sync_job")).all() == [("t", None)] * 2
    assert migrate.check(empty) == []


BEAT = "UPDATE sync_node SET last_heartbeat = clock_timestamp()"


def test_heartbeats_do_not_queue_up_behind_an_upgrade(empty: Engine) -> None:
    """A dump reads the tables for long: an upgrade that waits for it makes everybody wait who comes after it."""
    migrate.upgrade(empty, total_tokens=3, revision="0004")
    upgrading = threading.Thread(target=migrate.upgrade, args=(empty,), daemon=True)
    with empty.connect() as dump:
        dump.execute(text("SELECT * FROM sync_node"))
        upgrading.start()
        waits = text("SELECT count(*) FROM pg_locks WHERE NOT granted AND relation = CAST('sync_node' AS regclass)")
        with empty.connect() as other:
            deadline = time.monotonic() + 20
            while not other.scalar(waits):
                assert time.monotonic() < deadline
                time.sleep(0.01)
        with empty.begin() as worker:
            worker.execute(text("SET LOCAL lock_timeout = '15s'"))
            worker.execute(text(BEAT))
        assert migrate.current(empty) == "0004"
    upgrading.join(30)
    assert migrate.current(empty) == migrate.HEAD


@pytest.mark.parametrize(("revision", "table"), [("0004", "sync_node"), ("0005", "sync_job")])
def test_an_upgrade_gives_up_in_the_end(
    empty: Engine, monkeypatch: pytest.MonkeyPatch, revision: str, table: str
) -> None:
    migrate.upgrade(empty, total_tokens=3, revision=revision)
    monkeypatch.setattr(migrate, "PATIENCE_SEC", 0)
    with empty.connect() as dump:
        dump.execute(text(f"SELECT * FROM {table}"))
        with pytest.raises(LockNotAcquired, match="Nothing has changed"):
            migrate.upgrade(empty)
    assert migrate.current(empty) == revision
