"""The SQL of every queue transaction that the library starts itself. Each is ONE statement, sent in one message.

So no transaction of a worker is ever open while its process is not inside a round trip: a process that is paused or
killed between two statements holds no row lock. Every write of an attempt names it, by the job's id and the attempt's
number, which each claim raises; written late, twice or by a worker that was thought dead, it changes nothing.

None of a worker's own waits for a row: all take jobs with ``SKIP LOCKED``. A job that somebody else's transaction holds
is left for the next turn, and nothing stands still for it. Two belong to a handler, which waits for its own job's row.

| statement | locks | if the process stops right after sending it |
|---|---|---|
| claim, heads | the jobs taken (skip) | taken or not; if so they are rescued with their node, or past their deadline |
| dequeue | the jobs taken (skip), until COMMIT | not taken; or taken, and rescued past their deadline |
| settle | the jobs settled (skip) | settled or not; sent again it changes nothing more |
| promote | due jobs (skip) | ready or not; any worker does it at the next turn |
| rescue, overdue | jobs of dead nodes or past their deadline (skip) | done or not; another worker does it |
| stale | jobs past their deadline or begun too long ago (skip) | done or not; call again |
| unblock, sweep | jobs whose last dependency has completed (skip) | done or not; the next sweep does it |
| presence, absence | own worker row; worker rows of dead nodes (skip) | written or not; the next worker cleans up |
| restamp | attempts under way of one worker (skip) | done or not; what is not is rescued |
| declare | rows of the schedules declared, in order of name | declared or not; the next worker that starts does it |
| fire | the schedule's row (skip) | the jobs are there and it is fired until then, or neither |
| settle_one | the handler's own job (waits), until COMMIT | rolled back with what the handler wrote |
| extend | the handler's own job (waits) | extended or not |
| discover, lines, survey, unserved, held, adopt, lost, schedules, orders | nothing | nothing |

One wait there is, for the end of another transaction that is one message long: two that claim different jobs of one
key at once, one of which the other could not see yet, meet in the unique index of jobs under way by key. The second is
refused with one of ``COLLIDED`` and sends its statement again. So no two attempts of a key are ever alive, whoever
thinks what of who owns it.

How each finds its rows
-----------------------
The worker's session has ``SESSION`` set, so that a plan walks the partial index its statement is written for whatever
the table's statistics say, which change faster than they are gathered. Rows are updated by their ``ctid``, which a
locked row keeps. Rows come back as one JSON text: a batch is one value to decode.
"""

from __future__ import annotations

from sqlalchemy import text

from jobsync_orm.autocommit import instant, micros
from jobsync_orm.models.queue import IN_LINE
from jobsync_orm.models.states import LIVE
from jobsync_orm.naming import Names
from jobsync_orm.queue.options import LONGEST_SEC

__all__ = ["COLLIDED", "DEADLINE_SLACK_SEC", "SESSION", "WORKER_SILENT_SEC", "QueueStatements"]

# Of the queue's own sessions. No default of the database's or the role's may change what the statements mean.
SESSION = (
    "SET standard_conforming_strings = on; SET TimeZone = 'UTC'; SET DateStyle = 'ISO';"
    " SET default_transaction_isolation = 'read committed'; SET lock_timeout = '2s'; SET statement_timeout = '60s';"
    " SET idle_session_timeout = 0;"
    " SET enable_seqscan = off; SET enable_bitmapscan = off; SET enable_hashjoin = off;"
    " SET enable_mergejoin = off; SET enable_material = off; SET jit = off;"
    # Nothing in these plans depends on the values, and planning a statement takes as long as running it for ten jobs.
    " SET plan_cache_mode = force_generic_plan; SET client_encoding = 'UTF8'"
)

# An attempt may be written this much after its job's timeout, before another worker takes the job.
DEADLINE_SLACK_SEC = 30.0

# A worker whose row is older than this many seconds is not the one that sweeps for all.
CHIEF_SEC = 10

# Longest NOTIFY payload that names what is ready.
MOST_BYTES = 2000

# So many keys ``dequeue`` looks at in one statement.
KEYS_AT_ONCE = 200

# So many jobs with a key of each priority are looked at for types that nobody runs.
OLDEST_OF_KEYS = 100

# Before and after every incarnation.
FIRST_UUID, LAST_UUID = "00000000-0000-0000-0000-000000000000", "ffffffff-ffff-ffff-ffff-ffffffffffff"

# A worker that is a live node but has written nothing for this long does not claim: others may take its keys' jobs.
WORKER_SILENT_SEC = 30.0

# SQLSTATEs with which ``heads`` is refused when another has just claimed of the same key: send it again.
COLLIDED = frozenset({"23505", "40P01"})

NOW = "clock_timestamp()"


class QueueStatements:
    """The statements of one cluster, as text with ``$n`` parameters."""

    def __init__(self, names: Names) -> None:
        job, attempt, dependency = names.sql("job"), names.sql("job_attempt"), names.sql("job_dependency")
        cluster, node = names.sql("cluster"), names.sql("node")
        pause, worker = names.sql("job_pause"), names.sql("job_worker")
        token, lock = names.sql("token"), names.sql("lock")
        channel = names.queue_channel

        # What a worker is told of a job it has claimed; see jobs.ClaimedJob.
        # One row that somebody has written past enqueue must not stop those beside it.
        def limit(seconds: str) -> str:
            return f"greatest(least({seconds}, {LONGEST_SEC}), 0)"

        row = (
            f"json_build_array(id, type, priority, attempt, failures, max_retries, {limit('timeout')}, key, payload,"
            f" {micros('ready_at')}, {micros('created_at')})"
        )

        def beyond(key: str) -> str:
            """The condition of a key that comes after ``key``. After an empty text come all, an empty key too."""
            return f">= CASE {key} WHEN '' THEN '' ELSE {key} || chr(1) END"

        def take(source: str, worker: str, incarnation: str) -> str:
            """UPDATE that makes the rows with a tid in ``source`` this worker's, and returns all columns.

            ``source`` has what the handler of each says, too (NULL: there is none here). It holds where the call that
            enqueued the job did not say otherwise, and is written into the row: whoever has to end the attempt for this
            worker then goes by what this worker went by.
            """
            retries = "CASE WHEN j.max_retries_given THEN j.max_retries ELSE coalesce(p.max_retries, j.max_retries) END"
            seconds = "CASE WHEN j.timeout_given THEN j.timeout ELSE coalesce(p.timeout, j.timeout) END"
            return (
                f"UPDATE {job} j SET state = 'processing', attempt = attempt + 1, started_at = {NOW},"
                f" worker = {worker}, incarnation = {incarnation}, max_retries = {retries}, timeout = {seconds},"
                " retry_blocks_key = coalesce(p.blocks, j.retry_blocks_key),"
                f" deadline = {NOW} + ({limit(seconds)} + {DEADLINE_SLACK_SEC}) * interval '1 second'"
                f" FROM {source} p WHERE j.ctid = p.tid RETURNING j.*"
            )

        def with_options(source: str, types: str, number: int) -> str:
            """The rows of ``source``, and what ``$number`` and the two after it say of the type of each."""
            options = f"${number}::int[], ${number + 1}::float8[], ${number + 2}::bool[]"
            return (
                "(SELECT s.tid, o.max_retries, o.timeout, o.blocks"
                f" FROM {source} s LEFT JOIN unnest({types}::text[], {options})"
                " AS o (type, max_retries, timeout, blocks) ON o.type = s.type)"
            )

        def collected(source: str) -> str:
            return f"SELECT coalesce(json_agg({row} ORDER BY ready_at, id), '[]') FROM {source}"

        def places(source: str) -> str:
            """SQL of the distinct [type, priority, whether it has a key] of the rows of ``source``."""
            return (
                "(SELECT coalesce(jsonb_agg(DISTINCT jsonb_build_array(type, priority, keyed)), '[]')"
                f" FROM {source} WHERE state = 'pending')"
            )

        def tell(source: str) -> str:
            """SQL that wakes the workers if jobs in ``source`` became ready; see the payloads in ``waker.py``."""
            return (
                f"(SELECT pg_notify('{channel}', CASE WHEN octet_length(p::text) <= {MOST_BYTES} THEN p::text"
                f" ELSE '' END) FROM (SELECT {places(source)}) AS w (p) WHERE p <> '[]')"
            )

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

        # The worker that does what one is enough for: the first by name of those that were seen lately.
        chief = f"""$2::text = (SELECT w.node FROM {worker} w JOIN {node} n ON n.name = w.node
                    AND n.incarnation = w.incarnation AND n.state <> 'away'
                WHERE w.seen_at > now() - interval '{CHIEF_SEC} seconds' ORDER BY w.node LIMIT 1)"""

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

        waits = (
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

        # $1 and $2 attempts of this worker. Returned: the paused types, and [id, attempt, whether it is to be cancelled
        # (else it is no attempt of this worker any more)] of those to give up.
        self.orders = f"""
            SELECT (SELECT coalesce(json_agg(type), '[]') FROM {pause}),
                (SELECT coalesce(json_agg(json_build_array(m.id, m.attempt, j.attempt IS NOT DISTINCT FROM m.attempt
                        AND j.cancel_requested)), '[]')
                    FROM unnest($1::bigint[], $2::int[]) AS m (id, attempt) LEFT JOIN {job} j ON j.id = m.id
                    WHERE j.id IS NULL OR j.attempt <> m.attempt OR j.state = 'pending'
                        OR j.state = 'processing' AND j.cancel_requested)"""

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

        # Of attempts whose settling changed nothing, $1 ids and $2 attempts: [id, attempt, whether the attempt is still
        # under way, its outcome if that is written].
        self.lost = f"""
            SELECT coalesce(json_agg(json_build_array(e.id, e.attempt, j.id IS NOT NULL, a.outcome)), '[]')
            FROM unnest($1::bigint[], $2::int[]) AS e (id, attempt)
            LEFT JOIN {job} j ON j.id = e.id AND j.attempt = e.attempt AND j.deadline IS NOT NULL
            LEFT JOIN {attempt} a ON a.job_id = e.id AND a.attempt = e.attempt"""

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

        # Types that no live worker runs, whose jobs have been ready for more than $1 seconds, by the one worker ($2):
        # [type, seconds]. Of each lane its first is looked at, from one to the next by a leap in the index; of jobs
        # with a key, whose index does not know types, the oldest of each priority: those nobody takes stay in front.
        heads = f"SELECT j.type, j.priority, j.ready_at FROM {job} j WHERE j.state = 'pending' AND j.key"
        rung = f"SELECT j.priority FROM {job} j WHERE j.state = 'pending' AND j.key IS NOT NULL"
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
        # would wait for whoever is just ending it.
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
            SELECT (SELECT count(*) FROM fired), (SELECT coalesce(json_agg(id ORDER BY id), '[]') FROM inserted),
                (SELECT pg_notify($14::text, $15::text) FROM inserted LIMIT 1)"""
