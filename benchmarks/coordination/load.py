"""What a cluster that has nothing to do costs its database: statements per minute, per worker and in all.

Each worker connects as a role of its own, by which pg_stat_statements tells them apart.
"""

from __future__ import annotations

import argparse
import time
import uuid
from collections import Counter
from urllib.parse import urlsplit, urlunsplit

from benchmarks.coordination.cluster import Cluster, connect
from benchmarks.coordination.counters import Counters
from benchmarks.coordination.scenario import Scenario

ENDS = ("BEGIN", "COMMIT", "ROLLBACK")


def run(scenario: Scenario, cluster: Cluster, roles: dict[str, str], arguments: argparse.Namespace) -> None:
    counters = Counters(cluster.database)
    if not counters.available:
        raise SystemExit("the server has no pg_stat_statements: nothing to count with")
    for node, role in roles.items():
        u = urlsplit(cluster.dsn)
        where = f"{u.hostname}:{u.port or 5432}"
        cluster.add(node, dsn=urlunsplit(u._replace(netloc=f"{role}:{role}@{where}")))
    cluster.require(cluster.formed, 200, "the cluster has not formed")
    time.sleep(arguments.warm)
    before, t0 = counters.by_role(), time.time()
    time.sleep(arguments.seconds)
    after, t1 = counters.by_role(), time.time()
    minutes = (t1 - t0) / 60
    made = Counter({key: (calls - before.get(key, 0)) / minutes for key, calls in after.items()})
    nodes = {role: node for node, role in roles.items()}
    per_node: Counter[str] = Counter()
    work: Counter[str] = Counter()
    for (role, query), rate in made.items():
        if role in nodes:
            per_node[nodes[role]] += rate
            work[nodes[role]] += 0 if query.split()[0].upper() in ENDS else rate
    leader = cluster.leader
    assert leader is not None
    followers = [rate for node, rate in per_node.items() if node != leader.node]
    scenario.record(
        mode=arguments.mode,
        workers=len(roles),
        seconds=round(t1 - t0, 1),
        cluster_per_min=round(sum(per_node.values()), 1),
        follower_per_min=round(min(followers), 1),
        leader_per_min=round(per_node[leader.node], 1),
        per_min={node: round(rate, 1) for node, rate in sorted(per_node.items())},
        without_begin_commit_per_min={node: round(rate, 1) for node, rate in sorted(work.items())},
        top=[
            (round(rate, 1), nodes.get(role, role), " ".join(query.split())[:90])
            for (role, query), rate in made.most_common(9)
        ],
    )


def main() -> None:
    scenario = Scenario("load", __doc__)
    scenario.parser.add_argument("--workers", type=int, default=3)
    scenario.parser.add_argument("--seconds", type=float, default=120)
    scenario.parser.add_argument("--warm", type=float, default=8, metavar="SECONDS")
    scenario.parser.add_argument("--mode", choices=("fresh", "steady"), default="fresh")
    arguments = scenario.parse()
    unique = uuid.uuid4().hex[:8]
    roles = {f"w{i + 1}": f"bench_{unique}_{i + 1}" for i in range(arguments.workers)}
    with connect() as connection:
        for role in roles.values():
            connection.execute(f"create role {role} superuser login password '{role}'")
    try:
        with Cluster(scenario.adapter, settings=scenario.adapter.settings(arguments.mode)) as cluster:
            run(scenario, cluster, roles, arguments)
    finally:
        with connect() as connection:
            for role in roles.values():
                connection.execute(f"drop role {role}")


if __name__ == "__main__":
    main()
