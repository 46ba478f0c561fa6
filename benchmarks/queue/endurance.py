"""What a queue is like when it has been in use for long: many rows beside the jobs, dead rows among them, many jobs."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.queue.arena import Arena

__all__ = ["crowd", "memory", "snapshot"]

Line = dict[str, Any]

CROWD = 1_000_000
KINDS = ("no", "finished", "future")
ROUNDS = 5

# Jobs of one round, as many as the fastest does in a second or two.
DRAINED = {"ours": 40_000, "pgqueuer": 20_000}


def _rate(moments: Sequence[float]) -> float:
    """Jobs per second, of moments in order."""
    return (len(moments) - 1) / (moments[-1] - moments[0])


def crowd(peer: str, config: str) -> Iterator[Line]:
    """Drain beside no, finished and future rows: a database of each, some rounds in each, in turns.

    The tables are vacuumed and analysed before each round, as they are in production some time after they have grown.
    The rate is from the first job's start to the last one's: asking the database whether any is left reads a million
    rows.
    """
    jobs = DRAINED[peer]
    rates: dict[str, list[float]] = {kind: [] for kind in KINDS}
    with contextlib.ExitStack() as stack:
        arenas = {kind: stack.enter_context(Arena(peer, config, f"_{kind}")) for kind in KINDS}
        for kind in KINDS[1:]:
            arenas[kind].fill(CROWD, kind)
        if peer == "ours":
            yield from _figures(arenas["finished"])
        for number in range(ROUNDS):
            for kind in KINDS if number % 2 == 0 else KINDS[::-1]:
                arena = arenas[kind]
                arena.load(jobs)
                arena.start()
                arena.wait_for(jobs)
                _, first, last = arena.told.totals()
                rates[kind].append(jobs / (last - first))
                arena.clear()
    alone = statistics.median(rates["no"])
    for kind in KINDS[1:]:
        rate = statistics.median(rates[kind])
        yield {"what": f"drain beside {CROWD:,} {kind} rows, against none", "value": rate / alone, "rates": rates}


def _figures(arena: Arena) -> Iterator[Line]:
    """How long the queue's figures take."""
    arena.settle()
    times = arena.module.figures(arena.dsn, 40)
    yield {"what": f"stats() with {CROWD:,} rows, ms", "value": statistics.median(times), "all": times}


def snapshot(peer: str, config: str) -> Iterator[Line]:
    """Drain of 100,000 jobs while another session holds a snapshot: the last tenth, against the first, and against the
    last without."""
    jobs = 100_000
    tenth = jobs // 10
    last: dict[bool, float] = {}
    for held in (False, True):
        with Arena(peer, config) as arena, arena.connect() as connection:
            arena.load(jobs)
            if held:
                connection.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
                connection.execute("SELECT count(*) FROM pg_class")
            arena.start(numbers=jobs)
            arena.wait_for(jobs)
            moments = sorted(arena.told.starts(jobs))
            first, last[held] = _rate(moments[:tenth]), _rate(moments[-tenth:])
    what = "drain under a held snapshot, last tenth of 100,000"
    yield {"what": f"{what}, against the first tenth", "value": last[True] / first, "rate": last[True]}
    yield {"what": f"{what}, against none held", "value": last[True] / last[False], "rate": last[False]}


def memory(peer: str, config: str) -> Iterator[Line]:
    """A million no-op jobs: the worker's memory in the last tenth, against that after the first."""
    jobs, part = 1_000_000, 50_000
    samples: list[float] = []
    with Arena(peer, config) as arena:
        arena.load(jobs)
        worker = arena.start()
        for number in range(part, jobs, part):
            arena.wait_for_runs(number)
            samples.append(worker.rss_mb())
        arena.wait_for(jobs, seconds=900)
        samples.append(worker.rss_mb())
    yield {
        "what": "worker's memory after 1,000,000 jobs, against after 100,000",
        "value": max(samples[-2:]) / samples[1],
        "mb": samples,
    }
