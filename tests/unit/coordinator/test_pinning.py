"""From patterns to allowed nodes."""

from __future__ import annotations

from typing import Any

import pytest

from jobsync_orm.coordinator.pinning import allowed_nodes

NODES = ["cpu-1", "cpu-2", "gpu-1", "gpu-2"]


def test_first_pattern_with_a_live_match_decides() -> None:
    pins = [(1, ["tpu-%", "gpu-%", "cpu-%"]), (2, ["gpu-2"]), (3, ["%"])]
    assert allowed_nodes(pins, NODES) == {1: {"gpu-1", "gpu-2"}, 2: {"gpu-2"}, 3: set(NODES)}


def test_no_live_match_allows_nobody() -> None:
    assert allowed_nodes([(1, ["tpu-%", "GPU-1"])], NODES) == {1: set()}


def test_pins_that_share_a_token_are_satisfied_together() -> None:
    assert allowed_nodes([(1, ["gpu-%"]), (1, ["%-2"])], NODES) == {1: {"gpu-2"}}


def test_shared_token_takes_the_least_common_demotion() -> None:
    pins = [(1, ["gpu-1", "cpu-%"]), (1, ["gpu-2", "cpu-2", "%"])]
    # gpu-1 is first for one and third for the other; cpu-2 second for both; cpu-1 second and third.
    assert allowed_nodes(pins, NODES) == {1: {"cpu-2", "gpu-1"}}


def test_the_same_pin_twice_is_one() -> None:
    assert allowed_nodes([(1, ["gpu-1", "%"]), (1, ["gpu-1", "%"])], NODES) == {1: {"gpu-1"}}


def test_shared_token_without_common_node_allows_nobody() -> None:
    assert allowed_nodes([(1, ["gpu-%"]), (1, ["cpu-%"])], NODES) == {1: set()}


def test_a_malformed_pattern_matches_nobody_and_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """It was written past register_lock, which refuses it; the other pins are as good as before."""
    pins = [(1, ["gpu-\\"]), (2, ["gpu-\\", "cpu-1"]), (3, ["gpu-1"])]
    assert allowed_nodes(pins, NODES) == {1: set(), 2: {"cpu-1"}, 3: {"gpu-1"}}
    assert "a pin matches no node" in caplog.text


@pytest.mark.parametrize("patterns", [["gpu-\\"], [5], [None], [], {}])
def test_what_is_no_list_of_patterns_matches_nobody(patterns: Any) -> None:
    assert allowed_nodes([(1, patterns), (2, ["gpu-1"])], NODES) == {1: set(), 2: {"gpu-1"}}


@pytest.mark.parametrize("patterns", [5, None, True, "gpu-%"])
def test_what_is_no_list_at_all_matches_nobody(patterns: Any) -> None:
    assert allowed_nodes([(1, patterns), (2, ["gpu-1"])], NODES) == {1: set(), 2: {"gpu-1"}}
