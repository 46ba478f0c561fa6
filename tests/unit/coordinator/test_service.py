"""For how long the coordinator lets its node say yes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from jobsync_orm import CoordinationConfig
from jobsync_orm.coordinator import Coordinator
from jobsync_orm.coordinator.clock import Clock
from jobsync_orm.coordinator.membership import Beat
from jobsync_orm.coordinator.observation import FREED_GRACES, Seen
from jobsync_orm.coordinator.session import SessionLost


class Stand(Clock):
    """A coordinator that never runs, and its clock."""

    def __init__(self) -> None:
        self.at = 1000.0
        config = CoordinationConfig(url="postgresql+psycopg://nobody@localhost/none", connection_grace_sec=0.5)
        self.coordinator = Coordinator(config, "w1", clock=self)
        self.coordinator.ownership.publish([1], 1, 0)

    def now(self) -> float:
        return self.at

    @property
    def valid_until(self) -> float:
        return self.coordinator.ownership.view.valid_until


@pytest.fixture
def stand() -> Iterator[Stand]:
    stand = Stand()
    stand.coordinator._certain = True
    stand.coordinator._lease_until = 1100.0
    yield stand
    stand.coordinator.stop()


def test_a_look_is_good_for_the_grace_from_the_look_on(stand: Stand) -> None:
    stand.coordinator._look(999.75)
    assert stand.valid_until == 1000.25


def test_a_look_from_before_a_pause_proves_nothing(stand: Stand) -> None:
    stand.coordinator._look(999.75)
    stand.at = 1005.0
    stand.coordinator._look(999.9)
    assert stand.valid_until == 1000.25


def test_a_late_answer_does_not_take_back_a_newer_look(stand: Stand) -> None:
    stand.coordinator._look(999.9)
    stand.coordinator._look(999.6)
    assert stand.valid_until == 1000.4


def test_no_look_outlasts_the_lease(stand: Stand) -> None:
    stand.coordinator._lease_until = 1000.1
    stand.coordinator._look(999.9)
    assert stand.valid_until == 1000.1
    assert stand.coordinator._valid_until() == 1000.1


def test_the_view_taken_by_a_refresh_is_good_from_the_last_look_on(stand: Stand) -> None:
    stand.coordinator._look(999.75)
    stand.at = 1005.0
    assert stand.coordinator._valid_until() == 1000.25


def test_an_uncertain_node_is_not_made_certain_by_a_look(stand: Stand) -> None:
    stand.coordinator._certain = False
    stand.coordinator._look(999.9)
    assert stand.valid_until == 0


def answered(stand: Stand, monkeypatch: pytest.MonkeyPatch, sent_at: float, state: str | None = "active") -> bool:
    """Send a heartbeat that is answered now, at 1000."""
    beat = Beat(sent_at, stand.at, state, 1, (1, 1), ["w0", "w1"], [], 2, False)
    monkeypatch.setattr(stand.coordinator._membership, "beat", lambda *_, **__: beat)
    return stand.coordinator._beat()


def test_the_lease_counts_from_the_sending_of_the_heartbeat_and_ends_early(
    stand: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server may have executed it right after it was sent, and the others' clocks may be faster."""
    assert answered(stand, monkeypatch, 995.0)
    timeout = stand.coordinator._config.heartbeat_timeout_sec
    assert 995.0 < stand.coordinator._lease_until <= 995.0 + timeout - 0.2


def test_an_answer_is_a_look_from_when_its_question_was_sent(stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    assert answered(stand, monkeypatch, 999.75)
    assert stand.valid_until == 1000.25


def test_a_heartbeat_of_a_life_that_is_over_prolongs_nothing(stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    stand.coordinator._lease_until = 1000.1
    assert not answered(stand, monkeypatch, 999.75, None)
    assert stand.coordinator._lease_until == 1000.1
    assert stand.valid_until == 0


def test_tokens_on_their_way_here_are_looked_for_at_each_heartbeat(
    stand: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A release raises no epoch, and its notification may be lost."""
    stand.coordinator._handoff.known_epoch = 1
    assert answered(stand, monkeypatch, 999.75)
    assert not stand.coordinator._refresh_due
    stand.coordinator._handoff.coming = True
    assert answered(stand, monkeypatch, 999.75)
    assert stand.coordinator._refresh_due


def test_the_look_that_can_convict_is_made_as_soon_as_it_can(stand: Stand) -> None:
    node = Seen("w2", "life", "active", "beat", 0.0, 100, 15.0, 0.5, 0.0, locked=True)
    coordinator = stand.coordinator
    coordinator._leadership.oldest = ["w1", "w2"]
    for sent_at, row in ((999.0, node), (999.9, replace(node, locked=False))):
        coordinator._observer.look([row], sent_at, sent_at)
    looks = []
    while not coordinator._observer.dead(coordinator._asked_at, ["w2"]):
        stand.at += coordinator._beat_gap()
        coordinator._asked_at = stand.at
        coordinator._observer.look([replace(node, locked=False)], stand.at, stand.at)
        looks.append(stand.at)
    assert len(looks) == 5
    verdict = 999.9 + FREED_GRACES * 0.5
    assert verdict < looks[-1] < verdict + 0.01


def test_a_broken_session_leaves_nothing_certain(stand: Stand) -> None:
    stand.coordinator._look(999.9)
    stand.coordinator._lost(SessionLost("on purpose"))
    assert stand.valid_until == 0
    assert stand.coordinator.ownership.view.owned[1] == 1, "readers wait: it may be back within the lease"


def test_past_the_lease_a_broken_session_is_a_no_at_once(stand: Stand) -> None:
    stand.at = 1100.0
    stand.coordinator._lost(SessionLost("on purpose"))
    assert not stand.coordinator.ownership.view.tokens()
    assert stand.valid_until == float("inf"), "nobody waits"


def test_the_lease_that_ends_without_a_connection_is_a_no_at_once(
    stand: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    def passes(seconds: float) -> None:
        stand.at += seconds

    monkeypatch.setattr(stand.coordinator._stop, "wait", passes)
    stand.coordinator._entering.deadline = float("inf")
    stand.coordinator._lease_until = 1001.0
    stand.coordinator._lost(SessionLost("on purpose"))
    stand.coordinator._pause(0.5)
    assert stand.valid_until == 0
    stand.coordinator._pause(5.0)
    assert not stand.coordinator.ownership.view.tokens()
    assert stand.valid_until == float("inf")


def test_a_life_that_is_over_owns_nothing(stand: Stand) -> None:
    stand.coordinator._evicted()
    assert not stand.coordinator.ownership.view.tokens()
    assert not stand.coordinator.ownership.held.tokens()


def test_a_heartbeat_that_finds_an_older_epoch_prolongs_nothing(stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    """The database has been put back to an older state, which may hold this life of the node."""
    settled = []
    monkeypatch.setattr(stand.coordinator._history, "settle", settled.append)
    stand.coordinator._history.see(2)
    stand.coordinator._lease_until = 1000.1
    assert not answered(stand, monkeypatch, 999.75)
    assert stand.coordinator._lease_until == 1000.1
    assert stand.valid_until == 0
    assert settled == [stand.coordinator._session]


def test_the_highest_epoch_outlives_the_nodes_lives(stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    assert answered(stand, monkeypatch, 999.75)
    stand.coordinator._evicted()
    assert stand.coordinator._history.known_epoch == 1
