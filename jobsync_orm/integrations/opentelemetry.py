"""Metrics and spans for OpenTelemetry (extra ``opentelemetry``: its API; the SDK and exporters are the application's).

::

    from jobsync_orm.integrations import opentelemetry

    opentelemetry.instrument(worker)

The metrics are those of :mod:`~jobsync_orm.integrations.prometheus`, named ``jobsync.`` with the unit apart. The spans,
with the attributes of OpenTelemetry's conventions for messaging:

===================== ======== =================================================================================
``enqueue TYPE``      producer a call that writes jobs; a child of the application's span
``process TYPE``      consumer a handler's run, the parent of what the handler does; a child of ``enqueue TYPE``
``jobsync rebalance``          reading, planning and publishing, by the leader
``jobsync handoff``            from when a node is asked for tokens until it has released them
``jobsync failover``           from a dead node's last sign of life until its tokens are others'
===================== ======== =================================================================================

The trace of a job
------------------
The context of ``enqueue TYPE`` is stored with the jobs that it writes, as W3C Trace Context has it: the ``traceparent``
and, where there is one, a space and the ``tracestate``. Baggage is not. Whoever runs the job goes on in the same trace:
each attempt is a ``process TYPE`` whose parent is the span that enqueued it, and which has a link to that span too. The
conventions ask for the link, by which tools know such pairs whatever the queue. They allow the parent where a span
processes a single message, as here, and with it the request, its jobs, their attempts and the jobs these enqueue are
one trace, sampled or not as the request was.

For a loop of one's own, :func:`context_of` gives the parent of a job that :meth:`~jobsync_orm.JobQueue.dequeue` has
taken.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

from jobsync_orm import observe
from jobsync_orm.exceptions import ConfigurationError
from jobsync_orm.integrations.catalogue import Metric, Types
from jobsync_orm.integrations.readings import Reads, Source, appname_of
from jobsync_orm.integrations.watching import COUNTED, READ, Registration, Watching, guard
from jobsync_orm.job import Job
from jobsync_orm.observe import Event, FailedOver, Rebalanced, TokensReleased
from jobsync_orm.queue import ClaimedJob, JobQueue
from jobsync_orm.worker import JobWorker

try:
    from opentelemetry import metrics, trace
    from opentelemetry.context import Context, get_current
    from opentelemetry.metrics import CallbackOptions, MeterProvider, Observation
    from opentelemetry.trace import Link, SpanKind, Status, StatusCode, TracerProvider
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
except ImportError as error:
    raise ImportError(
        "jobsync_orm.integrations.opentelemetry needs opentelemetry-api: pip install 'jobsync-orm[opentelemetry]'"
    ) from error

__all__ = ["context_of", "instrument"]

NAME = "jobsync_orm"

# All gauges of one collection are read at once.
FRESH_SEC = 0.5

# Longest that a collection waits until what has happened has been counted.
FLUSH_SEC = 0.1

# Of a tracestate, in characters: so many are to be passed on, more need not be.
LONGEST_STATE = 512

# What is stored with a job: a traceparent, and maybe a tracestate. What else somebody has written there is no trace.
CARRIER = re.compile(rf"([0-9a-f]{{2}}-[0-9a-f]{{32}}-[0-9a-f]{{16}}-[0-9a-f]{{2}})(?: ([ -~]{{1,{LONGEST_STATE}}}))?")

# Not the application's propagators: what they write may be long, or nobody else's business, and the row is the queue's.
W3C = TraceContextTextMapPropagator()


def instrument(
    *things: Job | JobQueue | JobWorker,
    meter_provider: MeterProvider | None = None,
    tracer_provider: TracerProvider | None = None,
    reads: Reads = "leader",
    read_every_sec: float = 10,
    deadline_sec: float = 2,
) -> Registration:
    """Have metrics of jobs, queues and workers until they are stopped, and spans of queues until ``unregister()``.

    Set the application's providers first.

    Parameters
    ----------
    *things : Job, JobQueue or JobWorker
        A worker includes its node and its queue.
    meter_provider : MeterProvider, optional
        Where metrics go. None takes the process's own.
    tracer_provider : TracerProvider, optional
        Where spans go. None takes the process's own.
    reads, read_every_sec, deadline_sec
        As for :func:`jobsync_orm.integrations.prometheus.register`.

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
        raise ConfigurationError("instrument() needs a Job, a JobQueue or a JobWorker")
    types = Types()
    sources = [Source(thing, reads, read_every_sec, deadline_sec, types) for thing in things]
    meters = meter_provider or metrics.get_meter_provider()
    tracer = trace.get_tracer(NAME, tracer_provider=tracer_provider)
    with guard:
        instruments = _instruments.get(meters)
        if instruments is None:
            instruments = _instruments[meters] = _Instruments(meters)
        instruments.tracer = tracer
        instruments.add(sources)
    queues = [thing.queue if isinstance(thing, JobWorker) else thing for thing in things if not isinstance(thing, Job)]
    for queue in queues:
        queue.tracing = _Tracing(tracer, appname_of(queue.names))
    return _Instrumented(instruments, sources, queues)


def context_of(job: ClaimedJob) -> Context:
    """The present context, with the span that enqueued ``job`` as the parent of spans that are started in it.

    ::

        for job in queue.dequeue("resize", "my-loop"):
            with tracer.start_as_current_span("resize", context=opentelemetry.context_of(job)):
                ...

    Just the present context if the job was enqueued without a span, or if what is stored with it is no trace.
    """
    found = CARRIER.fullmatch(job.trace or "")
    if found is None:
        return get_current()
    headers = {"traceparent": found[1]} if found[2] is None else {"traceparent": found[1], "tracestate": found[2]}
    return W3C.extract(headers, get_current())


class _Instrumented(Registration):
    def __init__(self, watching: Watching, sources: list[Source], queues: list[JobQueue]) -> None:
        super().__init__(watching, sources)
        self._queues = queues

    def unregister(self) -> None:
        super().unregister()
        for queue in self._queues:
            queue.tracing = None


class _Instruments(Watching):
    """What one meter provider has of this library: instruments cannot be taken back, and are made once."""

    tracer: trace.Tracer

    def __init__(self, provider: MeterProvider) -> None:
        super().__init__()
        meter = provider.get_meter(NAME)
        self._add: dict[Metric, Callable[[float, dict[str, str]], None]] = {}
        for metric in COUNTED:
            name, text = metric.opentelemetry_name, metric.text
            if metric.kind == "histogram":
                histogram = meter.create_histogram(
                    name, metric.unit, text, explicit_bucket_boundaries_advisory=metric.buckets
                )
                self._add[metric] = histogram.record
            else:
                self._add[metric] = meter.create_counter(name, metric.unit, text).add
        for metric in READ:
            make = meter.create_observable_gauge if metric.kind == "gauge" else meter.create_observable_counter
            make(metric.opentelemetry_name, [self._callback(metric)], metric.unit, metric.text)
        self._found: dict[Metric, dict[tuple[str, ...], float]] = {}
        self._found_at = float("-inf")

    def count(self, metric: Metric, labels: tuple[str, ...], value: float) -> None:
        self._add[metric](value, dict(zip(metric.labels, labels, strict=True)))

    def happened(self, event: Event, appname: str) -> None:
        about: dict[str, str | int]
        if isinstance(event, Rebalanced):
            about = {"jobsync.reason": event.reason, "jobsync.tokens": event.moved, "jobsync.epoch": event.epoch}
        elif isinstance(event, TokensReleased):
            about = {"jobsync.tokens": event.tokens, "jobsync.epoch": event.epoch}
        elif isinstance(event, FailedOver):
            about = {}
        else:
            return
        ended = int(event.at * 1e9)
        span = self.tracer.start_span(
            _SPANS[type(event)],
            start_time=ended - int(event.seconds * 1e9),
            attributes={"jobsync.appname": appname, "jobsync.node": event.node, **about},
        )
        span.end(end_time=ended)

    def _callback(self, metric: Metric) -> Callable[[CallbackOptions], Iterable[Observation]]:
        def observe(options: CallbackOptions) -> Iterator[Observation]:
            for labels, value in self._latest()[metric].items():
                yield Observation(value, dict(zip(metric.labels, labels, strict=True)))

        return observe

    def _latest(self) -> dict[Metric, dict[tuple[str, ...], float]]:
        if time.monotonic() - self._found_at > FRESH_SEC:
            observe.flush(FLUSH_SEC)
            self._found = self.read()
            self._found_at = time.monotonic()
        return self._found


_SPANS = {Rebalanced: "jobsync rebalance", TokensReleased: "jobsync handoff", FailedOver: "jobsync failover"}

_instruments: WeakKeyDictionary[MeterProvider, _Instruments] = WeakKeyDictionary()


class _Tracing:
    """The spans of one queue."""

    def __init__(self, tracer: trace.Tracer, appname: str) -> None:
        self._tracer = tracer
        self._about = {"messaging.system": "jobsync_orm", "jobsync.appname": appname}

    @contextmanager
    def enqueuing(self, type: str, many: int) -> Iterator[_Producing]:
        about = {**self._about, **_operation("enqueue", "send", type)}
        with self._tracer.start_as_current_span(f"enqueue {type}", kind=SpanKind.PRODUCER, attributes=about) as span:
            yield _Producing(span)

    @contextmanager
    def running(self, job: Any, node: str) -> Iterator[_Consuming]:
        about = {
            **self._about,
            **_operation("process", "process", job.type),
            "messaging.message.id": str(job.id),
            "jobsync.node": node,
            "jobsync.attempt": job.attempt,
        }
        context, links = None, []
        if job.trace is not None:
            context = context_of(job)
            links = _links(trace.get_current_span(context), trace.get_current_span())
        with self._tracer.start_as_current_span(
            f"process {job.type}", context, SpanKind.CONSUMER, about, links
        ) as span:
            yield _Consuming(span)


def _links(enqueued: trace.Span, present: trace.Span) -> list[Link]:
    """To the span that enqueued the job, and to the one in which the handler runs, whose child its span is not then."""
    if enqueued is present:
        return []
    contexts = enqueued.get_span_context(), present.get_span_context()
    return [Link(context) for context in contexts if context.is_valid]


def _operation(name: str, kind: str, type: str) -> dict[str, str]:
    return {"messaging.operation.name": name, "messaging.operation.type": kind, "messaging.destination.name": type}


class _Producing:
    def __init__(self, span: trace.Span) -> None:
        self._span = span

    @property
    def carrier(self) -> str | None:
        headers: dict[str, str] = {}
        W3C.inject(headers, trace.set_span_in_context(self._span))
        parent, state = headers.get("traceparent"), headers.get("tracestate")
        return f"{parent} {state}" if parent is not None and state and len(state) <= LONGEST_STATE else parent

    def written(self, ids: list[int]) -> None:
        if len(ids) == 1:
            self._span.set_attribute("messaging.message.id", str(ids[0]))
        else:
            self._span.set_attribute("messaging.batch.message_count", len(ids))


class _Consuming:
    def __init__(self, span: trace.Span) -> None:
        self._span = span

    def ended(self, outcome: str, error: str | None) -> None:
        self._span.set_attribute("jobsync.outcome", outcome)
        if error is not None:
            # Its type alone: the message may say what is nobody's business, and is in the attempt's row.
            kind = error.partition(":")[0]
            self._span.set_attribute("error.type", kind)
            self._span.set_status(Status(StatusCode.ERROR, kind))
