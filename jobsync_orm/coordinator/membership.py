"""Being a member: register, heartbeat, leave.

A life of a node is an *incarnation*, a UUID drawn at each registration; every later statement names it, so that a
process whose name was taken over, or which was evicted, changes nothing and learns of it by zero rows.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata

from jobsync_orm.config import CoordinationConfig
from jobsync_orm.coordinator.admission import check_settings
from jobsync_orm.coordinator.clock import SYSTEM, Clock
from jobsync_orm.coordinator.observation import FREED_GRACES, Seen, parse_seen
from jobsync_orm.coordinator.session import Row, Session
from jobsync_orm.coordinator.statements import Statements
from jobsync_orm.exceptions import NodeNameInUse
from jobsync_orm.logs import fields

__all__ = ["Beat", "Membership"]

logger = logging.getLogger("jobsync_orm")

# Seconds between two looks at a name that cannot be had yet.
LOOK_SEC = 0.25


@dataclass(frozen=True, slots=True)
class Beat:
    """A heartbeat's answer."""

    sent_at: float
    received_at: float
    state: str | None
    epoch: int
    revisions: tuple[int, int]
    oldest: list[str]
    seen: list[Seen]
    members: int
    drained: bool


class Membership:
    """This node's row in the cluster."""

    def __init__(self, config: CoordinationConfig, name: str, statements: Statements, clock: Clock = SYSTEM) -> None:
        self._config = config
        self._clock = clock
        self._sql = statements
        self._version = _version()
        self.name = name
        self.incarnation = ""
        self._lock_pid = 0  # backend of the session that held the advisory lock last
        # A server that has not answered by now is asked again on a new connection, well within the lease.
        self.answer_sec = max(1.0, config.heartbeat_timeout_sec - config.heartbeat_interval_sec)

    # -- the advisory lock --------------------------------------------------------------------------------------

    def hold_lock(self, session: Session) -> bool:
        """Take this node's advisory lock for ``session``.

        If the server has not noticed the end of the session of this process that held it last, that one is ended.
        """
        ((got,),) = session.execute(self._sql.lock_node, self.name, timeout=self.answer_sec)
        if got != "t" and self._lock_pid:
            session.execute(self._sql.drop_old_session, self.name, self._lock_pid, timeout=self.answer_sec)
            ((got,),) = session.execute(self._sql.lock_node, self.name, timeout=self.answer_sec)
        if got == "t":
            self._lock_pid = session.pid
        return got == "t"

    # -- register -----------------------------------------------------------------------------------------------

    def register(
        self, session: Session, deadline: float, stopped: Callable[[], bool], known_history: bool = False
    ) -> bool:
        """Join the cluster under this name; ``session`` then holds its advisory lock.

        A row left by a crashed process of the same name is taken over, with its tokens, once it is certain that the
        process no longer says yes: its lock was had, and its heartbeat has stood still for longer than it may. That is
        a little more than its grace, if the end of its session has freed the lock; and its whole timeout, if it may
        have been the end or a crash of a server, of which a process whose packets are lost hears nothing.

        Parameters
        ----------
        session : Session
            This node's.
        deadline : float
            When to give up while the name's lock is held, on this process's clock.
        stopped : callable
            Whether to give up now.
        known_history : bool
            Whether the server is known to be the one on which the heartbeats were taken.

        Returns
        -------
        bool
            False if ``stopped`` turned true first.

        Raises
        ------
        NodeNameInUse
            A process of this name is alive: its heartbeat advanced while it was watched; or ``deadline`` (on this
            process's clock) has passed while its session still held the lock.
        ClusterMismatch
            The cluster has another number of tokens by now.
        """
        locked = False
        watched: tuple[Row, float] | None = None
        while not stopped():
            if not locked and self.hold_lock(session):
                # Stillness counts from here: before, its session held the lock and it may have been alive.
                locked, watched = True, None
            asked_at = self._clock.now()
            rows = session.execute(self._sql.find, self.name, timeout=self.answer_sec)
            row = rows[0] if rows and rows[0][1] != "away" else None
            if row is None:
                if locked and self._insert(session, None):
                    return True
                watched = None
            elif watched is None or watched[0][0] != row[0]:
                watched = (row, self._clock.now())
            elif watched[0][2] != row[2]:
                raise NodeNameInUse(self._in_use(row))
            else:
                still_for = asked_at - watched[1]
                age, timeout, grace = (float(text or 0) for text in row[6:9])
                silent = still_for > timeout and age > timeout
                freed = known_history and row[9] == "t" and still_for > FREED_GRACES * grace
                if locked and (freed or silent):
                    if self._insert(session, row):
                        return True
                    watched = None
                elif silent and row[3] is not None:
                    # Dead by its heartbeat, but the server still keeps its session.
                    session.execute(self._sql.drop_old_session, self.name, int(row[3]), timeout=self.answer_sec)
            if self._clock.now() > deadline and not locked:
                raise NodeNameInUse(self._in_use(row))
            session.wait(LOOK_SEC)
        return False

    def _in_use(self, row: Row | None) -> str:
        where = "" if row is None else f" (process {row[5]} on {row[4]})"
        return f"node name {self.name!r} is in use by a live process{where}: every worker needs a name of its own"

    def _insert(self, session: Session, replaced: Row | None) -> bool:
        config = self._config
        incarnation = str(uuid.uuid4())
        rows = session.execute(
            self._sql.register,
            self.name,
            incarnation,
            replaced[0] if replaced else None,
            replaced[2] if replaced else None,
            config.weight,
            config.can_lead,
            config.heartbeat_timeout_sec,
            config.connection_grace_sec,
            config.rejoin_grace_sec,
            json.dumps(dict(config.labels or {})),
            socket.gethostname(),
            os.getpid(),
            self._version,
            config.total_tokens,
            timeout=self.answer_sec,
        )
        if not rows:
            check_settings(config, session.execute(self._sql.cluster, timeout=self.answer_sec)[0][:3])
            return False
        self.incarnation = incarnation
        session.execute(self._sql.void_claims, self.name, incarnation, timeout=self.answer_sec)
        logger.info("%s has joined", self.name, extra=fields("joined", self.name))
        return True

    # -- heartbeat and leave ------------------------------------------------------------------------------------

    def beat(self, session: Session, applied_epoch: int, *, everyone: bool, locks: bool) -> Beat:
        """Send one heartbeat. ``state`` is None in the answer if this life of the node is over."""
        sent_at = self._clock.now()
        ((state, epoch, revision, pins_revision, oldest, seen, members, drained),) = session.execute(
            self._sql.beat,
            self.name,
            self.incarnation,
            applied_epoch,
            everyone,
            locks,
            timeout=self.answer_sec,
        )
        return Beat(
            sent_at,
            self._clock.now(),
            state,
            int(epoch or 0),
            (int(revision or 0), int(pins_revision or 0)),
            json.loads(oldest or "[]") or [],
            parse_seen(seen),
            int(members or 0),
            drained == "t",
        )

    def members(self, session: Session) -> list[str]:
        """Names of the live nodes, oldest first."""
        ((names,),) = session.execute(self._sql.members, timeout=self.answer_sec)
        return json.loads(names or "[]") or []

    def leave(self, session: Session) -> None:
        """End this life of the node. Its tokens have no live owner from here on."""
        session.execute(self._sql.leave, self.name, self.incarnation, timeout=self.answer_sec)
        logger.info("%s has left", self.name, extra=fields("left", self.name))


def _version() -> str:
    try:
        return metadata.version("jobsync-orm")
    except metadata.PackageNotFoundError:  # a checkout on the path, not installed
        return ""
