"""What a notification to the workers says, and when the next one may follow."""

from __future__ import annotations

import pytest

from jobsync_orm.queue.waker import MOST_BYTES, Lane, Pace, lanes_of, lanes_text


def test_what_is_written_is_read() -> None:
    lanes: set[Lane] = {("a", 0, False), ("a", -(2**31), True), ("ä", 2**31 - 1, False)}
    assert set(lanes_of(lanes_text(lanes)) or []) == lanes
    assert lanes_text({("x" * MOST_BYTES, 0, False)}) == ""


@pytest.mark.parametrize(
    "payload",
    [
        *(
            "",
            "7",
            "null",
            "no JSON",
            "[7]",
            "[" * 7000,
            '[["t"]]',
            '[["t", "x", false]]',
            '[["t", 2147483648, false]]',
        ),
        *('[["t", 0, 0]]', '[["t", true, true]]', '[["t", 1.0, true]]', "[[[], 0, true]]", '[["\\u0000", 0, true]]'),
    ],
)
def test_what_is_written_otherwise_names_nothing(payload: str) -> None:
    assert lanes_of(payload) is None


def test_a_long_way_to_the_server_is_no_reason_to_send_more_rarely_but_its_delays_are() -> None:
    pace = Pace()
    assert pace.interval == 0.01
    for _ in range(20):
        pace.answered(0.05)
    assert pace.interval == 0.01
    pace.answered(0.054)  # a quarter of 4 ms, times 40
    assert pace.interval == pytest.approx(0.04)
    for _ in range(50):
        pace.answered(0.056)
    assert pace.interval == pytest.approx(0.24, abs=0.001)
    pace.answered(5)
    assert pace.interval == 0.5
    for _ in range(50):
        pace.answered(0.05)
    assert pace.interval == 0.01


def test_one_slow_first_answer_is_not_taken_for_the_way() -> None:
    pace = Pace()
    pace.answered(1)
    pace.answered(0.001)
    assert pace.interval == 0.5
    for _ in range(30):
        pace.answered(0.001)
    assert pace.interval == 0.01
