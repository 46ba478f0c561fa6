"""For how long the coordinator lets its node say yes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from jobsync_orm import CoordinationConfig
from jobsync_orm.coordinator import Coordinator, service


class Stand:
    """A coordinator that never runs, on a clock of this test's."""

    def __init__(self) -> None:
        self.at = 1000.0
        config = CoordinationConfig(url="postgresql+psycopg://nobody@localhost/none", connection_grace_sec=0.5)
        self.coordinator = Coordinator(config, "w1")
        self.coordinator.ownership.publish([1], 1, 0)

    @property
    def valid_until(self) -> float:
        return self.coordinator.ownership.view.valid_until


@pytest.fixture
def stand(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stand]:
    stand = Stand()
    monkeypatch.setattr(service, "now", lambda: stand.at)
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
