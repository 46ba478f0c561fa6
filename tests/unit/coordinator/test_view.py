"""What a reader is told while the loop publishes, doubts and denies."""

from __future__ import annotations

import threading
import time

import pytest

from jobsync_orm.coordinator.clock import now
from jobsync_orm.coordinator.view import Ownership

SOON = 3600.0


@pytest.fixture
def ownership() -> Ownership:
    ownership = Ownership(10, wait_sec=0.2)
    ownership.publish([1, 2, 3], 5, now() + SOON)
    return ownership


def test_nothing_is_owned_at_first() -> None:
    assert not Ownership(10, 1).decide(0)


def test_publish_tells_what_changed(ownership: Ownership) -> None:
    assert ownership.publish([3, 4], 6, now() + SOON) == ([4], [1, 2])
    assert ownership.view.tokens() == {3, 4}
    assert (ownership.view.epoch, ownership.view.count) == (6, 2)


def test_past_its_time_a_view_says_no_after_the_wait(ownership: Ownership) -> None:
    ownership.extend(now() - 0.001)
    began = time.monotonic()
    assert not ownership.decide(1)
    assert time.monotonic() - began >= 0.2


def test_one_interruption_is_waited_for_once(ownership: Ownership) -> None:
    ownership.doubt()
    assert not ownership.decide(1)
    began = time.monotonic()
    assert not any(ownership.decide(token) for token in range(10))
    assert time.monotonic() - began < 1.5  # ten waits take two seconds


def test_the_next_interruption_is_waited_for_again(ownership: Ownership) -> None:
    ownership.doubt()
    assert not ownership.decide(1)
    ownership.extend(now() + SOON)
    ownership.doubt()
    began = time.monotonic()
    assert not ownership.decide(1)
    assert time.monotonic() - began >= 0.2


def test_a_waiting_reader_hears_when_certainty_returns() -> None:
    ownership = Ownership(10, wait_sec=60)
    ownership.publish([1], 1, 0)
    answers: list[bool] = []
    reader = threading.Thread(target=lambda: answers.extend([ownership.decide(1), ownership.decide(2)]))
    reader.start()
    ownership.extend(now() + SOON)
    reader.join(60)
    assert answers == [True, False]


def test_denial_answers_at_once_and_is_taken_back_by_certainty() -> None:
    ownership = Ownership(10, wait_sec=60)
    ownership.publish([1], 1, 0)
    ownership.deny()
    assert not ownership.decide(1)
    assert ownership.held.tokens() == {1}
    ownership.extend(now() + SOON)
    assert ownership.decide(1)


def test_clear_forgets_for_good(ownership: Ownership) -> None:
    assert ownership.clear() == [1, 2, 3]
    ownership.extend(now() + SOON)
    assert not ownership.decide(1)
    assert ownership.view.tokens() == set()


def test_tokens_that_are_asked_for_are_lost_and_yet_known() -> None:
    ownership = Ownership(10, 0)
    ownership.publish([1, 2], 5, now() + SOON)
    assert ownership.publish([1], 6, now() + SOON, draining=[2]) == ([], [2])
    assert (list(ownership.held.owned[:4]), ownership.held.count, ownership.held.tokens()) == ([0, 1, 2, 0], 1, {1})
    assert not ownership.decide(2)
    assert ownership.publish([1], 7, now() + SOON) == ([], []), "it has been handed over"
    ownership.publish([1], 8, now() + SOON, draining=[2])
    assert ownership.publish([1, 2], 9, now() + SOON) == ([2], []), "the mark was taken back"
    assert ownership.clear() == [1, 2]


def test_a_token_that_is_asked_for_before_it_was_owned_is_not_for_finishing(ownership: Ownership) -> None:
    """It is that of an earlier life of the node, whose work may still be committed."""
    ownership.publish([1, 2], 5, now() + SOON)
    ownership.clear()
    assert ownership.publish([1], 8, now() + SOON, draining=[2]) == ([1], [])
    assert ownership.held.owned[2] == 0
