"""`alembic` in the checkout: what a developer, or somebody who wants a script, does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psycopg
import pytest
from sqlalchemy import URL, Engine

from jobsync_orm import migrate
from tests.conftest import dsn

ROOT = Path(__file__).parents[2]
AWKWARD = 'a:b%d"'

pytestmark = pytest.mark.skipif(not (ROOT / "alembic.ini").is_file(), reason="needs the checkout")


def alembic(*arguments: str, url: URL | None = None) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "JOBSYNC_DATABASE_URL"}
    if url is not None:
        environment["JOBSYNC_DATABASE_URL"] = dsn(url)
    return subprocess.run(
        [sys.executable, "-m", "alembic", *arguments], cwd=ROOT, env=environment, capture_output=True, text=True
    )


def test_upgrade_check_and_downgrade_by_the_environments_url(empty_database: URL, empty: Engine) -> None:
    assert alembic("upgrade", "head", url=empty_database).returncode == 0
    assert migrate.check(empty, total_tokens=10_000, hash_function="double_sha256") == []
    compared = alembic("check", url=empty_database)
    assert "No new upgrade operations detected" in compared.stdout, compared.stderr
    assert f"{migrate.HEAD} (head)" in alembic("current", url=empty_database).stdout
    assert alembic("downgrade", "base", url=empty_database).returncode == 0
    assert migrate.current(empty) is None


def test_upgrade_by_arguments(empty_database: URL, empty: Engine) -> None:
    given = ("appname=x_", "schema=s", "total_tokens=9", "hash_function=md5", f"url={dsn(empty_database)}")
    done = alembic(*(part for value in given for part in ("-x", value)), "upgrade", "head")
    assert done.returncode == 0, done.stderr
    assert migrate.check(empty, appname="x_", schema="s", total_tokens=9, hash_function="md5") == []


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("colour=red", "-x colour=...: there is no such setting"),
        ("total_tokens=many", "-x total_tokens=many must be a whole number"),
        ("total_tokens=0", "total_tokens=0"),
        ("hash_function=crc", "hash_function='crc'"),
        ("appname=A", "appname 'A'"),
    ],
)
def test_bad_arguments_are_named(empty_database: URL, argument: str, message: str) -> None:
    done = alembic("-x", argument, "upgrade", "head", url=empty_database)
    assert done.returncode != 0
    assert message in done.stderr


def test_current_makes_nothing(empty_database: URL, empty: Engine) -> None:
    assert alembic("-x", "schema=s", "current", url=empty_database).returncode == 0
    assert migrate.check(empty, schema="s")[0].startswith("there is no schema")


def test_a_script_does_what_an_upgrade_does(empty_database: URL, empty: Engine) -> None:
    settings = ("-x", "appname=x_", "-x", f"schema={AWKWARD}", "-x", "total_tokens=30")
    script = alembic(*settings, "upgrade", "head", "--sql")
    assert script.returncode == 0, script.stderr
    with psycopg.connect(dsn(empty_database), autocommit=True) as connection:
        connection.execute(script.stdout.encode())
        assert migrate.check(empty, appname="x_", schema=AWKWARD, total_tokens=30) == []
        back = alembic(*settings, "downgrade", f"{migrate.HEAD}:base", "--sql")
        assert back.returncode == 0, back.stderr
        connection.execute(back.stdout.encode())
    assert migrate.check(empty, appname="x_", schema=AWKWARD)[0].startswith("there are no tables x_...")
    migrate.upgrade(empty, appname="x_", schema=AWKWARD, total_tokens=31)
    assert migrate.check(empty, appname="x_", schema=AWKWARD, total_tokens=31) == []
