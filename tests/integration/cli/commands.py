"""Run a command of `jobsync-orm` in this process."""

from __future__ import annotations

from sqlalchemy import URL
from typer.testing import CliRunner, Result

from jobsync_orm.cli import application
from tests.conftest import dsn


def run(*arguments: str, url: URL | str | None = None) -> Result:
    environment = {"JOBSYNC_DATABASE_URL": dsn(url) if isinstance(url, URL) else url}
    return CliRunner().invoke(application(), arguments, env=environment)
