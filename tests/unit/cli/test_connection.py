"""Where a command finds its cluster."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from jobsync_orm.cli.connection import Cluster, on_cluster
from jobsync_orm.exceptions import ConfigurationError

SECRET = "s3cret"


def run(*arguments: str, environment: str | None = None) -> Result:
    app = typer.Typer()

    @app.command()
    @on_cluster
    def where(cluster: Cluster, word: str = "x") -> None:
        """Say it."""
        url = cluster.engine.url
        names = cluster.names
        cluster.output.show([url.host, url.database, url.password, names.appname, names.schema, word], "text")

    return CliRunner().invoke(app, arguments, env={"JOBSYNC_DATABASE_URL": environment})


def run_look(*arguments: str) -> Result:
    """A command that asks the database."""
    app = typer.Typer()

    @app.command()
    @on_cluster
    def look(cluster: Cluster) -> None:
        cluster.operations.status()

    return CliRunner().invoke(app, arguments)


def found(*arguments: str, environment: str | None = None) -> list[str | None]:
    done = run(*arguments, "--json", environment=environment)
    assert done.exit_code == 0, done.stderr
    return json.loads(done.stdout)


def url(host: str) -> str:
    return f"postgresql://u:{SECRET}@{host}/d"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_option_comes_before_the_environment_before_the_file(folder: Path) -> None:
    (folder / "jobsync-orm.toml").write_text(f'url = "{url("file")}"')
    assert found("--url", url("option"), environment=url("environment"))[0] == "option"
    assert found(environment=url("environment"))[0] == "environment"
    assert found(environment="")[0] == "file"
    assert found() == ["file", "d", SECRET, "sync_", None, "x"]


def test_a_named_file_comes_before_that_of_the_folder_before_the_project(folder: Path) -> None:
    project = folder / "pyproject.toml"
    project.write_text(f'[tool.jobsync-orm]\nurl = "{url("project")}"\n[tool.other]\nx = 1')
    assert found()[0] == "project"
    (folder / "jobsync-orm.toml").write_text(f'url = "{url("folder")}"')
    assert found()[0] == "folder"
    (folder / "other.toml").write_text(f'url = "{url("named")}"')
    assert found("--config", "other.toml")[0] == "named"
    assert found("--config", str(project))[0] == "project"


def test_appname_and_schema_each_from_the_first_place_that_has_them(folder: Path) -> None:
    (folder / "jobsync-orm.toml").write_text('appname = "billing_"\nschema = "jobs"')
    assert found("--word", "y", environment=url("h"))[3:] == ["billing_", "jobs", "y"]
    assert found("--appname", "x_", environment=url("h"))[3:5] == ["x_", "jobs"]
    assert found("--schema", "other", environment=url("h"))[3:5] == ["billing_", "other"]


def test_without_a_database_every_way_is_named() -> None:
    done = run()
    assert (done.exit_code, done.stdout) == (2, "")
    for way in ("--url", "JOBSYNC_DATABASE_URL", "jobsync-orm.toml", "--config", "[tool.jobsync-orm]"):
        assert way in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('uri = "x"', "there is no setting 'uri'; there are url, appname, schema"),
        ("url = 5", "url must be text"),
        ("url = ", "is no TOML"),
        (f'url = "{SECRET}:/x"', "url is not a database URL (not shown"),
        ('url = "mysql://h/d"', "'mysql' is not PostgreSQL"),
        (f'url = "{url("h")}"\nappname = "A B"', "appname 'A B' must match"),
    ],
)
def test_a_file_that_cannot_be(folder: Path, text: str, message: str) -> None:
    (folder / "jobsync-orm.toml").write_text(text)
    done = run()
    assert (done.exit_code, done.stdout) == (2, "")
    assert message in done.stderr
    assert SECRET not in done.stderr
    in_json = run("--json")
    error = json.loads(in_json.stderr)["error"]
    assert (error["type"], message in error["message"]) == (ConfigurationError.__name__, True)


def test_a_file_that_is_not_there() -> None:
    done = run("--config", "none.toml")
    assert done.exit_code == 2
    assert "--config none.toml: No such file or directory" in done.stderr


def test_no_password_is_printed_when_the_server_is_away() -> None:
    for more in ([], ["--json"]):
        done = run_look("--url", f"postgresql://u:{SECRET}@127.0.0.1:1/d", *more)
        assert done.exit_code == 2
        assert "127.0.0.1" in done.stderr
        assert SECRET not in done.stderr


def test_an_embedded_server_that_does_not_run_is_named(folder: Path) -> None:
    (folder / "PG_VERSION").write_text("17\n")
    done = run_look("--url", f"postgresql://postgres@/postgres?host={folder}")
    assert done.exit_code == 2
    assert done.stderr == (
        f"error: the embedded server in {folder} is not running: start a process that uses it, and try again while "
        "that runs\n"
    )
    (folder / "PG_VERSION").unlink()
    assert "the embedded server" not in run_look("--url", f"postgresql://postgres@/postgres?host={folder}").stderr
