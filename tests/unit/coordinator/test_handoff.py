"""What a node does about tokens it is to let go of, whatever the database answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from jobsync_orm import CoordinationConfig
from jobsync_orm.coordinator.clock import Clock
from jobsync_orm.coordinator.handoff import Handoff
from jobsync_orm.coordinator.membership import Membership
from jobsync_orm.coordinator.session import SessionLost, StatementFailed
from jobsync_orm.coordinator.statements import Statements
from jobsync_orm.coordinator.view import Ownership


class Stand(Clock):
    """A hand-off on a clock of this test's, and the session that it talks to."""

    def __init__(self) -> None:
        self.at = 1000.0
        config = CoordinationConfig(url="postgresql+psycopg://nobody@localhost/none", total_tokens=4)
        self.sql = Statements(config.names)
        member = Membership(config, "w1", self.sql, self)
        self.handoff = Handoff(self.sql, member, Ownership(4, 0), 10, None, None, self)
        self.answers: dict[str, Callable[[], list[Any]]] = {}
        self.sent: list[str] = []

    def now(self) -> float:
        return self.at

    def execute(self, sql: str, *parameters: Any, timeout: float) -> list[Any]:
        name = next(name for name, statement in vars(self.sql).items() if statement == sql)
        self.sent.append(name)
        return self.answers[name]()

    def refresh(self, draining: str | None, marks: str | None, earlier: str, rest: str | None = None) -> None:
        self.answers["refresh"] = lambda: [("active", "7", "{1}", draining, marks, "0", earlier, rest)]
        self.handoff.refresh(self, lambda: 2000.0)  # type: ignore[arg-type]


def failing(error: Exception) -> Callable[[], list[Any]]:
    def answer() -> list[Any]:
        raise error

    return answer


@pytest.mark.parametrize("error", [StatementFailed("no", "55P03"), SessionLost("gone")])
@pytest.mark.parametrize("statement", ["release", "regain"])
def test_what_failed_is_tried_again_although_nothing_has_changed(statement: str, error: Exception) -> None:
    stand = Stand()
    draining = ("{2}", "{6}", "0") if statement == "release" else (None, None, "1")
    stand.refresh(*draining)
    assert stand.handoff.release_at == stand.at
    stand.answers[statement] = failing(error)
    with pytest.raises(type(error)):
        stand.handoff.release(stand)  # type: ignore[arg-type]
    stand.refresh(*draining)  # the same as before
    assert stand.at < stand.handoff.release_at < stand.at + 2
    stand.answers[statement] = lambda: [("w2", "1", "")] if statement == "release" else [("1",)]
    stand.handoff.release(stand)  # type: ignore[arg-type]
    assert stand.sent.count(statement) == 2


def test_with_nothing_left_nothing_is_due() -> None:
    stand = Stand()
    stand.refresh("{2}", "{6}", "0")
    stand.answers["release"] = lambda: [("w2", "1", "")]
    assert not stand.handoff.release(stand)  # type: ignore[arg-type]
    assert stand.handoff.release_at == float("inf")


def test_tokens_read_before_this_process_counts_the_rest_as_over_are_read_again() -> None:
    """The database's rest is over a moment earlier than this process knows, which was told late."""
    stand = Stand()
    stand.refresh("{2}", "{7}", "0", rest="0.5")
    stand.at += 0.45
    stand.refresh(None, None, "0", rest="-0.01")
    assert stand.handoff.known_epoch == 7
    assert stand.at < stand.handoff.refresh_at < stand.at + 0.1
    stand.at = stand.handoff.refresh_at
    stand.refresh(None, None, "0", rest="-0.07")
    assert stand.handoff.refresh_at == float("inf")
