"""`jobsync-orm db`: the commands against a real database."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
from sqlalchemy import URL, Engine, create_engine, text

from jobsync_orm import migrate
from tests.conftest import dsn
from tests.integration.cli.commands import run


def test_a_life_by_the_environments_url(empty_database: URL) -> None:
    before = run("db", "check", url=empty_database)
    assert before.exit_code == 1
    assert before.stdout == "there are no tables sync_... on the search_path: run `jobsync-orm db upgrade`\n"
    assert run("db", "current", url=empty_database).stdout == f"no tables (newest: {migrate.head()})\n"
    made = run("db", "upgrade", url=empty_database)
    assert (made.exit_code, made.stdout) == (0, f"{migrate.head()} (newest: {migrate.head()})\n")
    fine = run("db", "check", url=empty_database)
    assert (fine.exit_code, fine.stdout) == (0, "ok\n")
    kept = run("db", "downgrade", url=empty_database)
    assert kept.exit_code == 2
    assert kept.stderr.startswith("error: Remove all tables of the cluster, with all that is in them? Nobody is there")
    assert run("db", "current", url=empty_database).stdout.startswith(migrate.head())
    removed = run("db", "downgrade", "--yes", url=empty_database)
    assert (removed.exit_code, removed.stdout) == (0, f"no tables (newest: {migrate.head()})\n")


def test_every_setting_reaches_the_cluster(empty_database: URL) -> None:
    cluster = ["--url", dsn(empty_database), "--appname", "x_", "--schema", "s p"]
    settings = ["--total-tokens", "12", "--hash-function", "md5"]
    assert run("db", "upgrade", *cluster, *settings).exit_code == 0
    engine = create_engine(empty_database)
    keywords: dict[str, Any] = {"appname": "x_", "schema": "s p"}
    assert migrate.check(engine, **keywords, total_tokens=12, hash_function="md5") == []
    assert run("db", "check", *cluster, *settings).exit_code == 0
    other = run("db", "check", *cluster, "--total-tokens", "13")
    assert other.exit_code == 1
    assert "total_tokens=12, not 13" in other.stdout
    assert run("db", "current", *cluster).stdout.startswith(migrate.head())
    assert run("db", "downgrade", *cluster, "--yes").exit_code == 0
    assert migrate.current(engine, **keywords) is None
    engine.dispose()


def test_check_prints_each_problem(database: URL, engine: Engine) -> None:
    with engine.begin() as connection:
        connection.exec_driver_sql("DROP TABLE sync_claim")
        connection.exec_driver_sql("DROP TABLE sync_audit")
    done = run("db", "check", url=database)
    assert done.exit_code == 1
    assert [line.split(":")[0] for line in done.stdout.splitlines()] == [
        'table "sync_claim" is missing',
        'table "sync_audit" is missing',
    ]


@pytest.mark.parametrize("command", ["upgrade", "check"])
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--appname", "A-B"], "error: appname 'A-B' must match"),
        (["--total-tokens", "0"], "error: total_tokens=0 must be"),
        (["--hash-function", "crc"], "error: hash_function='crc' is none of"),
    ],
)
def test_bad_values_are_one_line_and_exit_code_2(
    database: URL, command: str, arguments: list[str], message: str
) -> None:
    done = run("db", command, *arguments, url=database)
    assert done.exit_code == 2
    assert done.stderr.startswith(message)
    assert done.stderr.count("\n") == 1


def test_another_number_of_tokens_is_refused(database: URL) -> None:
    done = run("db", "upgrade", "--total-tokens", "5", url=database)
    assert done.exit_code == 2
    assert "total_tokens=5 was asked for" in done.stderr


@pytest.mark.parametrize(
    ("url", "message"), [("garbage", "url is not a database URL"), ("mysql://h/d", "'mysql' is not PostgreSQL")]
)
def test_a_bad_url_is_refused(url: str, message: str) -> None:
    done = run("db", "check", url=url)
    assert done.exit_code == 2
    assert message in done.stderr


def test_an_unreachable_database_is_one_error(empty_database: URL) -> None:
    done = run("db", "check", url=empty_database.set(database="there_is_none"))
    assert done.exit_code == 2
    assert done.stderr.startswith("error: ")
    assert "there_is_none" in done.stderr


def test_without_a_url_it_says_how_to_give_one() -> None:
    done = run("db", "check")
    assert done.exit_code == 2
    for way in ("--url", "JOBSYNC_DATABASE_URL", "jobsync-orm.toml", "--config", "pyproject.toml"):
        assert way in done.stderr


def test_answers_in_json(database: URL) -> None:
    newest = migrate.head()
    assert json.loads(run("db", "current", "--json", url=database).stdout) == {"revision": newest, "newest": newest}
    assert json.loads(run("db", "check", "--json", url=database).stdout) == {"problems": []}
    refused = run("db", "check", "--json", "--appname", "A-B", url=database)
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert json.loads(refused.stderr)["error"]["type"] == "ConfigurationError"
    done = run("db", "reform", "--rest", "3", "--yes", "--json", url=database)
    assert json.loads(done.stdout) == {
        "epoch": 1_000_000,
        "rest_sec": pytest.approx(3, abs=0.1),
        "fences_raised": True,
    }


def test_the_version_is_printed() -> None:
    done = run("--version")
    assert done.exit_code == 0
    assert done.stdout.startswith("jobsync-orm ")


def test_without_typer_the_extra_is_named() -> None:
    program = "import sys; sys.modules['typer'] = None; from jobsync_orm.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr == "jobsync-orm needs the extra 'cli': pip install 'jobsync-orm[cli]'\n"


def test_reform_asks_first_and_says_what_it_does(database: URL, engine: Engine) -> None:
    epoch = text("SELECT epoch FROM sync_cluster")
    arguments = ("db", "reform", "--rest", "3")
    with engine.connect() as connection:
        before = connection.execute(epoch).scalar_one()
        refused = run(*arguments, url=database)
        assert refused.exit_code == 2
        assert refused.stderr.startswith(
            f"epoch {before}, 0 nodes: none\nerror: End all claims and let nobody own anything"
        )
        connection.rollback()
        assert connection.execute(epoch).scalar_one() == before
    done = run(*arguments, "--yes", url=database)
    assert done.exit_code == 0
    assert f"formed anew at epoch {before + 1_000_000}; nobody owns anything for 3 s" in done.stdout
    with engine.connect() as connection:
        assert connection.execute(epoch).scalar_one() == before + 1_000_000


def test_reform_without_tables_is_an_error_in_one_line(empty_database: URL) -> None:
    failed = run("db", "reform", "--yes", url=empty_database)
    assert failed.exit_code == 2
    assert failed.stderr.startswith('error: relation "sync_cluster" does not exist')
