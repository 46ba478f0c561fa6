"""Periodic jobs: declared, looked at, and fired. See :mod:`jobsync_orm.queue.statements`."""

from __future__ import annotations

from jobsync_orm.autocommit import instant, micros
from jobsync_orm.models.states import LIVE
from jobsync_orm.queue.statements.parts import NOW, Parts

__all__ = ["Firing"]


class Firing:
    """See :class:`~jobsync_orm.queue.statements.QueueStatements`."""

    def __init__(self, parts: Parts) -> None:
        job = parts.job
        names = parts.names

        # $1 names, $2 types, $3 expressions, $4 time zones. One that was not there, or has another expression or time
        # zone, begins now.
        schedule = names.sql("job_schedule")
        self.declare = f"""
            INSERT INTO {schedule} AS s (name, type, cron, timezone, fired_until)
            SELECT name, type, cron, timezone, {NOW}
                FROM unnest($1::text[], $2::text[], $3::text[], $4::text[]) AS d (name, type, cron, timezone)
                ORDER BY name
            ON CONFLICT (name) DO UPDATE SET type = excluded.type, cron = excluded.cron, timezone = excluded.timezone,
                fired_until = CASE WHEN (s.cron, s.timezone) = (excluded.cron, excluded.timezone)
                    THEN s.fired_until ELSE excluded.fired_until END
            WHERE (s.type, s.cron, s.timezone) <> (excluded.type, excluded.cron, excluded.timezone)"""

        # $1 names. Returned: the time, and [name, type, expression, time zone, fired until] of those that are there.
        self.schedules = f"""
            SELECT {micros(NOW)}, coalesce(json_agg(json_build_array(
                name, type, cron, timezone, {micros("fired_until")})), '[]')
            FROM {schedule} WHERE name = ANY ($1::text[])"""

        # $1 to $5: the row as it was seen (name, type, expression, time zone, fired until), $6 until when it is fired
        # now. Jobs to insert: $7 payloads, $8 idempotency keys; $9 priority, $10 key, $11 max_retries, $12 timeout,
        # $13 retry_blocks_key. $14 and $15: channel and payload of the notification that wakes the workers. $16 and
        # $17: whether max_retries and timeout are the schedule's own. Returned: how many rows it was, and the ids of
        # the jobs. A job that is there already under its idempotency key is looked for first, because ON CONFLICT alone
        # would wait for whoever is just ending it. Where a trigger of somebody's suppresses the UPDATE, the division by
        # zero undoes the INSERT: else the tick would be fired again at each turn.
        live = f"state IN ({', '.join(repr(str(state)) for state in LIVE)})"
        self.fire = f"""
            WITH seen AS (
                SELECT ctid FROM {schedule} WHERE name = $1::text AND type = $2::text AND cron = $3::text
                    AND timezone = $4::text AND fired_until = {instant("$5::bigint")} FOR UPDATE SKIP LOCKED),
            inserted AS (
                INSERT INTO {job} (type, payload, idempotency_key, priority, key, token_id, max_retries, timeout,
                    retry_blocks_key, max_retries_given, timeout_given)
                SELECT $2::text, f.payload, f.idempotency_key, $9::int, $10::text,
                        CASE WHEN $10::text IS NOT NULL THEN {names.sql("token_of")}($10::text) END,
                        $11::int, $12::float8, $13::bool, $16::bool, $17::bool
                    FROM seen, unnest($7::jsonb[], $8::text[]) WITH ORDINALITY AS f (payload, idempotency_key, n)
                    WHERE NOT EXISTS (SELECT 1 FROM {job} j WHERE j.type = $2::text
                        AND j.idempotency_key = f.idempotency_key AND j.{live})
                    ORDER BY n
                ON CONFLICT (type, idempotency_key) WHERE idempotency_key IS NOT NULL AND {live} DO NOTHING
                RETURNING id),
            fired AS (
                UPDATE {schedule} SET fired_until = {instant("$6::bigint")},
                    last_job_id = coalesce((SELECT max(id) FROM inserted), last_job_id)
                WHERE ctid = ANY (ARRAY(SELECT ctid FROM seen)) RETURNING 1)
            SELECT CASE WHEN EXISTS (SELECT 1 FROM inserted) THEN 1 / (SELECT count(*) FROM fired)
                    ELSE (SELECT count(*) FROM fired) END,
                (SELECT coalesce(json_agg(id ORDER BY id), '[]') FROM inserted),
                (SELECT pg_notify($14::text, $15::text) FROM inserted LIMIT 1)"""
