"""The queue's manual names all there is: columns, states, outcomes, and what its calls take."""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest

from jobsync_orm import JobContext, JobQueue, JobState, JobWorker
from jobsync_orm.models import AttemptOutcome, JobAttempt, QueuedJob
from tests.docs.test_code_blocks import ROOT

PAGE = (ROOT / "docs" / "queue.md").read_text(encoding="utf-8")

# The words of the call itself, and what only a worker calls.
NOT_IN_TABLES = {"where", "type", "payload", "close", "close_async", "job", "queue"}


def section(title: str) -> str:
    found = re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    assert found is not None, title
    return found[1]


def named(text: str) -> set[str]:
    """Names in the first cells of the tables of ``text``."""
    cells = [line.split("|")[1] for line in text.splitlines() if line.startswith("|")]
    return {name for cell in cells for name in re.findall(r"\w+", " ".join(re.findall(r"`([^`]+)`", cell)))}


def arguments(call: Any) -> set[str]:
    return set(inspect.signature(call).parameters) - {"self"} - NOT_IN_TABLES


@pytest.mark.parametrize("model", [QueuedJob, JobAttempt])
def test_columns(model: Any) -> None:
    assert set(model.__table__.columns.keys()) - named(section("Columns")) == set()


def test_states_and_outcomes() -> None:
    assert set(JobState) == named(section("States"))
    assert {outcome for outcome in AttemptOutcome if f"`{outcome}`" not in section("Handlers")} == set()


def test_options_of_enqueue() -> None:
    assert arguments(JobQueue.enqueue) - named(section("Enqueueing")) == set()


def test_arguments_of_a_worker() -> None:
    assert arguments(JobWorker) - named(section("Workers")) == set()


def test_arguments_of_periodic_jobs() -> None:
    assert arguments(JobQueue.add_periodic) - named(section("Periodic jobs")) == set()


def test_the_context() -> None:
    public = {name for name in (*vars(JobContext), *JobContext.__slots__) if not name.startswith("_")}
    internal = {"is_async", "limit", "on_extend", "over", "transaction"}
    text = section("Handlers")
    assert {name for name in public - internal - NOT_IN_TABLES if not re.search(rf"\b{name}\b", text)} == set()


def test_the_calls_of_a_queue() -> None:
    calls = {name for name, value in inspect.getmembers(JobQueue, inspect.isfunction) if not name.startswith("_")}
    left_out = {name for name in calls if not re.search(rf"\b{name.removesuffix('_async')}\b", PAGE)}
    assert left_out == {"handler_of"}
