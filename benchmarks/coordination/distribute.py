"""A redistribution on the real path: a worker joins, and tokens move to it.

All members are real processes. Reports the time from the leader's trigger until the last token is in place, in the
database's clock, both phases included; until the joined worker says yes; the WAL written for it; the highest resident
memory that the leader ever had.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from benchmarks.coordination.cluster import Cluster, Worker, rebalances
from benchmarks.coordination.counters import Counters
from benchmarks.coordination.scenario import Scenario


def peak_mb(worker: Worker) -> float:
    """Highest resident memory of ``worker`` so far, in MiB."""
    status = Path(f"/proc/{worker.process.pid}/status").read_text()
    (line,) = (line for line in status.splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) / 1024


def run(scenario: Scenario, cluster: Cluster, arguments: argparse.Namespace) -> None:
    counters = Counters(cluster.database)
    nodes = [f"w{i:02d}" for i in range(arguments.before)]
    leader = cluster.add(nodes[0])
    cluster.require(lambda: leader.first("ready"), arguments.limit, "the first worker is not ready")
    for node in nodes[1:]:
        cluster.add(node)
    form_s = cluster.require(cluster.formed, arguments.limit, "the cluster has not formed")
    time.sleep(4)
    base = {worker.node: peak_mb(worker) for worker in cluster.live}
    earlier = len(rebalances(cluster.cursor))
    before = counters.totals()
    joined = cluster.add(f"w{arguments.before:02d}")
    started = cluster.require(lambda: joined.first("start"), arguments.limit, "the new worker has not started")
    wall_s = cluster.require(
        lambda: len(rebalances(cluster.cursor)) > earlier and cluster.balanced(), arguments.limit, "nothing moved"
    )
    ready_s = cluster.require(lambda: joined.first("ready"), arguments.limit, "the new worker is not ready")
    time.sleep(1)
    after = counters.totals()
    last = rebalances(cluster.cursor)[-1]
    owners = scenario.adapter.owners(cluster.cursor)
    cost = after - before if after and before else None
    scenario.record(
        tokens=arguments.tokens,
        nodes=f"{arguments.before}->{arguments.before + 1}",
        form_s=round(form_s, 2),
        moved=last["moved"],
        minimal=arguments.tokens // (arguments.before + 1),
        ms=round(scenario.adapter.redistribution_ms(cluster.cursor), 1),
        noted_ms=last["ms"],
        start_to_balanced_s=round(wall_s, 2),
        balanced_to_ready_s=round(ready_s, 2),
        imports_s=round(started, 2),
        wal_mb=cost and round(cost.wal_bytes / 1e6, 2),
        statements=cost and cost.statements,
        begin_commit=cost and cost.begin_commit,
        spread=[min(owners.values()), max(owners.values())],
        leader_peak_rss_mb=round(peak_mb(leader), 1),
        peak_rss_mb={worker.node: round(peak_mb(worker), 1) for worker in cluster.live},
        peak_rss_mb_before=base and {node: round(value, 1) for node, value in base.items()},
    )


def main() -> None:
    scenario = Scenario("distribute", __doc__)
    scenario.parser.add_argument("--tokens", type=int, default=10_000)
    scenario.parser.add_argument("--before", type=int, default=2, help="workers before one more joins")
    scenario.parser.add_argument("--limit", type=float, default=600, metavar="SECONDS")
    arguments = scenario.parse()
    settings = scenario.adapter.settings(tokens=arguments.tokens, quick_rebalance=True)
    with Cluster(scenario.adapter, arguments.tokens, settings=settings, count=False) as cluster:
        run(scenario, cluster, arguments)


if __name__ == "__main__":
    main()
