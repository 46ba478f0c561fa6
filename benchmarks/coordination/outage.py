"""The database goes away under three running workers and comes back.

Stops and starts the server, so it needs the one that `make bench` has started for itself.
"""

from __future__ import annotations

import argparse
import time

from benchmarks.coordination.cluster import Cluster, rebalances
from benchmarks.coordination.overlap import overlap_and_gap
from benchmarks.coordination.scenario import Scenario
from benchmarks.server import Server


def run(scenario: Scenario, cluster: Cluster, arguments: argparse.Namespace) -> None:
    server = Server.of_this_run()
    for node in ("w1", "w2", "w3"):
        cluster.add(node)
    cluster.require(cluster.formed, 200, "the cluster has not formed")
    scenario.settle()
    happened = time.time()
    server.stop()
    time.sleep(arguments.down)
    server.start()
    up = time.time()
    # What the workers' last sweeps said before they noticed does not count as recovery.
    time.sleep(1)
    covered = cluster.wait(cluster.covered, arguments.watch)
    time.sleep(max(0.0, up + arguments.watch - time.time()))
    until = time.time()
    cluster.reconnect()
    scenario.record(
        down_s=round(up - happened, 1),
        covered_after_up_s=None if covered is None else round(covered + 1, 2),
        workers={
            w.node: {"condition": w.condition, "holds": len(w.held()), "alive": w.alive}
            for w in cluster.workers.values()
        },
        **overlap_and_gap(cluster.workers.values(), cluster.tasks, happened, until),
        owners=scenario.adapter.owners(cluster.cursor),
        rebalances=[
            (round(r["t"] - happened, 1), r["reason"], r["before"], r["after"], r["moved"])
            for r in rebalances(cluster.cursor)
        ],
    )


def main() -> None:
    scenario = Scenario("outage", __doc__)
    scenario.parser.add_argument("--down", type=float, default=20, metavar="SECONDS")
    scenario.parser.add_argument("--watch", type=float, default=120, metavar="SECONDS")
    scenario.parser.add_argument("--tasks", type=int, default=2000)
    arguments = scenario.parse()
    with Cluster(scenario.adapter, tasks=arguments.tasks) as cluster:
        run(scenario, cluster, arguments)


if __name__ == "__main__":
    main()
