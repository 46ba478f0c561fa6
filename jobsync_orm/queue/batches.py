"""Steer many jobs a thousand at a time, and hold none of them while another transaction is waited for.

A statement that changes a thousand rows keeps each of them locked until it has changed the last. A row that somebody
else has can be left out (SKIP LOCKED); an idempotency key cannot, with which a transaction that has not ended has
enqueued a job. So a batch waits for a lock for ``MOMENT_SEC`` at most. If that is not enough nothing of it has been
done, and it is cut into ``PARTS``, down to single jobs. Those that are still in somebody's hands come last, each in a
transaction of its own, in turns, and all of them together for ``PATIENCE_SEC`` at most.

| statement | locks | if the process stops right there |
|---|---|---|
| of a batch | its rows (skip), in order of their ids, then their idempotency keys (waits a moment) | done or not |
| of one job | its row, then its idempotency key (waits, ``TURN_SEC``) | done or not |
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from sqlalchemy import TextClause
from sqlalchemy.exc import DBAPIError

from jobsync_orm.autocommit import Autocommit, Row
from jobsync_orm.coordinator.session import array
from jobsync_orm.queue.control_statements import BATCH
from jobsync_orm.sqlstates import sqlstate

__all__ = ["Done", "alone", "in_batches"]

# Longest that a batch waits for a lock, and a single job of which there may be hundreds: the queue's own transactions
# seldom take that long.
MOMENT_SEC, LEAST_SEC = 0.05, 0.01

# Into so many a batch is cut that would have to wait longer.
PARTS = 10

# Longest that one job is waited for until it is the next one's turn, and all of a call together.
TURN_SEC = 0.25
PATIENCE_SEC = 10.0

# A lock that is not to be had; an idempotency key that has been committed at this moment.
IN_HANDS = frozenset({"55P03", "23505"})


@dataclass(frozen=True, slots=True)
class Done:
    """What a statement has done with some jobs.

    Attributes
    ----------
    ids : sequence of int
        The jobs.
    rows : dict of int to row
        What the statement has answered of each. Missing: those that are not there or in somebody's hands.
    again : bool
        Whether it was sent twice, because an answer was lost.
    """

    ids: Sequence[int]
    rows: Mapping[int, Row]
    again: bool


def in_batches(
    database: Autocommit, statement: TextClause, ids: Sequence[int], values: Mapping[str, object]
) -> Iterator[Done]:
    """Execute ``statement`` for ``ids``, a batch after the other."""
    parts = deque(ids[start : start + BATCH] for start in range(0, len(ids), BATCH))
    while parts:
        part = parts.popleft()
        done = _send(database, statement, part, values, MOMENT_SEC if len(part) > 1 else LEAST_SEC)
        if done is not None:
            yield done
        elif len(part) == 1:
            yield Done(part, {}, False)
        else:
            size = -(-len(part) // PARTS)
            parts.extendleft(reversed([part[start : start + size] for start in range(0, len(part), size)]))


def alone(database: Autocommit, statement: TextClause, ids: Sequence[int]) -> Iterator[Done | int]:
    """Execute ``statement`` for each of ``ids``; the id alone of one that others hold for longer than we wait."""
    left, until = deque(ids), time.monotonic() + PATIENCE_SEC
    while left:
        id = left.popleft()
        patience = until - time.monotonic()
        done = _send(database, statement, [id], {}, max(min(patience, TURN_SEC), LEAST_SEC))
        if done is not None:
            yield done
        elif patience > 0:
            left.append(id)
        else:
            yield id


def _send(
    database: Autocommit, statement: TextClause, ids: Sequence[int], values: Mapping[str, object], wait_sec: float
) -> Done | None:
    """None: one of them is in somebody's hands, and nothing has been done."""
    wait = f"{wait_sec * 1000:.0f}"
    try:
        rows, again = database.repeat(statement, {**values, "ids": array(ids), "wait": wait})
    except DBAPIError as error:
        if sqlstate(error.orig) not in IN_HANDS:
            raise
        return None
    return Done(ids, {row[0]: row[1:] for row in rows}, again)
