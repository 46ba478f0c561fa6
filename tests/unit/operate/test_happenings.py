from __future__ import annotations

from jobsync_orm.operate.happenings import Happenings
from jobsync_orm.operate.watching import Ended
from tests.unit.operate.looks import START, look, node


def told(happenings: Happenings) -> list[str]:
    """Oldest first."""
    return [event.what for event in reversed(happenings.events)]


def test_a_node_that_is_killed_and_its_recovery() -> None:
    seen = Happenings()
    seen.see(look(0, node("w1", 5), node("w2", 5)))
    seen.see(look(1, node("w1", 5), node("w2", 5, "cut off")))
    seen.see(look(2, node("w1", 5), unowned=5))
    assert seen.gone["w2"].dead
    seen.see(look(2.5, node("w1", 10)))
    assert told(seen) == [
        "w2 is cut off: its session has ended; 5 tokens",
        "w2 has been taken out",
        "w2's tokens have live owners again, after 1.5 s",
    ]
    assert [event.grave for event in seen.events] == [False, True, True]
    seen.see(look(32.5, node("w1", 10)))
    assert seen.gone == {}


def test_parked_tokens_do_not_keep_a_recovery_from_being_told() -> None:
    seen = Happenings()
    seen.see(look(0, node("w1", 5), node("w2", 5, "silent")))
    seen.see(look(3, node("w1", 9), unowned=1, parked=1))
    assert told(seen)[-1] == "w2's tokens have live owners again, after 3.0 s"


def test_those_who_come_leave_and_come_back() -> None:
    seen = Happenings()
    seen.see(look(0, node("w1", 10)))
    assert told(seen) == []
    seen.see(look(1, node("w1", 10), node("w2")))
    seen.see(look(2, node("w1", 10, "cut off"), node("w2")))
    seen.see(look(3, node("w1", 10), node("w2", drained=True)))
    seen.see(look(4, node("w2", drained=True), leader=None))
    assert not seen.gone["w1"].dead
    seen.see(look(5, node("w2", registered_at=START.replace(hour=13)), node("w1"), leader="w2"))
    assert seen.gone == {}
    assert told(seen) == [
        "w2 has joined (host:7)",
        "w1 is cut off: its session has ended; 10 tokens",
        "w1 is live again",
        "w2 is drained",
        "w1 has left",
        "nobody leads",
        "w2 has joined anew (host:7)",
        "w2 is undrained",
        "w1 has joined (host:7)",
        "w2 leads",
    ]


def test_rates_are_those_of_whole_seconds_and_what_is_counted_again_replaces_them() -> None:
    first = int(START.timestamp())
    seen = Happenings()
    seen.see(look(2, ended=(Ended(first, 5, 1), Ended(first + 1, 3, 0))))
    seen.see(look(3, ended=(Ended(first + 1, 4, 0), Ended(first + 2, 2, 2))))
    assert seen.per_second(START.replace(second=3, microsecond=500), 4) == [(0, 0), (5, 1), (4, 0), (2, 2)]
    seen.see(look(700, ended=()))
    assert seen.rates == {}
