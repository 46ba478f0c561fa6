"""For tests of single attempts: a job that this test has in hand, what became of it, and somebody who takes it away."""

from __future__ import annotations

import json
from typing import Any

from sqlalchemy import Engine, text

from jobsync_orm.autocommit import micros
from jobsync_orm.queue import CancelFlag, ClaimedJob, Ending, JobContext, JobQueue
from jobsync_orm.queue.execution import execute
from jobsync_orm.queue.jobs import claimed, settlement

ROW = (
    "json_build_array(id, type, priority, attempt, failures, max_retries, timeout, key, payload,"
    f" {micros('ready_at')}, {micros('created_at')})"
)


def taken(engine: Engine, job_type: str, payload: dict[str, Any] | None = None, **columns: Any) -> ClaimedJob:
    """A new job, claimed by worker ``w1``."""
    values = {"type": job_type, "payload": json.dumps(payload or {}), **columns}
    with engine.begin() as connection:
        job_id = connection.execute(
            text(
                f"INSERT INTO sync_job ({', '.join(values)}) VALUES ({', '.join(f':{name}' for name in values)})"
                " RETURNING id"
            ),
            values,
        ).scalar_one()
    return taken_again(engine, job_id)


def taken_again(engine: Engine, job_id: int, worker: str = "w1") -> ClaimedJob:
    """The same job's next attempt, whoever had the last."""
    with engine.begin() as connection:
        row = connection.execute(
            text(
                "UPDATE sync_job SET state = 'processing', attempt = attempt + 1, started_at = now(), worker = :worker,"
                " incarnation = gen_random_uuid(), deadline = now() + interval '1 hour', finished_at = NULL"
                f" WHERE id = :id RETURNING {ROW}::text"
            ),
            {"id": job_id, "worker": worker},
        ).scalar_one()
    (job,) = claimed(f"[{row}]")
    return job


def run(queue: JobQueue, job: ClaimedJob, flag: CancelFlag | None = None) -> Ending:
    """How this attempt at ``job`` ends, in this thread."""
    return execute(queue, queue.handlers[job.type], job, JobContext(queue, job, "w1", flag or CancelFlag()))


def settle(engine: Engine, queue: JobQueue, *endings: Ending) -> list[Any]:
    """Write endings as a worker does. What was written: [id, attempt, state] of each."""
    parameters = settlement(endings, max(ending.ended_at for ending in endings))
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        cursor = connection.connection.dbapi_connection.cursor()  # type: ignore[union-attr]
        names = [f"%({n})s" for n in range(1, len(parameters) + 1)]
        statement = queue.statements.settle
        for n in range(len(names), 0, -1):
            statement = statement.replace(f"${n}::", f"{names[n - 1]}::")
        cursor.execute(statement, {str(n): value for n, value in enumerate(parameters, 1)})
        written, _ = cursor.fetchone()
    return list(written)


def stored(engine: Engine, job_id: int) -> dict[str, Any]:
    """The job's row."""
    with engine.connect() as connection:
        return dict(connection.execute(text("SELECT * FROM sync_job WHERE id = :id"), {"id": job_id}).mappings().one())


def attempts(engine: Engine, job_id: int) -> list[dict[str, Any]]:
    """The rows of the job's attempts that have ended."""
    with engine.connect() as connection:
        rows = connection.execute(
            text("SELECT * FROM sync_job_attempt WHERE job_id = :id ORDER BY attempt"), {"id": job_id}
        )
        return [dict(row) for row in rows.mappings()]
