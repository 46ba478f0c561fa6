"""What several of the queue's statements are put together from."""

from __future__ import annotations

from jobsync_orm.autocommit import micros
from jobsync_orm.naming import Names
from jobsync_orm.queue.options import LONGEST_SEC
from jobsync_orm.tracing import LONGEST_TRACE

__all__ = ["DEADLINE_SLACK_SEC", "MOST_BYTES", "NOW", "Parts"]

# An attempt may be written this much after its job's timeout, before another worker takes the job.
DEADLINE_SLACK_SEC = 30.0

# A worker whose row is older than this many seconds is not the one that sweeps for all.
CHIEF_SEC = 10

# Longest NOTIFY payload that names what is ready.
MOST_BYTES = 2000

NOW = "clock_timestamp()"


class Parts:
    """The tables of one cluster, quoted, and pieces of SQL."""

    def __init__(self, names: Names) -> None:
        self.names = names
        self.job, self.attempt = names.sql("job"), names.sql("job_attempt")
        self.dependency, self.pause = names.sql("job_dependency"), names.sql("job_pause")
        self.worker = names.sql("job_worker")
        self.cluster, self.node = names.sql("cluster"), names.sql("node")
        self.token, self.lock = names.sql("token"), names.sql("lock")

        # What a worker is told of a job it has claimed; see jobs.ClaimedJob.
        # One row that somebody has written past enqueue must not stop those beside it.
        self.row = (
            f"json_build_array(id, type, priority, attempt, failures, max_retries, {self.limit('timeout')}, key,"
            f" payload, {micros('ready_at')}, {micros('created_at')},"
            f" CASE WHEN octet_length(trace) <= {LONGEST_TRACE} THEN trace END)"
        )

        # The worker that does what one is enough for: the first by name of those that were seen lately.
        self.chief = f"""$2::text = (SELECT w.node FROM {self.worker} w JOIN {self.node} n ON n.name = w.node
                    AND n.incarnation = w.incarnation AND n.state <> 'away'
                WHERE w.seen_at > now() - interval '{CHIEF_SEC} seconds' ORDER BY w.node LIMIT 1)"""

    def limit(self, seconds: str) -> str:
        """SQL of a timeout as it is taken."""
        return f"greatest(least({seconds}, {LONGEST_SEC}), 0)"

    def beyond(self, key: str) -> str:
        """The condition of a key that comes after ``key``. After an empty text come all, an empty key too."""
        return f">= CASE {key} WHEN '' THEN '' ELSE {key} || chr(1) END"

    def take(self, source: str, worker: str, incarnation: str) -> str:
        """UPDATE that makes the rows with a tid in ``source`` this worker's, and returns all columns.

        ``source`` has what the handler of each says, too (NULL: there is none here). It holds where the call that
        enqueued the job did not say otherwise, and is written into the row: whoever has to end the attempt for this
        worker then goes by what this worker went by.
        """
        retries = "CASE WHEN j.max_retries_given THEN j.max_retries ELSE coalesce(p.max_retries, j.max_retries) END"
        seconds = "CASE WHEN j.timeout_given THEN j.timeout ELSE coalesce(p.timeout, j.timeout) END"
        return (
            f"UPDATE {self.job} j SET state = 'processing', attempt = attempt + 1, started_at = {NOW},"
            f" worker = {worker}, incarnation = {incarnation}, max_retries = {retries}, timeout = {seconds},"
            " retry_blocks_key = coalesce(p.blocks, j.retry_blocks_key),"
            f" deadline = {NOW} + ({self.limit(seconds)} + {DEADLINE_SLACK_SEC}) * interval '1 second'"
            f" FROM {source} p WHERE j.ctid = p.tid RETURNING j.*"
        )

    def with_options(self, source: str, types: str, number: int) -> str:
        """The rows of ``source``, and what ``$number`` and the two after it say of the type of each."""
        options = f"${number}::int[], ${number + 1}::float8[], ${number + 2}::bool[]"
        return (
            "(SELECT s.tid, o.max_retries, o.timeout, o.blocks"
            f" FROM {source} s LEFT JOIN unnest({types}::text[], {options})"
            " AS o (type, max_retries, timeout, blocks) ON o.type = s.type)"
        )

    def collected(self, source: str) -> str:
        return f"SELECT coalesce(json_agg({self.row} ORDER BY ready_at, id), '[]') FROM {source}"

    def places(self, source: str) -> str:
        """SQL of the distinct [type, priority, whether it has a key] of the rows of ``source``."""
        return (
            "(SELECT coalesce(jsonb_agg(DISTINCT jsonb_build_array(type, priority, keyed)), '[]')"
            f" FROM {source} WHERE state = 'pending')"
        )

    def tell(self, source: str) -> str:
        """SQL that wakes the workers if jobs in ``source`` became ready; see the payloads in ``waker.py``."""
        return (
            f"(SELECT pg_notify('{self.names.queue_channel}', CASE WHEN octet_length(p::text) <= {MOST_BYTES}"
            f" THEN p::text ELSE '' END) FROM (SELECT {self.places(source)}) AS w (p) WHERE p <> '[]')"
        )
