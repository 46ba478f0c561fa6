"""Claims, audit and checkpoints of one worker that owns everything: seconds and statements for n tasks.

Statements are counted as they leave the job's engine. A checkpoint is one statement and waits for the server's disk;
its rate is that of one thread.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

from sqlalchemy import create_engine, event
from sqlalchemy.engine import make_url

from benchmarks.coordination.cluster import Cluster
from benchmarks.coordination.scenario import Scenario
from jobsync_orm import CoordinationConfig, Job


def run(scenario: Scenario, cluster: Cluster, arguments: argparse.Namespace) -> None:
    n, some = arguments.n, arguments.checkpoints
    engine = create_engine(make_url(cluster.dsn).set(drivername="postgresql+psycopg"))
    sent = [0]

    @event.listens_for(engine, "before_cursor_execute")
    def count(*_: Any) -> None:
        sent[0] += 1

    def timed(what: str, times: int, call: Callable[[], Any]) -> Any:
        sent[0] = 0
        start = time.perf_counter()
        result = call()
        seconds = time.perf_counter() - start
        scenario.record(what=what, n=times, seconds=round(seconds, 3), statements=sent[0], per_s=round(times / seconds))
        return result

    def all_of(found: Any) -> Any:
        if len(found) != n:
            raise SystemExit(f"{len(found)} of {n} tasks")
        return found

    config = CoordinationConfig(engine=engine, **cluster.options["settings"])
    with Job("a", config, wait_on_enter=120) as job:
        cluster.require(lambda: len(job.my_tokens) == cluster.tokens, 60, "the worker does not own everything")
        claims = all_of(timed("claim_tasks", n, lambda: job.claim_tasks(range(n))))
        timed("complete_claims", n, lambda: job.complete_claims(claims))
        all_of(timed("add_tasks", n, lambda: job.add_tasks(range(n))))
        timed("write_audit", n, job.write_audit)
        timed("checkpoint", some, lambda: [job.checkpoint(task, {"page": task}) for task in range(some)])
        timed("claim_task and complete", some, lambda: [job.claim_task(task).complete() for task in range(some)])
    engine.dispose()


def main() -> None:
    scenario = Scenario("claims", __doc__)
    scenario.parser.add_argument("--n", type=int, default=10_000)
    scenario.parser.add_argument("--checkpoints", type=int, default=1_000)
    arguments = scenario.parse()
    if arguments.library != "ours":
        raise SystemExit("the original has no claims of many tasks, and no checkpoints")
    with Cluster(scenario.adapter) as cluster:
        run(scenario, cluster, arguments)


if __name__ == "__main__":
    main()
