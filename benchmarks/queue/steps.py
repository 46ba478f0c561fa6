"""What is measured. A step yields lines, ``{"what": ..., "value": ...}``, for a peer in one of its configurations."""

from __future__ import annotations

import multiprocessing
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.queue.arena import Arena
from benchmarks.queue.endurance import crowd, memory, snapshot

__all__ = ["STEPS", "Step"]

Line = dict[str, Any]

# Jobs of a configuration: as many as it does in two or three seconds.
DRAINED = {
    ("ours", "default"): 50_000,
    ("ours", "one thread"): 50_000,
    ("pgqueuer", "default"): 10_000,
    ("pgqueuer", "batch 1000, pool of 4"): 40_000,
    ("procrastinate", "default"): 500,
    ("procrastinate", "concurrency 10"): 500,
}


@dataclass(frozen=True)
class Step:
    """A measurement: which (peer, configuration) pairs take part, and what is done with each.

    ``once``: not in each pass, as it takes long, or takes turns by itself.
    """

    pairs: Sequence[tuple[str, str]]
    measure: Callable[[str, str], Iterator[Line]]
    once: bool = False


def _rate(arena: Arena, jobs: int, workers: int = 1) -> float:
    """Jobs per second, from the first job's start until the database says that none is left."""
    for _ in range(workers):
        arena.start()
    arena.wait_for(jobs)
    return jobs / (time.monotonic() - arena.told.totals()[1])


def drain(peer: str, config: str) -> Iterator[Line]:
    """No-op jobs that are there already, with one worker process and with two."""
    for workers in (1, 2):
        jobs = DRAINED[peer, config]
        with Arena(peer, config) as arena:
            arena.load(jobs)
            yield {"what": f"drain, {workers} worker{'s' * (workers > 1)}", "value": _rate(arena, jobs, workers)}


def enqueue(peer: str, config: str) -> Iterator[Line]:
    """One job per transaction, in each way that there is, then 1,000 at a time, from one thread."""
    with Arena(peer, config) as arena, arena.producer() as producer:
        for what, enqueue in {"enqueue, one per transaction": producer.many, **getattr(producer, "ways", {})}.items():
            enqueue(range(100))
            begun = time.monotonic()
            enqueue(range(2_000))
            yield {"what": what, "value": 2_000 / (time.monotonic() - begun)}
        producer.bulk(range(1_000))
        jobs = 5_000 if peer == "procrastinate" else 30_000
        begun = time.monotonic()
        for first in range(0, jobs, 1_000):
            producer.bulk(range(first, first + 1_000))
        yield {"what": "enqueue, 1,000 at a time", "value": jobs / (time.monotonic() - begun)}


def latency(peer: str, config: str) -> Iterator[Line]:
    """From the return of enqueue to the job's start, one job each 0.04 s, an idle worker."""
    warm, jobs = 5, 350
    with Arena(peer, config) as arena, arena.producer() as producer:
        arena.start(numbers=warm + jobs)
        for number in range(warm):
            producer.one(number)
        arena.wait_for(warm)
        returned = [0.0] * (warm + jobs)
        due = time.monotonic() + 1
        for number in range(warm, warm + jobs):
            time.sleep(max(0.0, due - time.monotonic()))
            producer.one(number)
            returned[number] = time.monotonic()
            due += 0.04
        arena.wait_for(warm + jobs)
        starts = arena.told.starts(warm + jobs)
        waits = sorted((starts[n] - returned[n]) * 1000 for n in range(warm, warm + jobs))
        for name, share in (("p50", 0.5), ("p95", 0.95), ("p99", 0.99)):
            yield {"what": f"pick-up when idle, {name}, ms", "value": waits[int(share * len(waits))]}


def crash(peer: str, config: str) -> Iterator[Line]:
    """SIGKILL the only worker 2 s into a job of 5 s; another is started at once: until the job runs again."""
    with Arena(peer, config) as arena, arena.producer() as producer:
        first = arena.start()
        producer.one(0)
        arena.wait_for(1)
        producer.one(1, 5)
        while not arena.told.events():
            time.sleep(0.01)
        time.sleep(2)
        first.kill()
        killed = time.monotonic()
        arena.start()
        while len(events := [at for what, at in arena.told.events() if what == "start"]) < 2:
            if time.monotonic() > killed + 200:
                break
            time.sleep(0.02)
        yield {
            "what": "job of a killed worker runs again after, s",
            "value": events[1] - killed if events[1:] else None,
        }


def _produce(
    module: str, dsn: str, threads: int, apart: bool, seconds: float, options: dict[str, Any], answers: Any
) -> None:
    import importlib

    counts = [0] * threads
    producer_class = importlib.import_module(module).Producer
    made = [producer_class(dsn, **options) for _ in range(threads if apart else 1)]
    producers = made if apart else made * threads
    answers.put("ready")
    until = time.monotonic() + seconds

    def run(which: int) -> None:
        while time.monotonic() < until:
            producers[which].one(counts[which])
            counts[which] += 1

    running = [threading.Thread(target=run, args=(which,)) for which in range(threads)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    answers.put(sum(counts))
    for producer in made:
        producer.close()


def producers(peer: str, config: str) -> Iterator[Line]:
    """64 producers, one job per transaction, in 8 processes of 8 threads: with wake-ups against without.

    The threads of a process share its queue, as those of a web server do; and then as if they were processes, 64 queues
    with a sender each.
    """
    context = multiprocessing.get_context("spawn")
    for apart, what in ((False, ""), (True, ", a queue each")):
        rates: dict[bool, list[float]] = {True: [], False: []}
        for wake in (False, True, True, False):
            with Arena(peer, config) as arena:
                answers = context.Queue()
                arguments = (arena.module.__name__, arena.dsn, 8, apart, 8.0, {"wake": wake}, answers)
                processes = [context.Process(target=_produce, args=arguments) for _ in range(8)]
                for process in processes:
                    process.start()
                got = [answers.get() for _ in range(16)]
                for process in processes:
                    process.join()
                rates[wake].append(sum(count for count in got if count != "ready") / 8)
        with_, without = statistics.mean(rates[True]), statistics.mean(rates[False])
        yield {
            "what": f"64 producers' commits with wake-ups, against without{what}",
            "value": with_ / without,
            "rate": with_,
        }


BEST = [("ours", "default"), ("pgqueuer", "batch 1000, pool of 4")]
DEFAULTS = [("ours", "default"), ("pgqueuer", "default"), ("procrastinate", "default")]

STEPS = {
    "drain": Step([*DEFAULTS, ("ours", "one thread"), BEST[1], ("procrastinate", "concurrency 10")], drain),
    "enqueue": Step(DEFAULTS, enqueue),
    "latency": Step(DEFAULTS, latency),
    "crowd": Step(BEST, crowd, once=True),
    "snapshot": Step(BEST, snapshot, once=True),
    "crash": Step(DEFAULTS[:2], crash, once=True),
    "producers": Step(DEFAULTS[:1], producers, once=True),
    "memory": Step(DEFAULTS[:1], memory, once=True),
}
