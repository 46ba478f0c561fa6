"""A real pgbouncer in front of a test's server."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import URL

from tests.integration.cluster import wait_for
from tests.integration.postgres import free_port, identity, open_folder

PROGRAM = shutil.which("pgbouncer", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")

needs_pgbouncer = pytest.mark.skipif(
    PROGRAM is None, reason="pgbouncer is not installed (Debian: apt-get install pgbouncer)"
)


@contextmanager
def pooled(server: URL, mode: str) -> Iterator[URL]:
    """The URL by which the database of ``server`` is reached through a pgbouncer of this pool mode.

    It keeps two connections to the server for any number of clients.
    """
    assert PROGRAM is not None
    port = free_port()
    user = _user(server)
    with open_folder(user) as folder:
        (folder / "pgbouncer.ini").write_text(
            f"""
            [databases]
            {server.database} = {_target(server)}
            [pgbouncer]
            listen_addr = 127.0.0.1
            listen_port = {port}
            unix_socket_dir =
            auth_type = any
            pool_mode = {mode}
            default_pool_size = 2
            """.replace("            ", "")
        )
        with open(folder / "log", "wb") as log:
            process = subprocess.Popen([PROGRAM, folder / "pgbouncer.ini"], stdout=log, stderr=log, **user)
        try:
            wait_for(lambda: _listens(port), "pgbouncer listens", 10)
            yield URL.create(server.drivername, server.username, None, "127.0.0.1", port, server.database)
        finally:
            process.terminate()
            process.wait()


def _target(server: URL) -> str:
    host = server.query.get("host", server.host)
    parts = {"host": host, "port": server.port, "user": server.username, "password": server.password}
    return " ".join(f"{name}={value}" for name, value in parts.items() if value is not None)


def _user(server: URL) -> dict[str, Any]:
    """Whoever may use the server's socket, if that is how it is reached; in any case not root."""
    sockets = server.query.get("host")
    if isinstance(sockets, str) and sockets.startswith("/") and os.getuid() == 0:
        owner = Path(sockets).stat()
        return {"user": owner.st_uid, "group": owner.st_gid, "extra_groups": []}
    return identity()


def _listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 1).close()
    except OSError:
        return False
    return True
