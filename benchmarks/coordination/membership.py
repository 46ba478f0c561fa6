"""Failover and safety: one membership event in a cluster of three workers.

Events: kill (SIGKILL), stop (SIGTERM: a graceful leave) and pause (SIGSTOP, then SIGCONT) of a follower or the leader;
join of a fourth; swap, where one leaves as another joins.

Reports seconds from the event until the token table names just the workers that are left (``table_s``), and until every
task is claimable by exactly one of them (``view_s``); overlap and gap per task. A join and a swap also give the latter
from the moment at which the new process had imported the library (``view_from_start_s``), since the start of an
interpreter is nobody's doing.
"""

from __future__ import annotations

import argparse
import signal
import time
from typing import Any

from benchmarks.coordination.cluster import Cluster, Worker, rebalances
from benchmarks.coordination.overlap import overlap_and_gap, yes_until
from benchmarks.coordination.scenario import Scenario

EVENTS = (
    "kill_follower",
    "kill_leader",
    "stop_follower",
    "stop_leader",
    "join",
    "pause_follower",
    "pause_leader",
    "swap",
)

# After a resume the paused worker is watched for this long.
WATCH_RESUMED_SEC = 20


def run(scenario: Scenario, cluster: Cluster, arguments: argparse.Namespace) -> None:
    for node in ("w1", "w2", "w3"):
        cluster.add(node)
    form_s = cluster.require(cluster.formed, 200, "the cluster has not formed")
    scenario.settle()
    leader = cluster.leader
    assert leader is not None
    victim = leader if arguments.event.endswith("leader") else next(w for w in cluster.live if w is not leader)
    action = arguments.event.partition("_")[0]
    happened = time.time()
    act(cluster, victim, action)
    staying = [node for node in cluster.workers if action == "join" or node != victim.node]
    table_s = view_s = resumed = None
    watch = arguments.pause + WATCH_RESUMED_SEC if action == "pause" else 0
    while (passed := time.time() - happened) < arguments.limit and (
        table_s is None or view_s is None or passed < watch
    ):
        if table_s is None and cluster.balanced(staying):
            table_s = time.time() - happened
        if view_s is None and cluster.covered(cluster.workers[node] for node in staying):
            view_s = time.time() - happened
        if action == "pause" and resumed is None and passed > arguments.pause:
            resumed = time.time()
            victim.process.send_signal(signal.SIGCONT)
        time.sleep(0.05)
    time.sleep(3)
    until = time.time() - 1
    result: dict[str, Any] = {
        "form_s": form_s,
        "table_s": table_s,
        "view_s": view_s,
        **overlap_and_gap(cluster.workers.values(), cluster.tasks, happened, until),
    }
    if resumed is not None:
        last_yes = yes_until(victim, cluster.tasks, resumed)
        result["yes_until_s"] = None if last_yes is None else last_yes - happened
        result["yes_at_first_sweep_after_resume"] = sum(e["yes"] for e in victim.events if e["ev"] == "stall")
        result["condition_at_end"] = victim.condition
    if action in ("join", "swap") and view_s is not None:
        started = cluster.workers["w4"].first("start")
        assert started is not None
        result["view_from_start_s"] = view_s - (started["t"] - happened)
    stopped = victim.last("stopped")
    if stopped:
        result["exit_took_s"] = stopped["t"] - happened
    scenario.record(
        event=arguments.event,
        mode=arguments.mode,
        pause_s=arguments.pause if action == "pause" else None,
        **{key: round(value, 3) if isinstance(value, float) else value for key, value in result.items()},
        rebalances=[(r["reason"], r["before"], r["after"], r["moved"], r["ms"]) for r in rebalances(cluster.cursor)],
    )


def act(cluster: Cluster, victim: Worker, action: str) -> None:
    if action == "kill":
        victim.kill()
    if action in ("stop", "swap"):
        victim.process.send_signal(signal.SIGTERM)
    if action in ("join", "swap"):
        cluster.add("w4")
    if action == "pause":
        victim.process.send_signal(signal.SIGSTOP)


def main() -> None:
    scenario = Scenario("membership", __doc__)
    scenario.parser.add_argument("event", choices=EVENTS)
    scenario.parser.add_argument("--mode", choices=("fresh", "steady"), default="fresh")
    scenario.parser.add_argument("--tasks", type=int, default=2000)
    scenario.parser.add_argument("--pause", type=float, default=20, metavar="SECONDS")
    scenario.parser.add_argument("--limit", type=float, default=130, metavar="SECONDS")
    arguments = scenario.parse()
    settings = scenario.adapter.settings(arguments.mode)
    with Cluster(scenario.adapter, tasks=arguments.tasks, settings=settings) as cluster:
        run(scenario, cluster, arguments)


if __name__ == "__main__":
    main()
