"""The SDK of OpenTelemetry, as it collects in memory."""

from __future__ import annotations

from typing import Any

from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter


class Collected:
    """What a process's providers have got."""

    def __init__(self) -> None:
        self._reader = InMemoryMetricReader()
        self.meters = MeterProvider([self._reader])
        self._exporter = InMemorySpanExporter()
        self.tracers = TracerProvider()
        self.tracers.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.providers: Any = {"meter_provider": self.meters, "tracer_provider": self.tracers}

    def metrics(self) -> dict[str, Any]:
        data = self._reader.get_metrics_data()
        if data is None:
            return {}
        scopes = [scope for resource in data.resource_metrics for scope in resource.scope_metrics]
        return {metric.name: metric for scope in scopes for metric in scope.metrics}

    def value(self, name: str, **attributes: Any) -> Any:
        """Of the only such point: its value, or of a histogram how many were observed; None if there is none."""
        metric = self.metrics().get(name)
        if metric is None:
            return None
        points = [p for p in metric.data.data_points if attributes.items() <= dict(p.attributes).items()]
        assert len(points) <= 1, points
        return next((p.count if hasattr(p, "count") else p.value for p in points), None)

    def spans(self, name: str) -> list[ReadableSpan]:
        return [span for span in self._exporter.get_finished_spans() if span.name == name]

    def span(self, name: str) -> ReadableSpan:
        (span,) = self.spans(name)
        return span
