"""How attempts end, and whether they are still under way. See :mod:`jobsync_orm.queue.statements`."""

from __future__ import annotations

from sqlalchemy import text

from jobsync_orm.queue.statements.parts import DEADLINE_SLACK_SEC, NOW, Parts

__all__ = ["Ending"]


class Ending:
    """See :class:`~jobsync_orm.queue.statements.QueueStatements`."""

    def __init__(self, parts: Parts) -> None:
        job, attempt, dependency = parts.job, parts.attempt, parts.dependency
        names = parts.names

        # Arrays, one element per ended attempt: $1 ids, $2 attempts, $3 outcomes, $4 states the jobs go to, $5 results
        # (JSON or NULL), $6 errors, $7 tracebacks, $8 seconds until they are ready again (NULL where not), $9 whether
        # the attempt counts as a failure, $10 and $11 how many seconds ago it began and ended, $12 the moment at which
        # they are ready again, in seconds since 1970 (instead of $8). A job that was to be cancelled goes nowhere but
        # to its end. Returned: [id, attempt, state] of what was written, and the jobs that wait for one of the
        # completed.
        # The row is found by its id: "state = 'processing'" would make the planner take another index.
        self.settle = f"""
            WITH ended AS (
                SELECT * FROM unnest($1::bigint[], $2::int[], $3::text[], $4::text[], $5::jsonb[], $6::text[],
                    $7::text[], $8::float8[], $9::bool[], $10::float8[], $11::float8[], $12::float8[])
                    AS e (id, attempt, outcome, state, result, error, traceback, delay, counts, began, ended, until)
                ORDER BY id),
            mine AS (
                SELECT j.ctid AS tid, e.* FROM ended e CROSS JOIN LATERAL (
                    SELECT ctid FROM {job} j WHERE j.id = e.id AND j.attempt = e.attempt AND j.deadline IS NOT NULL
                    FOR UPDATE SKIP LOCKED) j),
            written AS (
                UPDATE {job} j SET
                    state = CASE WHEN j.cancel_requested AND m.state <> 'completed' THEN 'cancelled' ELSE m.state END,
                    result = m.result, error = m.error, failures = j.failures + m.counts::int,
                    finished_at = CASE WHEN m.state IN ('completed', 'failed', 'cancelled') OR j.cancel_requested
                        THEN {NOW} END,
                    run_at = coalesce(to_timestamp(m.until), {NOW} + m.delay * interval '1 second', j.run_at),
                    incarnation = NULL, deadline = NULL
                FROM mine m WHERE j.ctid = m.tid
                RETURNING j.id, j.attempt, j.state, j.worker, m.outcome, m.error, m.traceback, m.began, m.ended),
            attempts AS (
                INSERT INTO {attempt} (job_id, attempt, worker, started_at, ended_at, outcome, error, traceback)
                SELECT id, attempt, worker, {NOW} - began * interval '1 second', {NOW} - ended * interval '1 second',
                    outcome, error, traceback FROM written)
            SELECT coalesce(json_agg(json_build_array(id, attempt, state)), '[]'),
                (SELECT coalesce(json_agg(DISTINCT d.job_id), '[]') FROM written w
                    JOIN {dependency} d ON d.after_id = w.id WHERE w.state = 'completed')
            FROM written"""

        # The same of one attempt that has completed, for the transaction of its handler (see same_transaction). The row
        # may be locked for a moment by somebody who cancels the job or extends its lease: that is waited for, because
        # a row passed over would look like a lost one. Returned: a row if it was written, with the waiting jobs.
        job_, attempt_, dependency_ = names.text("job"), names.text("job_attempt"), names.text("job_dependency")
        self.settle_one = text(f"""
            WITH written AS (
                UPDATE {job_} SET state = 'completed', result = CAST(CAST(:result AS text) AS jsonb),
                    error = CAST(:error AS text), finished_at = {NOW}, incarnation = NULL, deadline = NULL
                WHERE id = CAST(:id AS bigint) AND attempt = CAST(:attempt AS int) AND deadline IS NOT NULL
                RETURNING id, attempt, worker, error),
            attempts AS (
                INSERT INTO {attempt_} (job_id, attempt, worker, started_at, ended_at, outcome, error)
                SELECT id, attempt, worker, {NOW} - CAST(:took AS float8) * interval '1 second', {NOW}, 'completed',
                    error FROM written)
            SELECT ARRAY(SELECT d.job_id FROM {dependency_} d WHERE d.after_id = written.id) FROM written""")

        # A running attempt may take so many seconds from now. Returned: a row if it is still the job's attempt, and
        # whether the job is to be cancelled.
        self.extend = text(f"""
            UPDATE {job_} SET
                deadline = {NOW} + (CAST(:seconds AS float8) + {DEADLINE_SLACK_SEC}) * interval '1 second'
            WHERE id = CAST(:id AS bigint) AND attempt = CAST(:attempt AS int) AND deadline IS NOT NULL
            RETURNING cancel_requested""")

        # Of attempts whose settling changed nothing, $1 ids and $2 attempts: [id, attempt, whether the attempt is still
        # under way, its outcome if that is written].
        self.lost = f"""
            SELECT coalesce(json_agg(json_build_array(e.id, e.attempt, j.id IS NOT NULL, a.outcome)), '[]')
            FROM unnest($1::bigint[], $2::int[]) AS e (id, attempt)
            LEFT JOIN {job} j ON j.id = e.id AND j.attempt = e.attempt AND j.deadline IS NOT NULL
            LEFT JOIN {attempt} a ON a.job_id = e.id AND a.attempt = e.attempt"""
