"""How a periodic job is declared, and what is refused."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import pytest

from jobsync_orm import CoordinationConfig, JobPriority, JobQueue
from jobsync_orm.exceptions import InvalidJob, InvalidPayload, UnknownJobType

TICK = datetime(2026, 6, 1, 12, tzinfo=UTC)


@dataclass
class Order:
    id: int
    scheduled_for: str = ""


@pytest.fixture
def queue() -> JobQueue:
    queue = JobQueue(CoordinationConfig())

    @queue.handler("report", max_retries=7, timeout=12, retry_blocks_key=False)
    def report(ctx: Any, region: str = "eu", scheduled_for: str = "") -> None: ...

    @queue.handler("ship", payload=Order)
    def ship(ctx: Any, order: Order) -> None: ...

    return queue


def test_the_decorator_takes_the_type_of_the_handler_below_it_and_returns_the_function(queue: JobQueue) -> None:
    def nightly(ctx: Any) -> None: ...

    decorated = queue.periodic("0  3 * * *", timezone="Europe/Berlin")(queue.handler("nightly")(nightly))

    assert decorated is nightly
    schedule = queue.periodic_jobs["nightly"]
    assert (schedule.name, schedule.type, schedule.missed, schedule.overlap) == ("nightly", "nightly", "latest", True)
    assert (schedule.cron.expression, schedule.cron.timezone) == ("0 3 * * *", "Europe/Berlin")


def test_what_is_not_said_comes_from_the_handler(queue: JobQueue) -> None:
    schedule = queue.add_periodic("0 3 * * *", "report")

    assert (schedule.max_retries, schedule.timeout, schedule.retry_blocks_key) == (7, 12.0, False)
    assert (schedule.max_retries_given, schedule.timeout_given) == (False, False)
    assert (schedule.priority, schedule.key, schedule.payload) == (0, None, {})


def test_what_is_said(queue: JobQueue) -> None:
    schedule = queue.add_periodic(
        "0 3 * * *",
        "report",
        {"region": "us"},
        name="us",
        tick_as="scheduled_for",
        priority=JobPriority.HIGH,
        key=17,
        max_retries=3,
        timeout=3600,
    )

    assert (schedule.max_retries, schedule.timeout, schedule.priority, schedule.key) == (3, 3600.0, 10, "17")
    assert (schedule.max_retries_given, schedule.timeout_given) == (True, True)
    assert schedule.job(schedule.cron, TICK)[0] == {"region": "us", "scheduled_for": "2026-06-01T12:00:00+00:00"}


def test_one_handler_may_have_several_schedules(queue: JobQueue) -> None:
    queue.add_periodic("0 3 * * *", "report")
    queue.add_periodic("0 4 * * *", "report", {"region": "us"}, name="us")

    with pytest.raises(InvalidJob, match="a periodic job named 'us' already"):
        queue.add_periodic("0 5 * * *", "report", name="us")
    assert {name: s.cron.expression for name, s in queue.periodic_jobs.items()} == {
        "report": "0 3 * * *",
        "us": "0 4 * * *",
    }


@pytest.mark.parametrize("payload", [{"id": 3}, Order(3)])
def test_a_payload_with_a_type(queue: JobQueue, payload: Any) -> None:
    schedule = queue.add_periodic("0 3 * * *", "ship", payload, tick_as="scheduled_for")

    assert schedule.job(schedule.cron, TICK)[0] == {"id": 3, "scheduled_for": "2026-06-01T12:00:00+00:00"}


def test_what_becomes_of_the_payload_later_changes_no_job(queue: JobQueue) -> None:
    regions: dict[str, Any] = {"region": ["eu"]}
    schedule = queue.add_periodic("0 3 * * *", "report", regions)
    regions["region"].append("us")

    assert schedule.job(schedule.cron, TICK)[0] == {"region": ["eu"]}


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"cron": "0 3 * *"}, InvalidJob, "'0 3 \\* \\*' cannot be read"),
        ({"timezone": "Mars"}, InvalidJob, "'Mars'"),
        ({"missed": "never"}, InvalidJob, "missed='never' must be one of 'latest', 'skip', 'all'"),
        ({"overlap": 1}, InvalidJob, "overlap=1"),
        ({"missed": "all", "overlap": False}, InvalidJob, "missed='all' needs overlap=True"),
        ({"tick_as": 3}, InvalidJob, "tick_as=3"),
        ({"tick_as": "time"}, InvalidPayload, "'time'"),
        ({"type": "reprot"}, UnknownJobType, "'reprot'.*report"),
        ({"type": "ship"}, InvalidPayload, "Order"),
        ({"payload": {"country": "de"}}, InvalidPayload, "'country'"),
        ({"payload": [1]}, InvalidPayload, r"\[1\]"),
        ({"payload": {"region": float("nan")}}, InvalidPayload, "nan"),
        ({"payload": {"region": "\0"}}, InvalidPayload, "region"),
        ({"name": ""}, InvalidJob, "name=''"),
        ({"name": "x" * 201}, InvalidJob, "name="),
        ({"name": 3}, InvalidJob, "name=3"),
        ({"priority": 1.5}, InvalidJob, "priority=1.5"),
        ({"key": "x" * 2000}, InvalidJob, "key="),
        ({"max_retries": -1}, InvalidJob, "max_retries=-1"),
        ({"timeout": 0}, InvalidJob, "timeout=0"),
    ],
)
def test_what_cannot_be_is_refused(
    queue: JobQueue, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    given = {"cron": "0 3 * * *", "type": "report", **options}

    with pytest.raises(error, match=message):
        queue.add_periodic(given.pop("cron"), given.pop("type"), given.pop("payload", None), **given)
    assert queue.periodic_jobs == {}


def test_the_decorator_needs_a_handler_below_it(queue: JobQueue) -> None:
    def alone(ctx: Any) -> None: ...

    with pytest.raises(InvalidJob, match="alone is no handler of this queue"):
        queue.periodic("0 3 * * *")(alone)
    with pytest.raises(InvalidJob, match="needs a cron expression"):
        queue.periodic(alone)  # type: ignore[arg-type]
    queue.register("one", alone)
    queue.register("two", alone)
    with pytest.raises(InvalidJob, match="alone is the handler of 'one', 'two'"):
        queue.periodic("0 3 * * *")(alone)
