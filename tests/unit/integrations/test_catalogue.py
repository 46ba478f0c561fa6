"""The list of metrics."""

from __future__ import annotations

import re
import subprocess
import sys
from typing import get_args

import pytest

from jobsync_orm import observe
from jobsync_orm.integrations.catalogue import ATTEMPTS, DROPPED, METRICS, OTHER, RETRIES, Types, changes
from jobsync_orm.integrations.watching import Watching
from jobsync_orm.observe import (
    AttemptsEnded,
    EndedAttempt,
    Event,
    Evicted,
    FailedOver,
    FenceRejected,
    Heartbeat,
    JobsClaimed,
    JobsEnqueued,
    JobsRescued,
    NodesTakenForDead,
    NodeStopped,
    OwnershipChanged,
    Rebalanced,
    RowsClaimed,
    SessionBroke,
    TaskClaims,
    TokensReleased,
    WokenUp,
    WorkerStopped,
)

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


# What happens, and which metrics say so: base name, labels after appname and node, and by how much.
HAPPENINGS = [
    (Heartbeat("w1", 0.5), [("heartbeat_duration", (), 0.5)]),
    (SessionBroke("w1"), [("connections_lost", (), 1)]),
    (Evicted("w1"), [("evicted", (), 1)]),
    (NodesTakenForDead("w1", 2), [("nodes_taken_for_dead", (), 2)]),
    (
        Rebalanced("w1", 3, "join", 40, 0.5),
        [("rebalances", ("join",), 1), ("tokens_moved", (), 40), ("rebalance_duration", (), 0.5)],
    ),
    (FailedOver("w1", 2.5), [("failover_duration", (), 2.5)]),
    (OwnershipChanged("w1", 3, 7, 5), [("tokens_gained", (), 7), ("tokens_lost", (), 5)]),
    (TokensReleased("w1", 3, 7, 0.25), [("handoff_duration", (), 0.25)]),
    (FenceRejected("w1", "commit"), [("fence_rejections", ("commit",), 1)]),
    (TaskClaims("w1", "taken", 4), [("task_claims", ("taken",), 4)]),
    (RowsClaimed("w1", 9), [("rows_claimed", (), 9)]),
    (JobsClaimed("w1", {"mail": 3}), [("jobs_claimed", ("mail",), 3)]),
    (JobsRescued("w1", 2), [("jobs_rescued", (), 2)]),
    (WokenUp("w1", 6), [("wake_ups", (), 6)]),
]


@pytest.mark.parametrize(("event", "counted"), HAPPENINGS, ids=lambda value: type(value).__name__)
def test_what_happens_is_counted(event: Event, counted: list[tuple[str, tuple[str, ...], float]]) -> None:
    found = list(changes(event, "sync_", Types()))
    assert [(metric.base, labels[2:], value) for metric, labels, value in found] == counted
    assert {labels[:2] for _, labels, _ in found} == {("sync_", "w1")}
    assert all(len(labels) == len(metric.labels) for metric, labels, _ in found)


def test_no_event_is_forgotten_but_those_of_the_end() -> None:
    tested = {type(event) for event, _ in HAPPENINGS} | {AttemptsEnded, JobsEnqueued}
    assert set(get_args(Event)) - tested == {NodeStopped, WorkerStopped}
    ((metric, labels, many),) = changes(JobsEnqueued("mail", 3), "sync_", Types())
    assert (metric.base, labels, many) == ("jobs_enqueued", ("sync_", "mail"), 3)


def test_events_that_are_dropped_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observe._delivery, "dropped", 7)
    assert Watching().read()[DROPPED] == {(): 7}


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
