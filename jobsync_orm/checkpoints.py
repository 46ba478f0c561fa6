"""Checkpoints: where a long-running task goes on after a hand-off, a crash or a restart.

``job.checkpoint(task, position)`` stores how far the work has come, ``job.last_checkpoint(task)`` reads it, whoever
wrote it. Writing is fenced: the one statement locks the row of the task's token ``FOR SHARE`` and writes only if the
token is this node's, of this life of it, at an epoch it knows. So a worker that was paused while its task went to
another node cannot set it back: it gets :class:`~jobsync_orm.OwnershipLost`. The epoch it knows is that of its open
claim on the task, or without one the present epoch of its node; so hold a claim, or use a bound session, where a pause
may be as long as two hand-offs. A stored position is never replaced by one of an older epoch.

With a session the position is part of its transaction: work, position and ownership are committed together.

| statement | locks | if the process stops right there |
|---|---|---|
| checkpoint, clear | token row (share), the checkpoint's row | written or not |
| last | nothing | nothing |

In a transaction of the application the locks last until it ends, so checkpoint last: while a worker is paused between
that and COMMIT its token cannot move, or, in a bound session, which locks tokens only as it commits, the next owner's
write of this checkpoint waits.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from sqlalchemy import Engine, TextClause, text
from sqlalchemy.exc import DBAPIError

from jobsync_orm.autocommit import Autocommit
from jobsync_orm.exceptions import OwnershipLost
from jobsync_orm.naming import Names
from jobsync_orm.sqlstates import SERIALIZATION_FAILURE, sqlstate

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

__all__ = ["CheckpointBook", "LoneCheckpoints"]


class CheckpointBook:
    """The SQL of the checkpoints of one cluster, as one node writes them.

    Parameters
    ----------
    engine : Engine
        The application's engine.
    names : Names
        The cluster.
    node : str
        This node.
    """

    def __init__(self, engine: Engine, names: Names, node: str) -> None:
        self._database = Autocommit(engine)
        self._node = node
        token, members, checkpoint = names.text("token"), names.text("node"), names.text("checkpoint")

        # A token that is marked for its own owner is nobody's yet: the cluster rests after it was formed anew.
        def fenced(lock: str, change: str) -> TextClause:
            return text(f"""
                WITH held AS (
                    SELECT t.epoch FROM {token} t
                        JOIN {members} n ON n.name = :node AND n.incarnation = CAST(CAST(:life AS text) AS uuid)
                            AND n.state <> 'away'
                    WHERE t.token_id = CAST(:token AS int) AND t.node = n.name
                        AND t.epoch BETWEEN n.join_epoch AND CAST(:known AS bigint)
                        AND t.next_node IS DISTINCT FROM t.node {lock}),
                changed AS ({change})
                SELECT (SELECT count(*) FROM held), (SELECT count(*) FROM changed),
                    (SELECT node FROM {token} WHERE token_id = CAST(:token AS int))""")

        write = f"""INSERT INTO {checkpoint} AS p (task_id, epoch, position, updated_at)
                    SELECT CAST(:id AS text), held.epoch, CAST(CAST(:position AS text) AS jsonb), clock_timestamp()
                    FROM held
                    ON CONFLICT (task_id) DO UPDATE SET epoch = excluded.epoch, position = excluded.position,
                        updated_at = excluded.updated_at WHERE p.epoch <= excluded.epoch
                    RETURNING 1"""
        clear = f"""DELETE FROM {checkpoint} p USING held
                    WHERE p.task_id = CAST(:id AS text) AND p.epoch <= held.epoch RETURNING 1"""
        # By whether the session itself sees to the token when it commits.
        self._write = {False: fenced("FOR SHARE OF t", write), True: fenced("", write)}
        self._clear = {False: fenced("FOR SHARE OF t", clear), True: fenced("", clear)}
        self._last = text(f"SELECT p.position::text FROM {checkpoint} p WHERE p.task_id = :id")
        self._owner = text(f"SELECT node FROM {token} WHERE token_id = :token")

    def write(
        self, key: str, token: int, position: str, life: str, known: int, session: Session | None, *, fenced: bool
    ) -> None:
        """Store a position, given as JSON.

        Parameters
        ----------
        key : str
            Text of the task's id.
        token : int
            Its token.
        position : str
            What to store.
        life : str
            Incarnation of this node.
        known : int
            The latest epoch at which this node may have got the token.
        session : Session, optional
            Whose transaction it is part of.
        fenced : bool
            Whether that session itself sees to the token when it commits.

        Raises
        ------
        OwnershipLost
            The token is not this node's, or not as of an epoch it knows. Nothing is stored.
        """
        values = {"id": key, "token": token, "life": life, "known": known, "node": self._node, "position": position}
        _, written, owner = self._fenced(self._write[fenced], values, session)
        if not written:
            raise OwnershipLost([token], {token: owner}, self._node)

    def clear(self, key: str, token: int, life: str, known: int, session: Session | None, *, fenced: bool) -> bool:
        """Delete a position; parameters and errors as of :meth:`write`. Returns whether there was one."""
        values = {"id": key, "token": token, "life": life, "known": known, "node": self._node}
        held, cleared, owner = self._fenced(self._clear[fenced], values, session)
        if not held:
            raise OwnershipLost([token], {token: owner}, self._node)
        return bool(cleared)

    def _fenced(
        self, statement: TextClause, values: dict[str, object], session: Session | None
    ) -> tuple[int, int, str | None]:
        if session is None:
            ((held, changed, owner),) = self._database.repeat(statement, values)[0]
            return held, changed, owner
        try:
            held, changed, owner = session.execute(statement, values).one()
        except DBAPIError as error:
            # The row of the token has changed since the snapshot of this transaction; a new one shows how.
            if sqlstate(error.orig) != SERIALIZATION_FAILURE:
                raise
            ((owner,),) = self._database.repeat(self._owner, {"token": values["token"]})[0]
            if owner == self._node:
                raise
            return 0, 0, owner
        return held, changed, owner

    def last(self, key: str, session: Session | None) -> Any:
        """The stored position, or None."""
        if session is None:
            rows = self._database.repeat(self._last, {"id": key})[0]
        else:
            rows = list(session.execute(self._last, {"id": key}))
        return json.loads(rows[0][0]) if rows else None


class LoneCheckpoints:
    """The checkpoints of a standalone job: in memory, for as long as the job lives. Sessions do not matter."""

    def __init__(self) -> None:
        self._positions: dict[str, str] = {}

    def write(
        self, key: str, token: int, position: str, life: str, known: int, session: Session | None, *, fenced: bool
    ) -> None:
        """As :meth:`CheckpointBook.write`."""
        self._positions[key] = position

    def clear(self, key: str, token: int, life: str, known: int, session: Session | None, *, fenced: bool) -> bool:
        """As :meth:`CheckpointBook.clear`."""
        return self._positions.pop(key, None) is not None

    def last(self, key: str, session: Session | None) -> Any:
        """As :meth:`CheckpointBook.last`."""
        position = self._positions.get(key)
        return None if position is None else json.loads(position)
