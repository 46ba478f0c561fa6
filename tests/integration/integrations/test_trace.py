"""The trace of who enqueues a job goes on where it runs, through its row."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, Tracer
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, TraceState
from sqlalchemy import URL, Engine, create_engine, text
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from jobsync_orm import CoordinationConfig, JobQueue, JobWorker, NewJob, Retry, migrate
from jobsync_orm.exceptions import SchemaNotReady
from jobsync_orm.integrations import opentelemetry
from jobsync_orm.testing import drain
from tests.integration.cluster import QUICK, ROOT, wait_for
from tests.integration.integrations.collected import Collected
from tests.integration.queue.stored import jobs, run

PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


@pytest.fixture
def traced(queue: JobQueue, collected: Collected) -> Iterator[JobQueue]:
    """A queue with spans, and handlers that do nothing."""
    for type in ("t", "u"):
        queue.register(type, lambda ctx: None)
    registration = opentelemetry.instrument(queue, **collected.providers)
    yield queue
    registration.unregister()


@pytest.fixture
def tracer(collected: Collected) -> Any:
    return collected.tracers.get_tracer("application")


def carrier(span: ReadableSpan) -> str:
    """What is stored with jobs that were written within this span."""
    assert span.context is not None
    return f"00-{span.context.trace_id:032x}-{span.context.span_id:016x}-{span.context.trace_flags:02x}"


def is_child(span: ReadableSpan, parent: ReadableSpan) -> bool:
    """Whether it is, and has the link beside."""
    assert span.context is not None
    assert parent.context is not None
    linked = [(link.context.trace_id, link.context.span_id) for link in span.links]
    return (
        span.parent is not None
        and span.parent.is_remote
        and span.context.trace_id == parent.context.trace_id
        and span.parent.span_id == parent.context.span_id
        and linked == [(parent.context.trace_id, parent.context.span_id)]
    )


# -- from enqueueing to the run --------------------------------------------------------------------------------------


def by_enqueue(queue: JobQueue, engine: Engine) -> None:
    with Session(engine) as session, session.begin():
        queue.enqueue(session, "t")


def with_conditions(queue: JobQueue, engine: Engine) -> None:
    with engine.begin() as connection:
        queue.enqueue(connection, "t", key="k", idempotency_key="i", after=[queue.submit("u")])


def by_submit(queue: JobQueue, engine: Engine) -> None:
    queue.submit("t")


def by_submit_async(queue: JobQueue, engine: Engine) -> None:
    asyncio.run(queue.submit_async("t"))


def in_an_async_session(queue: JobQueue, engine: Engine) -> None:
    async def put() -> None:
        async_engine = create_async_engine(engine.url)
        async with AsyncSession(async_engine) as session, session.begin():
            await queue.enqueue(session, "t")
        await async_engine.dispose()

    asyncio.run(put())


def many_of_a_type(queue: JobQueue, engine: Engine) -> None:
    with engine.begin() as connection:
        queue.enqueue_many(connection, "t", [{}])


def many_of_a_type_later(queue: JobQueue, engine: Engine) -> None:
    with engine.begin() as connection:
        queue.enqueue_many(connection, "t", [{}], key="k", after=[queue.submit("u")])


def many(queue: JobQueue, engine: Engine) -> None:
    with engine.begin() as connection:
        queue.enqueue_many(connection, [NewJob("t")])


def many_with_conditions(queue: JobQueue, engine: Engine) -> None:
    with engine.begin() as connection:
        queue.enqueue_many(connection, [NewJob("t", idempotency_key="i", after=[queue.submit("u")])])


WAYS = [
    by_enqueue,
    with_conditions,
    by_submit,
    by_submit_async,
    in_an_async_session,
    many_of_a_type,
    many_of_a_type_later,
    many,
    many_with_conditions,
]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_however_a_job_is_enqueued(
    traced: JobQueue, engine: Engine, collected: Collected, tracer: Tracer, way: Callable[[JobQueue, Engine], None]
) -> None:
    with tracer.start_as_current_span("request"):
        way(traced, engine)
    drain(traced)
    request, enqueued, ran = (collected.span(name) for name in ("request", "enqueue t", "process t"))
    assert enqueued.parent == request.context
    assert is_child(ran, enqueued)
    assert traces_of(engine, "t") == [carrier(enqueued)]


def traces_of(engine: Engine, type: str) -> list[Any]:
    with engine.connect() as connection:
        return list(connection.scalars(text("SELECT trace FROM sync_job WHERE type = :type"), {"type": type}))


def test_jobs_of_one_call_have_one_parent(traced: JobQueue, engine: Engine, collected: Collected) -> None:
    with engine.begin() as connection:
        traced.enqueue_many(connection, [NewJob("t"), NewJob("t"), NewJob("u")])
    drain(traced)
    enqueued = collected.span("enqueue t")
    ran = [*collected.spans("process t"), *collected.spans("process u")]
    assert len(ran) == 3
    assert all(is_child(span, enqueued) for span in ran)
    assert jobs(engine, "trace") == [carrier(enqueued)] * 3


def test_a_job_that_was_there_keeps_the_trace_of_who_made_it(
    traced: JobQueue, engine: Engine, collected: Collected
) -> None:
    for _ in range(2):
        traced.submit("t", idempotency_key="i")
    with engine.begin() as connection:
        traced.enqueue_many(connection, [NewJob("t", idempotency_key="i"), NewJob("u")])
    first, _, third = collected.spans("enqueue t")
    assert jobs(engine, "trace") == [carrier(first), carrier(third)]


def test_attempts_are_spans_of_one_trace(traced: JobQueue, engine: Engine, collected: Collected) -> None:
    @traced.handler("twice")
    def twice(ctx: Any) -> None:
        if ctx.attempt == 1:
            raise Retry(after=0)

    traced.submit("twice")
    drain(traced, run_due=True)
    enqueued = collected.span("enqueue twice")
    attempts = collected.spans("process twice")
    assert [dict(span.attributes or {})["jobsync.attempt"] for span in attempts] == [1, 2]
    assert all(is_child(span, enqueued) for span in attempts)
    assert attempts[0].context != attempts[1].context


def test_a_failed_job_that_an_operator_tries_again(traced: JobQueue, engine: Engine, collected: Collected) -> None:
    @traced.handler("fails", max_retries=0)
    def fails(ctx: Any) -> None:
        if ctx.attempt == 1:
            raise ValueError

    job = traced.submit("fails")
    drain(traced, check=False)
    traced.retry(job)
    drain(traced)
    enqueued, attempts = collected.span("enqueue fails"), collected.spans("process fails")
    assert len(attempts) == 2
    assert all(is_child(span, enqueued) for span in attempts)


def test_a_worker_goes_on_with_the_trace_in_threads_and_in_its_event_loop(
    traced: JobQueue, engine: Engine, collected: Collected, tracer: Tracer
) -> None:
    """Side by side, so that a context that leaks from one to another is seen; jobs of keys are claimed otherwise."""
    at_once = 4
    together = threading.Barrier(at_once)
    all_there = asyncio.Event()
    tasks = 0

    @traced.handler("thread")
    def thread(ctx: Any) -> None:
        together.wait(60)
        ctx.enqueue("after thread")

    @traced.handler("task")
    async def task(ctx: Any) -> None:
        nonlocal tasks
        tasks += 1
        if tasks == at_once:
            all_there.set()
        await asyncio.wait_for(all_there.wait(), 60)
        await ctx.enqueue("after task")

    for type in ("thread", "task"):
        traced.register(f"after {type}", lambda ctx: None)
        for n in range(at_once):
            with tracer.start_as_current_span("request"):
                traced.submit(type, key=n if n % 2 else None)
    with JobWorker(traced, node_name="w1", concurrency=at_once):
        for type in ("thread", "task"):
            wait_for(lambda type=type: len(collected.spans(f"process after {type}")) == at_once, "all have run")  # type: ignore[misc]
    spans = {span.context.span_id: span for name in ("request",) for span in collected.spans(name) if span.context}
    assert len(spans) == 2 * at_once
    for type in ("thread", "task"):
        traces = set()
        for step in (f"enqueue {type}", f"process {type}", f"enqueue after {type}", f"process after {type}"):
            found = collected.spans(step)
            parents = {span.parent.span_id: span for span in found if span.parent}
            assert len(found) == len(parents) == at_once
            assert parents.keys() <= spans.keys()
            assert all(span.context.trace_id == spans[parent].context.trace_id for parent, span in parents.items())  # type: ignore[union-attr]
            spans = {**spans, **{span.context.span_id: span for span in found if span.context}}
            traces |= {span.context.trace_id for span in found if span.context}
        assert len(traces) == at_once


def test_in_another_process_and_its_children(
    traced: JobQueue, engine: Engine, collected: Collected, tracer: Tracer, tmp_path: Path
) -> None:
    lines = tmp_path / "spans"
    lines.touch()
    environment = {**os.environ, "URL": engine.url.render_as_string(hide_password=False), "SPANS": str(lines)}
    worker = subprocess.Popen(
        [sys.executable, "-m", "tests.integration.integrations.traced"], cwd=ROOT, env=environment
    )
    try:
        with tracer.start_as_current_span("request"):
            traced.submit("thread", {"then": ["process", "task", "thread"]}, check=False)

        def there() -> list[dict[str, Any]]:
            return [json.loads(line) for line in lines.read_text(encoding="utf-8").splitlines()]

        wait_for(lambda: len(there()) == 11, "three jobs have enqueued the next, and a fourth has run")
    finally:
        worker.send_signal(signal.SIGTERM)
        assert worker.wait(60) == 0
    request, enqueued = collected.span("request").context, collected.span("enqueue thread").context
    assert request is not None
    assert enqueued is not None
    by_parent = {span["parent"]: span for span in there()}
    assert {span["trace"] for span in by_parent.values()} == {request.trace_id}
    chain, before = [], enqueued.span_id
    while (span := by_parent.get(before)) is not None:
        chain.append(span)
        if span["name"].startswith("process "):
            assert span["links"] == [before]
        before = span["id"]
    assert [span["name"] for span in chain] == [
        *("process thread", "inside thread"),
        *("enqueue process", "process process", "inside process"),
        *("enqueue task", "process task", "inside task"),
        *("enqueue thread", "process thread", "inside thread"),
    ]
    pids = [span["pid"] for span in chain]
    assert len({os.getpid(), worker.pid, *pids}) == 3, "the worker, and one child"
    assert set(pids) - {worker.pid} == {pids[3]}


def test_a_drain_within_a_span_has_a_link_to_it(
    traced: JobQueue, engine: Engine, collected: Collected, tracer: Tracer
) -> None:
    traced.submit("t")
    run(engine, "INSERT INTO sync_job (type) VALUES ('u')")
    with tracer.start_as_current_span("a test") as test:
        drain(traced)
    enqueued, ran, untraced = (collected.span(name) for name in ("enqueue t", "process t", "process u"))
    assert ran.parent is not None
    assert enqueued.context is not None
    assert ran.parent.span_id == enqueued.context.span_id
    assert [link.context.span_id for link in ran.links] == [
        enqueued.context.span_id,
        test.get_span_context().span_id,
    ]
    assert untraced.parent == test.get_span_context()
    assert not untraced.links


def test_a_loop_of_ones_own(traced: JobQueue, engine: Engine, collected: Collected, tracer: Tracer) -> None:
    traced.submit("t")
    run(engine, "INSERT INTO sync_job (type) VALUES ('u')")
    for job in traced.dequeue(["t", "u"], "loop", 2):
        with tracer.start_as_current_span(f"my {job.type}", context=opentelemetry.context_of(job)):
            traced.complete(job)
    enqueued, ran = collected.span("enqueue t"), collected.span("my t")
    assert enqueued.context is not None
    assert ran.parent is not None
    assert ran.parent.span_id == enqueued.context.span_id
    assert collected.span("my u").parent is None


def test_jobs_of_schedules_have_no_trace(traced: JobQueue, engine: Engine, collected: Collected) -> None:
    pytest.importorskip("cronsim")
    traced.add_periodic("* * * * * *", "t")
    with JobWorker(traced, node_name="w1"):
        wait_for(lambda: len(collected.spans("process t")) >= 2, "it has fired")
    assert set(jobs(engine, "trace is null")) == {True}
    assert all(span.parent is None and not span.links for span in collected.spans("process t"))


# -- what is stored --------------------------------------------------------------------------------------------------


def within(state: list[tuple[str, str]], sampled: bool = True) -> NonRecordingSpan:
    """A span of somebody else's, whose tracestate goes on."""
    flags = TraceFlags(TraceFlags.SAMPLED if sampled else TraceFlags.DEFAULT)
    ids = int(PARENT[3:35], 16), int(PARENT[36:52], 16)
    return NonRecordingSpan(SpanContext(*ids, is_remote=True, trace_flags=flags, trace_state=TraceState(state)))


def test_the_tracestate_goes_along(traced: JobQueue, engine: Engine, collected: Collected) -> None:
    with trace.use_span(within([("vendor", "a b;c"), ("other", "1")])):
        traced.submit("t")
    drain(traced)
    enqueued, ran = collected.span("enqueue t"), collected.span("process t")
    assert enqueued.context is not None
    assert ran.context is not None
    assert jobs(engine, "trace") == [f"{carrier(enqueued)} vendor=a b;c,other=1"]
    assert is_child(ran, enqueued)
    assert ran.context.trace_state.to_header() == "vendor=a b;c,other=1"


def test_a_long_tracestate_is_left_out(traced: JobQueue, engine: Engine, collected: Collected) -> None:
    for length in (200, 249, 250):
        with trace.use_span(within([("one", "x" * 250), ("two", "y" * length)])):
            traced.submit("t")
    lengths = [0 if " " not in value else len(value.split(" ")[1]) for value in jobs(engine, "trace")]
    assert lengths == [459, 508, 509]
    with trace.use_span(within([("one", "x" * 250), ("two", "y" * 254)])):
        traced.submit("t")
    drain(traced)
    enqueued, ran = collected.spans("enqueue t"), collected.spans("process t")
    assert jobs(engine, "trace")[-1] == carrier(enqueued[-1])
    assert all(is_child(span, parent) for parent, span in zip(enqueued, ran, strict=True))


def test_what_is_not_sampled_stays_so(traced: JobQueue, engine: Engine, collected: Collected) -> None:
    with trace.use_span(within([], sampled=False)):
        traced.submit("t")
    assert [value[:36] + value[52:] for value in jobs(engine, "trace")] == [PARENT[:36] + "-00"]
    drain(traced)
    assert not collected.spans("enqueue t")
    assert not collected.spans("process t")


def test_without_opentelemetry_nothing_is_stored(queue: JobQueue, engine: Engine) -> None:
    for way in WAYS:
        way(queue, engine)
        with engine.begin() as connection:
            connection.execute(text("UPDATE sync_job SET idempotency_key = NULL"))
    assert set(jobs(engine, "trace is null")) == {True}


def test_without_a_span_nothing_is_stored(queue: JobQueue, engine: Engine) -> None:
    """The application has the integration, and no provider of spans."""
    registration = opentelemetry.instrument(queue, tracer_provider=trace.NoOpTracerProvider())
    queue.register("t", lambda ctx: None)
    queue.submit("t")
    assert jobs(engine, "trace is null") == [True]
    drain(queue)
    registration.unregister()


@pytest.mark.parametrize(
    "stored",
    [
        "",
        " ",
        "x",
        PARENT.upper(),
        PARENT + " ",
        PARENT + "\n",
        PARENT + "-00",
        " " + PARENT,
        "ff" + PARENT[2:],
        f"00-{'0' * 32}-00f067aa0ba902b7-01",
        f"00-4bf92f3577b34da6a3ce929d0e0e4736-{'0' * 16}-01",
        f"{PARENT} {'x=' + 'y' * 511}",
        f"{PARENT} ümlaut=1",
        "00-" + "４" * 32 + "-00f067aa0ba902b7-01",
        "'; DROP TABLE sync_job; --",
        "\x01\x1b[31m",
        "x" * 600,
        "x" * 601,
        "ü" * 400,
        "x" * 20_000_000,
    ],
    ids=range(20),
)
def test_what_is_no_trace_is_ignored(
    traced: JobQueue, engine: Engine, collected: Collected, caplog: pytest.LogCaptureFixture, stored: str
) -> None:
    run(engine, "INSERT INTO sync_job (type, trace) VALUES ('t', :stored), ('t', :good)", stored=stored, good=PARENT)
    with caplog.at_level(logging.DEBUG, "opentelemetry"):
        assert [one.outcome for one in drain(traced)] == ["completed", "completed"]
    bad, good = collected.spans("process t")
    assert bad.parent is None
    assert not bad.links
    assert good.parent is not None
    assert f"{good.parent.span_id:016x}" in PARENT
    assert caplog.records == [], "nor does it fill a log"


@pytest.mark.parametrize("state", ["=", "a=1,a=2", "no members at all", "a=1,,b", "a=" + "y" * 400])
def test_a_tracestate_that_is_none_is_left_out(
    traced: JobQueue, engine: Engine, collected: Collected, state: str
) -> None:
    run(engine, "INSERT INTO sync_job (type, trace) VALUES ('t', :stored)", stored=f"{PARENT} {state}")
    drain(traced)
    ran = collected.span("process t")
    assert ran.parent is not None
    assert f"{ran.parent.span_id:016x}" in PARENT
    assert ran.context is not None
    assert ran.context.trace_state.to_header() == ""


def test_a_worker_is_told_no_more_than_the_limit(traced: JobQueue, engine: Engine) -> None:
    run(engine, "INSERT INTO sync_job (type, trace) VALUES ('t', :a), ('t', :b)", a="x" * 600, b="x" * 601)
    assert [job.trace for job in traced.dequeue("t", "loop", 2)] == ["x" * 600, None]


# -- releases side by side -------------------------------------------------------------------------------------------


def test_a_release_that_does_not_know_it(traced: JobQueue, engine: Engine, collected: Collected) -> None:
    """Its producers leave it out, and its workers do not read it: neither has to know."""
    run(engine, "INSERT INTO sync_job (type, payload) VALUES ('t', '{}')")
    traced.submit("t")
    run(
        engine,
        "UPDATE sync_job SET state = 'processing', attempt = attempt + 1, started_at = now(), worker = 'old',"
        " deadline = now() WHERE id = (SELECT max(id) FROM sync_job)",
    )
    traced.cleanup_stale(0)
    drain(traced, run_due=True)
    first, second = collected.spans("process t")
    assert first.parent is None
    assert is_child(second, collected.span("enqueue t"))


def test_at_the_schema_before(empty_database: URL, collected: Collected) -> None:
    """Who migrates late has producers without spans go on; everything else says what to do."""
    engine = create_engine(empty_database)
    migrate.upgrade(engine, revision="0005")
    queue = JobQueue(CoordinationConfig(url=empty_database, **QUICK), wake=False)
    queue.register("t", lambda ctx: None)
    queue.submit("t")
    with engine.begin() as connection:
        queue.enqueue_many(connection, "t", [{}])
        queue.enqueue_many(connection, [NewJob("t")])
    with pytest.raises(SchemaNotReady, match="jobsync-orm db upgrade"):
        queue.dequeue("t", "loop")
    with pytest.raises(SchemaNotReady, match="jobsync-orm db upgrade"):
        JobWorker(queue).start()
    registration = opentelemetry.instrument(queue, **collected.providers)
    with pytest.raises(SchemaNotReady, match="jobsync-orm db upgrade"):
        queue.submit("t")
    for many in ("t", [NewJob("t")]):
        with engine.connect() as connection, pytest.raises(SchemaNotReady, match="jobsync-orm db upgrade"):
            queue.enqueue_many(connection, many, [{}] if isinstance(many, str) else None)
    migrate.upgrade(engine)
    queue.submit("t")
    drain(queue)
    assert [span.parent is None for span in collected.spans("process t")] == [True, True, True, False]
    registration.unregister()
    queue.dispose()
    engine.dispose()
