"""An application that instruments its queue where it makes it, run as ``python -m``: its worker, and the child
processes of that, append each span that has ended to the file ``SPANS``, as a line of JSON.

A handler enqueues a job of the first type in its list, with the rest of the list, in ``ctx.session``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence

from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter, SpanExportResult
from sqlalchemy import make_url

from jobsync_orm import CoordinationConfig, JobQueue, JobWorker
from jobsync_orm.integrations import opentelemetry
from jobsync_orm.queue import JobContext
from tests.integration.cluster import QUICK


class Lines(SpanExporter):
    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        for span in spans:
            assert span.context is not None
            found = {
                "name": span.name,
                "pid": os.getpid(),
                "trace": span.context.trace_id,
                "id": span.context.span_id,
                "parent": None if span.parent is None else span.parent.span_id,
                "links": [link.context.span_id for link in span.links],
            }
            with open(os.environ["SPANS"], "a", encoding="utf-8") as file:
                file.write(json.dumps(found) + "\n")
        return SpanExportResult.SUCCESS


tracers = TracerProvider()
tracers.add_span_processor(SimpleSpanProcessor(Lines()))
queue = JobQueue(CoordinationConfig(url=make_url(os.environ["URL"]), **QUICK))  # type: ignore[arg-type]
opentelemetry.instrument(queue, tracer_provider=tracers)
tracer = tracers.get_tracer("application")


@queue.handler("thread")
def thread(ctx: JobContext, then: list[str]) -> None:
    with tracer.start_as_current_span("inside thread"):
        if then:
            ctx.enqueue(then[0], {"then": then[1:]})


@queue.handler("process", kind="process")
def process(ctx: JobContext, then: list[str]) -> None:
    with tracer.start_as_current_span("inside process"):
        if then:
            ctx.enqueue(then[0], {"then": then[1:]})


@queue.handler("task")
async def task(ctx: JobContext, then: list[str]) -> None:
    with tracer.start_as_current_span("inside task"):
        if then:
            await ctx.enqueue(then[0], {"then": then[1:]})


if __name__ == "__main__":
    JobWorker(queue, node_name="other").run()
