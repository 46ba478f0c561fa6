"""Jobs with a key: the first in line of each, and whose a key is. See :mod:`jobsync_orm.queue.statements`."""

from __future__ import annotations

from jobsync_orm.autocommit import instant, micros
from jobsync_orm.models.queue import IN_LINE
from jobsync_orm.queue.statements.parts import NOW, Parts

__all__ = ["WORKER_SILENT_SEC", "Keyed"]

# A worker that is a live node but has written nothing for this long does not claim: others may take its keys' jobs.
WORKER_SILENT_SEC = 30.0


class Keyed:
    """See :class:`~jobsync_orm.queue.statements.QueueStatements`."""

    def __init__(self, parts: Parts) -> None:
        job, node, worker, token, lock = parts.job, parts.node, parts.worker, parts.token, parts.lock
        beyond, collected = parts.beyond, parts.collected
        take, with_options = parts.take, parts.with_options

        # -- jobs with a key -------------------------------------------------------------------------------------
        # All three begin with: $1 node, $2 its incarnation, $3 types it handles and may take, $4 whether keys are tied
        # to nodes at all.
        #
        # A key is this node's if its token is. Where the token's owner is no worker that handles the type, the workers
        # that do share such keys by the token's number, unless it is pinned: then the job waits for a worker it is
        # pinned to. While a token is being handed over its keys are nobody's. All this says only who is to look at a
        # key; two that have different ideas of it for a moment do no harm.
        whose = f"""
            worker AS MATERIALIZED (
                SELECT w.node, w.types FROM {worker} w JOIN {node} n ON n.name = w.node
                WHERE n.incarnation = w.incarnation AND n.state <> 'away'
                    AND w.seen_at > {NOW} - {WORKER_SILENT_SEC} * interval '1 second'),
            turn AS MATERIALIZED (
                SELECT t.type, count(*) AS workers, bool_or(w.node = $1::text) AS present,
                    count(*) FILTER (WHERE w.node COLLATE "C" < $1::text) AS place
                FROM unnest($3::text[]) AS t (type) JOIN worker w ON t.type = ANY (w.types) GROUP BY t.type)"""

        place = f"type, priority, {micros('ready_at')}"

        def mine(row: str) -> str:
            """Whether the key of ``row``, which has a type and a token_id, is this node's."""
            return f"""(NOT $4::bool OR (
                EXISTS (SELECT 1 FROM {node} WHERE name = $1::text AND incarnation = $2::uuid AND state <> 'away')
                AND (SELECT CASE
                    WHEN t.node = $1::text THEN t.next_node IS NULL
                    WHEN EXISTS (SELECT 1 FROM worker w WHERE w.node = t.node AND {row}.type = ANY (w.types)) THEN false
                    WHEN EXISTS (SELECT 1 FROM {lock} l WHERE l.token_id = t.token_id
                        AND (l.expires_at IS NULL OR l.expires_at > {NOW})) THEN false
                    ELSE EXISTS (SELECT 1 FROM turn u
                        WHERE u.type = {row}.type AND u.present AND t.token_id % u.workers = u.place) END
                FROM {token} t WHERE t.token_id = {row}.token_id) IS TRUE))"""

        # Of each of the keys $5 the first in line, if it is ready, its type may be taken, the key is this node's, and
        # no job of the key is under way. Returned: the jobs claimed; of the other keys [key, why, seconds until the
        # first in line is due if it backs off, and type, priority, ready_at of the first in line]; and of the claimed
        # keys [key, type, priority, ready_at] of the next in line, if there is one. Why is 'empty', 'processing',
        # 'retrying', 'type' (it is not among $3), 'elsewhere' (another's key) or 'taken' (changed at this very moment).
        # $6, $7, $8: what the handlers of the types $3 say, as for claim.
        #
        # The first in line is looked for without a lock and then locked itself: skipping it would take the second. The
        # range instead of "key =" and the order by both columns keep the planner to the index made for it.
        self.heads = f"""
            WITH {whose},
            first AS MATERIALIZED (
                SELECT w.key, w.n, j.tid, j.type, j.priority, j.ready_at, j.run_at, CASE
                    WHEN j.id IS NULL THEN 'empty'
                    WHEN j.state = 'processing' OR (
                        SELECT true FROM {job} p WHERE p.state = 'processing' AND p.key IS NOT NULL
                            AND p.key >= w.key AND p.key <= w.key ORDER BY p.key LIMIT 1) THEN 'processing'
                    WHEN j.state = 'retrying' THEN 'retrying'
                    WHEN NOT j.type = ANY ($3::text[]) THEN 'type'
                    WHEN NOT {mine("j")} THEN 'elsewhere' END AS why
                FROM unnest($5::text[]) WITH ORDINALITY AS w (key, n) LEFT JOIN LATERAL (
                    SELECT j.ctid AS tid, j.id, j.type, j.priority, j.state, j.token_id, j.ready_at, j.run_at
                    FROM {job} j
                    WHERE {IN_LINE} AND j.key >= w.key AND j.key <= w.key ORDER BY j.key, j.id LIMIT 1) j ON true),
            picked AS (
                SELECT j.ctid AS tid, f.type FROM (SELECT * FROM first WHERE why IS NULL ORDER BY n) f
                CROSS JOIN LATERAL (
                    SELECT ctid FROM {job} j WHERE j.ctid = f.tid AND j.state = 'pending' FOR UPDATE SKIP LOCKED) j),
            taken AS ({take(with_options("picked", "$3", 6), "$1::text", "$2::uuid")})
            SELECT ({collected("taken")}),
                (SELECT coalesce(json_agg(json_build_array(key, coalesce(why, 'taken'),
                    CASE WHEN why = 'retrying' THEN extract(epoch FROM run_at - {NOW}) END, {place}) ORDER BY n), '[]')
                    FROM first WHERE key NOT IN (SELECT key FROM taken)),
                (SELECT coalesce(json_agg(json_build_array(j.key, {place})), '[]')
                    FROM (SELECT key AS mine, id AS ended FROM taken) t CROSS JOIN LATERAL (
                        SELECT j.key, j.type, j.priority, j.ready_at FROM {job} j
                        WHERE {IN_LINE} AND j.key >= t.mine AND j.key <= t.mine AND j.id > t.ended
                        ORDER BY j.key, j.id LIMIT 1) j)"""

        # Keys of ready jobs, the oldest first: $5 priorities, $6 and $7 their marks (see claim), $8 how many rows of
        # each to go on. Returned: for each priority with rows [priority, microseconds, id] of the last, and how many
        # they were; and [key, type, priority, ready_at] of each key that is this node's, once, in order.
        self.discover = f"""
            WITH {whose},
            seen AS MATERIALIZED (
                SELECT j.* FROM unnest($5::int[], $6::bigint[], $7::bigint[], $8::int[]) AS l (priority, at, id, most)
                CROSS JOIN LATERAL (
                    SELECT j.key, j.id, j.type, j.priority, j.token_id, j.ready_at FROM {job} j
                    WHERE j.state = 'pending' AND j.key IS NOT NULL AND j.priority = l.priority
                        AND (j.ready_at, j.id) > ({instant("l.at")}, l.id)
                    ORDER BY j.priority, j.ready_at, j.id LIMIT l.most) j),
            kind AS (SELECT DISTINCT type, token_id FROM seen),
            my AS MATERIALIZED (SELECT * FROM kind k WHERE k.type = ANY ($3::text[]) AND {mine("k")}),
            found AS (
                SELECT DISTINCT ON (r.key) r.key, r.type, r.priority, r.ready_at, r.id FROM seen r
                WHERE (r.type, r.token_id) IN (SELECT type, token_id FROM my) ORDER BY r.key, r.ready_at, r.id)
            SELECT (SELECT coalesce(json_agg(json_build_array(priority, {micros("ready_at")}, id, rows)), '[]') FROM (
                    SELECT DISTINCT ON (priority) priority, ready_at, id, count(*) OVER (PARTITION BY priority) AS rows
                    FROM seen ORDER BY priority, ready_at DESC, id DESC) AS last),
                (SELECT coalesce(json_agg(json_build_array(key, {place}) ORDER BY ready_at, id),
                    '[]') FROM found)"""

        # The same by one look at each key that has jobs in line, however long its line is, in the order of the keys: $5
        # the key to go on after, $6 how many keys. Finds what has become ready at a place that discover has passed.
        # Returned: [key, type, priority, ready_at] of those whose first job is this node's to take now, and the last
        # key if there may be more.
        def after(bound: str) -> str:
            return f"""SELECT j.key, j.id, j.type, j.state, j.priority, j.token_id, j.ready_at FROM {job} j
                    WHERE {IN_LINE} AND j.key {bound} ORDER BY j.key, j.id LIMIT 1"""

        self.lines = f"""
            WITH RECURSIVE {whose},
            line AS (
                ({after(beyond("$5::text"))})
                UNION ALL
                SELECT n.* FROM line l CROSS JOIN LATERAL ({after("> l.key")}) n),
            first AS MATERIALIZED (SELECT * FROM line LIMIT $6::int)
            SELECT (SELECT coalesce(json_agg(json_build_array(key, {place})
                    ORDER BY ready_at, id), '[]')
                    FROM first f WHERE f.state = 'pending' AND f.type = ANY ($3::text[]) AND {mine("f")}),
                (SELECT CASE WHEN count(*) = $6::int THEN max(key) END FROM first)"""
