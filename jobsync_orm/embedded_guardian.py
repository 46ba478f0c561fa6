"""Stops an embedded server when none of its users is left: a program of its own, run by path, without this package.

A process that is killed, or that ends by a signal as uvicorn's workers do, runs nothing on its way out. So whoever
starts a server starts one of these beside it. It waits for a lock that each user holds for as long as it lives; when it
gets it, the last one has gone, however it went, and what runs still is stopped. It is in a session of its own, so that
a terminal's Ctrl-C does not reach it, and a child of nobody.

Arguments: the two lock files (``alive``, ``users``), the folder of the data, ``pg_ctl``, user and group id of the
server (empty: those of this process), seconds for which to wait for the server's end, and the folder of its socket.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

# Seconds for the kernel to say whether somebody listens.
LOOK_SEC = 10

# Seconds until it is looked again whether somebody has the second lock.
AGAIN_SEC = 0.1


def listens(folder: str) -> bool:
    """Whether a server of the data in ``folder`` is there, by its socket.

    pg_ctl sends its signal to whatever process has the number in ``postmaster.pid``. Where the server was killed that
    file stays, and the number may be another process's by now.
    """
    try:
        lines = Path(folder, "postmaster.pid").read_text().splitlines()
        with socket.socket(socket.AF_UNIX) as probe:
            probe.settimeout(LOOK_SEC)
            probe.connect(f"{lines[4]}/.s.PGSQL.{lines[3]}")
    except (OSError, IndexError):
        return False
    return True


def _alone(users: int) -> bool:
    try:
        fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def main(alive: str, users: str, folder: str, pg_ctl: str, uid: str, gid: str, patience: str, sockets: str) -> None:
    handle = os.open(alive, os.O_RDWR | os.O_CLOEXEC)
    if os.fork():
        os._exit(0)
    os.setsid()
    fcntl.flock(handle, fcntl.LOCK_EX)
    other = os.open(users, os.O_RDWR | os.O_CLOEXEC)
    while not _alone(other):
        # Whoever goes lets go of the second lock a moment after the first; a user of an older release has the second
        # one only. Meanwhile a user that has just come is not to wait for the first.
        fcntl.flock(handle, fcntl.LOCK_UN)
        time.sleep(AGAIN_SEC)
        fcntl.flock(handle, fcntl.LOCK_EX)
    if not listens(folder):
        return
    identity: dict[str, Any] = {"user": int(uid), "group": int(gid), "extra_groups": []} if uid else {}
    # The folder's own name stays out of the command line, which pg_ctl passes through a shell.
    command = [pg_ctl, "stop", "-D", ".", "-w", "-t", patience]
    stopped = subprocess.run(command, cwd=folder, stdin=subprocess.DEVNULL, check=False, **identity).returncode == 0
    if stopped and sockets != folder:
        shutil.rmtree(sockets, ignore_errors=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
