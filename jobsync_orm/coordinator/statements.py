"""The SQL of every coordinator transaction. Each is ONE statement, sent in one message.

One statement per transaction means that no transaction is ever open while this process is not inside a round trip: a
process that is paused, swapped out or killed between two statements holds no row lock. Every statement is a
compare-and-set; executed late, twice or by a process that was thought dead, it changes nothing.

Lock order: the cluster row, which is the planning mutex; node rows; token rows; lock and claim rows. Token rows are
always taken with ``SKIP LOCKED`` (one that an application's transaction holds is in use and is left for the next try),
so nobody waits for them, and what writes tokens takes the cluster row after them, and only if there is something to
write: a try in vain moves no epoch. Node rows are taken after the cluster row everywhere. A heartbeat locks its own
node row and nothing else.

A token row that was locked is updated by its ``ctid``: it cannot have moved since, unless it was locked in a newer
version than this statement sees; then the update misses it, and it is left for the next try as well. Conditions on
other tables are as of the statement's start: a release may give tokens to a node that is evicted at this very moment.
They are then under a name without a row, which the next plan repairs, at the latest the one that is made every
``RECONCILE_SEC`` for this reason.

| statement | locks | if the process stops right after sending it |
|---|---|---|
| beat | own node row | executed or not; the answer is lost, so the lease is not extended |
| register | cluster, own node row, own tokens (skip) | the row gets no heartbeat and is evicted like any dead node |
| refresh | nothing | nothing |
| release | own draining tokens (skip) | the tokens have moved or not; the leader forces what has not |
| regain | own tokens (skip), cluster | done, or tried again |
| snapshot, tokens | nothing | nothing |
| publish | tokens (skip), cluster, joining node rows | the plan is published whole or not at all |
| evict | cluster, rows of dead nodes, their claims and ephemeral locks | done whole or not at all |
| leave | cluster, own node row, own claims and ephemeral locks | done, or the node is evicted later |
| identify, standing | nothing | nothing |
| adopt_history | cluster | done, or done at the next connection |
| drain, undrain | cluster | done or not; the leader acts on it when it looks next |
| expel | the node's row | done or not; the node hears of it with its next heartbeat |
| end_rest | the node's row | done or not; whoever may evict it does so |
| reform | cluster, node rows, tokens (skip), claims (skip) | done whole or not at all; whoever connects next does it |
"""

from __future__ import annotations

from jobsync_orm.naming import Names

__all__ = ["CONTROL", "HEAVY_SEC", "LEAP", "PARK", "Statements", "lock_held"]

# Seconds to wait for a statement that may touch every token.
HEAVY_SEC = 30.0

# next_node of a token that its owner must give up to nobody. No node may have an empty name.
PARK = ""

# The notification on the queue's channel that makes workers look at what they are not to run.
CONTROL = '{"control": true}'

# How far re-forming raises the epoch: more than any copy of the database can lag behind. The fencing numbers of claims,
# of which there are many in an epoch, leap a thousand times as far.
LEAP = 1_000_000


def lock_key(names: Names, name: str) -> str:
    """SQL of the key of the advisory lock of the node whose name the SQL expression ``name`` gives."""
    return f"pg_catalog.hashtextextended({name}, {names.advisory_key('node')})"


def lock_held(names: Names, name: str, pid: str) -> str:
    """SQL that says whether backend ``pid`` (``l.pid``: any) holds the advisory lock of node ``name``."""
    return (
        "EXISTS (SELECT 1 FROM pg_catalog.pg_locks l WHERE l.locktype = 'advisory' AND l.granted"
        " AND l.objsubid = 1 AND l.database = (SELECT oid FROM pg_catalog.pg_database"
        " WHERE datname = pg_catalog.current_database())"
        f" AND ((l.classid::bigint << 32) | l.objid::bigint) = {lock_key(names, name)} AND l.pid = {pid})"
    )


class Statements:
    """The statements of one cluster, as text with ``$n`` parameters."""

    def __init__(self, names: Names) -> None:
        cluster, node, token = names.sql("cluster"), names.sql("node"), names.sql("token")
        lock, claim, rebalance = names.sql("lock"), names.sql("claim"), names.sql("rebalance")
        sequence = names.sql("node_ordinal_seq").replace("'", "''")
        fences = names.sql("claim_fence_seq").replace("'", "''")
        channel = f"'{names.cluster_channel}'"
        workers = f"pg_notify('{names.queue_channel}', '{CONTROL}')"

        def key(name: str) -> str:
            return lock_key(names, name)

        def held(name: str, pid: str) -> str:
            return lock_held(names, name, pid)

        # The last two columns only show that the tables are of a revision that has them.
        self.cluster = f"""
            SELECT total_tokens, hash_function, protocol_version, rest_until, (SELECT bool_or(expelled) FROM {node})
            FROM {cluster}"""

        # -- which history of the database this is ---------------------------------------------------------------
        self.identify = """
            SELECT system_identifier || '/'
                || left(pg_catalog.pg_walfile_name(pg_catalog.pg_current_wal_insert_lsn()), 8)
            FROM pg_catalog.pg_control_system()"""
        self.standing = f"SELECT incarnation, history, epoch FROM {cluster}"
        self.adopt_history = f"UPDATE {cluster} SET history = $2::text WHERE incarnation = $1::uuid AND history IS NULL"
        # The CAS is on the cluster's incarnation, which only this statement changes: of several that notice at once,
        # the first does it, and one that was paused meanwhile changes nothing. It asks for the reason again: another
        # history, an epoch that has gone back, or an operator's word. Each token is marked to be handed over to the
        # owner it has: so nobody owns it, by any statement's standards, until the owner takes it up after the rest, as
        # it would release it to another, or the leader has other plans. Token rows in use stay as they are; whoever
        # gets those tokens next raises their epochs. A node whose registration this statement cannot see yet keeps its
        # row; it hears of the new epoch at its next heartbeat, and rests like everybody.
        self.reform = f"""
            WITH c AS (
                UPDATE {cluster} c SET incarnation = $2::uuid, history = coalesce($3::text, c.history),
                    epoch = greatest(c.epoch, $4::bigint) + {LEAP}, revision = c.revision + 1,
                    rest_until = clock_timestamp() + interval '1 second'
                        * greatest($5::float8, (SELECT max(heartbeat_timeout_sec) FROM {node}))
                WHERE c.incarnation = $1::uuid
                    AND ($6::bool OR c.epoch < $4::bigint OR c.history IS DISTINCT FROM coalesce($3::text, c.history))
                RETURNING c.epoch, c.rest_until),
            away AS (
                UPDATE {node} n SET state = 'away', last_heartbeat = clock_timestamp(), backend_pid = NULL FROM c
                WHERE n.rejoin_grace_sec > 0 AND n.state <> 'away' RETURNING n.name),
            dead AS (
                DELETE FROM {node} n USING c WHERE n.rejoin_grace_sec = 0 AND n.state <> 'away' RETURNING n.name),
            free AS (SELECT t.ctid FROM {token} t WHERE EXISTS (SELECT 1 FROM c) FOR UPDATE OF t SKIP LOCKED),
            raised AS (
                UPDATE {token} t SET epoch = c.epoch, next_node = t.node,
                    next_epoch = CASE WHEN t.node IS NOT NULL THEN c.epoch END, drain_deadline = NULL
                FROM free, c WHERE t.ctid = free.ctid),
            claims AS (
                DELETE FROM {claim} WHERE task_id IN (SELECT task_id FROM {claim}
                    WHERE EXISTS (SELECT 1 FROM c) FOR UPDATE SKIP LOCKED))
            SELECT c.epoch, extract(epoch FROM c.rest_until - clock_timestamp()),
                CASE WHEN pg_catalog.has_sequence_privilege('{fences}', 'UPDATE')
                    THEN setval('{fences}', nextval('{fences}') + {LEAP * 1000}) END,
                pg_notify({channel}, ''),
                (SELECT count(pg_notify({names.node_channel_sql("name")}, ''))
                    FROM (SELECT name FROM away UNION ALL SELECT name FROM dead) AS gone)
            FROM c"""

        # -- the advisory lock that tells a crash at once ------------------------------------------------------
        self.lock_node = f"SELECT pg_catalog.pg_try_advisory_lock({key('$1::text')})"
        self.drop_old_session = f"SELECT pg_catalog.pg_terminate_backend($2::int) WHERE {held('$1::text', '$2::int')}"

        # -- membership -----------------------------------------------------------------------------------------
        # Whether the sessions of this heartbeat's time can still be there. If a backend crashes, the server ends all of
        # them, and goes on with the start time it had; but it begins its statistics anew, as it does when somebody
        # resets them.
        beat_here = """last_heartbeat BETWEEN greatest(pg_catalog.pg_postmaster_start_time(),
            (SELECT pg_catalog.pg_stat_get_bgwriter_stat_reset_time())) AND clock_timestamp()"""
        self.find = (
            "SELECT incarnation, state, last_heartbeat, backend_pid, host, pid,"
            " extract(epoch FROM clock_timestamp() - last_heartbeat), heartbeat_timeout_sec, connection_grace_sec,"
            f" {beat_here} FROM {node} WHERE name = $1::text"
        )
        # It names the number of tokens: no process that was paused while that was changed joins with the old one.
        self.register = f"""
            WITH c AS (
                UPDATE {cluster} SET epoch = epoch + 1, revision = revision + 1 WHERE total_tokens = $14::int
                RETURNING epoch, coalesce(rest_until > clock_timestamp(), false) AS rests),
            me AS (
                INSERT INTO {node} AS n (name, ordinal, incarnation, registered_at, join_epoch, last_heartbeat,
                    applied_epoch, state, weight, can_lead, heartbeat_timeout_sec, connection_grace_sec,
                    rejoin_grace_sec, labels, host, pid, backend_pid, version)
                SELECT $1::text, nextval('{sequence}'), $2::uuid, clock_timestamp(), c.epoch, clock_timestamp(),
                    0, 'joining', $5::int, $6::bool, $7::float8, $8::float8, $9::float8, $10::jsonb, $11::text,
                    $12::int, pg_backend_pid(), $13::text
                FROM c
                ON CONFLICT (name) DO UPDATE SET ordinal = excluded.ordinal, incarnation = excluded.incarnation,
                    registered_at = excluded.registered_at, join_epoch = excluded.join_epoch,
                    last_heartbeat = excluded.last_heartbeat, applied_epoch = 0, state = 'joining',
                    weight = excluded.weight, can_lead = excluded.can_lead,
                    heartbeat_timeout_sec = excluded.heartbeat_timeout_sec,
                    connection_grace_sec = excluded.connection_grace_sec,
                    rejoin_grace_sec = excluded.rejoin_grace_sec, labels = excluded.labels, host = excluded.host,
                    pid = excluded.pid, backend_pid = excluded.backend_pid, version = excluded.version,
                    expelled = false
                WHERE n.state = 'away'
                    OR (n.incarnation = $3::uuid AND n.last_heartbeat = $4::timestamptz)
                RETURNING n.join_epoch),
            mine AS (
                SELECT t.ctid FROM {token} t WHERE t.node = $1::text AND EXISTS (SELECT 1 FROM me)
                FOR UPDATE OF t SKIP LOCKED),
            again AS (
                UPDATE {token} t SET epoch = c.epoch, assigned_at = clock_timestamp(),
                    next_node = CASE WHEN c.rests THEN t.node END, next_epoch = CASE WHEN c.rests THEN c.epoch END,
                    drain_deadline = NULL
                FROM mine, c WHERE t.ctid = mine.ctid)
            SELECT me.join_epoch, pg_notify({channel}, '') FROM me"""
        # Claims of an earlier life of the name; whatever it still does under them is void.
        self.void_claims = f"""
            DELETE FROM {claim} WHERE task_id IN (SELECT task_id FROM {claim}
                WHERE node = $1::text AND incarnation <> $2::uuid FOR UPDATE SKIP LOCKED)"""

        # Who leads: the oldest node that may. The oldest three are returned to everybody, so that each has its own
        # record of their heartbeats the moment it must replace them; all nodes to the one that leads.
        self.beat = f"""
            WITH me AS (
                UPDATE {node} SET last_heartbeat = clock_timestamp(),
                    applied_epoch = greatest(applied_epoch, $3::bigint), backend_pid = pg_backend_pid()
                WHERE name = $1::text AND incarnation = $2::uuid AND state <> 'away' AND NOT expelled
                RETURNING state),
            oldest AS (
                SELECT name FROM {node} WHERE can_lead AND state <> 'away' ORDER BY ordinal LIMIT 3),
            seen AS (
                SELECT n.ordinal, json_build_array(n.name, n.incarnation, n.state, n.last_heartbeat::text,
                    extract(epoch FROM clock_timestamp() - n.last_heartbeat), n.backend_pid,
                    n.heartbeat_timeout_sec, n.connection_grace_sec, n.rejoin_grace_sec,
                    CASE WHEN $5::bool THEN {held("n.name", "n.backend_pid")} END,
                    CASE WHEN $5::bool THEN n.{beat_here} END) AS line
                FROM {node} n WHERE $4::bool OR n.name IN (SELECT name FROM oldest))
            SELECT (SELECT state FROM me), c.epoch, c.revision, c.pins_revision,
                (SELECT json_agg(name) FROM oldest), (SELECT json_agg(line ORDER BY ordinal) FROM seen),
                (SELECT count(*) FROM {node} WHERE state <> 'away'), (c.drained -> $1::text) IS NOT NULL
            FROM {cluster} c"""

        self.members = f"SELECT json_agg(name ORDER BY ordinal) FROM {node} WHERE state <> 'away'"

        pins_of_dead = f"""pins AS (
                DELETE FROM {lock} WHERE task_id IN (SELECT task_id FROM {lock}
                    WHERE ephemeral AND created_by IN (SELECT name FROM dead) FOR UPDATE SKIP LOCKED))"""
        self.leave = f"""
            WITH c AS (UPDATE {cluster} SET epoch = epoch + 1, revision = revision + 1 RETURNING epoch),
            away AS (
                UPDATE {node} n SET state = 'away', last_heartbeat = clock_timestamp(), backend_pid = NULL FROM c
                WHERE name = $1::text AND incarnation = $2::uuid AND rejoin_grace_sec > 0 RETURNING name),
            dead AS (
                DELETE FROM {node} n USING c
                WHERE name = $1::text AND incarnation = $2::uuid AND rejoin_grace_sec = 0 RETURNING name),
            {pins_of_dead},
            claims AS (
                DELETE FROM {claim} WHERE task_id IN (SELECT task_id FROM {claim}
                    WHERE node = $1::text AND incarnation = $2::uuid FOR UPDATE SKIP LOCKED))
            SELECT pg_notify({channel}, '') FROM (SELECT name FROM away UNION ALL SELECT name FROM dead) gone"""

        # Each row is evicted only if it is just as the evidence against it says.
        self.evict = f"""
            WITH c AS (UPDATE {cluster} SET epoch = epoch + 1, revision = revision + 1 RETURNING epoch),
            gone AS (
                SELECT n.name, n.incarnation, n.rejoin_grace_sec FROM c,
                    unnest($1::text[], $2::uuid[], $3::timestamptz[], $4::bool[]) AS x (name, incarnation, beat, freed)
                    JOIN {node} n ON n.name = x.name AND n.incarnation = x.incarnation AND n.last_heartbeat = x.beat
                WHERE CASE WHEN n.state = 'away'
                    THEN n.last_heartbeat + n.rejoin_grace_sec * interval '1 second' < clock_timestamp()
                    WHEN x.freed THEN NOT {held("n.name", "n.backend_pid")}
                    ELSE n.last_heartbeat + n.heartbeat_timeout_sec * interval '1 second' < clock_timestamp() END
                FOR UPDATE OF n),
            away AS (
                UPDATE {node} n SET state = 'away', last_heartbeat = clock_timestamp(), backend_pid = NULL FROM gone
                WHERE n.name = gone.name AND n.rejoin_grace_sec > 0 AND n.state <> 'away' RETURNING n.name),
            dead AS (
                DELETE FROM {node} n USING gone
                WHERE n.name = gone.name AND (n.rejoin_grace_sec = 0 OR n.state = 'away') RETURNING n.name),
            {pins_of_dead},
            claims AS (
                DELETE FROM {claim} WHERE task_id IN (SELECT k.task_id FROM {claim} k
                    JOIN gone ON k.node = gone.name AND k.incarnation = gone.incarnation
                    FOR UPDATE OF k SKIP LOCKED))
            SELECT name, pg_notify({channel}, '') FROM (SELECT name FROM away UNION ALL SELECT name FROM dead) g"""

        # -- what an operator says ------------------------------------------------------------------------------
        # Who gets tokens has changed, as though a node had come or gone: no plan made before is published. That the
        # revision is what the operator saw keeps two from each draining the other's last node. Workers are told on
        # their own channel too, as of a pause: they take no more jobs.
        self.drain = f"""
            UPDATE {cluster} SET revision = revision + 1, drained = drained || jsonb_build_object($1::text,
                jsonb_build_object('since', clock_timestamp(), 'by', $2::text, 'reason', $3::text))
            WHERE revision = $4::bigint AND (drained -> $1::text) IS NULL
            RETURNING revision, pg_notify({channel}, ''), {workers}"""
        self.undrain = f"""
            UPDATE {cluster} SET revision = revision + 1, drained = drained - $1::text
            WHERE (drained -> $1::text) IS NOT NULL RETURNING revision, pg_notify({channel}, ''), {workers}"""
        # From here on this life of the node cannot renew its lease. Its row and tokens stay until it has heard of that
        # and joined anew, or until its lease has ended and it is evicted like any other.
        self.expel = f"""
            WITH out AS (
                UPDATE {node} SET expelled = true
                WHERE name = $1::text AND incarnation = $2::uuid AND state <> 'away' RETURNING name)
            SELECT name, pg_notify({names.node_channel_sql("name")}, ''), pg_notify({channel}, '') FROM out"""
        self.end_rest = f"""
            UPDATE {node} SET rejoin_grace_sec = 0
            WHERE name = $1::text AND incarnation = $2::uuid AND state = 'away'
            RETURNING name, pg_notify({channel}, '')"""

        # -- tokens of this node --------------------------------------------------------------------------------
        # A token whose epoch is older than this node's registration was given to an earlier life of the name.
        self.refresh = f"""
            SELECT n.state, c.epoch, t.owned, t.draining, t.marks, t.coming, t.earlier,
                extract(epoch FROM c.rest_until - clock_timestamp())
            FROM {cluster} c
            LEFT JOIN {node} n
                ON n.name = $1::text AND n.incarnation = $2::uuid AND n.state <> 'away' AND NOT n.expelled
            LEFT JOIN LATERAL (
                SELECT
                    array_agg(token_id) FILTER (WHERE node = $1::text AND next_node IS NULL AND epoch >= n.join_epoch)
                        AS owned,
                    array_agg(token_id) FILTER (WHERE node = $1::text AND next_node IS NOT NULL) AS draining,
                    array_agg(DISTINCT next_epoch) FILTER (WHERE node = $1::text AND next_node IS NOT NULL) AS marks,
                    count(*) FILTER (WHERE next_node = $1::text) AS coming,
                    count(*) FILTER (WHERE node = $1::text AND next_node IS NULL AND epoch < n.join_epoch) AS earlier
                FROM {token} WHERE node = $1::text OR next_node = $1::text) t ON true"""
        rests = f"(SELECT rest_until > clock_timestamp() FROM {cluster}) IS TRUE"
        self.regain = f"""
            WITH mine AS (
                SELECT t.ctid FROM {node} n JOIN {token} t ON t.node = n.name AND t.epoch < n.join_epoch
                WHERE NOT {rests} AND n.name = $1::text AND n.incarnation = $2::uuid AND n.state <> 'away'
                    AND t.next_node IS NULL
                FOR UPDATE OF t SKIP LOCKED),
            c AS (
                UPDATE {cluster} SET epoch = epoch + 1 WHERE (SELECT count(*) FROM mine) > 0 RETURNING epoch),
            again AS (
                UPDATE {token} t SET epoch = c.epoch, assigned_at = clock_timestamp()
                FROM mine, c WHERE t.ctid = mine.ctid RETURNING t.token_id)
            SELECT count(*) FROM again"""
        # The new owner gets the token at the epoch of the mark: what the old owner began on it, it began before it knew
        # that epoch. So no release touches the cluster row, owners release side by side, and nobody else has to look.
        # A token that was marked for its own owner, when the cluster was formed anew, waits for no claim.
        self.release = f"""
            WITH free AS (
                SELECT t.ctid FROM {token} t
                WHERE NOT {rests} AND t.node = $1::text AND t.next_epoch = ANY ($3::bigint[])
                    AND NOT t.token_id = ANY ($4::int[]) AND t.next_node IS NOT NULL
                    AND EXISTS (SELECT 1 FROM {node} WHERE name = $1::text AND incarnation = $2::uuid)
                    AND (t.next_node = '{PARK}'
                        OR EXISTS (SELECT 1 FROM {node} n WHERE n.name = t.next_node AND n.state <> 'away'))
                    AND (t.next_node = t.node
                        OR NOT EXISTS (SELECT 1 FROM {claim} k WHERE k.token_id = t.token_id AND k.node = $1::text))
                FOR UPDATE OF t SKIP LOCKED),
            moved AS (
                UPDATE {token} t SET node = nullif(t.next_node, '{PARK}'), epoch = t.next_epoch,
                    assigned_at = clock_timestamp(), next_node = NULL, next_epoch = NULL, drain_deadline = NULL
                FROM free WHERE t.ctid = free.ctid RETURNING t.node)
            SELECT node, count, CASE WHEN node IS NOT NULL THEN pg_notify({names.node_channel_sql("node")}, '') END
            FROM (SELECT node, count(*) FROM moved GROUP BY node) AS m"""

        # Ephemeral pins whose creator has gone while nobody could delete them, or has never joined after all.
        orphaned = (
            f"ephemeral AND created_at < clock_timestamp() - interval '1 minute'"
            f" AND NOT EXISTS (SELECT 1 FROM {node} n WHERE n.name = created_by)"
        )

        # -- the plan -------------------------------------------------------------------------------------------
        self.snapshot = f"""
            SELECT c.revision, c.pins_revision, clock_timestamp(),
                (SELECT json_agg(json_build_array(name, weight, state, (c.drained -> name) IS NOT NULL)
                    ORDER BY ordinal) FROM {node}),
                (SELECT json_agg(json_build_array(token_id, node_patterns)) FROM {lock}
                    WHERE expires_at IS NULL OR expires_at > clock_timestamp()),
                (SELECT extract(epoch FROM min(expires_at) - clock_timestamp()) FROM {lock}
                    WHERE expires_at > clock_timestamp()),
                EXISTS (SELECT 1 FROM {lock} WHERE {orphaned}),
                extract(epoch FROM c.rest_until - clock_timestamp())
            FROM {cluster} c"""
        self.drop_orphaned_pins = f"""
            DELETE FROM {lock} WHERE task_id IN (SELECT task_id FROM {lock} WHERE {orphaned} FOR UPDATE SKIP LOCKED)"""
        # A mark may be forced once its deadline has passed and the owner has said that it has applied it.
        self.tokens = f"""
            SELECT t.node, t.next_node,
                coalesce(t.drain_deadline < clock_timestamp() AND n.applied_epoch >= t.next_epoch, false) AS overdue,
                array_agg(t.token_id), extract(epoch FROM min(t.drain_deadline) - clock_timestamp())
            FROM {token} t LEFT JOIN {node} n ON n.name = t.node AND n.state <> 'away'
            GROUP BY 1, 2, 3"""
        # kind: 0 give at once what has no live owner, 1 mark, 2 take a mark back, 3 force an overdue mark. Whether a
        # mark may be forced is asked again here: it may have been taken back and made anew since it was read. A leader
        # that knows of a higher epoch than the cluster's has an older copy of the database before it and changes
        # nothing; nor does anybody while the cluster rests.
        self.publish = f"""
            WITH me AS (
                SELECT 1 FROM {node} m WHERE name = $1::text AND incarnation = $2::uuid AND can_lead
                    AND NOT EXISTS (SELECT 1 FROM {node} o
                        WHERE o.can_lead AND o.state <> 'away' AND o.ordinal < m.ordinal)),
            step AS (
                SELECT r.low, r.high, ($9::text[])[r.source] AS source, ($9::text[])[r.marked] AS marked,
                    r.kind, ($9::text[])[r.target] AS target
                FROM unnest($5::int[], $6::int[], $7::int[], $8::int[], $10::int[], $11::int[])
                        AS r (low, high, source, marked, kind, target)),
            free AS (
                SELECT t.ctid, s.kind, s.target FROM step s JOIN {token} t ON t.token_id BETWEEN s.low AND s.high
                WHERE EXISTS (SELECT 1 FROM me) AND t.node IS NOT DISTINCT FROM s.source
                    AND t.next_node IS NOT DISTINCT FROM s.marked
                    AND (s.kind <> 3 OR (t.drain_deadline < clock_timestamp() AND t.next_epoch
                        <= (SELECT n.applied_epoch FROM {node} n WHERE n.name = s.source AND n.state <> 'away')))
                FOR UPDATE OF t SKIP LOCKED),
            c AS (
                UPDATE {cluster} SET epoch = epoch + 1
                WHERE revision = $3::bigint AND epoch >= $18::bigint AND EXISTS (SELECT 1 FROM me)
                    AND (rest_until IS NULL OR rest_until < clock_timestamp())
                    AND ((SELECT count(*) FROM free) > 0 OR cardinality($4::text[]) > 0)
                RETURNING epoch),
            joined AS (
                UPDATE {node} n SET state = 'active' FROM c WHERE n.name = ANY ($4::text[]) AND n.state = 'joining'),
            done AS (
                UPDATE {token} t SET
                    node = CASE WHEN f.kind IN (0, 3) THEN f.target ELSE t.node END,
                    epoch = CASE WHEN f.kind IN (0, 3) THEN c.epoch ELSE t.epoch END,
                    assigned_at = CASE WHEN f.kind IN (0, 3) THEN clock_timestamp() ELSE t.assigned_at END,
                    next_node = CASE WHEN f.kind = 1 THEN f.target END,
                    next_epoch = CASE WHEN f.kind = 1 THEN c.epoch END,
                    drain_deadline = CASE WHEN f.kind = 1
                        THEN clock_timestamp() + $12::float8 * interval '1 second' END
                FROM free f, c WHERE t.ctid = f.ctid RETURNING f.kind),
            tally AS (SELECT count(*) AS steps, count(*) FILTER (WHERE kind IN (0, 1)) AS moved FROM done),
            note AS (
                INSERT INTO {rebalance} (triggered_at, trigger_reason, leader_node, nodes_before, nodes_after,
                    tokens_moved, duration_ms, epoch)
                SELECT $13::timestamptz, $14::text, $1::text, $15::int, $16::int, tally.moved,
                    (extract(epoch FROM clock_timestamp() - $13::timestamptz) * 1000)::int, c.epoch
                FROM c, tally WHERE tally.moved > 0)
            SELECT c.epoch, tally.steps, tally.moved,
                (SELECT count(pg_notify(channel, '')) FROM unnest($17::text[]) AS channel)
            FROM c, tally"""
        self.revision = f"SELECT revision FROM {cluster}"
