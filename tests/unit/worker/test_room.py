"""How many jobs are taken in advance."""

from __future__ import annotations

from jobsync_orm.worker.room import FIRST, GROWTH, Room


def learnt(room: Room, seconds: float, times: int = 20) -> Room:
    for _ in range(times):
        room.learn([("a", seconds)] * 5)
    return room


def test_nothing_is_taken_in_advance_of_what_nobody_knows_and_of_what_runs_long() -> None:
    assert Room(1000).ahead("a", 8) == 0
    assert learnt(Room(1000), 0.3).ahead("a", 8) == 0
    assert learnt(Room(1000), 2.0).ahead("a", 8) == 0


def test_what_the_slots_run_in_a_quarter_of_a_second_is() -> None:
    assert learnt(Room(1000), 0.125).ahead("a", 8) == 16
    assert learnt(Room(1000), 1e-6).ahead("a", 8) == 1000


def test_it_grows_step_by_step() -> None:
    room = learnt(Room(1000), 1e-6, 1)
    assert room.ahead("a", 8) == FIRST
    assert learnt(room, 1e-6, 1).ahead("a", 8) == FIRST * GROWTH
    assert learnt(room, 1e-6, 9).ahead("a", 8) == 1000


def test_jobs_that_waited_for_a_slot_show_that_the_mean_was_wrong() -> None:
    room = learnt(Room(1000), 1e-6)
    room.stalled("a", 1.0)
    assert room.ahead("a", 8) == 0
    assert 0 < learnt(room, 1e-6, 5).ahead("a", 8) <= FIRST * GROWTH**5
    assert room.ahead("b", 8) == 0
