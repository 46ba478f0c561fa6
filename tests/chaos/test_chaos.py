"""Directed runs: the checker finds what goes wrong without the library's safeguards, and nothing with them."""

from __future__ import annotations

from typing import Any

import pytest

from tests.chaos import checker
from tests.chaos.arena import Arena, until
from tests.chaos.control import Point
from tests.chaos.fleet import Life
from tests.chaos.history import History
from tests.chaos.run import report
from tests.chaos.schedule import Act

pytestmark = pytest.mark.chaos

SECONDS = 40.0

# What is stopped is to go on, however long it took the others.
PLAIN: dict[str, Any] = {"WORK": "plain", "IDLE_SEC": "120"}


def stop_one_across_its_eviction(arena: Arena) -> History:
    """Stop w1 where it has read its tasks and written nothing; let it go on when others have done them."""
    arena.begin(["w1", "w2", "w3"])
    life = arena.fleet.current["w1"]
    arena.nemesis.do(Act(0, "stop in work", "w1", how=Point.READ.name, fault="stop in work"))
    must(lambda: life.stopped, "w1 stopped itself")
    last = arena.rows("SELECT max(id) FROM todo")[0][0]
    must(lambda: not arena.rows("SELECT 1 FROM sync_node WHERE name = 'w1'"), "w1 is taken for dead")
    must(
        lambda: arena.rows("SELECT NOT EXISTS (SELECT FROM todo WHERE NOT done AND id <= %s)", last) == [(True,)],
        "the others have done its tasks",
    )
    before = len(transactions(life))
    arena.nemesis.do(Act(0, "continue", "w1"))
    must(lambda: len(transactions(life)) > before, "w1 knows what became of its transaction")
    return arena.finish()


def transactions(life: Life) -> list[dict[str, Any]]:
    """How its transactions ended."""
    return [event for event in life.events() if event["e"] in ("done", "refused", "failed", "found")]


def must(condition: Any, what: str) -> None:
    assert until(condition, what, SECONDS), what


def found(history: History) -> set[str]:
    """The rules that are broken."""
    results = checker.check(history)
    print(report(history, results))
    return {rule for rule, violations in results.items() if violations}


def test_with_the_fence_a_late_commit_is_refused() -> None:
    with Arena(1, **PLAIN) as arena:
        history = stop_one_across_its_eviction(arena)
    assert found(history) == set()
    assert any(attempt.outcome == "refused" for attempt in history.attempts)


def test_without_the_fence_a_late_commit_is_found() -> None:
    with Arena(1, FENCE="off", **PLAIN) as arena:
        history = stop_one_across_its_eviction(arena)
    assert {"duplicated effects", "epochs fall in commit order", "commits by others than the owner"} <= found(history)


def test_without_the_lease_two_workers_that_say_yes_are_found() -> None:
    with Arena(1, FENCE="off", LEASE="ignored", **PLAIN) as arena:
        arena.begin(["w1", "w2", "w3"])
        arena.nemesis.do(Act(0, "blackhole", "w1", how="both", fault="blackhole"))
        must(lambda: not arena.rows("SELECT 1 FROM sync_node WHERE name = 'w1'"), "w1 is taken for dead")
        must(
            lambda: not arena.rows("SELECT 1 FROM sync_token WHERE node NOT IN (SELECT name FROM sync_node)"),
            "the others have its tokens",
        )
        asked = len(arena.fleet.current["w2"].events())
        must(lambda: len(arena.fleet.current["w2"].events()) > asked + 40, "they are asked side by side for a while")
        history = arena.finish()
    assert "two say yes at one time" in found(history)
