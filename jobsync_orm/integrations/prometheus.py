"""Metrics for Prometheus (extra ``prometheus``, the official client).

::

    from jobsync_orm.integrations import prometheus

    with Job("worker-01", config) as job:
        prometheus.register(job)
        prometheus_client.start_http_server(9000)

:func:`register` takes jobs, queues and workers, running or not; each goes by itself when it is stopped. One registry
may have any number of them, and a process any number of registries. ``docs/monitoring.md`` lists the metrics.

With several processes behind one port (gunicorn with ``PROMETHEUS_MULTIPROC_DIR``) the client adds up counters and
histograms of all processes; what is read at the moment of the scrape (gauges, and what comes from the tables) is not in
its files and not told. There let each process have a port of its own, or use OpenTelemetry.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from weakref import WeakKeyDictionary, ref

from jobsync_orm import observe
from jobsync_orm.exceptions import ConfigurationError
from jobsync_orm.integrations.catalogue import Metric, Types
from jobsync_orm.integrations.readings import Reads, Source
from jobsync_orm.integrations.watching import COUNTED, READ, Registration, Watching, guard
from jobsync_orm.job import Job
from jobsync_orm.queue import JobQueue
from jobsync_orm.worker import JobWorker

try:
    from prometheus_client import REGISTRY, CollectorRegistry, Counter, Histogram
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
    from prometheus_client.metrics_core import Metric as Family
    from prometheus_client.registry import Collector
except ImportError as error:
    raise ImportError(
        "jobsync_orm.integrations.prometheus needs prometheus-client: pip install 'jobsync-orm[prometheus]'"
    ) from error

__all__ = ["Registration", "register"]

# Longest that a scrape waits until what has happened has been counted.
FLUSH_SEC = 0.1


def register(
    *things: Job | JobQueue | JobWorker,
    registry: CollectorRegistry = REGISTRY,
    reads: Reads = "leader",
    read_every_sec: float = 10,
    deadline_sec: float = 2,
) -> Registration:
    """Have the metrics of jobs, queues and workers in a registry, until they are stopped.

    Parameters
    ----------
    *things : Job, JobQueue or JobWorker
        A worker includes its node and its queue; give the queue itself where jobs are only enqueued.
    registry : CollectorRegistry
        Where. None other than the client's own by default.
    reads : {"leader", "always", "never"}
        Who reads the cluster's tables for queue depth and parked tokens: by default only the node that leads, so that
        a cluster is read once however many workers it has. ``"always"`` is for a process that exports metrics and is
        no worker, given a ``JobQueue``.
    read_every_sec : float
        The tables are read at most this often, in seconds, when metrics are asked for.
    deadline_sec : float
        Longest that such a read may take, in seconds, and be waited for.

    Returns
    -------
    Registration
        Its ``unregister()`` takes them out again before they are stopped.

    Raises
    ------
    ConfigurationError
        Nothing is given, or something else, or a standalone job; or a setting is out of range.
    """
    if not things:
        raise ConfigurationError("register() needs a Job, a JobQueue or a JobWorker")
    types = Types()
    sources = [Source(thing, reads, read_every_sec, deadline_sec, types) for thing in things]
    with guard:
        exporter = _exporters.get(registry)
        if exporter is None:
            exporter = _exporters[registry] = _Exporter(registry)
            registry.register(exporter)
        exporter.add(sources)
    return Registration(exporter, sources)


class _Exporter(Watching, Collector):
    """All that one registry has of this library: a name may be in it once."""

    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__()
        self._registry = ref(registry)
        self._counted = {metric: _made(metric) for metric in COUNTED}
        self._adds: dict[tuple[Metric, tuple[str, ...]], Callable[[float], None]] = {}  # the client finds them slowly

    def count(self, metric: Metric, labels: tuple[str, ...], value: float) -> None:
        add = self._adds.get((metric, labels))
        if add is None:
            one = self._counted[metric].labels(*labels)
            add = self._adds[metric, labels] = one.observe if isinstance(one, Histogram) else one.inc
        add(value)

    def forgotten(self, appname: str, node: str) -> None:
        """Its series would stay for ever. In files of several processes they do."""
        if "PROMETHEUS_MULTIPROC_DIR" in os.environ or "prometheus_multiproc_dir" in os.environ:
            return
        self._adds.clear()
        for metric, counted in self._counted.items():
            if "node" in metric.labels:
                counted.remove_by_labels({"appname": appname, "node": node})

    def emptied(self) -> None:
        registry = self._registry()
        if registry is not None and _exporters.get(registry) is self:
            del _exporters[registry]
            registry.unregister(self)

    def describe(self) -> Iterator[Family]:
        for counted in self._counted.values():
            yield from counted.describe()
        yield from (_family(metric) for metric in READ)

    def collect(self) -> Iterator[Family]:
        observe.flush(FLUSH_SEC)
        found = self.read()
        for counted in self._counted.values():
            yield from counted.collect()
        for metric, values in found.items():
            family = _family(metric)
            for labels, value in values.items():
                family.add_metric(labels, value)
            yield family


def _made(metric: Metric) -> Counter | Histogram:
    if metric.kind == "histogram":
        return Histogram(metric.prometheus_name, metric.text, metric.labels, registry=None, buckets=metric.buckets)
    return Counter(metric.prometheus_name, metric.text, metric.labels, registry=None)


def _family(metric: Metric) -> CounterMetricFamily | GaugeMetricFamily:
    kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
    return kind(metric.prometheus_name, metric.text, labels=metric.labels)


_exporters: WeakKeyDictionary[CollectorRegistry, _Exporter] = WeakKeyDictionary()
