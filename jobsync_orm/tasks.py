"""Tasks, the claims on them, and the audit of what was done.

A claim records, for everybody to see, that this node has taken up one task. It is exclusive: the claim table has one
row for each task. It ends when the task is written to the audit, when it is released, or with this life of the node;
a row left over from a life that has ended stops nobody.
A token with open claims is handed over only after they end or ``drain_timeout_sec`` has passed.

Each call below is one statement in one transaction: it locks the token rows it relies on ``FOR SHARE`` and inserts or
deletes its own claim and audit rows; a process that stops in it leaves all of it or nothing.
"""

from __future__ import annotations

import datetime
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import total_ordering
from typing import Any

from sqlalchemy import Engine, TextClause, text
from sqlalchemy.exc import DBAPIError

from jobsync_orm.coordinator.session import array
from jobsync_orm.hashing import task_key
from jobsync_orm.naming import Names

__all__ = ["Task", "TaskBook", "task_ids"]


@total_ordering
class Task:
    """A unit of work, compared, ordered and hashed by its id alone.

    Parameters
    ----------
    id : int, str, uuid.UUID or another type of stable text
        What is hashed to a token. 1 and "1" have the same text and are one task.
    name : str, optional
        For people.

    Raises
    ------
    UnstableTaskId
        The text of ``id`` would differ from process to process.
    InvalidTaskId
        The text of ``id`` cannot be stored.
    """

    __slots__ = ("id", "name")

    def __init__(self, id: Any, name: str | None = None) -> None:
        task_key(id)
        self.id = id
        self.name = name

    def __repr__(self) -> str:
        return f"id:{self.id},name:{self.name}"

    def __hash__(self) -> int:
        return hash(self.id)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Task):
            return NotImplemented
        return bool(self.id == other.id)

    def __lt__(self, other: object) -> bool:
        if not isinstance(other, Task):
            return NotImplemented
        return bool(self.id < other.id)


def task_ids(tasks: object) -> list[object]:
    """The ids of one task, or of an iterable of them. Text, bytes and mappings are never taken apart."""
    if isinstance(tasks, Task):
        return [tasks.id]
    if isinstance(tasks, Iterable) and not isinstance(tasks, str | bytes | bytearray | memoryview | Mapping):
        return [task.id if isinstance(task, Task) else task for task in tasks]
    return [tasks]


@dataclass(frozen=True, slots=True)
class _Done:
    key: str
    token: int
    epoch: int
    at: float  # time.monotonic(); its age, not its value, reaches the database


class TaskBook:
    """Claims and audit of one node.

    Parameters
    ----------
    engine : Engine
        The application's engine.
    names : Names
        The cluster.
    node : str
        This node.
    date : datetime.date, optional
        The processing date of audit rows. None takes the database's date when a task was added.
    """

    def __init__(self, engine: Engine, names: Names, node: str, date: datetime.date | None) -> None:
        self._engine = engine.execution_options(isolation_level="AUTOCOMMIT")
        self._node = node
        self._date = date
        self._done: list[_Done] = []
        self._guard = threading.RLock()  # a signal handler may stop the job in the middle of a call
        token, node_table = names.sql("token"), names.sql("node")
        claim, audit = names.sql("claim"), names.sql("audit")
        claimed = f"""
            taken AS (
                INSERT INTO {claim} AS k (task_id, token_id, node, incarnation, epoch, claimed_at)
                SELECT DISTINCT ON (task_id) task_id, token_id, CAST(:node AS text), CAST(:incarnation AS uuid),
                    epoch, clock_timestamp()
                FROM asked ORDER BY task_id
                ON CONFLICT (task_id) DO UPDATE SET node = excluded.node, incarnation = excluded.incarnation,
                    epoch = excluded.epoch, token_id = excluded.token_id, claimed_at = excluded.claimed_at
                    WHERE (k.node = excluded.node AND k.incarnation = excluded.incarnation)
                        OR NOT EXISTS (SELECT 1 FROM {node_table} o
                            WHERE o.name = k.node AND o.incarnation = k.incarnation AND o.state <> 'away')
                RETURNING task_id, epoch)
            SELECT task_id, epoch FROM taken"""
        by_live_node = f"""SELECT a.task_id, a.token_id, t.epoch
                FROM unnest(CAST(:ids AS text[]), CAST(:tokens AS int[])) AS a (task_id, token_id)
                    JOIN {token} t ON t.token_id = a.token_id
                    JOIN {node_table} n ON n.name = :node AND n.incarnation = CAST(:incarnation AS uuid)
                        AND n.state <> 'away'"""
        self._claim = text(f"WITH asked AS ({by_live_node}), {claimed}")
        self._claim_owned = text(f"""
            WITH asked AS (
                {by_live_node}
                WHERE t.node = :node AND t.next_node IS NULL AND t.epoch >= n.join_epoch
                FOR SHARE OF t), {claimed}""")
        release = f"""DELETE FROM {claim} WHERE task_id = ANY (CAST(:ids AS text[]))
                AND node = :node AND incarnation = CAST(:incarnation AS uuid)"""
        self._release = text(f"{release} RETURNING task_id")
        at = "clock_timestamp() - d.age * interval '1 second'"
        self._write = text(f"""
            WITH released AS ({release})
            INSERT INTO {audit} (date, node, task_id, token_id, epoch, created_on)
            SELECT coalesce(CAST(:date AS date), ({at})::date), :node, d.task_id, d.token_id, d.epoch, {at}
            FROM unnest(CAST(:ids AS text[]), CAST(:tokens AS int[]), CAST(:epochs AS bigint[]),
                CAST(:ages AS float8[])) WITH ORDINALITY AS d (task_id, token_id, epoch, age, place)
            ORDER BY d.place""")
        self._read = text(f"""
            SELECT node, task_id FROM {audit}
            WHERE date = coalesce(CAST(:date AS date), current_date) AND task_id IS NOT NULL ORDER BY id""")

    def claim(self, tokens: Mapping[str, int], incarnation: str, *, owned: bool) -> dict[str, int]:
        """Claim tasks, given as text of id -> token. Returns text of id -> epoch for those claimed.

        With ``owned``, only tasks whose token is this node's and not on its way elsewhere.
        """
        statement = self._claim_owned if owned else self._claim
        values = {"ids": array(tokens), "tokens": array(tokens.values()), "node": self._node}
        return {row[0]: row[1] for row in self._again(statement, {**values, "incarnation": incarnation})}

    def release(self, keys: Iterable[str], incarnation: str) -> list[str]:
        """End this node's claims on these tasks. Returns those that were claimed."""
        values = {"ids": array(keys), "node": self._node, "incarnation": incarnation}
        return [row[0] for row in self._again(self._release, values)]

    def _again(self, statement: TextClause, values: Mapping[str, object]) -> list[Sequence[Any]]:
        """Execute what may be executed twice; once more if the pooled connection turns out to be a dead one."""
        for attempt in (1, 2):
            try:
                with self._engine.connect() as connection:
                    return list(connection.execute(statement, values))
            except DBAPIError as error:
                if attempt == 2 or not error.connection_invalidated:
                    raise
        raise AssertionError("unreachable")

    def add(self, key: str, token: int, epoch: int) -> None:
        """Put a task down for the next ``write``."""
        with self._guard:
            self._done.append(_Done(key, token, epoch, time.monotonic()))

    def write(self, incarnation: str) -> int:
        """Write what was added to the audit and end its claims, in one transaction. Returns the number of rows.

        A failure raises, and everything stays down for the next call.
        """
        with self._guard:
            done, self._done = self._done, []
        if not done:
            return 0
        now = time.monotonic()
        try:
            with self._engine.connect() as connection:
                connection.execute(
                    self._write,
                    {
                        "ids": array(entry.key for entry in done),
                        "tokens": array(entry.token for entry in done),
                        "epochs": array(entry.epoch for entry in done),
                        "ages": array(now - entry.at for entry in done),
                        "date": self._date,
                        "node": self._node,
                        "incarnation": incarnation,
                    },
                )
        except BaseException:
            with self._guard:
                self._done[:0] = done
            raise
        return len(done)

    def read(self) -> list[dict[str, str]]:
        """Audit rows of the processing date, of all nodes, oldest first: ``node`` and ``task_id``."""
        with self._engine.connect() as connection:
            rows = connection.execute(self._read, {"date": self._date})
            return [{"node": row[0], "task_id": row[1]} for row in rows]
