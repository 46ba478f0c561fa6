"""Which pins are accepted, before anything is stored."""

from __future__ import annotations

import pytest

from jobsync_orm import InvalidPattern, LockConflict
from jobsync_orm.pins import Pin, check_conflicts, patterns_of


def pin(task: str, *patterns: str, token: int = 7) -> Pin:
    return Pin(task, token, patterns, None)


def test_one_pattern_or_several_in_order() -> None:
    assert patterns_of("t", "gpu-%") == ("gpu-%",)
    assert patterns_of("t", ["b", "a"]) == ("b", "a")


@pytest.mark.parametrize("patterns", [[], "ends with \\", ["ok", 1], "nul\0"])
def test_patterns_that_cannot_be(patterns: object) -> None:
    with pytest.raises(InvalidPattern, match=r"'t'|ends with|has a NUL"):
        patterns_of("t", patterns)  # type: ignore[arg-type]


def test_pins_on_different_tokens_never_conflict() -> None:
    check_conflicts([pin("a", "x", token=1)], [pin("b", "y", token=2)])


def test_pins_that_some_name_satisfies_do_not_conflict() -> None:
    check_conflicts([pin("a", "gpu-1", "cpu-%")], [pin("b", "gpu-2", "%-7")])


def test_conflict_with_a_stored_pin_and_within_one_batch() -> None:
    with pytest.raises(LockConflict) as stored:
        check_conflicts([pin("a", "gpu-%")], [pin("c", "x", token=1), pin("b", "cpu-%")])
    assert (stored.value.token_id, stored.value.task_ids) == (7, ("b", "a"))
    assert "'a' ['gpu-%']" in str(stored.value)
    with pytest.raises(LockConflict):
        check_conflicts([], [pin("a", "gpu-%"), pin("b", "cpu-%")])
