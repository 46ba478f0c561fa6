"""When a leader plans."""

from __future__ import annotations

from jobsync_orm.coordinator import leadership
from jobsync_orm.coordinator.clock import Clock
from jobsync_orm.coordinator.statements import Statements
from jobsync_orm.naming import Names


class Hand(Clock):
    at = 1000.0

    def now(self) -> float:
        return self.at


def test_after_a_new_session_the_same_revisions_are_planned_for() -> None:
    """They may be those of another history of the database."""
    clock = Hand()
    leader = leadership.Leadership(Names(), Statements(Names()), "a", 3, clock)
    leader.heard(["z", "a"], (5, 0))
    assert leader.plan_at == float("inf")
    leader.forget()
    clock.at += 1
    leader.heard(["a"], (5, 0))
    assert leader.plan_at == clock.at
