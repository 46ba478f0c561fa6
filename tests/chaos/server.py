"""A PostgreSQL server of the suite's own, which can be restarted and killed: the embedded wheel's, on a TCP port."""

from __future__ import annotations

import os
import pwd
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

import psycopg
from sqlalchemy import URL

from jobsync_orm import embedded

__all__ = ["Server"]

READY_SEC = 60.0


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]


class Server:
    """One server with its data in ``folder``.

    Its files need not survive a power cut, only its own death, so it runs without fsync. It keeps commit times, which
    the checker asks for.
    """

    def __init__(self, folder: Path) -> None:
        self._log = (folder / "server.log").open("ab")
        self._wheel = embedded._describe(folder / "data")
        # Makes the data, and opens the way to them where the server runs as a system user of its own.
        self._wheel.ensure_pgdata_inited()
        self._identity: dict[str, Any] = {}
        if self._wheel.system_user is not None:
            user = pwd.getpwnam(self._wheel.system_user)
            self._identity = {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}
        self.port = free_port()
        self.url = URL.create("postgresql+psycopg", "postgres", host="127.0.0.1", port=self.port, database="postgres")
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it and wait until it takes connections."""
        settings = {
            "port": self.port,
            "listen_addresses": "127.0.0.1",
            "unix_socket_directories": "",
            "max_connections": 200,
            "fsync": "off",
            "track_commit_timestamp": "on",
            "log_min_messages": "warning",
            "log_line_prefix": "%m %p %a ",
        }
        self.process = subprocess.Popen(
            [str(self._wheel.bin_path / "postgres"), "-D", str(self._wheel.pgdata)]
            + [part for name, value in settings.items() for part in ("-c", f"{name}={value}")],
            cwd=self._wheel.pgdata,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            **self._identity,
        )
        self.wait_ready()

    def wait_ready(self) -> None:
        """Until it takes connections, after a start or a recovery."""
        deadline = time.monotonic() + READY_SEC
        while True:
            try:
                self.connect().close()
                return
            except psycopg.OperationalError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)

    def connect(self) -> psycopg.Connection[Any]:
        """A connection past the relay."""
        return psycopg.connect(
            host="127.0.0.1", port=self.port, user="postgres", dbname="postgres", autocommit=True, connect_timeout=5
        )

    def stop(self, how: signal.Signals) -> None:
        """SIGINT is a fast shutdown, SIGQUIT an immediate one: as a crash, with a recovery at the next start."""
        if self.process is not None:
            self.process.send_signal(how)
            self.process.wait(READY_SEC)
            self.process = None

    def kill(self, backend: int) -> None:
        """SIGKILL one session's process: the server ends all the others, recovers, and takes connections again."""
        os.kill(backend, signal.SIGKILL)
        # Until the recovery has begun it might still answer.
        time.sleep(0.2)
        self.wait_ready()

    def close(self) -> None:
        """End it for good."""
        self.stop(signal.SIGQUIT)
        self._log.close()
