"""Taking jobs, and what has been taken; where there are jobs without a key. See :mod:`jobsync_orm.queue.statements`."""

from __future__ import annotations

from jobsync_orm.autocommit import instant, micros
from jobsync_orm.models.queue import IN_LINE
from jobsync_orm.queue.statements.parts import NOW, Parts

__all__ = ["Claiming"]

# So many keys ``dequeue`` looks at in one statement.
KEYS_AT_ONCE = 200


class Claiming:
    """See :class:`~jobsync_orm.queue.statements.QueueStatements`."""

    def __init__(self, parts: Parts) -> None:
        job, node, pause = parts.job, parts.node, parts.pause
        row, beyond, collected = parts.row, parts.beyond, parts.collected
        take, with_options = parts.take, parts.with_options

        # $1 types, $2 priorities, $3 marks as microseconds since 1970, $4 ids of the marks, $5 how many jobs at most:
        # one lane each, the most urgent first. $6 how many in all, $7 node, $8 its incarnation. $9, $10, $11: what the
        # handler of each lane says of max_retries, timeout, and whether a retry blocks the key. A mark is the last row
        # claimed of a lane: nothing before it is looked at, so that entries which a vacuum cannot remove yet are not
        # stepped over again.
        # A node that is no member any more takes nothing.
        self.claim = f"""
            WITH lane AS (
                SELECT l.* FROM unnest($1::text[], $2::int[], $3::bigint[], $4::bigint[], $5::int[],
                        $9::int[], $10::float8[], $11::bool[])
                    WITH ORDINALITY AS l (type, priority, at, id, most, max_retries, timeout, blocks, n)
                WHERE EXISTS (SELECT 1 FROM {node} WHERE name = $7::text AND incarnation = $8::uuid AND state <> 'away')
                ORDER BY n),
            picked AS (
                SELECT j.ctid AS tid, lane.max_retries, lane.timeout, lane.blocks FROM lane CROSS JOIN LATERAL (
                    SELECT ctid FROM {job} j WHERE j.state = 'pending' AND j.key IS NULL
                        AND j.type = lane.type AND j.priority = lane.priority
                        AND (j.ready_at, j.id) > ({instant("lane.at")}, lane.id)
                    ORDER BY j.ready_at, j.id LIMIT lane.most FOR UPDATE SKIP LOCKED) j
                LIMIT $6::int),
            taken AS ({take("picked", "$7::text", "$8::uuid")})
            {collected("taken")}"""

        # For those who run their own loop (see manual.py): $1 types, $2 how many at most, $3 worker, $4 seconds that
        # weigh as much as a point of priority, $5 whether to look at jobs with a key too, $6 the key after which to
        # begin. $7, $8, $9: what the handler of each type says, as for claim, if this process knows one. Of what is not
        # paused: each lane, from its head, and the first in line of each key that has none under way. The most urgent
        # first. Such an attempt is no node's: it has no incarnation, and ends by its deadline only. Returned: the jobs
        # claimed, and the last of the keys looked at (NULL if there are no more).
        unkeyed = "j.state = 'pending' AND j.key IS NULL"

        def first_of(type: str) -> str:
            return (
                f"SELECT j.type, j.priority, j.ready_at FROM {job} j WHERE {unkeyed} AND j.type = {type}"
                " ORDER BY j.type, j.priority, j.ready_at, j.id LIMIT 1"
            )

        def next_key(bound: str) -> str:
            return (
                f"SELECT j.key, j.id, j.type, j.state, j.priority, j.ready_at FROM {job} j"
                f" WHERE {IN_LINE} AND j.key {bound} ORDER BY j.key, j.id LIMIT 1"
            )

        # Not a timestamp: a priority may be any integer, and lead to a year that no timestamp has.
        urgency = "extract(epoch FROM ready_at)::float8 - priority * $4::float8"
        self.dequeue = f"""
            WITH RECURSIVE allowed AS MATERIALIZED (
                SELECT DISTINCT t.type FROM unnest($1::text[]) AS t (type)
                WHERE NOT EXISTS (SELECT 1 FROM {pause} p WHERE p.type IN ('', t.type))),
            lane AS (
                SELECT h.* FROM allowed a CROSS JOIN LATERAL ({first_of("a.type")}) h
                UNION ALL
                SELECT h.* FROM lane l CROSS JOIN LATERAL ({first_of("l.type AND j.priority > l.priority")}) h),
            line AS (
                SELECT h.*, 1 AS n FROM ({next_key(beyond("$6::text"))}) h WHERE $5::bool
                UNION ALL
                SELECT h.*, l.n + 1 FROM line l CROSS JOIN LATERAL ({next_key("> l.key")}) h
                WHERE l.n < {KEYS_AT_ONCE}),
            source AS MATERIALIZED (
                SELECT type, priority, NULL::bigint AS id, {urgency} AS urgency FROM lane
                UNION ALL
                SELECT type, priority, id, {urgency} FROM line l
                WHERE state = 'pending' AND type IN (SELECT type FROM allowed) AND NOT EXISTS (
                    SELECT 1 FROM {job} p WHERE p.key = l.key AND p.key IS NOT NULL AND p.state = 'processing')
                ORDER BY urgency),
            picked AS (
                SELECT j.ctid AS tid, s.type FROM source s CROSS JOIN LATERAL (
                    SELECT ctid FROM (
                        SELECT ctid FROM {job} j WHERE s.id IS NULL AND {unkeyed}
                            AND j.type = s.type AND j.priority = s.priority
                        ORDER BY j.ready_at, j.id LIMIT $2::int FOR UPDATE SKIP LOCKED) AS in_lane
                    UNION ALL
                    SELECT ctid FROM (
                        SELECT ctid FROM {job} j WHERE j.id = s.id AND j.state = 'pending'
                        FOR UPDATE SKIP LOCKED) AS in_line) j
                LIMIT $2::int),
            taken AS ({take(with_options("picked", "$1", 7), "$3::text", "NULL")})
            SELECT ({collected("taken")})::text, (SELECT max(key) FROM line HAVING count(*) = {KEYS_AT_ONCE})"""

        # Where there are jobs without a key: [type, priority, when the first of them became ready] for $1 types, and
        # the time. From each priority it leaps to the next.
        ready = f"SELECT priority, ready_at FROM {job} j WHERE j.state = 'pending' AND j.key IS NULL"
        first = "ORDER BY j.type, j.priority, j.ready_at, j.id LIMIT 1"
        self.survey = f"""
            WITH RECURSIVE lane AS (
                SELECT t.type, j.priority, j.ready_at FROM unnest($1::text[]) AS t (type)
                    CROSS JOIN LATERAL ({ready} AND j.type = t.type {first}) j
                UNION ALL
                SELECT l.type, j.priority, j.ready_at FROM lane l
                    CROSS JOIN LATERAL ({ready} AND j.type = l.type AND j.priority > l.priority {first}) j)
            SELECT coalesce(json_agg(json_build_array(type, priority, {micros("ready_at")})), '[]'), {micros(NOW)}
            FROM lane"""

        # [id, attempt] of all attempts under way that bear the incarnation $1.
        self.held = (
            f"SELECT coalesce(json_agg(json_build_array(id, attempt)), '[]') FROM {job}"
            " WHERE state = 'processing' AND incarnation = $1::uuid"
        )

        # The jobs $1 among them, as a claim tells of them. For a claim whose answer was lost.
        self.adopt = f"""
            SELECT coalesce(json_agg({row} ORDER BY ready_at, id), '[]') FROM {job}
            WHERE state = 'processing' AND incarnation = $2::uuid AND id = ANY ($1::bigint[])"""

        # Attempts under way, $1 ids and $2 attempts, of a node $3 that has been taken for dead and has joined anew with
        # the incarnation $4: those nobody has rescued yet go on. Returned: their ids.
        self.restamp = f"""
            WITH mine AS (
                SELECT j.ctid FROM (SELECT * FROM unnest($1::bigint[], $2::int[]) AS e (id, attempt) ORDER BY 1) e
                CROSS JOIN LATERAL (
                    SELECT ctid FROM {job} j WHERE j.id = e.id AND j.attempt = e.attempt AND j.deadline IS NOT NULL
                    FOR UPDATE SKIP LOCKED) j
                WHERE EXISTS (SELECT 1 FROM {node} WHERE name = $3::text AND incarnation = $4::uuid AND state <> 'away')
                ),
            kept AS (
                UPDATE {job} j SET incarnation = $4::uuid WHERE j.ctid = ANY (ARRAY(SELECT ctid FROM mine))
                RETURNING j.id)
            SELECT coalesce(json_agg(id), '[]') FROM kept"""
