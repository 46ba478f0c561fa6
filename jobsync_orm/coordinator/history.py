"""Which history of the database this is, and forming the cluster anew in another one.

An epoch is only worth something as long as the database never forgets one. A standby that is promoted may lack the
newest transactions; a restored dump lacks all since it was made; both would give tokens and epochs out again that
others hold already. So the cluster's row names the *history* it was formed in: the server's system identifier, and its
timeline, which each promotion and each recovery to a point in time changes. It is compared once on each connection.

Where they differ, or where the epoch is lower than one this process has seen (a dump restored into the same server, a
commit lost in a crash), whoever notices first *re-forms* the cluster, in one statement: epoch, the claims' fencing
numbers and the cluster's incarnation leave behind whatever may have been given out, marks and claims end, every node
has to register anew, and the cluster *rests* for the longest heartbeat timeout. While it rests nobody owns anything: a
worker that has not noticed yet may say yes until its lease ends.

A server that does not tell its history (no right to ask, a service without these functions) has none; the epoch is
compared all the same.
"""

from __future__ import annotations

import logging
import re
import uuid
from dataclasses import dataclass
from typing import Literal, Protocol

from sqlalchemy import Engine
from sqlalchemy.exc import DBAPIError

from jobsync_orm.coordinator.session import Param, Row, Session, SessionLost, StatementFailed
from jobsync_orm.coordinator.statements import HEAVY_SEC, Statements
from jobsync_orm.exceptions import SchemaNotReady
from jobsync_orm.logs import fields
from jobsync_orm.naming import Names

__all__ = ["History", "Operator", "Reformed", "Standing", "decide", "reform", "standing"]

logger = logging.getLogger("jobsync_orm")

# object_not_in_prerequisite_state: the position of the log is asked of a server in recovery.
IN_RECOVERY = "55000"


@dataclass(frozen=True, slots=True)
class Standing:
    """What the cluster's row says of itself."""

    incarnation: str
    history: str | None
    epoch: int


@dataclass(frozen=True, slots=True)
class Reformed:
    """A cluster formed anew: its epoch, seconds it rests, and whether the claims' fencing numbers were raised."""

    epoch: int
    rest_sec: float
    fences_raised: bool


class Executes(Protocol):
    """What runs a statement with ``$n`` parameters in a transaction of its own."""

    def execute(self, sql: str, *params: Param, timeout: float) -> list[Row]:
        """Return the rows as text."""


def decide(standing: Standing, server: str | None, known_epoch: int) -> Literal["keep", "adopt", "reform"]:
    """What is to be done on a server of this history (None: it does not say) by one that has seen ``known_epoch``."""
    if standing.epoch < known_epoch:
        return "reform"
    if server is None or server == standing.history:
        return "keep"
    return "adopt" if standing.history is None else "reform"


def standing(session: Executes, sql: Statements, timeout: float) -> Standing:
    """Read the cluster's row."""
    ((incarnation, history, epoch),) = session.execute(sql.standing, timeout=timeout)
    return Standing(incarnation or "", history, int(epoch or 0))


def reform(
    session: Executes,
    sql: Statements,
    found: Standing,
    server: str | None,
    *,
    known_epoch: int,
    rest_sec: float,
    forced: bool,
) -> Reformed | None:
    """Form the cluster anew if it still is as it was ``found``, and if there still is a reason or it is ``forced``.

    Parameters
    ----------
    session : Session
        Or anything else that executes statements.
    sql : Statements
        Those of the cluster.
    found : Standing
        The cluster's row that was the reason.
    server : str or None
        The server's history.
    known_epoch : int
        Highest epoch known to have been given out.
    rest_sec : float
        Shortest rest, in seconds; nodes whose rows show a longer heartbeat timeout make it longer.
    forced : bool
        Whether an operator says so.

    Returns
    -------
    Reformed or None
        None if another process was first.
    """
    rows = session.execute(
        sql.reform, found.incarnation, str(uuid.uuid4()), server, known_epoch, rest_sec, forced, timeout=HEAVY_SEC
    )
    if not rows:
        return None
    epoch, rest, fences, *_ = rows[0]
    return Reformed(int(epoch or 0), float(rest or 0), fences is not None)


class History:
    """What one node knows of the database's history.

    Parameters
    ----------
    statements : Statements
        Those of the cluster.
    name : str
        This node, for the log.
    heartbeat_timeout_sec : float
        Of this node, in seconds.
    answer_sec : float
        Seconds to wait for an answer.
    """

    def __init__(self, statements: Statements, name: str, heartbeat_timeout_sec: float, answer_sec: float) -> None:
        self._sql = statements
        self._name = name
        self._timeout = heartbeat_timeout_sec
        self._answer = answer_sec
        self._silent = False
        self.is_told = False
        """Whether the server has said which history it has."""
        self.known_epoch = 0  # the highest this process has ever seen, over all its lives as a node

    def see(self, epoch: int) -> None:
        """Remember an epoch that the database has shown."""
        self.known_epoch = max(self.known_epoch, epoch)

    def identify(self, session: Session) -> str | None:
        """The server's history; None if it does not say.

        Raises
        ------
        SessionLost
            It is a standby, which cannot be written to. The session is closed.
        """
        try:
            rows = session.execute(self._sql.identify, timeout=self._answer)
        except StatementFailed as failed:
            if failed.sqlstate == IN_RECOVERY:
                session.close()
                raise SessionLost("the server is a standby that has not been promoted") from failed
            if not self._silent:
                self._silent = True
                logger.debug(
                    "%s: the server does not tell its history: %s",
                    self._name,
                    failed,
                    extra=fields("history_unknown", self._name),
                )
            self.is_told = False
            return None
        server = rows[0][0] if rows else None
        self.is_told = server is not None
        return server

    def settle(self, session: Session) -> None:
        """See to it that the cluster belongs to the history of the server; each of several may call this."""
        server = self.identify(session)
        found = standing(session, self._sql, self._answer)
        action = decide(found, server, self.known_epoch)
        if action == "adopt":
            session.execute(self._sql.adopt_history, found.incarnation, server, timeout=self._answer)
        elif action == "reform":
            self._reform(session, found, server)
        else:
            self.see(found.epoch)

    def _reform(self, session: Session, found: Standing, server: str | None) -> None:
        done = reform(
            session,
            self._sql,
            found,
            server,
            known_epoch=self.known_epoch,
            rest_sec=self._timeout,
            forced=False,
        )
        if found.epoch < self.known_epoch:
            why = f"the database has gone back from epoch {self.known_epoch} to {found.epoch}"
        else:
            why = f"the database's history is {server}, no longer {found.history} (failover or restore)"
        if done is None:
            logger.warning(
                "%s: %s; another node has formed the cluster anew",
                self._name,
                why,
                extra=fields("cluster_formed_anew", self._name),
            )
            return
        self.see(done.epoch)
        logger.warning(
            "%s: %s; the cluster is formed anew at epoch %d and rests for %.1f s",
            self._name,
            why,
            done.epoch,
            done.rest_sec,
            extra=fields("cluster_formed_anew", self._name, done.epoch),
        )
        if not done.fences_raised:
            logger.error(
                "%s: fencing numbers of claims may be given out twice: this role lacks UPDATE on their sequence; see "
                "`jobsync-orm db check`",
                self._name,
                extra=fields("fences_not_raised", self._name),
            )


class Operator:
    """Forms a cluster anew because a person says so, after a restore that no running worker can notice.

    Parameters
    ----------
    engine : Engine
        The database; one connection is used at a time.
    names : Names
        The cluster.
    """

    def __init__(self, engine: Engine, names: Names) -> None:
        self._engine = engine.execution_options(isolation_level="AUTOCOMMIT")
        self._sql = Statements(names)
        self._names = names

    def execute(self, sql: str, *params: Param, timeout: float) -> list[Row]:
        """Run one statement in a transaction of its own and return its rows as text; ``timeout`` is in seconds."""
        numbered = re.sub(r"\$(\d+)", r"%(p\1)s", sql.replace("%", "%%"))
        values = {f"p{place}": value for place, value in enumerate(params, 1)}
        with self._engine.connect() as connection:
            connection.exec_driver_sql(f"SET statement_timeout = {int(timeout * 1000)}")
            rows = connection.exec_driver_sql(numbered, values).all()
        return [tuple(None if value is None else str(value) for value in row) for row in rows]

    def look(self) -> tuple[Standing, list[str]]:
        """The cluster's row, and the names of the nodes that are members.

        Raises
        ------
        SchemaNotReady
            The cluster has no row.
        """
        if not self.execute(self._sql.standing, timeout=HEAVY_SEC):
            raise SchemaNotReady(f"{self._names.sql('cluster')} is empty: there is no cluster to form anew")
        members = self.execute(f"SELECT name FROM {self._names.sql('node')} ORDER BY name", timeout=HEAVY_SEC)
        return standing(self, self._sql, HEAVY_SEC), [row[0] or "" for row in members]

    def reform(self, found: Standing, rest_sec: float) -> Reformed | None:
        """Form it anew if it still is as it was ``found``; None if somebody else just has.

        ``rest_sec`` is the shortest rest, in seconds.
        """
        try:
            server = self.execute(self._sql.identify, timeout=HEAVY_SEC)[0][0]
        except DBAPIError:
            server = None  # no right to ask; a standby refuses what comes next
        return reform(self, self._sql, found, server, known_epoch=0, rest_sec=rest_sec, forced=True)
