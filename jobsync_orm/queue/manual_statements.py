"""The SQL of :mod:`jobsync_orm.queue.manual`, which says what each locks."""

from __future__ import annotations

from sqlalchemy import text

from jobsync_orm.naming import Names
from jobsync_orm.queue.statements import QueueStatements
from jobsync_orm.queue.taking import named

__all__ = ["ManualStatements"]


class ManualStatements:
    """The statements of one cluster."""

    def __init__(self, names: Names, statements: QueueStatements) -> None:
        job, attempt, dependency = names.text("job"), names.text("job_attempt"), names.text("job_dependency")
        now = "clock_timestamp()"

        def waiting(row: str) -> str:
            return f"ARRAY(SELECT d.job_id FROM {dependency} d WHERE d.after_id = {row}.id)"

        self.dequeue = named(statements.dequeue)
        self.promote = named(statements.promote)
        self.unblock = named(statements.unblock)
        self.stale = named(statements.stale)
        # Returned: the job's state, and the jobs that wait for it; no row if the attempt is over.
        self.end = text(f"""
            WITH written AS (
                UPDATE {job} SET
                    state = CASE WHEN cancel_requested AND :state <> 'completed' THEN 'cancelled'
                        ELSE CAST(:state AS text) END,
                    result = CAST(CAST(:result AS text) AS jsonb), error = CAST(:error AS text),
                    failures = failures + CAST(:counts AS int),
                    finished_at = CASE WHEN :state IN ('completed', 'failed') OR cancel_requested THEN {now} END,
                    run_at = coalesce({now} + CAST(:delay AS float8) * interval '1 second', run_at),
                    incarnation = NULL, deadline = NULL
                WHERE id = CAST(:id AS bigint) AND attempt = CAST(:attempt AS int) AND deadline IS NOT NULL
                RETURNING id, attempt, worker, started_at, state),
            attempts AS (
                INSERT INTO {attempt} (job_id, attempt, worker, started_at, outcome, error, traceback)
                SELECT id, attempt, worker, started_at, CAST(:outcome AS text), CAST(:error AS text),
                    CAST(:traceback AS text) FROM written)
            SELECT state, {waiting("written")} FROM written""")
        # The same of an attempt that has ended so.
        self.ended = text(f"""
            SELECT j.state, {waiting("j")} FROM {job} j JOIN {attempt} a ON a.job_id = j.id
            WHERE a.job_id = :id AND a.attempt = :attempt AND a.outcome = :outcome""")
