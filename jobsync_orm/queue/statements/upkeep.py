"""What workers do for the queue as a whole, and say of themselves. See :mod:`jobsync_orm.queue.statements`."""

from __future__ import annotations

from jobsync_orm.autocommit import instant, micros
from jobsync_orm.queue.statements.parts import NOW, Parts

__all__ = ["Upkeep"]

# Before and after every incarnation.
FIRST_UUID, LAST_UUID = "00000000-0000-0000-0000-000000000000", "ffffffff-ffff-ffff-ffff-ffffffffffff"

# So many jobs with a key of each priority are looked at for types that nobody runs.
OLDEST_OF_KEYS = 100


class Upkeep:
    """See :class:`~jobsync_orm.queue.statements.QueueStatements`."""

    def __init__(self, parts: Parts) -> None:
        job, attempt, dependency = parts.job, parts.attempt, parts.dependency
        cluster, node, pause, worker = parts.cluster, parts.node, parts.pause, parts.worker
        places, tell, chief = parts.places, parts.tell, parts.chief

        # $1 how many at most, $2 a mark, as microseconds since 1970: nothing due before it is looked at, so that
        # entries which a vacuum cannot remove yet are not stepped over each time; 0 is the very beginning, as a job may
        # be due since long before 1970 ("at once", somebody says). Returned: [type, priority, whether it
        # has a key] of what became ready, how many those are, the next mark, and the seconds until the next is due
        # (NULL if none waits). An index can be entered with now(), which is this statement's, not with NOW.
        self.promote = f"""
            WITH due AS (
                SELECT ctid FROM {job} WHERE state IN ('scheduled', 'retrying')
                    AND run_at >= CASE WHEN $2::bigint = 0 THEN '-infinity' ELSE {instant("$2::bigint")} END
                    AND run_at <= now()
                ORDER BY run_at LIMIT $1::int FOR UPDATE SKIP LOCKED),
            ready AS (
                UPDATE {job} j SET state = 'pending', ready_at = {NOW} WHERE j.ctid = ANY (ARRAY(SELECT ctid FROM due))
                RETURNING j.type, j.priority, j.key IS NOT NULL AS keyed, j.run_at, j.state)
            SELECT {places("ready")}, (SELECT count(*) FROM ready), (SELECT {micros("max(run_at)")} FROM ready),
                (SELECT extract(epoch FROM run_at - {NOW}) FROM {job} WHERE state IN ('scheduled', 'retrying')
                    AND run_at > now() ORDER BY run_at LIMIT 1)"""

        def rescued(why: str) -> str:
            """Ends the attempts of the jobs with a ctid in ``stuck``; ``why`` follows the worker's name."""
            return f"""
            freed AS (
                UPDATE {job} j SET failures = j.failures + 1, incarnation = NULL, deadline = NULL,
                    state = CASE WHEN j.cancel_requested THEN 'cancelled'
                        WHEN j.failures < j.max_retries THEN 'pending' ELSE 'failed' END,
                    finished_at = CASE WHEN j.cancel_requested OR j.failures >= j.max_retries THEN {NOW} END,
                    error = 'worker ' || coalesce(j.worker, '?') || ' {why}'
                WHERE j.ctid = ANY (ARRAY(SELECT ctid FROM stuck))
                RETURNING j.id, j.attempt, j.worker, j.started_at, j.state, j.error, j.type, j.priority,
                    j.key IS NOT NULL AS keyed),
            attempts AS (
                INSERT INTO {attempt} (job_id, attempt, worker, started_at, outcome, error)
                SELECT id, attempt, worker, started_at, 'died', error FROM freed ON CONFLICT DO NOTHING)
            SELECT (SELECT coalesce(json_agg(json_build_array(id, worker, state) ORDER BY id), '[]') FROM freed),
                {places("freed")}, {tell("freed")}"""

        # Attempts of nodes that are no members any more. The attempt counts: a job that kills its worker must not do so
        # for ever. It is ready again at once, at the place it had. $1 how many at most. Returned: [id, worker, state]
        # of each, [type, priority, whether it has a key] of what became ready. Attempts without an incarnation are not
        # a node's (see JobQueue.dequeue); they have their deadline only.
        #
        # Only what lies between the incarnations of the members is looked at: the entries of the living, which are
        # many and mostly dead themselves, are not. A job is held by whoever the locked row says; one that somebody else
        # has freed and a new member has taken meanwhile is no row of the dead incarnation any more. While the cluster
        # rests, having been formed anew after a failover, all members have to join again: theirs is kept for them.
        self.rescue = f"""
            WITH RECURSIVE gap AS (
                SELECT low, coalesce(lead(low) OVER (ORDER BY low), '{LAST_UUID}') AS high FROM (
                    SELECT incarnation FROM {node} WHERE state <> 'away'
                    UNION ALL SELECT '{FIRST_UUID}'::uuid) AS m (low)
                WHERE (SELECT rest_until > now() FROM {cluster}) IS NOT TRUE),
            dead AS (
                SELECT j.incarnation, g.high FROM gap g CROSS JOIN LATERAL (
                    SELECT incarnation FROM {job} WHERE state = 'processing'
                        AND incarnation > g.low AND incarnation < g.high ORDER BY incarnation LIMIT 1) j
                UNION ALL
                SELECT j.incarnation, d.high FROM dead d CROSS JOIN LATERAL (
                    SELECT incarnation FROM {job} WHERE state = 'processing'
                        AND incarnation > d.incarnation AND incarnation < d.high ORDER BY incarnation LIMIT 1) j),
            stuck AS (
                SELECT j.ctid FROM dead d CROSS JOIN LATERAL (
                    SELECT ctid FROM {job} j WHERE j.state = 'processing' AND j.incarnation = d.incarnation
                    LIMIT $1::int FOR UPDATE SKIP LOCKED) j
                LIMIT $1::int), {rescued("died")}"""

        # Attempts held past their deadline, by a worker that is stuck or by somebody's own loop. It has to look at all
        # that are under way. $1 how many at most, $2 this worker. Returned as by rescue.
        self.overdue = f"""
            WITH stuck AS (
                SELECT ctid FROM {job} WHERE state = 'processing' AND deadline < now() AND {chief}
                LIMIT $1::int FOR UPDATE SKIP LOCKED), {rescued("held the job past its deadline")}"""

        # Attempts held past their deadline or begun more than $2 seconds ago, whoever has them: for somebody who has no
        # workers. $1 how many at most. Returned as by rescue.
        self.stale = f"""
            WITH stuck AS (
                SELECT ctid FROM {job} WHERE state = 'processing'
                    AND (deadline < now() OR started_at < now() - $2::float8 * interval '1 second')
                LIMIT $1::int FOR UPDATE SKIP LOCKED), {rescued("held the job for too long")}"""

        # That a job ``j`` waits for another.
        self.waits = waits = (
            f"EXISTS (SELECT 1 FROM {dependency} d JOIN {job} a ON a.id = d.after_id"
            " WHERE d.job_id = j.id AND a.state <> 'completed')"
        )
        unblocked = f"""
            ready AS (
                UPDATE {job} j SET ready_at = {NOW},
                    state = CASE WHEN j.run_at > {NOW} THEN 'scheduled' ELSE 'pending' END
                WHERE j.ctid = ANY (ARRAY(SELECT ctid FROM free))
                RETURNING j.type, j.priority, j.key IS NOT NULL AS keyed, j.state)"""

        # $1 jobs that waited for one that has completed. Runs in a transaction of its own after the completions: of two
        # that complete the last two dependencies at once, the later one sees both. Returned: [type, priority, whether
        # it has a key] of what became ready.
        self.unblock = f"""
            WITH free AS (
                SELECT j.ctid FROM {job} j WHERE j.id = ANY ($1::bigint[]) AND j.state = 'blocked' AND NOT {waits}
                ORDER BY j.id FOR UPDATE SKIP LOCKED), {unblocked}
            SELECT {places("ready")}"""

        # The same for all that wait, for what nobody was told of: by the one worker ($2), $1 at a time, after the id
        # $3. Returned: as above, and the last id of a full turn (NULL after the last turn).
        self.sweep = f"""
            WITH looked AS (
                SELECT id FROM {job} WHERE state = 'blocked' AND id > $3::bigint AND {chief} ORDER BY id LIMIT $1::int),
            free AS (
                SELECT j.ctid FROM looked l CROSS JOIN LATERAL (
                    SELECT ctid FROM {job} j WHERE j.id = l.id AND j.state = 'blocked' AND NOT {waits}
                    FOR UPDATE SKIP LOCKED) j), {unblocked}
            SELECT {places("ready")}, {tell("ready")}, (SELECT max(id) FROM looked HAVING count(*) = $1::int)"""

        # $1 and $2 attempts of this worker, $3 its node. Returned: the paused types, [id, attempt, whether it is to be
        # cancelled (else it is no attempt of this worker any more)] of those to give up, whether the node is drained.
        self.orders = f"""
            SELECT (SELECT coalesce(json_agg(type), '[]') FROM {pause}),
                (SELECT coalesce(json_agg(json_build_array(m.id, m.attempt, j.attempt IS NOT DISTINCT FROM m.attempt
                        AND j.cancel_requested)), '[]')
                    FROM unnest($1::bigint[], $2::int[]) AS m (id, attempt) LEFT JOIN {job} j ON j.id = m.id
                    WHERE j.id IS NULL OR j.attempt <> m.attempt OR j.state = 'pending'
                        OR j.state = 'processing' AND j.cancel_requested),
                (SELECT (drained -> $3::text) IS NOT NULL FROM {cluster})"""

        # This worker's row: $1 node, $2 incarnation, $3 types, $4 concurrency, $5 running, $6 completed, $7 failed, $8
        # seconds since it started, $9 seconds since it claimed (NULL if it has not). Rows of nodes that are no members
        # any more go. Returned: the nodes of those.
        self.presence = f"""
            WITH mine AS (
                INSERT INTO {worker} AS w (node, incarnation, types, concurrency, running, completed, failed,
                    started_at, seen_at, claimed_at)
                SELECT $1::text, $2::uuid, $3::text[], $4::int, $5::int, $6::bigint, $7::bigint,
                    {NOW} - $8::float8 * interval '1 second', {NOW}, {NOW} - $9::float8 * interval '1 second'
                FROM {node} WHERE name = $1::text AND incarnation = $2::uuid AND state <> 'away'
                ON CONFLICT (node) DO UPDATE SET incarnation = excluded.incarnation, types = excluded.types,
                    concurrency = excluded.concurrency, running = excluded.running, completed = excluded.completed,
                    failed = excluded.failed, started_at = excluded.started_at, seen_at = excluded.seen_at,
                    claimed_at = excluded.claimed_at),
            gone AS (
                DELETE FROM {worker} WHERE node IN (
                    SELECT w.node FROM {worker} w WHERE w.node <> $1::text AND NOT EXISTS (
                        SELECT 1 FROM {node} n
                        WHERE n.name = w.node AND n.incarnation = w.incarnation AND n.state <> 'away')
                    FOR UPDATE SKIP LOCKED)
                RETURNING node)
            SELECT coalesce(json_agg(node), '[]') FROM gone"""

        # $1 node, $2 incarnation.
        self.absence = f"DELETE FROM {worker} WHERE node = $1::text AND incarnation = $2::uuid"

        # Types that no live worker runs, whose jobs have been ready for more than $1 seconds, by the one worker ($2):
        # [type, seconds]. Of each lane its first is looked at, from one to the next by a leap in the index; of jobs
        # with a key, whose index does not know types, the oldest of each priority: those nobody takes stay in front.
        heads = f"SELECT j.type, j.priority, j.ready_at FROM {job} j WHERE j.state = 'pending' AND j.key"
        rung = f"SELECT j.priority FROM {job} j WHERE j.state = 'pending' AND j.key IS NOT NULL"
        first = "ORDER BY j.type, j.priority, j.ready_at, j.id LIMIT 1"
        lowest = "ORDER BY j.priority, j.ready_at, j.id LIMIT 1"
        self.unserved = f"""
            WITH RECURSIVE lane AS (
                ({heads} IS NULL AND {chief} {first})
                UNION ALL
                SELECT n.* FROM lane l CROSS JOIN LATERAL (
                    {heads} IS NULL AND (j.type, j.priority) > (l.type, l.priority) {first}) n),
            rung AS (
                ({rung} AND {chief} {lowest})
                UNION ALL
                SELECT n.* FROM rung r CROSS JOIN LATERAL ({rung} AND j.priority > r.priority {lowest}) n),
            old AS (
                SELECT type, min(ready_at) AS since FROM (
                    SELECT type, ready_at FROM lane
                    UNION ALL
                    SELECT j.type, j.ready_at FROM rung r CROSS JOIN LATERAL (
                        {heads} IS NOT NULL AND j.priority = r.priority
                        ORDER BY j.priority, j.ready_at, j.id LIMIT {OLDEST_OF_KEYS}) j) AS ready
                GROUP BY type HAVING min(ready_at) < now() - $1::float8 * interval '1 second')
            SELECT coalesce(json_agg(json_build_array(type, extract(epoch FROM {NOW} - since)) ORDER BY type), '[]')
            FROM old o WHERE NOT EXISTS (
                SELECT 1 FROM {worker} w JOIN {node} n ON n.name = w.node AND n.incarnation = w.incarnation
                    AND n.state <> 'away'
                WHERE o.type = ANY (w.types))"""
