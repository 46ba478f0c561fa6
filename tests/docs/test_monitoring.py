"""The page, the dashboard and the alert rules name metrics that there are."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import CollectorRegistry

from jobsync_orm import CoordinationConfig, JobQueue
from jobsync_orm.integrations import prometheus
from jobsync_orm.integrations.catalogue import METRICS

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "monitoring.md").read_text(encoding="utf-8")
DASHBOARD = json.loads((DOCS / "grafana" / "jobsync-orm.json").read_text(encoding="utf-8"))
ALERTS = yaml.safe_load((DOCS / "grafana" / "alerts.yml").read_text(encoding="utf-8"))

LABELS = {label for metric in METRICS for label in metric.labels} | {"le"}


@pytest.fixture(scope="module")
def exported() -> set[str]:
    """Names of all series that a registry may have of this library."""
    queue = JobQueue(CoordinationConfig(url="postgresql://nowhere/nothing"))
    registry = CollectorRegistry()
    registration = prometheus.register(queue, registry=registry)
    suffixes = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_count", "_sum")}
    names = {family.name + suffix for family in registry.collect() for suffix in suffixes[family.type]}
    registration.unregister()
    return names


def expressions(node: Any) -> Iterator[str]:
    """Every PromQL expression of a dashboard or of rules."""
    if isinstance(node, dict):
        for key, value in node.items():
            if key in ("expr", "definition") and isinstance(value, str):
                yield value
            else:
                yield from expressions(value)
    elif isinstance(node, list):
        for value in node:
            yield from expressions(value)


@pytest.mark.parametrize("what", [DASHBOARD, ALERTS], ids=["dashboard", "alerts"])
def test_expressions_name_what_is_exported(what: Any, exported: set[str]) -> None:
    found = list(expressions(what))
    assert len(found) > 15
    for expression in found:
        names = set(re.findall(r"\bjobsync_\w+", expression))
        assert names, expression
        assert names <= exported, expression
        used = re.findall(r"(?:by|on) \(([^)]*)\)", expression)
        used += re.findall(r"label_values\([^,]+(?:\{[^}]*\})?, (\w+)\)", expression)
        labels = {label.strip() for some in used for label in some.split(",")}
        labels |= set(re.findall(r"(\w+)(?:=~|!=|!~|=)\"", expression))
        assert labels <= LABELS, expression
        assert expression.count("(") == expression.count(")"), expression
        assert expression.count("{") == expression.count("}"), expression


def test_what_a_counter_counts_is_shown_as_a_rate() -> None:
    for expression in (*expressions(DASHBOARD), *expressions(ALERTS)):
        for name in re.findall(r"\bjobsync_\w+_(?:total|bucket)\b", expression):
            assert re.search(rf"(?:rate|increase)\({name}(?:\{{[^}}]*\}})?\[", expression), expression


def test_the_dashboard_can_be_imported() -> None:
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels) > 20
    variables = {variable["name"]: variable for variable in DASHBOARD["templating"]["list"]}
    assert variables["datasource"]["type"] == "datasource"
    sources = re.findall(r'"uid": "([^"]*)"', json.dumps(panels))
    assert set(sources) == {"${datasource}"}
    assert set(re.findall(r"\$(\w+)", " ".join(expressions(panels)))) <= {*variables, "__rate_interval"}
    for panel in panels:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        assert panel["type"] == "row" or panel["description"], panel["title"]


def test_each_alert_says_how_bad_and_what() -> None:
    rules = [rule for group in ALERTS["groups"] for rule in group["rules"]]
    assert len({rule["alert"] for rule in rules}) == len(rules)
    for rule in rules:
        assert rule["labels"]["severity"] in ("critical", "warning"), rule
        assert rule["annotations"]["summary"], rule
    named = set(re.findall(r"`(Jobsync\w+)`", PAGE))
    assert named == {rule["alert"] for rule in rules}


def test_the_page_lists_all_metrics() -> None:
    listed = re.findall(r"^\| `(jobsync_\w+)` \| (\w+) \| ([^|]*) \|", PAGE, re.MULTILINE)
    assert {(name, kind, tuple(re.findall(r"`(\w+)`", labels))) for name, kind, labels in listed} == {
        (
            metric.prometheus_name + ("_total" if metric.kind == "counter" else ""),
            metric.kind,
            tuple(label for label in metric.labels if label not in ("appname", "node")),
        )
        for metric in METRICS
    }
    assert len(listed) == len(METRICS)
