"""A crowd of worker processes started at once: seconds to a balanced cluster, and errors.

``--tables new`` leaves it to the workers to create the tables in an empty database.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter

from benchmarks.coordination.cluster import Cluster, rebalances
from benchmarks.coordination.scenario import Scenario


def run(scenario: Scenario, cluster: Cluster, arguments: argparse.Namespace) -> None:
    begun = time.time()
    for i in range(arguments.workers):
        cluster.add(f"w{i:02d}")
    table_s = view_s = None
    while time.time() - begun < arguments.limit and view_s is None:
        if table_s is None and cluster.balanced():
            table_s = time.time() - begun
        if table_s is not None and cluster.covered():
            view_s = time.time() - begun
        time.sleep(0.1)
    starts = [event["t"] - begun for w in cluster.workers.values() if (event := w.first("start"))]
    readies = [event["t"] - begun for w in cluster.workers.values() if (event := w.first("ready"))]
    errors = Counter(event["msg"][:160] for w in cluster.workers.values() if (event := w.last("error")))
    last_up = max(starts)
    scenario.record(
        workers=arguments.workers,
        tables=arguments.tables,
        last_process_up_s=round(last_up, 2),
        last_ready_s=round(max(readies), 2) if readies else None,
        table_balanced_s=table_s and round(table_s, 2),
        views_balanced_s=view_s and round(view_s, 2),
        after_last_up_s=view_s and round(view_s - last_up, 2),
        live_at_end=len(cluster.live),
        errors=dict(errors),
        rebalances=[
            (round(r["t"] - begun, 2), r["reason"], r["leader"], r["before"], r["after"], r["moved"], r["ms"])
            for r in rebalances(cluster.cursor)
        ],
    )


def main() -> None:
    scenario = Scenario("startup", __doc__)
    scenario.parser.add_argument("--workers", type=int, default=30)
    scenario.parser.add_argument("--tables", choices=("new", "ready"), default="new")
    scenario.parser.add_argument("--limit", type=float, default=240, metavar="SECONDS")
    arguments = scenario.parse()
    new = arguments.tables == "new"
    settings = scenario.adapter.settings(create_tables=new)
    options = {"tasks": 2000, "sweep": 0.5, "settings": settings}
    with Cluster(scenario.adapter, prepare=not new, **options) as cluster:
        run(scenario, cluster, arguments)


if __name__ == "__main__":
    main()
