"""One worker process: increments counters, one per key, and bears witness of each attempt on a connection of its own.

Environment: URL, NODE, CONFIG (settings as JSON). Leaves on SIGTERM.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time

import psycopg
from sqlalchemy import make_url, text

from jobsync_orm import Backoff, CoordinationConfig, JobContext, JobQueue, JobWorker

# How long a session may stand still in a transaction: a worker that is stopped must not hold rows for as long.
IDLE = "-c idle_in_transaction_session_timeout=2000"

url = make_url(os.environ["URL"])
queue = JobQueue(
    CoordinationConfig(url=url.update_query_dict({"options": IDLE}), **json.loads(os.environ.get("CONFIG", "{}")))
)
witnesses = threading.local()


def witness() -> psycopg.Connection:
    """This thread's connection for what must be known even if the attempt comes to nothing."""
    if not hasattr(witnesses, "connection"):
        dsn = url.set(drivername="postgresql").render_as_string(hide_password=False)
        witnesses.connection = psycopg.connect(dsn, autocommit=True)
    return witnesses.connection


@queue.handler("increment", max_retries=1000, backoff=Backoff(base=0.2, factor=1, jitter=0.5))
def increment(ctx: JobContext, n: int, sec: float, fails: int) -> None:
    row = witness().execute(
        "INSERT INTO span (key, n, job, attempt, worker) VALUES (%s, %s, %s, %s, %s) RETURNING id",
        (ctx.key, n, ctx.id, ctx.attempt, ctx.worker),
    )
    ((span,),) = row.fetchall()
    try:
        session = ctx.session
        value = session.scalar(
            text("UPDATE counter SET value = value + 1 WHERE key = :key RETURNING value"), {"key": ctx.key}
        )
        session.execute(
            text("INSERT INTO effect (key, n, value, worker) VALUES (:key, :n, :value, :worker)"),
            {"key": ctx.key, "n": n, "value": value, "worker": ctx.worker},
        )
        time.sleep(sec)
        if ctx.attempt <= fails:
            raise ValueError("on purpose")
    finally:
        witness().execute("UPDATE span SET ended_at = clock_timestamp() WHERE id = %s", (span,))


if __name__ == "__main__":
    JobWorker(queue, concurrency=6, node_name=os.environ["NODE"], grace_sec=3).run()
    sys.exit(0)
