"""The keys a worker has in memory: whose turn it is, and what it forgets."""

from __future__ import annotations

import math
from typing import Any

import pytest

from jobsync_orm.models.states import JobState
from jobsync_orm.queue.jobs import ClaimedJob
from jobsync_orm.worker import keys as keys_module
from jobsync_orm.worker.keys import ASLEEP_MOST_SEC, ASLEEP_SEC, Keys

SECOND = 1_000_000
TYPES = {"t", "u"}


@pytest.fixture
def keys() -> Keys:
    return Keys(ageing_sec=60)


def job(key: str, type: str = "t", priority: int = 0, ready_at: int = 0) -> ClaimedJob:
    return ClaimedJob(1, type, priority, 1, 0, 3, 60.0, key, {}, ready_at, 0)


def claim(keys: Keys, *names: str, follows: tuple[list[Any], ...] = (), most: int = 10) -> None:
    """Ask for what there is, and get all of it."""
    assert keys.plan({"t": most, "u": most}, 0.0) == list(names)
    keys.claimed([job(name) for name in names], [], follows, TYPES, 0.0)


def left(keys: Keys, name: str, why: str, now: float = 0.0, type: str = "t") -> None:
    keys.claimed([], [[name, why, None, type, 0, 0]], [], TYPES, now)


def test_a_key_is_asked_for_once(keys: Keys) -> None:
    for name in ("a", "b", "a"):
        keys.seen(name, ("t", 0, 0))
    assert keys.waiting(0) == 2
    claim(keys, "a", "b")
    assert keys.plan({"t": 10}, 0.0) == []
    assert keys.waiting(0) == 0


def test_no_more_keys_than_there_is_room_for_by_type(keys: Keys) -> None:
    for n in range(5):
        keys.seen(f"t{n}", ("t", n, 0))
        keys.seen(f"u{n}", ("u", n, 0))
    assert keys.plan({"t": 2}, 0.0) == ["t4", "t3"]
    assert keys.plan({"t": 1, "u": 3}, 0.0) == ["u4", "u3", "t2"]


def test_the_urgent_and_the_old_go_first(keys: Keys) -> None:
    keys.seen("normal", ("t", 0, 0))
    keys.seen("low", ("t", -10, 0))
    keys.seen("high", ("t", 10, 0))
    keys.seen("low and old", ("u", -10, -1201 * SECOND))
    assert keys.urgency(TYPES, 0.0) == -601 * SECOND
    assert keys.plan({"t": 9, "u": 9}, 0.0) == ["low and old", "high", "normal", "low"]


def test_only_what_is_as_urgent_as_something_else(keys: Keys) -> None:
    keys.seen("high", ("t", 10, 0))
    keys.seen("normal", ("t", 0, 0))
    assert keys.plan({"t": 9}, 0.0, before=-1.0) == ["high"]
    assert keys.plan({"t": 9}, 0.0) == ["normal"]


def test_keys_take_turns(keys: Keys) -> None:
    keys.seen("hot", ("t", 0, 0))
    for n in range(3):
        keys.seen(f"cold {n}", ("t", 0, n + 1))
    turns = []
    for _ in range(6):
        (name,) = keys.plan({"t": 1}, 0.0)
        turns.append(name)
        more = [[name, "t", 0, 0]] if name == "hot" else []
        keys.claimed([job(name)], [], more, TYPES, 0.0)
        keys.settled(job(name), JobState.COMPLETED, TYPES)
    assert turns == ["hot", "cold 0", "cold 1", "cold 2", "hot", "hot"]


@pytest.mark.parametrize("state", [JobState.COMPLETED, JobState.FAILED, JobState.CANCELLED])
def test_a_key_with_nothing_left_is_forgotten(keys: Keys, state: JobState) -> None:
    keys.seen("a", ("t", 0, 0))
    claim(keys, "a")
    assert len(keys) == 1
    keys.settled(job("a"), state, TYPES)
    assert len(keys) == 0


@pytest.mark.parametrize("state", [JobState.RETRYING, JobState.SCHEDULED])
def test_a_key_that_backs_off_is_forgotten_until_it_is_ready(keys: Keys, state: JobState) -> None:
    keys.seen("a", ("t", 0, 0))
    claim(keys, "a")
    keys.settled(job("a"), state, TYPES)
    assert len(keys) == 0


def test_a_job_given_back_is_asked_for_again(keys: Keys) -> None:
    keys.seen("a", ("t", 0, 7))
    claim(keys, "a")
    keys.settled(job("a", ready_at=7), JobState.PENDING, TYPES)
    assert keys.urgency(TYPES, 0.0) == 7
    claim(keys, "a")


def test_what_follows_is_asked_for_where_it_belongs(keys: Keys) -> None:
    keys.seen("a", ("t", 0, 0))
    claim(keys, "a", follows=(["a", "u", 5, 9],))
    assert keys.due_at(TYPES, 0.0) == math.inf
    keys.settled(job("a"), JobState.COMPLETED, TYPES)
    assert keys.waiting(5) == 1
    assert keys.plan({"t": 1}, 0.0) == []
    assert keys.plan({"u": 1}, 0.0) == ["a"]


def test_what_follows_is_somebody_elses_if_this_worker_may_not_take_its_type(keys: Keys) -> None:
    keys.seen("a", ("t", 0, 0))
    claim(keys, "a", follows=(["a", "other", 0, 0],))
    keys.settled(job("a"), JobState.COMPLETED, TYPES)
    assert len(keys) == 0


def test_what_is_enqueued_meanwhile_is_not_forgotten(keys: Keys) -> None:
    keys.seen("a", ("t", 0, 0))
    claim(keys, "a")
    keys.seen("a", ("t", 0, 3))
    keys.settled(job("a"), JobState.COMPLETED, TYPES)
    claim(keys, "a")


@pytest.mark.parametrize("why", ["empty", "retrying", "elsewhere", "type"])
def test_what_is_not_to_be_had_is_forgotten(keys: Keys, why: str) -> None:
    keys.seen("a", ("t", 0, 0))
    keys.plan({"t": 1}, 0.0)
    left(keys, "a", why)
    assert len(keys) == 0


def test_a_key_whose_first_job_is_of_another_type_changes_its_place(keys: Keys) -> None:
    keys.seen("a", ("t", 0, 0))
    keys.plan({"t": 1}, 0.0)
    left(keys, "a", "type", type="u")
    assert keys.plan({"u": 1}, 0.0) == ["a"]
    left(keys, "a", "type", type="other")
    assert len(keys) == 0


@pytest.mark.parametrize("why", ["processing", "taken"])
def test_a_key_whose_job_runs_elsewhere_sleeps_ever_longer(keys: Keys, why: str) -> None:
    keys.seen("a", ("t", 0, 0))
    now, rests = 0.0, []
    for _ in range(8):
        assert keys.plan({"t": 1}, now) == ["a"]
        left(keys, "a", why, now)
        assert keys.plan({"t": 1}, now) == []
        wake_at = keys.due_at(TYPES, now)
        rests.append(wake_at - now)
        now = wake_at
    assert rests[0] == pytest.approx(ASLEEP_SEC)
    assert rests[-1] == pytest.approx(ASLEEP_MOST_SEC)
    assert rests == sorted(rests)


def test_a_key_that_is_found_ready_sleeps_no_longer(keys: Keys) -> None:
    keys.seen("a", ("t", 0, 0))
    keys.plan({"t": 1}, 0.0)
    left(keys, "a", "processing")
    keys.seen("a", ("t", 0, 5))  # another job of its line, which says nothing of the first
    assert keys.plan({"t": 1}, 0.0) == []
    keys.ready("a", ("t", 0, 0))
    assert keys.plan({"t": 1}, 0.0) == ["a"]
    left(keys, "a", "processing")
    assert keys.plan({"t": 1}, ASLEEP_SEC) == []  # the first alarm does not count any more
    assert keys.plan({"t": 1}, 10.0) == ["a"]


def test_only_so_many_sleep(keys: Keys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keys_module, "MOST_ASLEEP", 3)
    for n in range(5):
        keys.seen(f"k{n}", ("t", 0, 0))
    for name in keys.plan({"t": 9}, 0.0):
        left(keys, name, "processing")
    assert len(keys) == 3


def test_without_an_answer_nothing_has_changed(keys: Keys) -> None:
    for n in range(4):
        keys.seen(f"k{n}", ("t", 0, n))
    asked = keys.plan({"t": 3}, 0.0)
    keys.put_back(asked)
    assert keys.waiting(0) == 4
    assert keys.plan({"t": 9}, 0.0) == ["k0", "k1", "k2", "k3"]


def test_only_the_busy_ones_are_kept_when_others_are_this_workers(keys: Keys) -> None:
    for name in ("busy", "asleep", "waiting"):
        keys.seen(name, ("t", 0, 0))
    keys.plan({"t": 2}, 0.0)
    keys.claimed([job("busy")], [["asleep", "processing", None, "t", 0, 0]], [], TYPES, 0.0)
    keys.forget()
    assert len(keys) == 1
    assert keys.due_at(TYPES, 100.0) == math.inf
    assert keys.waiting(0) == 0
    keys.seen("busy", ("t", 0, 0))
    assert keys.plan({"t": 2}, 100.0) == []
    keys.settled(job("busy"), JobState.COMPLETED, TYPES)
    claim(keys, "busy")


def test_a_job_that_nobody_remembers_asking_for(keys: Keys) -> None:
    """Its claim's answer was lost, and it was found by other means."""
    keys.settled(job("a"), JobState.COMPLETED, TYPES)
    claim(keys, "a")
    keys.settled(job("a"), JobState.COMPLETED, TYPES)
    keys.seen("a", ("t", 0, 0))
    keys.put_back(keys.plan({"t": 1}, 0.0))
    keys.settled(job("a"), JobState.COMPLETED, TYPES)
    assert keys.waiting(0) == 1


def test_nothing_is_kept_of_priorities_that_came_once(keys: Keys) -> None:
    for priority in range(50):
        keys.seen(f"k{priority}", ("t", priority, 0))
    keys.plan({"t": 50}, 0.0)
    assert keys.waiting(7) == 0
    assert not keys._waiting
    assert not keys._lanes
