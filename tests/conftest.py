"""One PostgreSQL server for the whole run, one fresh database for each test that asks for it.

The server is the one named by ``JOBSYNC_TEST_URL`` (a superuser, or a role with CREATEDB and CREATEROLE), or else an
embedded one in a temporary folder, in memory if there is room. Databases are cloned from a template that holds the
library's tables. (Each process of ``pytest -n`` is a run of its own.)
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import tempfile
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psycopg
import pytest
from sqlalchemy import URL, Engine, create_engine, make_url

from jobsync_orm import embedded, migrate

# How the folder of a run's server begins.
RUN = "jobsync-run-"

# A shell ignores Ctrl-C for what it runs in the background, and what is started from there inherits that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# A database is some hundred small files, and so is a server: in memory they are made several times as quickly.
_MEMORY = Path("/dev/shm")
if "TMPDIR" not in os.environ and os.access(_MEMORY, os.W_OK) and shutil.disk_usage(_MEMORY).free > 4 * 2**30:
    os.environ["TMPDIR"] = tempfile.tempdir = str(_MEMORY)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Each process of ``pytest -n`` begins with a part of the slow tests, so that none of them is left for the end."""
    many = getattr(config, "workerinput", {}).get("workercount", 1)
    slow = [item for item in items if item.get_closest_marker("slow")]
    others = [item for item in items if not item.get_closest_marker("slow")]
    cuts = [len(others) * part // many for part in range(many + 1)]
    # With --dist worksteal the first share of the nth process is the nth part of the list.
    items[:] = [item for part in range(many) for item in slow[part::many] + others[cuts[part] : cuts[part + 1]]]


@dataclass(frozen=True)
class Server:
    """The PostgreSQL server of this run. ``strategy``: how it copies a template; the server's own choice if empty."""

    url: URL
    strategy: str = ""

    def connect(self, database: str | None = None) -> psycopg.Connection:
        return psycopg.connect(dsn(self.url, database), autocommit=True)

    def create_database(self, template: str = "template0") -> URL:
        name = f"jobsync_test_{uuid.uuid4().hex[:12]}"
        with self.connect() as connection:
            connection.execute(f"CREATE DATABASE {name} TEMPLATE {template} {self.strategy}")
        return self.url.set(database=name)

    def drop_database(self, url: URL) -> None:
        with self.connect() as connection:
            connection.execute(f"DROP DATABASE IF EXISTS {url.database} WITH (FORCE)")


def dsn(url: URL, database: str | None = None) -> str:
    """``url`` for libpq."""
    if database is not None:
        url = url.set(database=database)
    return url.set(drivername="postgresql").render_as_string(hide_password=False)


def hurry(server: Server) -> None:
    """Have a server that is thrown away after the tests keep nothing safe from a power failure."""
    with server.connect() as connection:
        for setting in ("fsync", "synchronous_commit", "full_page_writes"):
            connection.execute(f"ALTER SYSTEM SET {setting} = off")
        connection.execute("ALTER SYSTEM SET max_wal_size = '256MB'")  # of memory, perhaps
        connection.execute("SELECT pg_reload_conf()")


def remove_leftovers() -> None:
    """The folders of runs that were killed. Their servers have been stopped; of a run that goes on one is in use."""
    for folder in Path(tempfile.gettempdir()).glob(f"{RUN}*"):
        with contextlib.suppress(OSError):
            if time.time() - folder.stat().st_mtime < 60:  # somebody may just be about to use it
                continue
            handle = os.open(folder / ".data.alive", os.O_RDWR)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(handle)


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    given = os.environ.get("JOBSYNC_TEST_URL")
    if given:
        yield Server(make_url(given).set(drivername="postgresql+psycopg"))
        return
    remove_leftovers()
    # Short path: a UNIX socket's name has little room.
    folder = Path(tempfile.mkdtemp(prefix=RUN))
    try:
        server = Server(embedded.server_url(folder / "data"), "STRATEGY file_copy")
        hurry(server)
        yield server
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
