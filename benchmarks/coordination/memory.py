"""Memory, threads and connections that the library adds to a process which has SQLAlchemy and one connection.

The memory allocated since the imports (tracemalloc) is taken in a cluster of its own, because tracing itself takes
memory.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time

import psutil

from benchmarks.coordination.cluster import ROOT, Cluster
from benchmarks.coordination.scenario import Scenario

APPLICATION = """
import sys, time
from benchmarks.coordination.worker import like_an_application
import sqlalchemy, psycopg
like_an_application(sys.argv[1])
kept = psycopg.connect(sys.argv[1])
print('up', flush=True)
time.sleep(120)
"""


def rss_mb(pid: int) -> float:
    return float(psutil.Process(pid).memory_info().rss) / 2**20


def application_mb(dsn: str) -> float:
    process = subprocess.Popen([sys.executable, "-c", APPLICATION, dsn], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(1)
        return rss_mb(process.pid)
    finally:
        process.kill()
        process.wait()


def run(scenario: Scenario, arguments: argparse.Namespace) -> None:
    nodes = [f"w{i + 1}" for i in range(arguments.workers)]
    with Cluster(scenario.adapter) as cluster:
        base = application_mb(cluster.dsn)
        for node in nodes:
            cluster.add(node)
        cluster.require(cluster.formed, 200, "the cluster has not formed")
        time.sleep(arguments.seconds)
        rows = []
        for worker in cluster.live:
            process = psutil.Process(worker.process.pid)
            rows.append(
                {
                    "leader": worker.leads,
                    "rss_mb": round(rss_mb(process.pid), 1),
                    "threads": process.num_threads() - 1,
                    "connections": sum(c.status == "ESTABLISHED" for c in process.net_connections()),
                }
            )
    with Cluster(scenario.adapter, trace=arguments.seconds) as cluster:
        for node in nodes:
            cluster.add(node)
        cluster.require(cluster.formed, 200, "the cluster has not formed")
        cluster.require(
            lambda: all(worker.first("memory") for worker in cluster.live), arguments.seconds + 60, "no report"
        )
        own = [worker.first("memory") for worker in cluster.live]
    followers = [row for row in rows if not row["leader"]]
    scenario.record(
        application_rss_mb=round(base, 1),
        rss_over_application_mb=round(statistics.median(row["rss_mb"] for row in rows) - base, 1),
        own_mb=[round(event["bytes"] / 2**20, 3) for event in own if event],
        threads=max(row["threads"] for row in rows),
        threads_of_a_follower=min(row["threads"] for row in followers),
        connections=max(row["connections"] for row in rows),
        workers=rows,
        cpus=os.cpu_count(),
    )


def main() -> None:
    scenario = Scenario("memory", __doc__)
    scenario.parser.add_argument("--workers", type=int, default=3)
    scenario.parser.add_argument("--seconds", type=float, default=40, help="how long the workers settle")
    run(scenario, scenario.parse())


if __name__ == "__main__":
    main()
