"""Costs in CPU time alone, in one process: the hot path, the hashes, the pure planning step.

Rates are calls per second of the thread's own CPU time, so that a busy machine matters less.

    hot       can_claim_task, for tasks of this worker and of the other
    hash      task to token
    compute   planning, without a database
    locked    planning with pinned tokens whose owner is gone
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

from benchmarks.coordination.cluster import Cluster
from benchmarks.coordination.scenario import Scenario

TASKS = 60_000
TOKENS = 10_000
CHANGES = ((2, 3), (7, 6), (1, 1))
PINNED = ((10_000, 1_000), (10_000, 5_000), (10_000, 10_000), (100_000, 20_000))


def rate(batch: Callable[[], int], seconds: float, runs: int = 5) -> dict[str, int]:
    """Calls per CPU second; ``batch`` makes some calls and returns how many."""
    rates = []
    for _ in range(runs):
        calls, start = 0, time.thread_time()
        while time.thread_time() - start < seconds:
            calls += batch()
        rates.append(calls / (time.thread_time() - start))
    return {"per_cpu_s": round(statistics.median(rates)), "least": round(min(rates)), "most": round(max(rates))}


def cpu_ms(run: Callable[[], Any], runs: int) -> float:
    times = []
    for _ in range(runs):
        start = time.thread_time()
        run()
        times.append((time.thread_time() - start) * 1000)
    return round(statistics.median(times), 2)


def over(call: Callable[[Any], Any], items: list[Any]) -> Callable[[], int]:
    def batch() -> int:
        for item in items:
            call(item)
        return len(items)

    return batch


def hot(scenario: Scenario, arguments: argparse.Namespace) -> None:
    settings = scenario.adapter.settings(quick_rebalance=True)
    with Cluster(scenario.adapter, settings=settings) as cluster:
        other = cluster.add("b")
        cluster.require(lambda: other.first("start"), 30, "the other worker has not started")
        with scenario.adapter.make_job(cluster.dsn, "a", settings) as job:
            cluster.require(lambda: len(job.my_tokens) == TOKENS // 2, 120, "the two have not shared the tokens")
            answers = {task: job.can_claim_task(task) for task in range(TASKS)}
            for what, wanted in (("owned", True), ("not owned", False)):
                tasks = [task for task, mine in answers.items() if mine is wanted][: TASKS // 3]
                measured = rate(over(job.can_claim_task, tasks), arguments.seconds)
                scenario.record(what=f"can_claim_task {what}", **measured)


def hashes(scenario: Scenario, arguments: argparse.Namespace) -> None:
    for name, call in scenario.adapter.hash_calls(TOKENS).items():
        scenario.record(what=f"hash {name}", **rate(over(call, list(range(TASKS // 3))), arguments.seconds))


def compute(scenario: Scenario, arguments: argparse.Namespace) -> None:
    for before, after in CHANGES:
        tokens = arguments.tokens
        run = scenario.adapter.planning(tokens, before, after)
        around = scenario.adapter.conversion(tokens, before, after)
        scenario.record(
            what="planning",
            tokens=tokens,
            nodes=f"{before}->{after}",
            moved=run(),
            cpu_ms=cpu_ms(run, 5),
            around_cpu_ms={name: cpu_ms(part, 3) for name, part in around.items()},
        )


def locked(scenario: Scenario, arguments: argparse.Namespace) -> None:
    for tokens, pins in PINNED:
        run = scenario.adapter.pinned_planning(tokens, pins, nodes=7)
        # The original takes many seconds for it: once is enough.
        ms = cpu_ms(run, 1)
        scenario.record(what="planning with pins", tokens=tokens, pins=pins, nodes=7, cpu_s=round(ms / 1000, 4))


PARTS = {"hot": hot, "hash": hashes, "compute": compute, "locked": locked}


def main() -> None:
    scenario = Scenario("cpu", __doc__)
    scenario.parser.add_argument("what", choices=PARTS)
    scenario.parser.add_argument("--tokens", type=int, default=1_000_000, help="for compute")
    scenario.parser.add_argument("--seconds", type=float, default=1, help="CPU seconds of each run, for rates")
    arguments = scenario.parse()
    PARTS[arguments.what](scenario, arguments)


if __name__ == "__main__":
    main()
