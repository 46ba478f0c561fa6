"""What is counted when: without a database, and with a clock of the test's own."""

from __future__ import annotations

from collections.abc import Sequence

from jobsync_orm.operate.counting import AT_ONCE, STRETCH, Group, TokenTally

MANY = 3 * AT_ONCE
TOTAL = MANY * STRETCH


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def rows(numbers: Sequence[int], node: str = "a", next_node: str | None = None) -> list[tuple[object, ...]]:
    return [(number, node, next_node, STRETCH, 0) for number in numbers]


def test_a_settled_table_is_looked_at_bit_by_bit_every_ten_seconds() -> None:
    tally = TokenTally(clock := Clock())
    assert tally.due() is None
    assert tally.learn(1, TOTAL, None, rows(range(MANY)))
    assert tally.groups() == (Group("a", None, TOTAL, 0),)
    clock.now = 9.0
    assert tally.due() == ()
    checked: set[int] = set()
    for _ in range(3):
        clock.now += 10.0
        due = tally.due()
        assert due is not None
        assert len(due) == AT_ONCE
        assert tally.learn(1, TOTAL, due, rows(due))
        assert tally.due() == ()
        assert tally.age_sec == 0.0
        checked |= set(due)
    assert checked == set(range(MANY))


def test_what_waits_is_counted_in_turn_and_all_at_once_for_who_looks_seldom() -> None:
    tally = TokenTally(clock := Clock())
    tally.learn(1, TOTAL, None, rows(range(MANY), next_node="b"))
    seen: list[int] = []
    for _ in range(6):
        clock.now += 0.25
        due = tally.due()
        assert due is not None
        assert len(due) == AT_ONCE
        assert tally.learn(1, TOTAL, due, rows(due, next_node="b"))
        seen += due
    assert seen == [*range(MANY)] * 2
    assert tally.age_sec == 0.5
    clock.now += 15.0
    assert tally.due() is None


def test_a_new_version_is_told_and_has_all_counted_anew() -> None:
    tally = TokenTally(clock := Clock())
    tally.learn(1, TOTAL, None, rows(range(MANY)))
    clock.now = 1.0
    assert not tally.learn(2, TOTAL, (), ())
    assert tally.age_sec == 1.0
    for start in range(0, MANY, AT_ONCE):
        assert tally.due() == tuple(range(start, start + AT_ONCE))
        tally.learn(2, TOTAL, tally.due(), rows(range(start, start + AT_ONCE), "b"))
        assert sum(group.tokens for group in tally.groups()) == TOTAL
    assert (tally.due(), tally.groups(), tally.age_sec) == ((), (Group("b", None, TOTAL, 0),), 0.0)
    # Fewer tokens than there were: nothing that was known counts.
    assert not tally.learn(3, 10, (), ())
    assert tally.due() is None
