"""The checker finds each kind of fault in a made-up history, and nothing in a good one; the schedule is its seed's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.chaos import checker
from tests.chaos.history import Attempt, Effect, History, Member, Ownership, Sweep, Todo
from tests.chaos.model import lanes
from tests.chaos.nemesis import Disturbance
from tests.chaos.schedule import FEWEST, MOST, first_workers, schedule
from tests.chaos.settings import HEARTBEAT_TIMEOUT_SEC, TOKENS

SECOND = 1_000_000
TICK = 1 / 16


def sweeps(begun: float, ended: float) -> list[Sweep]:
    """Yes to token 0, sixteen times a second."""
    return [Sweep(begun + n * TICK, begun + n * TICK + 0.001, 1) for n in range(int((ended - begun) / TICK))]


def effect(todo: int, version: int, node: str, epoch: int, second: float) -> Effect:
    return Effect(todo, 0, version, node, node + "-life", epoch, f"attempt {todo}", 10 + todo, int(second * SECOND))


@pytest.fixture
def good() -> History:
    """Token 0 is a's for ten seconds, is asked for at 10, goes to b and is used by both."""
    return History(
        tokens=1,
        bound_sec=5,
        confirmed=3,
        begun=1,
        ended=20,
        todos=[Todo(1, 0, True), Todo(2, 0, True), Todo(3, 0, True)],
        counters={0: 3},
        audit={0: 3},
        checkpoints={0: 3},
        effects=[effect(1, 1, "a", 2, 3), effect(2, 2, "a", 3, 9.9), effect(3, 3, "b", 4, 12)],
        ownership=[
            Ownership(0, "a", 2, None, 1 * SECOND),
            Ownership(0, "a", 2, "b", 9 * SECOND),
            Ownership(0, "b", 4, None, 10 * SECOND),
        ],
        members=[Member(0, "a", 1, False), Member(0, "b", 2, False)],
        attempts=[Attempt(f"attempt {n}", 1, "done") for n in (1, 2, 3)] + [Attempt("attempt 4", 2, "refused")],
        sweeps={("a", 1): sweeps(1, 9), ("b", 2): sweeps(10, 20)},
    )


def broken(history: History) -> set[str]:
    return {rule for rule, found in checker.check(history).items() if found}


def test_a_good_history_has_nothing(good: History) -> None:
    assert broken(good) == set()
    assert checker.RULES.keys() == checker.check(good).keys()


def set_effect(number: int, **changes: object) -> Callable[[History], None]:
    def change(history: History) -> None:
        history.effects[number] = replace(history.effects[number], **changes)  # type: ignore[arg-type]

    return change


def set_row(number: int, **changes: object) -> Callable[[History], None]:
    def change(history: History) -> None:
        history.ownership[number] = replace(history.ownership[number], **changes)  # type: ignore[arg-type]

    return change


def set_attempt(number: int, **changes: object) -> Callable[[History], None]:
    def change(history: History) -> None:
        history.attempts[number] = replace(history.attempts[number], **changes)  # type: ignore[arg-type]

    return change


@pytest.mark.parametrize(
    ("rules", "change"),
    [
        ({"lost tasks"}, lambda h: h.todos.pop()),
        ({"lost tasks"}, lambda h: h.todos.__setitem__(1, Todo(2, 0, False))),
        ({"lost tasks"}, lambda h: (h.effects.pop(), h.counters.update({0: 2}), h.attempts.pop(2))),
        ({"duplicated effects"}, lambda h: (h.effects.append(effect(3, 4, "b", 5, 13)), h.counters.update({0: 4}),
                                            h.attempts.__setitem__(2, Attempt("attempt 3", 2, "done")))),
        ({"lost updates"}, set_effect(1, version=1)),
        ({"lost updates"}, lambda h: h.counters.update({0: 4})),
        ({"epochs fall in commit order"}, set_effect(2, epoch=3)),
        ({"epochs fall in commit order"}, lambda h: (set_effect(0, epoch=4)(h), set_effect(1, epoch=3)(h))),
        ({"epochs fall in commit order"}, set_effect(0, committed_us=int(9.95 * SECOND))),
        ({"commits by others than the owner"}, set_effect(1, committed_us=int(10.1 * SECOND))),
        ({"commits by others than the owner", "epochs fall in commit order"}, set_effect(2, epoch=3)),
        ({"commits by others than the owner"}, lambda h: h.ownership.__delitem__(slice(1, 3))),
        ({"epochs of ownership fall"}, set_row(1, epoch=1)),
        ({"epochs of ownership fall"}, set_row(2, epoch=2)),
        ({"commits that were not what was said"}, set_attempt(2, todos=2)),
        ({"commits that were not what was said"}, set_attempt(0, outcome="refused")),
        ({"commits that were not what was said"}, set_attempt(0, outcome="failed")),
        ({"claims, their fences, audit and checkpoints"}, set_effect(1, fence=14)),
        ({"claims, their fences, audit and checkpoints"}, set_effect(1, fence=11)),
        ({"claims, their fences, audit and checkpoints"}, lambda h: h.audit.update({0: 4})),
        ({"claims, their fences, audit and checkpoints"}, lambda h: h.checkpoints.update({0: 2})),
        ({"workers that ended by an error"}, lambda h: h.broken.append("a (process 1): TypeError")),
        ({"two say yes at one time"}, lambda h: h.sweeps.update({("a", 1): sweeps(1.02, 10.5)})),
        ({"tokens ownerless past the bound"}, lambda h: h.sweeps.update({("b", 2): sweeps(15, 20)})),
        ({"tokens ownerless past the bound"}, lambda h: h.sweeps.update({("b", 2): sweeps(10, 14)})),
        ({"tokens draining past the bound"}, set_row(1, committed_us=4 * SECOND)),
    ],
)  # fmt: skip
def test_each_fault_is_found(good: History, rules: set[str], change: Callable[[History], object]) -> None:
    change(good)
    assert rules <= broken(good)


def test_a_token_that_went_and_came_between_two_looks_has_one_owner(good: History) -> None:
    looks = sweeps(1, 9)
    seen = (looks[40].ended + looks[41].begun) / 2
    good.sweeps["b", 2][:0] = [Sweep(seen - 0.001, seen + 0.001, 1)]
    assert broken(good) == {"two say yes at one time"}
    at = int(seen * SECOND)
    good.ownership[1:1] = [Ownership(0, "b", 3, None, at - 9000), Ownership(0, "a", 4, None, at + 9000)]
    assert checker.check(good)["two say yes at one time"] == []


def test_only_what_disturbs_who_has_part_excuses_a_gap(good: History) -> None:
    good.sweeps["b", 2] = sweeps(16, 20)

    def undisturbed(*disturbances: Disturbance) -> float:
        good.disturbances = list(disturbances)
        (gap,) = checker.unserved(good)
        assert gap.seconds == pytest.approx(7, abs=0.1)
        return round(gap.undisturbed)

    assert undisturbed() == 7
    assert undisturbed(Disturbance(12, 12, "pause", "b", "pause")) == 4, "b is to have it"
    assert undisturbed(Disturbance(12, 12, "pause", "c", "pause")) == 7, "c has no part in it"
    assert undisturbed(Disturbance(12, 12, "clock step", "b", "clock step")) == 7, "no wall clock is an excuse"
    assert undisturbed(Disturbance(10, 14, "restart", "", "restart")) == 2, "without a server nobody can"
    good.members += [Member(11, "c", 0, False)]
    assert undisturbed(Disturbance(12, 12, "pause", "c", "pause")) == 4, "c leads"


def test_a_schedule_is_its_seeds() -> None:
    assert schedule(5, 120) == schedule(5, 120) != schedule(6, 120)
    assert schedule(5, 60) == [act for act in schedule(5, 120) if act.at <= 60]
    # No run dries up.
    assert all(len(schedule(seed, 600)) > 600 and schedule(seed, 600)[-1].at > 590 for seed in range(20))
    for seed in range(50):
        acts = schedule(seed, 60)
        kinds = Counter(act.fault.partition(" (")[0] for act in acts if act.fault)
        assert set(kinds) == {
            "kill", "leave", "join", "pause", "stop in work", "cut", "delay", "blackhole", "terminate", "restart",
            "crash", "clock step",
        }, seed  # fmt: skip
        assert kinds.total() >= 25
        assert any(a.kind in ("pause", "stop in work") and a.amount > HEARTBEAT_TIMEOUT_SEC for a in acts), seed
        present = set(first_workers(seed))
        for act in acts:
            if act.kind in ("kill", "leave"):
                present.remove(act.worker)
            elif act.kind in ("start", "join"):
                assert act.worker not in present
                present.add(act.worker)
            assert FEWEST - 2 <= len(present) <= MOST


def test_there_is_a_lane_for_each_token() -> None:
    assert len(set(lanes())) == TOKENS
