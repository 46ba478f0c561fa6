"""Which ticks of a periodic job get a job, after an outage of any length."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from jobsync_orm.queue.cron import Cron
from jobsync_orm.queue.schedule import MOST_MISSED, Missed, Schedule

NOON = datetime(2026, 6, 1, 12, tzinfo=UTC)
HOUR, MINUTE, SECOND = timedelta(hours=1), timedelta(minutes=1), timedelta(seconds=1)


def make(
    missed: Missed = "latest", *, cron: str = "0 * * * *", overlap: bool = True, tick_as: str | None = None
) -> Schedule:
    return Schedule(
        name="hourly report",
        type="report",
        cron=Cron(cron, "Europe/Berlin"),
        payload={"region": "eu"},
        missed=missed,
        overlap=overlap,
        tick_as=tick_as,
        priority=0,
        key=None,
        max_retries=3,
        timeout=60,
        retry_blocks_key=True,
        max_retries_given=False,
        timeout_given=False,
    )


@pytest.mark.parametrize("missed", ["latest", "skip", "all"])
def test_nothing_is_due_between_two_ticks(missed: Missed) -> None:
    schedule = make(missed)

    assert schedule.due(schedule.cron, NOON, NOON + 59 * MINUTE) is None


@pytest.mark.parametrize("missed", ["latest", "skip", "all"])
@pytest.mark.parametrize("late", [0, 1, 60])
def test_a_tick_that_has_just_come_gets_its_job(missed: Missed, late: int) -> None:
    schedule = make(missed)

    assert schedule.due(schedule.cron, NOON - HOUR, NOON + late * SECOND) == (NOON, [NOON])


def test_after_an_outage_latest_runs_once() -> None:
    schedule = make("latest")

    assert schedule.due(schedule.cron, NOON - 50 * HOUR, NOON + 5 * MINUTE) == (NOON, [NOON])


def test_after_an_outage_skip_runs_nothing_and_does_not_come_back_to_it() -> None:
    schedule = make("skip")

    assert schedule.due(schedule.cron, NOON - 50 * HOUR, NOON + 5 * MINUTE) == (NOON, [])


def test_after_an_outage_all_runs_each_in_order() -> None:
    schedule = make("all")

    until, ticks = schedule.due(schedule.cron, NOON - 3 * HOUR, NOON + 5 * MINUTE) or pytest.fail("nothing is due")

    assert until == NOON
    assert ticks == [NOON - 2 * HOUR, NOON - HOUR, NOON]


def test_all_is_bounded_and_keeps_the_last_ones() -> None:
    schedule = make("all", cron="* * * * *")

    _, ticks = schedule.due(schedule.cron, NOON - 9000 * HOUR, NOON) or pytest.fail("nothing is due")

    assert len(ticks) == MOST_MISSED
    assert (ticks[-1], ticks[0]) == (NOON, NOON - (MOST_MISSED - 1) * MINUTE)


def test_the_job_of_a_tick_is_named_by_it_and_told_it_if_it_asks() -> None:
    schedule = make(tick_as="scheduled_for")

    payload, idempotency_key = schedule.job(schedule.cron, NOON)

    assert payload == {"region": "eu", "scheduled_for": "2026-06-01T14:00:00+02:00"}
    assert idempotency_key == "periodic:hourly report:2026-06-01T14:00:00+02:00"
    assert make().job(schedule.cron, NOON)[0] == {"region": "eu"}


def test_jobs_that_may_not_overlap_share_one_name() -> None:
    schedule = make(overlap=False)

    assert {schedule.job(schedule.cron, NOON + n * HOUR)[1] for n in range(3)} == {"periodic:hourly report"}
