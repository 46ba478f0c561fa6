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
import threading
from collections.abc import Iterator, Sequence
from typing import Any
from weakref import WeakKeyDictionary, ref

from jobsync_orm import observe
from jobsync_orm.exceptions import ConfigurationError
from jobsync_orm.integrations.catalogue import DROPPED, METRICS, READ_FAILURES, Metric, Types, changes
from jobsync_orm.integrations.readings import Reads, Source
from jobsync_orm.job import Job
from jobsync_orm.observe import Audience, Event, NodeStopped, WorkerStopped
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

# What has no event: read when it is asked for.
READ = tuple(metric for metric in METRICS if metric.kind == "gauge" or metric in (READ_FAILURES, DROPPED))
COUNTED = tuple(metric for metric in METRICS if metric not in READ)


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
    with _guard:
        exporter = _exporters.get(registry)
        if exporter is None:
            exporter = _exporters[registry] = _Exporter(registry)
            registry.register(exporter)
        exporter.add(sources)
    return Registration(exporter, sources)


class Registration:
    """What one call of :func:`register` has put into a registry."""

    def __init__(self, exporter: _Exporter, sources: list[Source]) -> None:
        self._exporter = exporter
        self._sources = sources

    def unregister(self) -> None:
        """Take it out again. What has been stopped is out already."""
        self._exporter.remove(self._sources)


class _Exporter(Collector):
    """All that one registry has of this library: a name may be in it once."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = ref(registry)
        self._sources: list[Source] = []
        self._observers: WeakKeyDictionary[Audience, Any] = WeakKeyDictionary()
        self._types = Types()
        self._counted = {metric: _made(metric) for metric in COUNTED}

    # -- who is in ---------------------------------------------------------------------------------------------

    def add(self, sources: Sequence[Source]) -> None:
        for source in sources:
            self._sources.append(source)
            for audience in source.audiences:
                if audience not in self._observers:
                    observer = self._observers[audience] = self._observer(audience, source.appname)
                    audience.add(observer)

    def remove(self, sources: Sequence[Source]) -> None:
        with _guard:
            gone = [source for source in self._sources if source in sources]
            self._sources = [source for source in self._sources if source not in gone]
            for audience in list(self._observers):
                if not any(source.listens_to(audience) for source in self._sources):
                    audience.remove(self._observers.pop(audience))
            for source in gone:
                if source.node is not None:
                    self._forget(source.appname, source.node)
            registry = self._registry()
            if not self._sources and registry is not None and _exporters.get(registry) is self:
                del _exporters[registry]
                registry.unregister(self)

    def _observer(self, audience: Audience, appname: str) -> Any:
        def observe(event: Event) -> None:
            if isinstance(event, NodeStopped | WorkerStopped):
                self._stopped(audience, appname, event)
                return
            for metric, labels, value in changes(event, appname, self._types):
                one = self._counted[metric].labels(*labels)
                if isinstance(one, Histogram):
                    one.observe(value)
                else:
                    one.inc(value)

        return observe

    def _stopped(self, audience: Audience, appname: str, event: NodeStopped | WorkerStopped) -> None:
        with _guard:
            over = [source for source in self._sources if source.listens_to(audience) and source.node == event.node]
            if isinstance(event, WorkerStopped):  # its job may go on
                over = [source for source in over if len(source.audiences) > 1]
        self.remove(over)
        self._forget(appname, event.node)

    def _forget(self, appname: str, node: str) -> None:
        """Series of a node that is not here any more would stay for ever. In files of several processes they do."""
        with _guard:
            if any(source.appname == appname and source.node == node for source in self._sources) or _in_files():
                return
            for metric, counted in self._counted.items():
                if "node" in metric.labels:
                    counted.remove_by_labels({"appname": appname, "node": node})

    # -- what the registry asks --------------------------------------------------------------------------------

    def describe(self) -> Iterator[Family]:
        for counted in self._counted.values():
            yield from counted.describe()
        yield from (_family(metric) for metric in READ)

    def collect(self) -> Iterator[Family]:
        observe.flush(FLUSH_SEC)
        with _guard:
            self.remove([source for source in self._sources if source.is_gone])
            sources = list(self._sources)
        for counted in self._counted.values():
            yield from counted.collect()
        # Two sources of one cluster may read the same: the last one counts.
        found: dict[Metric, dict[tuple[str, ...], float]] = {metric: {} for metric in READ}
        found[DROPPED][()] = observe.dropped()
        for source in sources:
            for metric, labels, value in source.figures():
                found[metric][labels] = value
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


def _in_files() -> bool:
    return "PROMETHEUS_MULTIPROC_DIR" in os.environ or "prometheus_multiproc_dir" in os.environ


_guard = threading.RLock()
_exporters: WeakKeyDictionary[CollectorRegistry, _Exporter] = WeakKeyDictionary()
