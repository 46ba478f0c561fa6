"""What a notification to the workers says, and when the next one may follow."""

from __future__ import annotations

import pytest

from jobsync_orm.queue.waker import MOST_BYTES, Lane, lanes_of, lanes_text, next_interval


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


def test_where_commits_pour_in_the_interval_grows_and_otherwise_it_is_short_again() -> None:
    assert next_interval(0.01, commits=1, seconds=60) == 0.01
    assert next_interval(0.01, commits=3, seconds=0.01) == 0.01
    assert next_interval(0.01, commits=4, seconds=0.01) == 0.02
    assert next_interval(0.02, commits=8, seconds=0.02) == 0.04
    assert next_interval(0.04, commits=400, seconds=0.04) == 0.04
    assert next_interval(0.04, commits=15, seconds=0.04) == 0.01
