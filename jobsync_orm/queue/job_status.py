"""One job, with all that is known of it."""

from __future__ import annotations

import datetime
import json
from dataclasses import dataclass, fields
from typing import Any

from sqlalchemy import text

from jobsync_orm.autocommit import Autocommit
from jobsync_orm.models.queue import IN_LINE
from jobsync_orm.models.states import LIVE, AttemptOutcome, JobState
from jobsync_orm.naming import Names

__all__ = ["AttemptStatus", "JobStatus", "StatusReader"]

# So many jobs before another are counted.
AHEAD_UP_TO = 1000


@dataclass(frozen=True, slots=True)
class AttemptStatus:
    """One attempt that has ended. Times are the database's."""

    attempt: int
    outcome: AttemptOutcome
    started_at: datetime.datetime
    ended_at: datetime.datetime
    worker: str | None
    error: str | None
    traceback: str | None


@dataclass(frozen=True, slots=True)
class JobStatus:
    """One job, at one moment. Times are the database's.

    Attributes
    ----------
    id, type, state, priority, key, idempotency_key, payload, result
        As enqueued, and as far as it has come.
    error : str or None
        Of the last attempt, if it failed.
    attempt : int
        Number of the last attempt, or of the one under way.
    failures, max_retries : int
        Attempts that have failed, and after how many retries it is not tried again.
    created_at, ready_at : datetime
        When it was enqueued, and when it last became ready.
    run_at : datetime or None
        When it becomes ready, if it is scheduled or backs off.
    started_at, finished_at, deadline : datetime or None
        When the last attempt began; when it finished; until when the worker that has it may keep it.
    worker : str or None
        The worker that has it or had it last.
    cancel_requested : bool
        Whether that worker has been told to stop.
    waits_for : tuple[int, ...]
        Of the jobs it was enqueued ``after``, those that have not completed.
    ahead : int or None
        Of a job that is ready: how many go before it, up to 1,000. Of a job with a key these are those of its key;
        without one, those of its type and priority.
    workers : int or None
        Of a job that has not finished: how many live workers run jobs of its type. With 0 it stays where it is, unless
        somebody's own loop takes it: is the type spelled right?
    attempts : tuple[AttemptStatus, ...]
        All that have ended, first to last.
    """

    id: int
    type: str
    state: JobState
    priority: int
    key: str | None
    idempotency_key: str | None
    payload: Any
    result: Any
    error: str | None
    attempt: int
    failures: int
    max_retries: int
    created_at: datetime.datetime
    ready_at: datetime.datetime
    run_at: datetime.datetime | None
    started_at: datetime.datetime | None
    finished_at: datetime.datetime | None
    deadline: datetime.datetime | None
    worker: str | None
    cancel_requested: bool
    waits_for: tuple[int, ...]
    ahead: int | None
    workers: int | None
    attempts: tuple[AttemptStatus, ...]


# As the statement returns them.
COLUMNS = tuple(field.name for field in fields(JobStatus) if field.name != "attempts")


class StatusReader:
    """Reads jobs of one cluster's queue. One statement each, which locks nothing."""

    def __init__(self, names: Names) -> None:
        job, attempt, dependency = names.text("job"), names.text("job_attempt"), names.text("job_dependency")

        def before(condition: str) -> str:
            return f"SELECT count(*) FROM (SELECT 1 FROM {job} a WHERE {condition} LIMIT {AHEAD_UP_TO}) AS before"

        live = ", ".join(repr(str(state)) for state in LIVE)
        in_line = f"{IN_LINE} AND a.key = j.key AND a.id < j.id"
        in_lane = """a.state = 'pending' AND a.key IS NULL AND a.type = j.type AND a.priority = j.priority
            AND (a.ready_at, a.id) < (j.ready_at, j.id)"""
        self._read = text(f"""
            SELECT id, type, state, priority, key, idempotency_key, CAST(payload AS text), CAST(result AS text), error,
                attempt, failures, max_retries, created_at, ready_at,
                CASE WHEN state IN ('scheduled', 'retrying', 'blocked') THEN run_at END, started_at, finished_at,
                deadline, worker, cancel_requested,
                (SELECT coalesce(CAST(json_agg(d.after_id ORDER BY d.after_id) AS text), '[]') FROM {dependency} d
                    JOIN {job} a ON a.id = d.after_id WHERE d.job_id = j.id AND a.state <> 'completed'),
                CASE WHEN state <> 'pending' THEN NULL WHEN key IS NULL THEN ({before(in_lane)})
                    ELSE ({before(in_line)}) END,
                CASE WHEN state IN ({live}) THEN (
                    SELECT count(*) FROM {names.text("job_worker")} w JOIN {names.text("node")} n
                        ON n.name = w.node AND n.incarnation = w.incarnation AND n.state <> 'away'
                    WHERE j.type = ANY (w.types)) END
            FROM {job} j WHERE id = :id""")
        self._attempts = text(f"""
            SELECT attempt, outcome, started_at, ended_at, worker, error, traceback FROM {attempt}
            WHERE job_id = :id ORDER BY attempt""")

    def read(self, database: Autocommit, id: int) -> JobStatus | None:
        """The job, or None if there is none."""
        rows = database.repeat(self._read, {"id": id})[0]
        if not rows:
            return None
        values = dict(zip(COLUMNS, rows[0], strict=True))
        attempts = tuple(
            AttemptStatus(number, AttemptOutcome(outcome), *values)
            for number, outcome, *values in database.repeat(self._attempts, {"id": id})[0]
        )
        for column in ("payload", "result", "waits_for"):
            values[column] = None if values[column] is None else json.loads(values[column])
        values |= {"state": JobState(values["state"]), "waits_for": tuple(values["waits_for"]), "attempts": attempts}
        return JobStatus(**values)
