"""One PostgreSQL server for the whole run, one fresh database for each test that asks for it.

The server is the one named by ``JOBSYNC_TEST_URL`` (a superuser, or a role with CREATEDB and CREATEROLE), or else an
embedded one in a temporary folder. Databases are cloned from a template that holds the library's tables.
"""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psycopg
import pytest
from sqlalchemy import URL, Engine, create_engine, make_url

from jobsync_orm import embedded, migrate

# A shell ignores Ctrl-C for what it runs in the background, and what is started from there inherits that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@dataclass(frozen=True)
class Server:
    """The PostgreSQL server of this run."""

    url: URL

    def connect(self, database: str | None = None) -> psycopg.Connection:
        return psycopg.connect(dsn(self.url, database), autocommit=True)

    def create_database(self, template: str = "template0") -> URL:
        name = f"jobsync_test_{uuid.uuid4().hex[:12]}"
        with self.connect() as connection:
            connection.execute(f"CREATE DATABASE {name} TEMPLATE {template}")
        return self.url.set(database=name)

    def drop_database(self, url: URL) -> None:
        with self.connect() as connection:
            connection.execute(f"DROP DATABASE IF EXISTS {url.database} WITH (FORCE)")


def dsn(url: URL, database: str | None = None) -> str:
    """``url`` for libpq."""
    if database is not None:
        url = url.set(database=database)
    return url.set(drivername="postgresql").render_as_string(hide_password=False)


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    given = os.environ.get("JOBSYNC_TEST_URL")
    if given:
        yield Server(make_url(given).set(drivername="postgresql+psycopg"))
        return
    # Short path: a UNIX socket's name has little room.
    folder = Path(tempfile.mkdtemp(prefix="jobsync-pg-"))
    try:
        yield Server(embedded.server_url(folder / "data"))
    finally:
        embedded.stop(folder / "data")
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def template(server: Server) -> Iterator[str]:
    """A database with the library's tables for the default appname and 10,000 tokens."""
    url = server.create_database()
    engine = create_engine(url)
    migrate.upgrade(engine)
    engine.dispose()
    yield url.database or ""
    server.drop_database(url)


@pytest.fixture
def empty_database(server: Server) -> Iterator[URL]:
    """URL of a database with nothing in it."""
    url = server.create_database()
    yield url
    server.drop_database(url)


@pytest.fixture
def database(server: Server, template: str) -> Iterator[URL]:
    """URL of a database with the library's tables, default appname, 10,000 tokens."""
    url = server.create_database(template)
    yield url
    server.drop_database(url)


@pytest.fixture
def engine(database: URL) -> Iterator[Engine]:
    """A SQLAlchemy engine on ``database``."""
    engine = create_engine(database)
    yield engine
    engine.dispose()
