"""The PostgreSQL server of one benchmark run: a new cluster in a temporary folder, with the server's own defaults.

Programs are taken from ``JOBSYNC_BENCH_PGBIN``, else from ``pg_config``, else from the newest installation in the usual
place, as long as it has pg_stat_statements; else from the embedded PostgreSQL, which cannot count statements. What is
set: the port, more connections than 30 workers need, trust on the loopback address, and pg_stat_statements. fsync and
everything else that costs time stays as it comes.
"""

from __future__ import annotations

import json
import os
import pwd
import shutil
import socket
import subprocess
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

__all__ = ["Server"]

CONNECTIONS = 200

# Who may run the server where this process is root, which PostgreSQL refuses.
UNPRIVILEGED = ("postgres", "pgserver", "nobody")


@dataclass(frozen=True)
class Server:
    """A server that this run has made.

    Parameters
    ----------
    bin : str
        Folder of its programs.
    folder : str
        Temporary folder of its data, its socket and its log.
    port : int
        TCP port on the loopback address.
    user : str or None
        Account that runs it, where this process is root.
    counts : bool
        Whether it has pg_stat_statements.
    """

    bin: str
    folder: str
    port: int
    user: str | None
    counts: bool

    @classmethod
    def create(cls) -> Self:
        """Make and start it."""
        folder = tempfile.mkdtemp(prefix="jobsync-bench-")
        user = _unprivileged() if os.geteuid() == 0 else None
        bin, counts = _installation(Path(folder))
        if user is not None:
            shutil.chown(folder, user)
        server = cls(str(bin), folder, _free_port(), user, counts)
        server._run("initdb", "-D", server.data, "-U", "postgres", "-A", "trust", "-E", "UTF8", "--no-locale")
        settings = [
            "listen_addresses = '127.0.0.1'",
            f"port = {server.port}",
            f"max_connections = {CONNECTIONS}",
            f"unix_socket_directories = '{folder}'",
        ]
        if counts:
            settings += ["shared_preload_libraries = 'pg_stat_statements'", "pg_stat_statements.max = 10000"]
        with open(Path(server.data) / "postgresql.conf", "a", encoding="utf-8") as conf:
            conf.write("\n".join(settings) + "\n")
        server.start()
        if counts:
            server._run(
                "psql", "-h", "127.0.0.1", "-p", str(server.port), "-U", "postgres", "-d", "postgres",
                "-qc", "create extension pg_stat_statements",
            )  # fmt: skip
        return server

    @classmethod
    def of_this_run(cls) -> Self:
        """The server of the run that has started this process."""
        try:
            return cls(**json.loads(os.environ["BENCH_SERVER"]))
        except KeyError:
            raise SystemExit("BENCH_SERVER is not set: only `make bench` has a server that may be stopped") from None

    @property
    def data(self) -> str:
        return str(Path(self.folder) / "data")

    @property
    def dsn(self) -> str:
        return f"postgresql://postgres:postgres@127.0.0.1:{self.port}/postgres"

    @property
    def environment(self) -> dict[str, str]:
        """Variables by which the scenarios find it."""
        return {"BENCH_DSN": self.dsn, "BENCH_SERVER": json.dumps(asdict(self))}

    def start(self) -> None:
        self._run("pg_ctl", "start", "-w", "-D", self.data, "-l", str(Path(self.folder) / "log"))

    def stop(self) -> None:
        self._run("pg_ctl", "stop", "-w", "-m", "fast", "-D", self.data)

    def remove(self) -> None:
        """Stop it and delete all it has."""
        if (Path(self.data) / "postmaster.pid").exists():
            self.stop()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _run(self, program: str, *arguments: str) -> None:
        # Not captured: pg_ctl's child would keep the pipe open.
        subprocess.run(
            [str(Path(self.bin) / program), *arguments],
            check=True,
            cwd=self.folder,
            user=self.user,
            group=None if self.user is None else pwd.getpwnam(self.user).pw_gid,
            stdout=subprocess.DEVNULL,
        )


def _unprivileged() -> str:
    for name in UNPRIVILEGED:
        try:
            return pwd.getpwnam(name).pw_name
        except KeyError:
            continue
    raise SystemExit(f"PostgreSQL does not run as root, and there is none of the users {', '.join(UNPRIVILEGED)}")


def _installation(folder: Path) -> tuple[Path, bool]:
    """Folder of the programs, and whether pg_stat_statements comes with them."""
    named = os.environ.get("JOBSYNC_BENCH_PGBIN")
    candidates = [Path(named)] if named else []
    if not named:
        if shutil.which("pg_config"):
            out = subprocess.run(["pg_config", "--bindir"], check=True, capture_output=True, text=True).stdout
            candidates.append(Path(out.strip()))
        found = Path("/usr/lib/postgresql").glob("*/bin")
        candidates += sorted(found, key=lambda path: float(path.parent.name), reverse=True)
    for bin in candidates:
        if (bin / "initdb").exists() and _has_statistics(bin):
            return bin, True
    if named:
        raise SystemExit(f"JOBSYNC_BENCH_PGBIN={named}: no server with pg_stat_statements there")
    return _embedded(folder), False


def _has_statistics(bin: Path) -> bool:
    programs = [bin / "pg_config", bin / "postgres"]
    if not all(program.exists() for program in programs):
        return False
    where = subprocess.run([programs[0], "--sharedir"], check=True, capture_output=True, text=True).stdout.strip()
    return (Path(where) / "extension" / "pg_stat_statements.control").exists()


def _embedded(folder: Path) -> Path:
    """The programs of the embedded PostgreSQL. Starting it once sees to users and permissions."""
    from jobsync_orm import embedded

    first = folder / "embedded"
    embedded.server_url(first)
    bin = embedded.server_bin(first)
    embedded.stop(first)
    return bin


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
