-- What to ask the tables of a cluster. Runs in psql from top to bottom, and changes nothing:
--
--     psql -d shop -f cheatsheet.sql
--     psql -d shop -v prefix=billing_ -v schema=jobs -v task=customer-7 -v my_table=item -f cheatsheet.sql
--
-- prefix: the appname. schema: of the library's tables. task: a task id, or the key of a row or job.
-- my_table: a table of yours with a column token_id (TokenOwned).
-- Everything here is also in the command line, with the same figures: docs/cli.md.

\if :{?prefix}
\else
    \set prefix sync_
\endif
\if :{?schema}
    SELECT set_config('search_path', quote_ident(:'schema') || ', ' || current_setting('search_path'), false) AS search_path \gset
\endif
\if :{?task}
\else
    \set task customer-7
\endif
\set cluster :prefix cluster
\set node :prefix node
\set token :prefix token
\set token_of :prefix token_of
\set lock :prefix lock
\set claim :prefix claim
\set checkpoint :prefix checkpoint
\set audit :prefix audit
\set rebalance :prefix rebalance
\set job :prefix job
\set job_attempt :prefix job_attempt
\set job_dependency :prefix job_dependency
\set job_pause :prefix job_pause
\set job_schedule :prefix job_schedule
\set job_worker :prefix job_worker

-- OWNERSHIP ----------------------------------------------------------------------------------------------------------

-- # cluster: what it is, and until when it rests after a failover (empty: it does not)
SELECT total_tokens, hash_function, epoch, revision, rest_until, drained FROM :"cluster";

-- # nodes: who is there, the oldest first; the first that may lead and is active is the leader
SELECT name, state, can_lead, weight, host, pid, version,
    round(extract(epoch FROM clock_timestamp() - last_heartbeat)::numeric, 1) AS heartbeat_age_sec,
    round((heartbeat_timeout_sec - extract(epoch FROM clock_timestamp() - last_heartbeat))::numeric, 1) AS lease_left_sec
FROM :"node" ORDER BY ordinal;

-- # balance: who owns how much, how much of it is leaving, and what is on its way there
SELECT coalesce(n.name, '(nobody)') AS node, count(t.token_id) AS owned, count(t.next_epoch) AS leaving,
    (SELECT count(*) FROM :"token" c WHERE c.next_node = n.name) AS coming
FROM :"token" t FULL JOIN :"node" n ON n.name = t.node
GROUP BY n.name ORDER BY n.name NULLS LAST;

-- # unowned: tokens that nobody works on. For long: parked, by pins that match no live node
SELECT t.token_id, t.assigned_at, l.task_id AS pinned_task, l.node_patterns
FROM :"token" t LEFT JOIN :"lock" l USING (token_id)
WHERE NOT EXISTS (SELECT 1 FROM :"node" n WHERE n.name = t.node) ORDER BY 1 LIMIT 100;

-- # overdue: hand-offs that take longer than drain_timeout_sec; an application's transaction holds the rows
SELECT node, next_node, count(*) AS tokens, min(drain_deadline) AS since
FROM :"token" WHERE drain_deadline < clock_timestamp() GROUP BY 1, 2 ORDER BY 4;

-- # where: which token a task has, and who owns it
SELECT :'task' AS task, t.token_id, t.node, t.epoch, t.next_node, c.node AS claimed_by, c.claimed_at
FROM :"token" t LEFT JOIN :"claim" c ON c.task_id = :'task'
WHERE t.token_id = :"token_of"(:'task');

-- # pins: on which nodes tasks may be, the preferred first
SELECT task_id, token_id, node_patterns, reason, created_by, expires_at, expires_at < clock_timestamp() AS expired
FROM :"lock" ORDER BY created_at DESC LIMIT 100;

-- # claims: tasks that are being done, the oldest first
SELECT task_id, node, claimed_at, clock_timestamp() - claimed_at AS age, fence FROM :"claim" ORDER BY claimed_at LIMIT 100;

-- # checkpoints: where the next owner goes on
SELECT task_id, position, updated_at FROM :"checkpoint" ORDER BY updated_at DESC LIMIT 100;

-- # audit: tasks done today, by node
SELECT date, node, count(*) AS tasks, max(created_on) AS last FROM :"audit"
WHERE date = current_date GROUP BY 1, 2 ORDER BY 1, 2;

-- # rebalances: the last ten
SELECT triggered_at, trigger_reason, leader_node, nodes_before, nodes_after, tokens_moved, duration_ms, epoch
FROM :"rebalance" ORDER BY id DESC LIMIT 10;

-- THE QUEUE ----------------------------------------------------------------------------------------------------------
-- Live jobs are in small partial indexes; finished ones can be found by their id only, so nothing below counts them.

-- # depth: live jobs by type and state, and since when the oldest of them has been ready
SELECT type, state, count(*) AS jobs, clock_timestamp() - min(ready_at) FILTER (WHERE state = 'pending') AS oldest
FROM :"job" WHERE state IN ('pending', 'scheduled', 'blocked', 'processing', 'retrying')
GROUP BY 1, 2 ORDER BY 1, 2;

-- # running: what is being done, by whom, the longest first; overdue ones may be taken by anybody
SELECT id, type, key, attempt, worker, clock_timestamp() - started_at AS for_so_long, deadline < clock_timestamp() AS overdue
FROM :"job" WHERE state = 'processing' ORDER BY started_at LIMIT 100;

-- # due: what waits for a moment
SELECT id, type, state, run_at, failures, error FROM :"job" WHERE state IN ('scheduled', 'retrying') ORDER BY run_at LIMIT 100;

-- # blocked: what waits for other jobs, and for which; those that failed or were cancelled hold it up for good
SELECT j.id, j.type, d.after_id, a.type AS after_type, a.state AS after_state
FROM :"job" j JOIN :"job_dependency" d ON d.job_id = j.id LEFT JOIN :"job" a ON a.id = d.after_id
WHERE j.state = 'blocked' AND a.state IS DISTINCT FROM 'completed' ORDER BY j.id LIMIT 100;

-- # lines: keys with the most jobs in line
SELECT key, count(*) AS jobs, min(id) AS first, (array_agg(state ORDER BY id))[1] AS state_of_first
FROM :"job" WHERE key IS NOT NULL AND (state IN ('pending', 'processing') OR state = 'retrying' AND retry_blocks_key)
GROUP BY key ORDER BY 2 DESC LIMIT 20;

-- # attempts: how they ended in the last hour, by type
SELECT j.type, a.outcome, count(*) AS attempts, round(avg(extract(epoch FROM a.ended_at - a.started_at))::numeric, 3) AS mean_sec
FROM :"job_attempt" a JOIN :"job" j ON j.id = a.job_id
WHERE a.ended_at > clock_timestamp() - interval '1 hour' GROUP BY 1, 2 ORDER BY 1, 2;

-- # errors: the last twenty attempts that failed
SELECT a.ended_at, j.type, a.job_id, a.attempt, a.worker, a.outcome, a.error
FROM :"job_attempt" a JOIN :"job" j ON j.id = a.job_id
WHERE a.ended_at > clock_timestamp() - interval '1 hour' AND a.outcome IN ('failed', 'timeout', 'died', 'discarded')
ORDER BY a.ended_at DESC LIMIT 20;

-- # job: the newest one with its attempts; say  \set job_id 4711  for another
SELECT coalesce(max(id), 0) AS job_id FROM :"job" \gset
SELECT j.id, j.type, j.state, j.key, j.priority, j.attempt, j.failures, j.worker, j.error, j.trace, a.attempt AS of_attempt, a.outcome, a.ended_at
FROM :"job" j LEFT JOIN :"job_attempt" a ON a.job_id = j.id WHERE j.id = :job_id ORDER BY a.attempt;

-- # paused: types of which nothing is taken; the empty one is all of them
SELECT type, since, reason FROM :"job_pause" ORDER BY since;

-- # schedules: periodic jobs, and up to when each has fired
SELECT name, type, cron, timezone, fired_until, last_job_id FROM :"job_schedule" ORDER BY name;

-- # workers: who runs jobs, of which types, and how many slots are taken
SELECT node, types, running, concurrency, completed, failed, clock_timestamp() - seen_at AS last_seen
FROM :"job_worker" ORDER BY node;

-- # unserved: types with jobs that are ready and that no worker runs
SELECT type, count(*) AS jobs FROM :"job" j WHERE state = 'pending'
    AND NOT EXISTS (SELECT 1 FROM :"job_worker" w WHERE j.type = ANY (w.types)) GROUP BY type ORDER BY 2 DESC;

-- THE SERVER ---------------------------------------------------------------------------------------------------------

-- # sessions: transactions that keep locks, or keep vacuum from working, for longer than a minute
SELECT pid, usename, application_name, state, clock_timestamp() - xact_start AS open_for, left(query, 60) AS query
FROM pg_stat_activity
WHERE datname = current_database() AND xact_start < clock_timestamp() - interval '1 minute' ORDER BY xact_start;

-- # sizes: the library's tables, their size with indexes, and rows that vacuum has not removed yet
SELECT relname, pg_size_pretty(pg_total_relation_size(relid)) AS size, n_live_tup, n_dead_tup, last_autovacuum
FROM pg_stat_user_tables WHERE starts_with(relname, :'prefix') ORDER BY pg_total_relation_size(relid) DESC;

-- YOUR TABLE ---------------------------------------------------------------------------------------------------------

\if :{?my_table}
-- # rows: of your table, by owner
SELECT coalesce(t.node, '(nobody)') AS node, count(*) AS rows FROM :"my_table" m JOIN :"token" t USING (token_id)
GROUP BY 1 ORDER BY 1;
\endif
