"""Many at once, in one process: seconds and statements for n pins, n add_task, one write_audit of n tasks."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

from benchmarks.coordination.cluster import Cluster
from benchmarks.coordination.counters import Counters
from benchmarks.coordination.scenario import Scenario


def run(scenario: Scenario, cluster: Cluster, arguments: argparse.Namespace) -> None:
    counters, n = Counters(cluster.database), arguments.n

    def timed(what: str, call: Callable[[], Any]) -> None:
        before = counters.totals()
        start = time.perf_counter()
        call()
        seconds = time.perf_counter() - start
        after = counters.totals()
        cost = after - before if after and before else None
        scenario.record(
            what=what,
            n=n,
            seconds=round(seconds, 3),
            statements=cost and cost.statements,
            begin_commit=cost and cost.begin_commit,
            wal_mb=cost and round(cost.wal_bytes / 1e6, 2),
        )

    with scenario.adapter.make_job(cluster.dsn, "a", cluster.options["settings"]) as job:
        cluster.require(lambda: len(job.my_tokens) == cluster.tokens, 60, "the worker does not own everything")
        locks = [(f"task-{i}", "a%", "bench") for i in range(n)]
        timed("register_locks_bulk", lambda: job.register_locks_bulk(locks))
        timed("register_locks_bulk again", lambda: job.register_locks_bulk(locks))
        timed("clear_all_locks", job.clear_all_locks)
        timed("add_task", lambda: [job.add_task(i) for i in range(n)])
        timed("write_audit", job.write_audit)
        timed("get_audit", job.get_audit)


def main() -> None:
    scenario = Scenario("bulk", __doc__)
    scenario.parser.add_argument("--n", type=int, default=10_000)
    arguments = scenario.parse()
    with Cluster(scenario.adapter) as cluster:
        run(scenario, cluster, arguments)


if __name__ == "__main__":
    main()
