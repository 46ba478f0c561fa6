"""Whom the evidence convicts, and whom it does not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from jobsync_orm.coordinator.observation import Evidence, Observer, Seen

NODE = Seen("w2", "life-1", "active", "beat-1", 0.0, 100, 15.0, 0.5, 0.0, True)


@pytest.fixture
def observer() -> Observer:
    return Observer(patience_sec=11)


def watch(observer: Observer, looks: list[tuple[float, Seen]]) -> list[Evidence]:
    """What is concluded after the last of these looks."""
    for at, row in looks:
        observer.look([row], at, at + 0.01)
    return observer.dead(looks[-1][0], ["w2"])


def free(row: Seen = NODE) -> Seen:
    return replace(row, locked=False)


def test_freed_lock_convicts_after_more_than_twice_the_grace(observer: Observer) -> None:
    looks = [(0.0, NODE), (1.0, free()), (1.9, free())]
    assert watch(observer, looks) == []
    assert observer.suspects
    assert watch(observer, [(2.3, free())]) == [Evidence("w2", "life-1", "beat-1", freed=True)]


def test_when_a_look_will_convict_is_known_beforehand(observer: Observer) -> None:
    watch(observer, [(0.0, NODE)])
    assert observer.verdict_at(0.0) == float("inf")
    assert watch(observer, [(1.0, free())]) == []
    verdict = observer.verdict_at(1.0)
    assert watch(observer, [(verdict, free())]) == []
    assert watch(observer, [(verdict + 0.001, free())]) != []
    assert observer.verdict_at(verdict + 0.001) == float("inf")  # whom it does not evict it does not wait for


def test_lock_that_was_never_seen_held_proves_nothing(observer: Observer) -> None:
    assert watch(observer, [(0.0, free()), (2.0, free()), (9.0, free())]) == []
    assert not observer.suspects


def newcomer(observer: Observer, looks: list[tuple[float, Seen]], known: bool = True) -> list[Evidence]:
    """The same for a process that has just come; ``known`` is whether the server has said which it is."""
    for at, row in looks:
        observer.look([row], at, at + 0.01, known)
    return observer.dead(looks[-1][0], ["w2"])


ORPHANED = replace(free(), beat_here=True)
FREED = [Evidence("w2", "life-1", "beat-1", freed=True)]


def test_a_newcomer_takes_a_heartbeat_for_a_lock_that_was_held(observer: Observer) -> None:
    assert newcomer(observer, [(0.0, ORPHANED), (1.1, ORPHANED)]) == []
    assert observer.suspects
    assert newcomer(observer, [(1.3, ORPHANED)]) == FREED


def test_a_newcomers_first_look_may_have_been_without_locks(observer: Observer) -> None:
    unlooked = replace(NODE, locked=None, beat_here=None)
    assert newcomer(observer, [(0.0, unlooked), (1.0, ORPHANED), (2.1, ORPHANED)]) == []
    assert newcomer(observer, [(2.3, ORPHANED)]) == FREED


def test_a_newcomer_hears_who_comes_back(observer: Observer) -> None:
    assert newcomer(observer, [(0, ORPHANED), (1, replace(ORPHANED, locked=True)), (2, ORPHANED), (3, ORPHANED)]) == []
    beaten = replace(ORPHANED, beat="beat-2")
    assert newcomer(observer, [(3.1, beaten), (4.2, beaten)]) == []


@pytest.mark.parametrize(
    ("row", "known"),
    [
        (replace(ORPHANED, beat_here=False), True),  # the server was started again since, and ended all sessions
        (ORPHANED, False),  # it may be another server
        (replace(ORPHANED, state="away"), True),
    ],
)
def test_what_a_heartbeat_does_not_prove(observer: Observer, row: Seen, known: bool) -> None:
    row = replace(row, rejoin_grace_sec=100.0)
    assert newcomer(observer, [(0, row), (2, row), (9, row)], known) == []


def test_who_has_lost_its_own_session_is_no_newcomer(observer: Observer) -> None:
    observer.reset()  # nor does it cease to be one because the database was away at first
    assert newcomer(observer, [(0, ORPHANED), (1.3, ORPHANED)]) == FREED
    observer.reset()
    assert newcomer(observer, [(2, ORPHANED), (9, ORPHANED)]) == []


def test_freed_locks_may_be_no_evidence_for_a_newcomer_either() -> None:
    observer = Observer(patience_sec=11, trust_freed_locks=False)
    assert newcomer(observer, [(0, ORPHANED), (2, ORPHANED)]) == []


def test_lock_taken_again_clears_the_suspicion(observer: Observer) -> None:
    assert watch(observer, [(0, NODE), (1, free()), (1.5, NODE), (2, free()), (2.9, free())]) == []


def test_heartbeat_after_the_lock_was_freed_clears_the_suspicion(observer: Observer) -> None:
    beaten = replace(free(), beat="beat-2")
    assert watch(observer, [(0, NODE), (1, free()), (2, beaten), (2.9, beaten)]) == []


def test_new_session_of_the_node_must_be_seen_with_its_own_lock(observer: Observer) -> None:
    moved = replace(free(), backend_pid=101, beat="beat-2")
    assert watch(observer, [(0, NODE), (1, moved), (3, moved), (6, moved)]) == []


def test_silence_convicts_after_the_timeout_by_own_watch_and_database_age(observer: Observer) -> None:
    silent = replace(NODE, locked=None)
    looks = [(float(at), replace(silent, age_sec=float(at))) for at in range(0, 15, 5)]
    assert watch(observer, looks) == []
    assert watch(observer, [(15.5, replace(silent, age_sec=15.5))]) == [Evidence("w2", "life-1", "beat-1", False)]


def test_old_row_at_first_sight_is_not_dead(observer: Observer) -> None:
    ancient = replace(NODE, age_sec=3600.0, locked=None)
    assert watch(observer, [(0, ancient), (10, ancient)]) == []


def test_watcher_that_slept_begins_anew(observer: Observer) -> None:
    silent = replace(NODE, age_sec=3600.0)
    assert watch(observer, [(0, silent), (3600, silent)]) == []


def test_reset_forgets(observer: Observer) -> None:
    watch(observer, [(0, NODE), (1, free())])
    observer.reset()
    assert watch(observer, [(2, free()), (5, free())]) == []


def test_new_life_of_the_name_starts_clean(observer: Observer) -> None:
    newborn = replace(free(), incarnation="life-2")
    assert watch(observer, [(0, NODE), (1, free()), (2, newborn), (5, newborn)]) == []


def test_resting_node_is_over_when_its_grace_has_passed(observer: Observer) -> None:
    resting = replace(NODE, state="away", rejoin_grace_sec=30.0, backend_pid=None, locked=False)
    assert watch(observer, [(0, replace(resting, age_sec=29.0))]) == []
    assert watch(observer, [(2, replace(resting, age_sec=31.0))]) == [Evidence("w2", "life-1", "beat-1", False)]


def test_only_those_asked_about_are_convicted(observer: Observer) -> None:
    watch(observer, [(0, NODE), (1, free()), (3, free())])
    assert observer.dead(3, ["w3"]) == []


def test_freed_locks_convict_nobody_where_they_are_not_trusted() -> None:
    distrustful = Observer(patience_sec=11, trust_freed_locks=False)
    assert watch(distrustful, [(0, NODE), (1, free()), (5, free())]) == []
    assert not distrustful.suspects
    looks = [(at, replace(free(), age_sec=at)) for at in (10.0, 15.5)]
    assert watch(distrustful, looks) == [Evidence("w2", "life-1", "beat-1", freed=False)], "silence does"
