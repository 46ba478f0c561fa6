"""A name for a worker that was not given one.

Workers on one host are ``{hostname}-1``, ``{hostname}-2`` and so on, each the first number that nobody has. So a worker
that is started again after a crash has the name of the one that died, and takes over its jobs and tokens at once.
"""

from __future__ import annotations

import os
import socket
from types import TracebackType
from typing import Self

from jobsync_orm.config import CoordinationConfig
from jobsync_orm.coordinator.session import Session, SessionLost
from jobsync_orm.coordinator.statements import lock_held

__all__ = ["FreeName"]

# Most workers of a host that are looked for.
MOST_WORKERS = 10_000

ANSWER_SEC = 10.0


class FreeName:
    """A name that no live node has, kept for this process until the block ends.

    Parameters
    ----------
    config : CoordinationConfig
        Where the cluster is.
    """

    def __init__(self, config: CoordinationConfig) -> None:
        self._names = config.names
        self._held = f"SELECT {lock_held(config.names, '$1::text', 'l.pid')}"
        self._fd, self._write = os.pipe()
        self._session = Session(config.connection_pool(), self._fd, lambda at: None, 1.0, "")
        self._taken: set[str] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._session.close()
        os.close(self._fd)
        os.close(self._write)

    def next(self) -> str:
        """The first name that is free; each call another one.

        Raises
        ------
        SessionLost
            The database could not be reached.
        """
        if not self._session.is_open:
            self._session.open()
        host = socket.gethostname()[:180]
        for number in range(1, MOST_WORKERS + 1):
            name = f"{host}-{number}"
            if name not in self._taken and self._is_free(name):
                self._taken.add(name)
                return name
        raise SessionLost(f"{MOST_WORKERS} workers run on {host}, or are about to")

    def _is_free(self, name: str) -> bool:
        # Two that start at the same time: the lock on the intention goes to one of them, and is kept until it has
        # become a member or has given up.
        intention = self._names.advisory_key("worker", name)
        ((mine,),) = self._session.execute(f"SELECT pg_catalog.pg_try_advisory_lock({intention})", timeout=ANSWER_SEC)
        if mine != "t":
            return False
        # A node holds its lock for as long as it lives. Looked at, not taken: it may just be about to take it again.
        ((held,),) = self._session.execute(self._held, name, timeout=ANSWER_SEC)
        return held != "t"
