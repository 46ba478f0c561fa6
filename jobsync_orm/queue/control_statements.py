"""The SQL of :mod:`jobsync_orm.queue.control`, which says what each locks."""

from __future__ import annotations

from collections.abc import Iterable

from sqlalchemy import TextClause, text

from jobsync_orm.autocommit import listed
from jobsync_orm.coordinator.statements import CONTROL
from jobsync_orm.models.states import LIVE, JobState
from jobsync_orm.naming import Names

__all__ = ["BATCH", "RETRIABLE", "ControlStatements"]

# Rows that one statement of the *_many forms changes at most.
BATCH = 1000

WAITING = tuple(state for state in LIVE if state is not JobState.PROCESSING)
RETRIABLE = (JobState.FAILED, JobState.CANCELLED, JobState.RETRYING)


def among(states: Iterable[JobState]) -> str:
    return f"({', '.join(repr(str(state)) for state in states)})"


class ControlStatements:
    """The statements of one cluster."""

    def __init__(self, names: Names) -> None:
        job, dependency, pause = names.text("job"), names.text("job_dependency"), names.text("job_pause")
        control = f"pg_notify('{names.queue_channel}', '{CONTROL}')".replace(":", r"\:")
        # No payload: what workers are to look at is everything.
        everything = f"pg_notify('{names.queue_channel}', '')"
        now = "clock_timestamp()"

        def one(change: str, when: str) -> TextClause:
            """Change job ``:id``, locked as ``seen``, if ``when``; answers its state before, after, and what it is."""
            return text(f"""
                WITH seen AS MATERIALIZED (
                    SELECT id, state, cancel_requested FROM {job} WHERE id = :id FOR UPDATE),
                changed AS (
                    UPDATE {job} j SET {change} FROM seen WHERE j.id = seen.id AND {when}
                    RETURNING j.id, j.state, j.type, j.priority, j.key IS NOT NULL AS keyed)
                SELECT seen.state, changed.state, CASE WHEN changed.id IS NOT NULL THEN {control} END,
                    CASE WHEN changed.state = 'pending' THEN pg_notify('{names.queue_channel}',
                        json_build_array(json_build_array(changed.type, changed.priority, changed.keyed))::text) END
                FROM seen LEFT JOIN changed ON true""")

        cancelling = f"""
            state = CASE j.state WHEN 'processing' THEN j.state ELSE 'cancelled' END,
            cancel_requested = j.state = 'processing',
            finished_at = CASE j.state WHEN 'processing' THEN NULL ELSE {now} END"""
        self.cancel = one(cancelling, f"seen.state IN {among(LIVE)} AND NOT seen.cancel_requested")

        # A job cancelled while it was blocked waits again for what it waited for.
        retrying = f"""
            state = CASE WHEN EXISTS (SELECT 1 FROM {dependency} d JOIN {job} a ON a.id = d.after_id
                WHERE d.job_id = j.id AND a.state <> 'completed') THEN 'blocked' ELSE 'pending' END,
            failures = 0, cancel_requested = false, error = NULL, result = NULL, finished_at = NULL, run_at = NULL,
            ready_at = {now}"""
        self.retry = one(retrying, f"seen.state IN {among(RETRIABLE)}")
        self.holder = text(f"""
            SELECT a.id, a.state, a.type, a.idempotency_key FROM {job} j JOIN {job} a
                ON a.type = j.type AND a.idempotency_key = j.idempotency_key AND a.id <> j.id
                    AND a.idempotency_key IS NOT NULL AND a.state IN {among(LIVE)}
            WHERE j.id = :id""")

        self.reprioritise = one("priority = :priority", f"seen.state IN {among(WAITING)}")

        # Up to so many jobs after :after, of those that were there when the call began.
        fitting = f"""id > :after AND id <= :last AND state = ANY ({listed("states", "text")})
                AND (CAST(:type AS text) IS NULL OR type = :type)"""
        chosen = f"SELECT id, state FROM {job} WHERE {fitting} ORDER BY id LIMIT {BATCH} FOR UPDATE SKIP LOCKED"
        self.newest = text(f"SELECT max(id) FROM {job}")
        cancelled = f"""
            changed AS (
                UPDATE {job} j SET {cancelling} FROM picked
                WHERE j.id = picked.id AND NOT j.cancel_requested AND picked.state IN {among(LIVE)}
                RETURNING j.id, j.state)"""
        self.cancel_many = text(f"""
            WITH picked AS MATERIALIZED ({chosen}), {cancelled}
            SELECT (SELECT count(*) FROM picked), (SELECT max(id) FROM picked), (SELECT count(*) FROM changed),
                (SELECT {control} FROM changed LIMIT 1)""")

        # Of several with one idempotency key the oldest; none if there is a live one.
        def retried(of: str = "true") -> str:
            return f"""
            free AS (
                SELECT DISTINCT ON (p.type, coalesce(p.idempotency_key, p.id::text), p.idempotency_key IS NULL) p.id
                FROM picked p
                WHERE p.state IN {among(RETRIABLE)} AND {of} AND (p.idempotency_key IS NULL OR NOT EXISTS (
                    SELECT 1 FROM {job} a
                    WHERE a.type = p.type AND a.idempotency_key = p.idempotency_key AND a.idempotency_key IS NOT NULL
                        AND a.state IN {among(LIVE)} AND a.id <> p.id))
                ORDER BY p.type, coalesce(p.idempotency_key, p.id::text), p.idempotency_key IS NULL, p.id),
            changed AS (UPDATE {job} j SET {retrying} FROM free WHERE j.id = free.id RETURNING j.id, j.state)"""

        # Which jobs these are, for the statement below.
        self.page = text(f"SELECT id FROM {job} WHERE {fitting} ORDER BY id LIMIT {10 * BATCH}")

        # The same for the jobs :ids, and no wait for a lock of theirs takes longer than :wait ms; the one that all who
        # notify take at their commit is waited for as ever. Returned of each that is there and that nobody else has
        # locked: its state before, and after if it was changed.
        bound = """
            bound AS MATERIALIZED (
                SELECT current_setting('lock_timeout') AS before,
                    set_config('lock_timeout', CAST(:wait AS text), true))"""
        named = f"""
            SELECT j.id, j.type, j.idempotency_key, j.state FROM bound, {job} j
            WHERE j.id = ANY ({listed("ids", "bigint")})"""
        in_order = "ORDER BY j.id FOR UPDATE OF j"
        each = """
            SELECT p.id, p.state, c.state, p.type, p.idempotency_key, (SELECT %s FROM changed LIMIT 1),
                (SELECT set_config('lock_timeout', bound.before, true)
                    FROM bound, (SELECT count(*) FROM changed) AS all_of_them)
            FROM picked p LEFT JOIN changed c ON c.id = p.id"""

        def of_each(picked: str, changed: str, tell: str) -> TextClause:
            return text(f"WITH {bound}, picked AS MATERIALIZED ({picked}), {changed} {each % tell}")

        self.cancel_each = of_each(f"{named} {in_order} SKIP LOCKED", cancelled, control)
        self.retry_each = of_each(f"{named} {in_order} SKIP LOCKED", retried(), everything)
        # Not where the jobs are read: the planner would take a state's share of them for a handful.
        of_states = f"p.state = ANY ({listed('states', 'text')})"
        self.retry_many = of_each(f"{named} {in_order} SKIP LOCKED", retried(of_states), everything)
        # Of a single job, which is waited for.
        self.cancel_waiting = of_each(f"{named} {in_order}", cancelled, control)
        self.retry_waiting = of_each(f"{named} {in_order}", retried(), everything)

        self.pause = text(f"""
            WITH put AS (
                INSERT INTO {pause} AS p (type, reason) VALUES (:type, :reason)
                ON CONFLICT (type) DO UPDATE SET reason = excluded.reason RETURNING 1)
            SELECT {control} FROM put""")
        self.resume = text(
            f"WITH gone AS (DELETE FROM {pause} WHERE type = :type RETURNING 1) SELECT {control} FROM gone"
        )
        self.paused = text(f"SELECT type, since, reason FROM {pause} ORDER BY type")
