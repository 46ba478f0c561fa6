"""The page on configuration has every setting, with the default and the range that it has in the code."""

from __future__ import annotations

import inspect
import re
from dataclasses import MISSING, fields
from typing import Any

import pytest

from jobsync_orm import CoordinationConfig, Job, JobQueue, JobWorker
from jobsync_orm.exceptions import ConfigurationError, InvalidJob
from jobsync_orm.queue.core import QueueCore
from tests.docs.test_code_blocks import ROOT

PAGE = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")

Rows = dict[str, tuple[str, str]]


def rows(title: str) -> Rows:
    """Default and range of each setting in the table below ``title``."""
    found = re.search(rf"^## `?{title}`?\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    assert found is not None, title
    cells = re.findall(r"^\| `(\w+)` \|([^|]*)\|([^|]*)\|", found[1], re.MULTILINE)
    assert len({name for name, _, _ in cells}) == len(cells)
    return {name: (default.strip(), allowed.strip()) for name, default, allowed in cells}


def shown(value: Any) -> str:
    if value is inspect.Parameter.empty or value is MISSING:
        return ""
    return f'"{value}"' if isinstance(value, str) else repr(value)


def defaults(call: Any) -> dict[str, str]:
    parameters = list(inspect.signature(call).parameters.values())
    return {parameter.name: shown(parameter.default) for parameter in parameters if parameter.name != "self"}


def settings() -> dict[str, str]:
    return {field.name: shown(field.default) for field in fields(CoordinationConfig)}


def written(table: Rows) -> dict[str, str]:
    return {name: default for name, (default, _) in table.items()}


@pytest.mark.parametrize(
    ("title", "in_code"),
    [
        ("CoordinationConfig", settings()),
        ("Job", defaults(Job.__init__)),
        ("JobQueue", defaults(QueueCore.__init__)),
        ("JobWorker", defaults(JobWorker.__init__)),
        ("Handlers", defaults(JobQueue.handler)),
    ],
)
def test_names_and_defaults(title: str, in_code: dict[str, str]) -> None:
    assert written(rows(title)) == in_code


def config(**values: Any) -> Any:
    return CoordinationConfig(**values)


def handler(**values: Any) -> Any:
    queue = JobQueue(CoordinationConfig(url="postgresql://nowhere/nothing"))
    return queue.register("resize", lambda ctx: None, **values)


def queue(**values: Any) -> Any:
    return JobQueue(CoordinationConfig(url="postgresql://nowhere/nothing"), **values)


def worker(**values: Any) -> Any:
    return JobWorker(queue(), **values)


RANGES = [
    (make, name, allowed)
    for title, make in (
        ("CoordinationConfig", config),
        ("JobQueue", queue),
        ("JobWorker", worker),
        ("Handlers", handler),
    )
    for name, (_, allowed) in rows(title).items()
    if re.match(r"(?:from |above |\d+ to \d+$)", allowed)
]


def least(allowed: str) -> float:
    number = re.match(r"(?:from |above )?([\d.]+)", allowed)
    assert number is not None
    return float(number[1]) if "." in number[1] else int(number[1])


@pytest.mark.parametrize(("make", "name", "allowed"), RANGES, ids=lambda value: value if isinstance(value, str) else "")
def test_ranges(make: Any, name: str, allowed: str) -> None:
    low = least(allowed)
    below = low if allowed.startswith("above") else low - (1 if " to " in allowed else 0.01)
    with pytest.raises((ConfigurationError, InvalidJob), match=name):
        make(**{name: below})
    # Of two settings that limit each other, the other one is set so that this one's own limit is what counts.
    beside = {
        "heartbeat_timeout_sec": {"heartbeat_interval_sec": 0.5, "connection_grace_sec": 0.4},
    }.get(name, {})
    if not allowed.startswith("above"):
        make(**{name: low}, **beside)
    if most := re.search(r" to (\d+)$", allowed):
        make(**{name: int(most[1])})
        with pytest.raises((ConfigurationError, InvalidJob), match=name):
            make(**{name: int(most[1]) + 1})


def test_there_are_ranges_to_test() -> None:
    assert len(RANGES) > 20
