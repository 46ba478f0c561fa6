"""When a periodic job is due."""

from __future__ import annotations

import contextlib
import sys
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jobsync_orm.exceptions import ConfigurationError, InvalidJob
from jobsync_orm.queue.cron import Cron

BERLIN = "Europe/Berlin"
ZONES = ["UTC", BERLIN, "America/New_York", "Australia/Lord_Howe", "Asia/Kathmandu"]
EXPRESSIONS = [
    "30 2 * * *",
    "*/20 * * * *",
    "0 * * * *",
    "15 1,2,3 * * *",
    "0,30 2-3 * * *",
    "5 0 1 * *",
    "0 0 * * SUN",
]


def berlin(*parts: int, fold: int = 0) -> datetime:
    return datetime(*parts, tzinfo=ZoneInfo(BERLIN), fold=fold)  # type: ignore[misc, arg-type]


def shown(cron: Cron, after: datetime, until: datetime) -> list[str]:
    return [cron.local(tick) for tick in cron.latest(after, until, 100)]


def test_ticks_after_a_moment_and_until_another_are_of_its_time_zone() -> None:
    cron = Cron("0 3 * * *", BERLIN)

    assert shown(cron, berlin(2026, 7, 1, 3), berlin(2026, 7, 3, 3)) == [
        "2026-07-02T03:00:00+02:00",
        "2026-07-03T03:00:00+02:00",
    ]
    assert cron.next(berlin(2026, 12, 1)) == datetime(2026, 12, 1, 2, tzinfo=UTC)


def test_in_the_hour_that_is_left_out_a_daily_job_runs_once_right_after_it() -> None:
    cron = Cron("30 2 * * *", BERLIN)

    assert shown(cron, berlin(2027, 3, 27, 12), berlin(2027, 3, 29, 12)) == [
        "2027-03-28T03:00:00+02:00",
        "2027-03-29T02:30:00+02:00",
    ]


def test_in_the_hour_that_comes_twice_a_daily_job_runs_once() -> None:
    cron = Cron("30 2 * * *", BERLIN)

    assert shown(cron, berlin(2026, 10, 24, 12), berlin(2026, 10, 26, 12)) == [
        "2026-10-25T02:30:00+02:00",
        "2026-10-26T02:30:00+01:00",
    ]


def test_looked_for_from_the_second_of_two_equal_hours_the_first_one_has_passed() -> None:
    cron = Cron("30 2 * * *", BERLIN)

    assert cron.local(cron.next(berlin(2026, 10, 25, 2, 15, fold=1)) or datetime.max) == "2026-10-26T02:30:00+01:00"


def test_an_hourly_job_runs_in_both_equal_hours_and_not_in_the_one_left_out() -> None:
    cron = Cron("0 * * * *", BERLIN)

    assert shown(cron, berlin(2026, 10, 25, 1), berlin(2026, 10, 25, 3)) == [
        "2026-10-25T02:00:00+02:00",
        "2026-10-25T02:00:00+01:00",
        "2026-10-25T03:00:00+01:00",
    ]
    assert shown(cron, berlin(2027, 3, 28, 1), berlin(2027, 3, 28, 4)) == [
        "2027-03-28T03:00:00+02:00",
        "2027-03-28T04:00:00+02:00",
    ]


def test_six_fields_begin_with_the_second() -> None:
    cron = Cron("*/20 * * * * *", "UTC")
    start = datetime(2026, 1, 1, tzinfo=UTC)

    assert [t.second for t in cron.latest(start, start + timedelta(seconds=50), 100)] == [20, 40]


def test_of_many_ticks_only_the_last_ones_are_computed() -> None:
    cron = Cron("* * * * *", BERLIN)
    until = berlin(2026, 6, 1, 12, 0, 30)

    found = cron.latest(until - timedelta(days=20 * 365), until, 3)

    assert [cron.local(tick)[11:16] for tick in found] == ["11:58", "11:59", "12:00"]


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(EXPRESSIONS),
    st.sampled_from(ZONES),
    st.sampled_from([datetime(2026, 3, 7), datetime(2026, 3, 28), datetime(2026, 4, 4), datetime(2026, 10, 24)]),
    st.lists(st.integers(0, 4 * 24 * 3600), min_size=1, max_size=12),
)
def test_each_tick_is_found_once_however_the_time_is_divided(
    expression: str, zone: str, begin: datetime, cuts: list[int]
) -> None:
    """What is fired until some moment and what is fired after it are together all there is."""
    cron, begin = Cron(expression, zone), begin.replace(tzinfo=UTC)
    moments = sorted({begin, begin + timedelta(days=4), *(begin + timedelta(seconds=cut) for cut in cuts)})

    parts = [tick for a, b in pairwise(moments) for tick in cron.latest(a, b, 1000)]

    whole = cron.latest(moments[0], moments[-1], 1000)
    assert parts == whole == sorted(set(whole))
    for some in (1, 2, 5):
        assert cron.latest(moments[0], moments[-1], some) == whole[-some:]


@pytest.mark.parametrize(
    "expression", ["", "* * * *", "61 * * * *", "0 3 * * FOO", "@daily", "1#2/2 * * * *", "0 0 * * 1#2/3", 5, None]
)
def test_an_expression_that_cannot_be_read_is_refused(expression: Any) -> None:
    with pytest.raises(InvalidJob, match=r"cron expression .* (fields|text)"):
        Cron(expression, "UTC")


@given(st.text("0123456789*/,-#L WMONFRI", max_size=15))
def test_any_text_is_read_or_refused(text: str) -> None:
    with contextlib.suppress(InvalidJob):
        Cron(text, BERLIN)


def test_a_moment_that_never_comes_is_refused() -> None:
    with pytest.raises(InvalidJob, match="0 0 30 2"):
        Cron("0 0 30 2 *", "UTC")


@pytest.mark.parametrize("name", ["Europe/Atlantis", "", "../etc/passwd", "/etc", "Europe", None, 3])
def test_a_time_zone_that_is_not_known_is_refused(name: Any) -> None:
    with pytest.raises(InvalidJob, match="time zone"):
        Cron("0 3 * * *", name)


def test_without_the_library_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cronsim", None)

    with pytest.raises(ConfigurationError, match=r"pip install 'jobsync-orm\[cron\]'"):
        Cron("0 3 * * *", "UTC")
