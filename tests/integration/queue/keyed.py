"""Jobs with keys, nodes and queue workers as rows, and somebody who claims as a worker does."""

from __future__ import annotations

import json
import os
import time
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import psycopg
from sqlalchemy import Engine

from jobsync_orm.coordinator.session import Session, array
from jobsync_orm.models.states import AttemptOutcome, JobState
from jobsync_orm.naming import Names
from jobsync_orm.queue.jobs import ClaimedJob, Ending, claimed, settlement
from jobsync_orm.queue.statements import SESSION, QueueStatements

BEGINNING = -(10**15)  # microseconds: before any row


@dataclass(frozen=True)
class Heads:
    """The answer of ``heads``."""

    jobs: list[ClaimedJob]
    left: dict[str, str]
    waits: dict[str, float | None]
    more: dict[str, list[Any]]


class Claimer:
    """A node's session on the queue."""

    def __init__(self, engine: Engine, name: str, incarnation: str | None, types: Sequence[str]) -> None:
        self.name = name
        self.incarnation = incarnation
        self.types = list(types)
        self.affinity = True
        self.sql = QueueStatements(Names())
        self._wake, self._wake_end = os.pipe()
        self.session = Session(engine.pool, self._wake, lambda _: None, 1.0, SESSION)
        self.session.open()

    def close(self) -> None:
        self.session.close()
        os.close(self._wake)
        os.close(self._wake_end)

    def _execute(self, sql: str, *more: Any) -> tuple[Any, ...]:
        whose = (self.name, self.incarnation, array(self.types), self.affinity)
        (row,) = self.session.execute(sql, *whose, *more, timeout=20)
        return row

    def heads(self, *keys: str) -> Heads:
        unsaid = array(None for _ in self.types)
        jobs, left, more = self._execute(self.sql.heads, array(keys), unsaid, unsaid, unsaid)
        rows = json.loads(left)
        return Heads(
            claimed(jobs),
            {row[0]: row[1] for row in rows},
            {row[0]: row[2] for row in rows},
            {row[0]: row[1:] for row in json.loads(more)},
        )

    def discover(
        self, lanes: Iterable[tuple[int, int, int]] = ((0, BEGINNING, 0),), most: int = 100
    ) -> tuple[list[Any], list[Any]]:
        lanes = list(lanes)
        columns = [array(lane[n] for lane in lanes) for n in range(3)]
        marks, keys = self._execute(self.sql.discover, *columns, array(most for _ in lanes))
        return json.loads(marks), json.loads(keys)

    def lines(self, after: str = "", most: int = 100) -> tuple[list[Any], str | None]:
        keys, last = self._execute(self.sql.lines, after, most)
        return json.loads(keys), last

    def settle(self, job: ClaimedJob, state: str = "completed", delay: float | None = None) -> list[Any]:
        """Write that the attempt has ended so. Returns what was written: nothing if it is not its own."""
        now = time.monotonic()
        outcome = AttemptOutcome.COMPLETED if state == "completed" else AttemptOutcome.FAILED
        ending = Ending(job.id, job.attempt, outcome, JobState(state), now, now, delay=delay)
        ((written, _),) = self.session.execute(self.sql.settle, *settlement([ending], now), timeout=20)
        return list(json.loads(written or "[]"))


class Board:
    """What a test writes directly."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.connection: psycopg.Connection[Any] = psycopg.connect(
            engine.url.set(drivername="postgresql").render_as_string(hide_password=False), autocommit=True
        )
        self.claimers: list[Claimer] = []

    def close(self) -> None:
        for claimer in self.claimers:
            claimer.close()
        self.connection.close()

    def clear(self) -> None:
        """No jobs, no nodes, and every token without an owner."""
        self.connection.execute("TRUNCATE sync_job, sync_job_attempt, sync_job_worker, sync_lock, sync_node")
        self.connection.execute(
            "UPDATE sync_token SET node = NULL, next_node = NULL, next_epoch = NULL WHERE node <> ''"
        )

    def execute(self, sql: str, *values: Any) -> list[tuple[Any, ...]]:
        cursor = self.connection.execute(sql, values or None)
        return cursor.fetchall() if cursor.description else []

    def claimer(self, name: str, *types: str, works: bool = True, tokens: str | None = None) -> Claimer:
        """A live node, and, if it ``works``, a queue worker. ``tokens`` is a condition: which are its own."""
        incarnation = str(uuid.uuid4())
        self.execute(
            "INSERT INTO sync_node (name, incarnation, state) VALUES (%s, %s, 'active') ON CONFLICT (name) DO UPDATE"
            " SET incarnation = excluded.incarnation",
            name, incarnation,
        )  # fmt: skip
        if works:
            self.execute(
                "INSERT INTO sync_job_worker (node, incarnation, types, concurrency) VALUES (%s, %s, %s, 8)",
                name, incarnation, list(types or ["t"]),
            )  # fmt: skip
        if tokens:
            self.connection.execute(f"UPDATE sync_token SET node = %s WHERE {tokens}", (name,))
        claimer = Claimer(self.engine, name, incarnation, types or ["t"])
        self.claimers.append(claimer)
        return claimer

    def add(self, key: str, *, type: str = "t", state: str = "pending", on: Any = None, **columns: Any) -> int:
        """One job; ``on`` is the connection to write it on."""
        columns = {"type": type, "state": state, "key": key, **columns}
        names = ", ".join(columns)
        marks = ", ".join(["%s"] * len(columns))
        row = (on or self.connection).execute(
            f"INSERT INTO sync_job ({names}, token_id) VALUES ({marks}, sync_token_of(%s)) RETURNING id",
            (*columns.values(), key),
        ).fetchone()  # fmt: skip
        return int(row[0])

    def state(self, job: int) -> str:
        ((state,),) = self.execute("SELECT state FROM sync_job WHERE id = %s", job)
        return str(state)

    def owner(self, key: str, node: str | None, next_node: str | None = None) -> None:
        self.execute(
            "UPDATE sync_token SET node = %s, next_node = %s WHERE token_id = sync_token_of(%s)", node, next_node, key
        )

    def pin(self, key: str, *patterns: str) -> None:
        self.execute(
            "INSERT INTO sync_lock (task_id, token_id, node_patterns, created_by)"
            " VALUES (%s, sync_token_of(%s), %s, 'x')",
            key, key, json.dumps(patterns),
        )  # fmt: skip
