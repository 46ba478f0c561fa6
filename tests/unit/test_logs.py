"""Each record of the library's log names its event, and the manual lists them."""

from __future__ import annotations

import ast
import logging
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from jobsync_orm import Job
from jobsync_orm.logs import fields

ROOT = Path(__file__).parents[2]
MANUAL = ROOT / "docs" / "monitoring.md"
LEVELS = {"debug", "info", "warning", "error", "exception"}

# It prints for people, and is no part of an application.
NOT_THE_LIBRARY = {"demo"}


def calls() -> Iterator[tuple[str, ast.Call]]:
    for path in sorted((ROOT / "jobsync_orm").rglob("*.py")):
        if path.relative_to(ROOT / "jobsync_orm").parts[0] in NOT_THE_LIBRARY:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                owner = node.func.value
                if isinstance(owner, ast.Name) and owner.id == "logger":
                    yield f"{path.relative_to(ROOT)}:{node.lineno}", node


def event_of(call: ast.Call) -> str | None:
    """The name that a call gives its event."""
    for keyword in call.keywords:
        if keyword.arg != "extra" or not isinstance(keyword.value, ast.Call):
            continue
        function, (first, *_) = keyword.value.func, keyword.value.args
        name = function.id if isinstance(function, ast.Name) else getattr(function, "attr", "")
        if name in ("fields", "_about") and isinstance(first, ast.Constant):
            return str(first.value)
    return None


def test_every_record_names_its_event() -> None:
    found = {place: event_of(call) for place, call in calls()}
    assert len(found) > 60
    silent = [place for place, event in found.items() if event is None]
    assert not silent, (
        "give it extra=fields('what_happened', node) of jobsync_orm.logs, and list it in docs/monitoring.md"
    )
    assert all(re.fullmatch(r"[a-z]+(_[a-z]+)*", event or "") for event in found.values())


def test_only_levels_that_are_known() -> None:
    others = {place: call.func.attr for place, call in calls() if getattr(call.func, "attr", "") not in LEVELS}  # type: ignore[attr-defined]
    assert others == {}


def test_the_manual_lists_each_event_with_its_levels() -> None:
    used: dict[str, set[str]] = {}
    for _, call in calls():
        level = getattr(call.func, "attr", "")
        used.setdefault(event_of(call) or "", set()).add("ERROR" if level == "exception" else level.upper())
    rows = re.findall(r"^\| `([a-z_]+)` \| ([A-Z, ]+) \|", MANUAL.read_text(encoding="utf-8"), re.MULTILINE)
    listed = {event: set(levels.split(", ")) for event, levels in rows}
    assert listed == used
    assert len(rows) == len(listed), "each is listed once"


def test_a_record(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "jobsync_orm"):
        Job("alone", on_rebalance=print)
    (record,) = caplog.records
    assert (record.event, record.node, record.epoch, record.job_id) == ("standalone", "alone", None, None)  # type: ignore[attr-defined]


def test_no_field_is_an_attribute_that_a_record_has_already() -> None:
    record = logging.LogRecord("name", logging.INFO, "path", 1, "text", None, None)
    assert not fields("event").keys() & record.__dict__.keys()
