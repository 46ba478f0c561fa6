"""PostgreSQL servers that a test may kill, promote and put a pooler before."""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
from sqlalchemy import URL

from jobsync_orm import embedded


def free_port() -> int:
    """A TCP port of this machine that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def programs() -> Path:
    """The folder of initdb and the rest: the newest that is installed, else the embedded one's."""
    installed = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda path: int(path.parts[-3]))
    if installed:
        return installed[-1].parent
    with tempfile.TemporaryDirectory(prefix="jobsync-pg-") as folder:
        return embedded.server_bin(Path(folder) / "data")


def identity() -> dict[str, Any]:
    """Arguments for Popen: PostgreSQL and its poolers do not run as root."""
    if os.getuid() != 0:
        return {}
    known = {entry.pw_name: entry for entry in pwd.getpwall()}
    user = known.get("postgres") or known["pgserver"]  # the latter is made by the embedded server
    return {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}


@contextmanager
def open_folder(who: dict[str, Any]) -> Iterator[Path]:
    """A temporary folder of the user that ``identity`` gives."""
    folder = Path(tempfile.mkdtemp(prefix="jobsync-pg-"))
    try:
        if who:
            os.chown(folder, who["user"], who["group"])
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class Postgres:
    """A server in a subfolder of ``folder`` that anybody on this machine may connect to as ``postgres``."""

    def __init__(self, folder: Path, name: str, bin: Path) -> None:
        self._bin = bin
        self._folder = folder
        self._data = folder / name
        self.port = free_port()
        self.url = URL.create("postgresql+psycopg", "postgres", None, "127.0.0.1", self.port, "postgres")

    def _run(self, program: str, *arguments: str) -> None:
        subprocess.run(
            [str(self._bin / program), *arguments],
            cwd=self._folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            check=True,
            **identity(),
        )

    def create(self) -> None:
        self._run("initdb", "-D", str(self._data), "-U", "postgres", "-A", "trust", "-N")

    def create_standby_of(self, primary: Postgres) -> None:
        self._run("pg_basebackup", "-D", str(self._data), "-d", primary.dsn, "-R", "-X", "stream", "-c", "fast")

    def start(self) -> None:
        options = f"-c listen_addresses=127.0.0.1 -p {self.port} -k {self._folder} -c fsync=off"
        self._run("pg_ctl", "start", "-w", "-D", str(self._data), "-l", f"{self._data}.log", "-o", options)

    def promote(self) -> None:
        self._run("pg_ctl", "promote", "-w", "-D", str(self._data))

    def kill(self) -> None:
        """End it as a power failure would; its children follow by themselves."""
        os.kill(self._pid(), signal.SIGKILL)

    def stop(self) -> None:
        with contextlib.suppress(subprocess.CalledProcessError):  # it has been killed, or never ran
            self._run("pg_ctl", "stop", "-m", "immediate", "-w", "-D", str(self._data))

    def _pid(self) -> int:
        return int((self._data / "postmaster.pid").read_text().splitlines()[0])

    @property
    def dsn(self) -> str:
        return self.url.set(drivername="postgresql").render_as_string(hide_password=False)

    def execute(self, sql: str) -> list[tuple[Any, ...]]:
        with psycopg.connect(self.dsn, autocommit=True) as connection:
            cursor = connection.execute(sql)
            return [] if cursor.description is None else cursor.fetchall()
