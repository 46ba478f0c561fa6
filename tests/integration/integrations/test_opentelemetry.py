"""Metrics and spans, as the SDK of OpenTelemetry collects them."""

from __future__ import annotations

import asyncio
import signal
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.trace import SpanKind, StatusCode
from sqlalchemy import Engine
from sqlalchemy.orm import Session

from jobsync_orm import ConfigurationError, CoordinationConfig, Job, JobQueue, JobWorker, NewJob
from jobsync_orm.integrations import opentelemetry
from jobsync_orm.integrations.catalogue import METRICS
from tests.integration.cluster import Cluster, wait_for
from tests.integration.integrations.collected import Collected


def test_a_cluster_of_two_one_of_which_is_killed(
    config: CoordinationConfig, cluster: Cluster, collected: Collected
) -> None:
    w1 = {"appname": "sync_", "node": "w1"}
    job = Job("w1", config)
    opentelemetry.instrument(job, **collected.providers)
    with job:
        assert collected.value("jobsync.tokens_owned", **w1) == 10_000
        assert collected.value("jobsync.cluster_nodes") == 1
        other = cluster.add("w2")
        wait_for(lambda: len(other.held()) > 0, "w2 has joined")
        wait_for(lambda: collected.value("jobsync.handoff_duration", **w1) == 1, "the hand-over is counted")
        other.signal(signal.SIGKILL)
        wait_for(lambda: collected.value("jobsync.failover_duration", **w1) == 1, "the failover is counted")
        wait_for(lambda: len(job.my_tokens) == 10_000, "w1 has all")
        unit = collected.metrics()["jobsync.failover_duration"].unit
        assert unit == "s"
    wait_for(lambda: collected.value("jobsync.tokens_owned", **w1) is None, "it has stopped")
    assert not job.audience.observers
    handoff = collected.span("jobsync handoff")
    assert dict(handoff.attributes or {})["jobsync.tokens"] == 5_000
    assert 0 <= (handoff.end_time or 0) - (handoff.start_time or 0) < 30e9
    reasons = [dict(span.attributes or {})["jobsync.reason"] for span in collected.spans("jobsync rebalance")]
    assert reasons == ["initial", "join", "leave"]
    failover = collected.span("jobsync failover")
    assert (failover.end_time or 0) > (failover.start_time or 0)
    assert dict(failover.attributes or {}) == {"jobsync.appname": "sync_", "jobsync.node": "w1"}


def test_spans_of_jobs(queue: JobQueue, engine: Engine, collected: Collected) -> None:
    tracer = collected.tracers.get_tracer("application")
    inside: list[trace.SpanContext] = []

    @queue.handler("mail", max_retries=0)
    def mail(ctx: Any, to: str) -> None:
        inside.append(trace.get_current_span().get_span_context())
        if to == "nobody":
            raise LookupError("nobody@example.com is a secret")

    @queue.handler("ping")
    async def ping(ctx: Any) -> None:
        await asyncio.sleep(0)
        inside.append(trace.get_current_span().get_span_context())

    worker = JobWorker(queue, node_name="w1")
    registration = opentelemetry.instrument(worker, **collected.providers)
    with worker:
        with tracer.start_as_current_span("request") as request, Session(engine) as session:
            good = queue.enqueue(session, "mail", {"to": "ann"})
            session.commit()
        bad = queue.submit("mail", {"to": "nobody"})
        queue.submit("ping")
        with Session(engine) as session:
            queue.enqueue_many(session, "ping", [{}, {}])
            queue.enqueue_many(session, [NewJob("ping"), NewJob("mail", {"to": "bob"})])
            session.commit()
        wait_for(lambda: len(collected.spans("process ping")) == 4, "all have run")
        wait_for(lambda: len(collected.spans("process mail")) == 3, "all have run")
        wait_for(lambda: collected.value("jobsync.attempts", type="ping", outcome="completed") == 4, "it is counted")
        assert collected.value("jobsync.jobs_enqueued", type="mail") == 3
    registration.unregister()
    queue.submit("ping")

    sent = {dict(span.attributes or {}).get("messaging.message.id"): span for span in collected.spans("enqueue mail")}
    produced = sent[str(good.id)]
    assert produced.kind is SpanKind.PRODUCER
    assert produced.parent is not None
    assert produced.parent.span_id == request.get_span_context().span_id
    assert dict(produced.attributes or {}) == {
        "messaging.system": "jobsync_orm",
        "messaging.operation.name": "enqueue",
        "messaging.operation.type": "send",
        "messaging.destination.name": "mail",
        "messaging.message.id": str(good.id),
        "jobsync.appname": "sync_",
    }
    batches = [
        dict(span.attributes or {}).get("messaging.batch.message_count") for span in collected.spans("enqueue ping")
    ]
    assert batches == [None, 2, 2], "and the one after unregister() has none"

    runs = {dict(span.attributes or {})["messaging.message.id"]: span for span in collected.spans("process mail")}
    run = runs[str(good.id)]
    assert run.kind is SpanKind.CONSUMER
    assert dict(run.attributes or {}) == {
        "messaging.system": "jobsync_orm",
        "messaging.operation.name": "process",
        "messaging.operation.type": "process",
        "messaging.destination.name": "mail",
        "messaging.message.id": str(good.id),
        "jobsync.appname": "sync_",
        "jobsync.node": "w1",
        "jobsync.attempt": 1,
        "jobsync.outcome": "completed",
    }
    spans = [*collected.spans("process mail"), *collected.spans("process ping")]
    assert {context.span_id for context in inside} == {span.context.span_id for span in spans if span.context}
    failed = runs[str(bad.id)]
    assert failed.status.status_code is StatusCode.ERROR
    assert dict(failed.attributes or {})["error.type"] == "LookupError"
    assert "secret" not in failed.to_json()


def test_each_metric_has_an_instrument(queue: JobQueue, collected: Collected) -> None:
    queue.register("work", lambda ctx: None)
    worker = JobWorker(queue, node_name="w1")
    registration = opentelemetry.instrument(worker, **collected.providers)
    second = opentelemetry.instrument(queue, reads="always", **collected.providers)
    with worker:
        queue.submit("work")
        wait_for(lambda: collected.value("jobsync.attempts", type="work") == 1, "it has run")
        found = set(collected.metrics())
    assert found <= {metric.opentelemetry_name for metric in METRICS}
    assert {"jobsync.queue_jobs", "jobsync.worker_healthy", "jobsync.pickup_latency", "jobsync.events_dropped"} <= found
    second.unregister()
    registration.unregister()
    assert not queue.audience.observers


@pytest.mark.parametrize(("things", "message"), [((), "needs a Job"), ((Job("alone"),), "standalone")])
def test_what_cannot_be(things: Any, message: str, collected: Collected) -> None:
    with pytest.raises(ConfigurationError, match=message):
        opentelemetry.instrument(*things, **collected.providers)
