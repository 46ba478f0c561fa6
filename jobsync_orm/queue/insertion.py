"""Putting jobs into the table, in a transaction of the application's.

Each call is one statement, so it is atomic even on a connection with isolation level AUTOCOMMIT, and if the process
stops right after it nothing happens that would not happen to the application's own writes.

| statement | locks | waits for |
|---|---|---|
| insert | the new rows; until the end of the transaction, the (type, idempotency_key) it takes, and against removal jobs it is to run after that have failed or were cancelled | a transaction that has written a live job of the same type and idempotency_key, or writes one of those jobs |
| existing | nothing | nothing |

Idempotency
-----------
A unique index over (type, idempotency_key) of live jobs decides. Under READ COMMITTED the insert waits for a
transaction that has just used the key; if that one is rolled back the job is new, and if it commits the job that it made
is returned. If that one has finished by then, the key is free again and the insert is repeated. Under REPEATABLE READ
and SERIALIZABLE a job that was committed after the transaction's first statement cannot be seen, nor its id be
returned: PostgreSQL refuses with SQLSTATE 40001, and the transaction is to be repeated.

Two transactions that each use two keys, in opposite order, would wait for each other; PostgreSQL ends one of them
with a deadlock (40P01) after its ``deadlock_timeout``. Use keys in the same order everywhere.

Dependencies
------------
The jobs it is to run after are looked at in the same statement. If one of them completes between that and the commit,
nobody sees that the new job waits for it; the worker's sweep finds it.
"""  # noqa: E501

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Sequence
from typing import Any

from sqlalchemy import Connection, TextClause, text

from jobsync_orm.autocommit import listed
from jobsync_orm.exceptions import JobConflict, UnknownJob
from jobsync_orm.logs import fields
from jobsync_orm.models.states import LIVE, JobState
from jobsync_orm.naming import Names
from jobsync_orm.queue.new_jobs import Enqueued
from jobsync_orm.queue.one_message import NOT_GIVEN, TYPES, PlainInsert, begins_as_usual, is_plain, is_transaction

__all__ = ["LIVE_KEY", "NOW", "TRIES", "Insertion", "cast_text", "stuck_behind", "unknown_jobs"]

logger = logging.getLogger("jobsync_orm")

NOW = "clock_timestamp()"

# How often a job that was there may be gone again when it is looked at, before that is called an error.
TRIES = 20

LIVE_KEY = f"idempotency_key IS NOT NULL AND state IN ({', '.join(repr(str(state)) for state in LIVE)})"

# Columns that are stored as they are given, and their types.
_TYPES = {**TYPES, "idempotency_key": "text"}


class Insertion:
    """The statements by which jobs of one cluster are put in."""

    def __init__(self, names: Names) -> None:
        self._names = names
        self._plain = PlainInsert(names)
        self._known: dict[tuple[str, ...], TextClause] = {}
        self._existing = text(
            f"SELECT id, state FROM {names.text('job')}"
            f" WHERE type = :type AND idempotency_key = :idempotency_key AND {LIVE_KEY}"
        )

    def one(self, connection: Connection, columns: dict[str, str]) -> Enqueued:
        """Put one job in; ``columns`` as :meth:`NewJob.columns` gives them.

        Raises
        ------
        UnknownJob
            One of the jobs it is to run after is not there.
        JobConflict
            Jobs of its type and ``idempotency_key`` come and go faster than they can be looked at.
        """
        if is_plain(connection, columns):
            return _new(self._plain.put(connection, [columns])[0])
        statement = self._statement(tuple(columns))
        for _ in range(TRIES):
            row: Sequence[Any] | None = connection.execute(statement, columns).first()
            if row is not None and len(row) > 2:
                row = self._found(row, columns)
            if row is not None:
                return Enqueued(row[0], True, JobState(row[1]), *row[2:])
            row = connection.execute(self._existing, columns).first()
            if row is not None:
                return Enqueued(row[0], False, JobState(row[1]))
        raise JobConflict(
            f"{columns['type']!r} jobs with idempotency_key={columns['idempotency_key']!r} came and went {TRIES} times "
            "while one was to be enqueued"
        )

    def alone(self, connection: Connection, columns: dict[str, str]) -> Enqueued:
        """:meth:`one` on a connection without a transaction, committed on return."""
        if is_transaction(connection, columns):
            return _new(self._plain.put(connection, [columns], alone=True)[0])
        return self.one(connection.execution_options(isolation_level="AUTOCOMMIT"), columns)

    def begun(self, connection: Connection, jobs: Sequence[dict[str, str]]) -> list[int]:
        """Put plain jobs in as part of the transaction of ``connection``, in one message where that can be; returns
        their ids."""
        if is_plain(connection, jobs[0]):
            return self._plain.put(connection, jobs)
        return [self.one(connection, columns).id for columns in jobs]

    def whole(self, connection: Connection, jobs: Sequence[dict[str, str]]) -> list[int] | None:
        """The same as a transaction of their own, committed on return; None if that cannot be done."""
        if is_transaction(connection, jobs[0]) and begins_as_usual(connection):
            return self._plain.put(connection, jobs, alone=True)
        return None

    def _found(self, row: Sequence[Any], columns: dict[str, str]) -> Sequence[Any] | None:
        id, state, unknown, stuck = row
        if unknown is not None:
            raise unknown_jobs(unknown)
        return None if id is None else (id, state, stuck_behind([id], stuck))

    def _statement(self, columns: tuple[str, ...]) -> TextClause:
        statement = self._known.get(columns)
        if statement is None:
            statement = self._known[columns] = text(self._sql(columns))
        return statement

    def values(self, columns: Iterable[str]) -> tuple[dict[str, str], str]:
        """SQL of what goes into each column, from parameters named like ``columns``; and the state if not blocked."""
        values = NOT_GIVEN | {
            name: f"CAST({cast_text(name)} AS {_TYPES[name]})"
            for name in columns
            if name not in ("run_at", "delay", "after")
        }
        state = "'pending'"
        if "key" in columns:
            values["token_id"] = f"{self._names.text('token_of')}({values['key']})"
        if "delay" in columns:
            values["run_at"] = f"{NOW} + CAST({cast_text('delay')} AS float8) * interval '1 second'"
            state = "'scheduled'"
        if "run_at" in columns:
            values["run_at"] = f"CAST({cast_text('run_at')} AS timestamptz)"
            state = f"CASE WHEN {values['run_at']} > {NOW} THEN 'scheduled' ELSE 'pending' END"
        return values, state

    def state_before(self) -> str:
        """SQL of the state of ``j``, a job that others are to run after; NULL if it is not there.

        One that has failed or was cancelled must not be pruned before those others are committed: once it is gone, it
        counts as completed.
        """
        kept = f"SELECT kept.state FROM {self._names.text('job')} kept WHERE kept.id = j.id FOR KEY SHARE"
        return f"CASE WHEN j.state IN ('failed', 'cancelled') THEN ({kept}) ELSE j.state END"

    def _sql(self, columns: tuple[str, ...]) -> str:
        job, dependency = self._names.text("job"), self._names.text("job_dependency")
        values, state = self.values(columns)
        conflict = (
            f" ON CONFLICT (type, idempotency_key) WHERE {LIVE_KEY} DO NOTHING" if "idempotency_key" in columns else ""
        )
        if "after" not in columns:
            if state != "'pending'":
                values["state"] = state
            return (
                f"INSERT INTO {job} ({', '.join(values)}) VALUES ({', '.join(values.values())}){conflict}"
                " RETURNING id, state"
            )
        values["state"] = (
            f"CASE WHEN EXISTS (SELECT 1 FROM before WHERE state <> 'completed') THEN 'blocked' ELSE {state} END"
        )
        return f"""
            WITH before AS MATERIALIZED (
                SELECT a.id, {self.state_before()} AS state FROM unnest({listed("after", "bigint")}) AS a (id)
                    LEFT JOIN {job} j ON j.id = a.id),
            new AS (
                INSERT INTO {job} ({", ".join(values)}) SELECT {", ".join(values.values())}
                WHERE NOT EXISTS (SELECT 1 FROM before WHERE state IS NULL){conflict}
                RETURNING id, state),
            waits AS (INSERT INTO {dependency} (after_id, job_id) SELECT before.id, new.id FROM before, new)
            SELECT (SELECT id FROM new), (SELECT state FROM new),
                (SELECT CAST(json_agg(id ORDER BY id) AS text) FROM before WHERE state IS NULL),
                (SELECT CAST(json_agg(id ORDER BY id) AS text) FROM before WHERE state IN ('failed', 'cancelled'))"""


def _new(id: int) -> Enqueued:
    return Enqueued(id, True, JobState.PENDING)


def unknown_jobs(ids: str) -> UnknownJob:
    """The error for jobs, a JSON array of ids, that others were to run after."""
    return UnknownJob(
        f"after: there is no job {', '.join(map(str, json.loads(ids)))} that this transaction can see; nothing has "
        "been enqueued"
    )


def stuck_behind(jobs: Sequence[int], ids: str | None) -> tuple[int, ...]:
    """The jobs, a JSON array of ids, that have failed or were cancelled while ``jobs`` were to run after them."""
    stuck: tuple[int, ...] = tuple(json.loads(ids or "[]"))
    if stuck:
        logger.warning(
            "%s to run after %s, which failed or was cancelled: blocked until that is retried and completes",
            f"job {jobs[0]} is" if len(jobs) == 1 else f"jobs {jobs[0]} to {jobs[-1]} are",
            ", ".join(map(str, stuck[:20])),
            extra=fields("job_blocked_for_good"),
        )
    return stuck


def cast_text(parameter: str) -> str:
    """SQL of a parameter that is sent as text whatever it stands for, for every driver the same."""
    return f"CAST(:{parameter} AS text)"
