"""One process that runs queue jobs; prints what happens as JSON lines and leaves on SIGTERM.

Environment: URL, NODE (optional), CONFIG (settings as JSON), WORKER (JobWorker's arguments as JSON).

Job types: ``nothing``; ``slow`` sleeps for ``seconds`` and says when it starts and ends; ``forks`` and ``spawns`` leave
a child behind, and say which; ``effect`` inserts a row into ``effect`` in the transaction of its completion.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
import time
import warnings
from typing import Any

from sqlalchemy import text

from jobsync_orm import CoordinationConfig, JobContext, JobQueue, JobWorker

began = time.time()
printing = threading.Lock()


def tell(event: str, **more: object) -> None:
    with printing:
        print(json.dumps({"event": event, "at": time.time(), **more}), flush=True)


queue = JobQueue(CoordinationConfig(url=os.environ["URL"], **json.loads(os.environ.get("CONFIG", "{}"))))


@queue.handler("nothing")
def nothing(ctx: JobContext, **_: Any) -> None:
    pass


@queue.handler("slow")
def slow(ctx: JobContext, seconds: float = 60, **_: Any) -> None:
    tell("start", job=ctx.id, attempt=ctx.attempt)
    # Not ctx.cancelled.wait: this handler does not listen.
    time.sleep(seconds)
    tell("end", job=ctx.id, attempt=ctx.attempt)


@queue.handler("forks")
def forks(ctx: JobContext, **_: Any) -> None:
    """Leave a child behind that is a copy of this process."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forking where there are threads
        child = os.fork()
    if child == 0:
        time.sleep(600)
        os._exit(0)
    tell("start", job=ctx.id, attempt=ctx.attempt, child=child)
    time.sleep(60)


@queue.handler("spawns")
def spawns(ctx: JobContext, **_: Any) -> None:
    """Leave a program behind that has got all that it can get of this process."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], close_fds=False)
    tell("start", job=ctx.id, attempt=ctx.attempt, child=child.pid)
    time.sleep(60)


@queue.handler("effect", max_retries=1000)
def effect(ctx: JobContext, **_: Any) -> None:
    ctx.session.execute(
        text("INSERT INTO effect (job, attempt) VALUES (:job, :attempt)"), {"job": ctx.id, "attempt": ctx.attempt}
    )


def watch(worker: JobWorker) -> None:
    """Say when the worker's health changes."""
    before = None
    while True:
        health = worker.health()
        if (now := (health.ok, health.problems)) != before:
            tell("health", ok=health.ok, problems=health.problems)
            before = now
        time.sleep(0.05)


class Told(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        tell("log", level=record.levelname, message=self.format(record))


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, handlers=[Told()])
    tell("imported", after=time.time() - began)
    worker = JobWorker(queue, node_name=os.environ.get("NODE"), **json.loads(os.environ.get("WORKER", "{}")))
    threading.Thread(target=watch, args=(worker,), daemon=True).start()
    try:
        worker.run()
    except BaseException as error:
        tell("error", error=repr(error))
        raise
    tell("stopped")
    sys.stdout.flush()
