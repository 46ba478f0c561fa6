"""What it costs to be observed: jobs per second of one worker, with nobody listening and with each integration.

    python -m benchmarks.observing --url postgresql://... [--jobs 20000] [--rounds 5]

Handlers that do nothing, eight threads, one process. Ways take turns, in an order that is turned round from one round
to the next; what is printed is the median of each, as a share of the first. It also prints what a look at an audience
without observers costs, beside the quickest call there is.
"""

from __future__ import annotations

import argparse
import statistics
import time
import timeit
from collections.abc import Callable
from typing import Any

import prometheus_client
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from sqlalchemy import create_engine, make_url, text

from jobsync_orm import CoordinationConfig, Job, JobQueue, JobWorker, migrate
from jobsync_orm.integrations import opentelemetry, prometheus
from jobsync_orm.observe import Audience

APPNAME = "observing_"


def nobody(worker: JobWorker) -> Callable[[], None]:
    return lambda: None


def with_prometheus(worker: JobWorker) -> Callable[[], None]:
    return prometheus.register(worker, registry=prometheus_client.CollectorRegistry(), reads="never").unregister


def with_opentelemetry(worker: JobWorker) -> Callable[[], None]:
    meters, tracers = MeterProvider([InMemoryMetricReader()]), TracerProvider()
    return opentelemetry.instrument(worker, meter_provider=meters, tracer_provider=tracers, reads="never").unregister


WAYS: dict[str, Callable[[JobWorker], Callable[[], None]]] = {
    "nobody listens": nobody,
    "Prometheus": with_prometheus,
    "OpenTelemetry, metrics and spans": with_opentelemetry,
}


def rate(config: CoordinationConfig, jobs: int, way: Callable[[JobWorker], Callable[[], None]]) -> float:
    """Jobs per second, from the first claim until the last completion is stored."""
    queue = JobQueue(config)
    queue.register("nothing", lambda ctx: None)
    with queue.engine.begin() as connection:
        connection.execute(text(f"TRUNCATE {APPNAME}job, {APPNAME}job_attempt"))
        queue.enqueue_many(connection, "nothing", [{}] * jobs)
    worker = JobWorker(queue)
    end = way(worker)
    began = time.monotonic()
    with worker:
        while worker.health().completed == 0:
            began = time.monotonic()
            time.sleep(0.001)
        done = worker.health().completed
        while worker.health().completed < jobs:
            time.sleep(0.005)
        found = (jobs - done) / (time.monotonic() - began)
    end()
    queue.dispose()
    return found


def looks() -> tuple[float, float]:
    """Seconds for a look at an audience without observers, and for ``can_claim_task`` of a standalone job."""
    audience, job, many = Audience(), Job("alone"), 200_000

    def look() -> None:
        if audience.active:
            raise AssertionError

    def empty() -> None:
        pass

    look_sec = min(timeit.repeat(look, number=many, repeat=5)) - min(timeit.repeat(empty, number=many, repeat=5))
    call_sec = min(timeit.repeat(lambda: job.can_claim_task(7), number=many, repeat=5))
    return look_sec / many, call_sec / many


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", required=True)
    parser.add_argument("--jobs", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    config = CoordinationConfig(url=options.url, appname=APPNAME)
    engine: Any = create_engine(make_url(config.sqlalchemy_url()))
    migrate.upgrade(engine, appname=APPNAME)
    rates: dict[str, list[float]] = {name: [] for name in WAYS}
    for number in range(options.rounds):
        for name in list(WAYS)[:: 1 if number % 2 else -1]:
            rates[name].append(rate(config, options.jobs, WAYS[name]))
    migrate.downgrade(engine, appname=APPNAME)
    engine.dispose()
    first = statistics.median(rates["nobody listens"])
    for name, found in rates.items():
        middle = statistics.median(found)
        print(f"{name:34} {middle:8.0f} jobs/s  {middle / first:6.3f}  ({min(found):.0f} to {max(found):.0f})")
    look, call = looks()
    print(f"a look at an audience: {look * 1e9:.0f} ns; can_claim_task of a standalone job: {call * 1e9:.0f} ns")


if __name__ == "__main__":
    main()
