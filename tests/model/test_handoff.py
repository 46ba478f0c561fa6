"""The protocol holds in every interleaving searched, and each of its safeguards is needed."""

from __future__ import annotations

import pytest

from tests.model.handoff import SAFEGUARDS, Protocol, search

# Far more than the longest of the short searches needs.
ENOUGH = 200_000


@pytest.mark.parametrize("name", SAFEGUARDS)
def test_without_this_safeguard_something_goes_wrong(name: str) -> None:
    safeguard = SAFEGUARDS[name]
    found = search(Protocol(epochs=safeguard.epochs, off=frozenset({name}), never=safeguard.never), ENOUGH)
    assert found.wrong, f"{safeguard.otherwise}, and that does no harm? {found}"


@pytest.mark.parametrize("name", [name for name, guard in SAFEGUARDS.items() if guard.epochs == 3 and guard.never])
def test_with_all_of_them_nothing_goes_wrong_in_the_same_corner(name: str) -> None:
    found = search(Protocol(never=SAFEGUARDS[name].never), ENOUGH)
    assert found.complete, found
    assert not found.wrong, found


@pytest.mark.parametrize("epochs", [2, 4])
def test_nothing_goes_wrong_within_a_bounded_search(epochs: int) -> None:
    found = search(Protocol(epochs=epochs), 40_000)
    assert not found.wrong, found


def test_three_peers() -> None:
    found = search(Protocol(peers=3), 20_000)
    assert not found.wrong, found


@pytest.mark.chaos
@pytest.mark.parametrize("peers", [2, 3])
def test_nothing_goes_wrong_however_long_one_looks(peers: int) -> None:
    found = search(Protocol(peers=peers), 3_000_000)
    assert not found.wrong, found
