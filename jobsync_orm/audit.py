"""The audit: who has done which task, on which day.

A row comes into being in one of two ways. Completing a :class:`~jobsync_orm.Claim` writes it in the transaction that
ends the claim. ``job.add_task`` puts a task down here, in memory, and ``job.write_audit`` writes all that were put
down since. The writing statement inserts the row of each claim it deletes, so that it may be repeated after a lost
answer: of two executions, however late the first, only one deletes the claim. For a task whose claim is no longer
there (it was released, this life of the node has ended, or the answer was lost) a second statement inserts the row
unless it is there.

| statement | locks | if the process stops right there |
|---|---|---|
| write | own claims of these tasks | written and claims ended, or neither |
| write again | nothing | written or not |
"""

from __future__ import annotations

import datetime
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sqlalchemy import Engine, text

from jobsync_orm.autocommit import Autocommit, instant, listed
from jobsync_orm.coordinator.session import array
from jobsync_orm.naming import Names

__all__ = ["AuditBook", "Done"]


@dataclass(frozen=True, slots=True)
class Done:
    """A task put down for the audit.

    Parameters
    ----------
    key : str
        Text of the task's id.
    token : int
        Its token.
    epoch : int
        At which this node had got the token.
    fence : int
        Of the claim that the writing ends.
    at : int
        When it was claimed, in microseconds since 1970 by the database's clock.
    """

    key: str
    token: int
    epoch: int
    fence: int
    at: int


class AuditBook:
    """The audit of one cluster, written by one node.

    Parameters
    ----------
    engine : Engine
        The application's engine.
    names : Names
        The cluster.
    node : str
        This node.
    date : datetime.date, optional
        The processing date of its rows. None takes the database's date when a task was added.
    """

    def __init__(self, engine: Engine, names: Names, node: str, date: datetime.date | None) -> None:
        self._database = Autocommit(engine)
        self._node = node
        self._date = date
        self._done: list[Done] = []
        self._guard = threading.RLock()  # a signal handler may stop the job in the middle of a call
        claim, audit = names.text("claim"), names.text("audit")
        at = instant("d.at")
        done = f"""unnest({listed("ids", "text")}, {listed("tokens", "int")}, {listed("epochs", "bigint")},
                {listed("fences", "bigint")}, {listed("ats", "bigint")}) WITH ORDINALITY
                AS d (task_id, token_id, epoch, fence, at, place)"""
        rows = f"""INSERT INTO {audit} (date, node, task_id, token_id, epoch, created_on)
            SELECT coalesce(CAST(:date AS date), {at}::date), :node, d.task_id, d.token_id, d.epoch, {at}"""
        # A task added twice has one claim, with the later number, which ends for both.
        self._write = text(f"""
            WITH ended AS (
                DELETE FROM {claim} k USING {done}
                WHERE k.task_id = d.task_id AND k.fence = d.fence AND k.node = :node RETURNING d.*),
            written AS ({rows} FROM ended d ORDER BY d.place)
            SELECT task_id, fence FROM ended""")
        self._write_again = text(f"""
            {rows} FROM {done}
            WHERE NOT EXISTS (SELECT 1 FROM {audit} a
                WHERE a.node = :node AND a.date = coalesce(CAST(:date AS date), {at}::date)
                    AND a.task_id = d.task_id AND a.created_on = {at})
            ORDER BY d.place RETURNING task_id""")
        self._read = text(f"""
            SELECT node, task_id FROM {audit}
            WHERE date = coalesce(CAST(:date AS date), current_date) AND task_id IS NOT NULL ORDER BY id""")

    def add(self, done: Sequence[Done]) -> None:
        """Put tasks down for the next ``write``."""
        with self._guard:
            self._done += done

    def write(self, written: Callable[[Sequence[Done]], object]) -> int:
        """Write what was added to the audit and end its claims, in one transaction. Returns the number of rows.

        A failure raises, and what has not been written stays down for the next call.

        Parameters
        ----------
        written : callable
            Called with what has been written, in the order in which it was added.
        """
        with self._guard:
            done, self._done = self._done, []
        if not done:
            return 0
        left = done
        try:
            rows, _ = self._database.repeat(self._write, self._values(done))
            ended = {(key, fence) for key, fence in rows}
            left = [entry for entry in done if (entry.key, entry.fence) not in ended]
            if left:
                self._database.repeat(self._write_again, self._values(left))
                left = []
        finally:
            if left:
                with self._guard:
                    self._done[:0] = left
            missing = set(left)
            written([entry for entry in done if entry not in missing])
        return len(done)

    def _values(self, done: Sequence[Done]) -> dict[str, object]:
        return {
            "ids": array(entry.key for entry in done),
            "tokens": array(entry.token for entry in done),
            "epochs": array(entry.epoch for entry in done),
            "fences": array(entry.fence for entry in done),
            "ats": array(entry.at for entry in done),
            "date": self._date,
            "node": self._node,
        }

    def read(self) -> list[dict[str, str]]:
        """Audit rows of the processing date, of all nodes, oldest first: ``node`` and ``task_id``."""
        return [{"node": row[0], "task_id": row[1]} for row in self._database.execute(self._read, {"date": self._date})]
