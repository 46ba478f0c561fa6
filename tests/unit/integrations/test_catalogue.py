"""The list of metrics."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from jobsync_orm.integrations.catalogue import ATTEMPTS, METRICS, OTHER, RETRIES, Types, changes
from jobsync_orm.observe import AttemptsEnded, EndedAttempt, WorkerStopped

# What Prometheus or its scraper uses for itself.
RESERVED = {"job", "instance", "le", "quantile"}


def test_names_follow_the_conventions() -> None:
    assert len({metric.base for metric in METRICS}) == len(METRICS) > 40
    for metric in METRICS:
        assert re.fullmatch(r"[a-z]+(_[a-z]+)*", metric.base), metric
        assert not metric.base.endswith(("_total", "_seconds", "_count", "_sum", "_bucket", "_info")), metric
        assert not RESERVED & set(metric.labels), metric
        assert metric.labels[:1] == ("appname",) or not metric.labels, metric
        assert metric.text, metric
        assert (metric.kind == "histogram") == bool(metric.buckets), metric
        assert list(metric.buckets) == sorted(set(metric.buckets)), metric
        assert metric.kind != "histogram" or metric.unit == "s", metric


def test_number_of_types_is_bounded() -> None:
    types = Types(most=2)
    assert [types(name) for name in ("a", "b", "c", "a", "d", "b")] == ["a", "b", OTHER, "a", OTHER, "b"]


def test_attempts() -> None:
    ended = AttemptsEnded(
        "w1",
        (
            EndedAttempt("mail", "failed", "retrying", 0.5, 0.25),
            EndedAttempt("mail", "released", "pending", None, None),
            EndedAttempt("mail", "failed", "failed", None, None),
        ),
    )
    found = list(changes(ended, "sync_", Types()))
    assert [(metric.base, labels[2:], value) for metric, labels, value in found] == [
        ("attempt_duration", ("mail",), 0.25),
        ("pickup_latency", ("mail",), 0.5),
        ("attempts", ("mail", "failed"), 2),
        ("attempts", ("mail", "released"), 1),
        ("retries", ("mail",), 1),
    ]
    assert {labels[:2] for _, labels, _ in found} == {("sync_", "w1")}
    assert [metric for metric, _, _ in found[2:]] == [ATTEMPTS, ATTEMPTS, RETRIES]
    assert not list(changes(WorkerStopped("w1"), "sync_", Types()))


@pytest.mark.parametrize(
    ("module", "package", "extra"),
    [
        ("prometheus", "prometheus_client", "prometheus"),
        ("opentelemetry", "opentelemetry", "opentelemetry"),
    ],
)
def test_without_the_package_the_error_names_the_extra(module: str, package: str, extra: str) -> None:
    program = f"import sys; sys.modules[{package!r}] = None; import jobsync_orm.integrations.{module}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert f"pip install 'jobsync-orm[{extra}]'" in done.stderr


def test_the_library_does_not_import_them() -> None:
    program = (
        "import sys, jobsync_orm, jobsync_orm.worker, jobsync_orm.cli, jobsync_orm.testing;"
        "print([name for name in sys.modules"
        " if name.startswith(('prometheus_client', 'opentelemetry', 'jobsync_orm.integrations'))])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
