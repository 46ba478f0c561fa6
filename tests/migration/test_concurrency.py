"""Many upgrades at once, in processes and in threads: all succeed, one works."""

from __future__ import annotations

import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest
from sqlalchemy import URL, Engine, NullPool, create_engine

from jobsync_orm import migrate
from jobsync_orm.naming import Names
from tests.conftest import dsn
from tests.migration.conftest import wait_until

PROGRAM = """
import sys
from sqlalchemy import create_engine
from jobsync_orm import migrate
migrate.upgrade(create_engine(sys.argv[1]), schema="shared", total_tokens=200)
"""


def waiting(connection: psycopg.Connection) -> int:
    row = connection.execute(
        "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"
        " AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"
    ).fetchone()
    assert row is not None
    return int(row[0])


def test_twelve_processes_upgrade_an_empty_database(empty_database: URL, empty: Engine) -> None:
    url = empty_database.render_as_string(hide_password=False)
    with psycopg.connect(dsn(empty_database), autocommit=True) as gate:
        # Held until all of them stand before it, so that they do start together.
        gate.execute("SELECT pg_advisory_lock(%s)", [Names(schema="shared").advisory_key("migrate")])
        processes = [
            subprocess.Popen([sys.executable, "-c", PROGRAM, url], stderr=subprocess.PIPE, text=True) for _ in range(12)
        ]
        try:
            wait_until(lambda: waiting(gate) == 12, 120)
        finally:
            gate.execute("SELECT pg_advisory_unlock_all()")
            ends = [(process.communicate()[1], process.returncode) for process in processes]
    assert [code for _, code in ends] == [0] * 12, ends
    assert migrate.check(empty, schema="shared", total_tokens=200) == []


def test_threads_upgrade_one_cluster(empty_database: URL, empty: Engine) -> None:
    start = threading.Barrier(8)

    def upgrade(_: int) -> None:
        engine = create_engine(empty_database, poolclass=NullPool)
        start.wait()
        migrate.upgrade(engine, total_tokens=50)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(upgrade, range(8)))
    assert migrate.check(empty, total_tokens=50) == []


def test_threads_upgrade_clusters_of_their_own(empty_database: URL, empty: Engine) -> None:
    # No advisory lock keeps these apart: Alembic itself is what they share.
    start = threading.Barrier(8)

    def upgrade(number: int) -> None:
        engine = create_engine(empty_database, poolclass=NullPool)
        start.wait()
        migrate.upgrade(engine, appname=f"t{number}_", total_tokens=number + 1)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(upgrade, range(8)))
    for number in range(8):
        assert migrate.check(empty, appname=f"t{number}_", total_tokens=number + 1) == []


def test_an_upgrade_that_waits_for_the_database_keeps_no_other_thread_waiting(
    empty_database: URL, empty: Engine
) -> None:
    with psycopg.connect(dsn(empty_database), autocommit=True) as watch, ThreadPoolExecutor(1) as pool:
        with empty.connect() as mine:
            mine.begin()
            migrate.upgrade(mine, total_tokens=5)
            other = pool.submit(migrate.upgrade, create_engine(empty_database, poolclass=NullPool), total_tokens=5)
            wait_until(lambda: waiting(watch) == 1)
            migrate.upgrade(mine, appname="second_", total_tokens=5)
            assert migrate.check(mine, total_tokens=5) == []
            mine.commit()
        other.result(60)
    assert migrate.check(empty, total_tokens=5) == []
    assert migrate.check(empty, appname="second_", total_tokens=5) == []


@pytest.mark.parametrize("level", ["AUTOCOMMIT", "SERIALIZABLE"])
def test_who_has_waited_sees_what_was_done_whatever_the_engines_isolation(
    empty_database: URL, empty: Engine, level: Any
) -> None:
    engine = create_engine(empty_database, poolclass=NullPool, isolation_level=level)
    with psycopg.connect(dsn(empty_database), autocommit=True) as watch, ThreadPoolExecutor(1) as pool:
        with empty.begin() as first:
            migrate.upgrade(first, total_tokens=5)
            second = pool.submit(migrate.upgrade, engine, total_tokens=5)
            wait_until(lambda: waiting(watch) == 1)
        second.result(60)
    assert migrate.check(empty, total_tokens=5) == []
