from __future__ import annotations

from jobsync_orm.cli.plot import bar, columns


def test_columns_are_as_high_as_their_values() -> None:
    assert columns([0, 1, 4, 8], 4, 1) == [" ▁▄█"]
    assert columns([0, 8, 12, 16], 4, 2) == ["  ▄█", " ███"]
    assert columns([4], 3, 1, top=8) == ["  ▄"]


def test_something_is_seen_of_what_is_little() -> None:
    assert columns([0, 1, 1000], 3, 2) == ["  █", " ▁█"]


def test_the_last_values_count_and_stand_at_the_right() -> None:
    assert columns([8, 8, 1, 8], 2, 1) == ["▁█"]
    assert columns([8], 3, 1) == ["  █"]
    assert columns([], 3, 2) == ["   ", "   "]
    assert columns([0, 0], 2, 1) == ["  "]
    assert columns([1, 2], 0, 1) == [""]


def test_bars() -> None:
    assert bar(1, 4) == "████"
    assert bar(0, 4) == "    "
    assert bar(0.5, 3) == "█▌ "
    assert (bar(2, 2), bar(-1, 2), bar(1, 0)) == ("██", "  ", "")
