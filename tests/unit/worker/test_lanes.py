"""Which lanes are walked, from where, and in which order."""

from __future__ import annotations

from jobsync_orm.queue.jobs import ClaimedJob
from jobsync_orm.worker.lanes import MOST_LANES, WALK_SHARE, Lanes

SEC = 1_000_000


def job(id: int, ready_at: int, type: str = "a", priority: int = 0) -> ClaimedJob:
    return ClaimedJob(id, type, priority, 1, 0, 3, 60.0, None, {}, ready_at, ready_at)


def lanes(*found: tuple[str, int, int]) -> Lanes:
    lanes = Lanes(ageing_sec=60)
    lanes.surveyed(found)
    return lanes


def order(lanes: Lanes, now: float = 0.0) -> list[tuple[str, int]]:
    return [(walk.lane.type, walk.lane.priority) for walk in lanes.plan({"a": 10, "b": 10}, now)]


def test_larger_priorities_go_first_unless_the_others_have_waited_a_minute_per_point_longer() -> None:
    assert order(lanes(("a", 0, 0), ("a", 1, 59 * SEC))) == [("a", 1), ("a", 0)]
    assert order(lanes(("a", 0, 0), ("a", 1, 61 * SEC))) == [("a", 0), ("a", 1)]
    assert order(lanes(("a", 0, 5), ("b", 0, 4))) == [("b", 0), ("a", 0)]


def test_types_without_room_are_left_out() -> None:
    known = lanes(("a", 0, 0), ("b", 0, 0))
    assert [walk.lane.type for walk in known.plan({"b": 3}, 0.0)] == ["b"]
    assert known.due_at({"c": 1}) == float("inf")


def test_a_lane_goes_on_at_its_mark_and_begins_again_after_ten_times_as_long_as_a_walk_took() -> None:
    known = lanes(("a", 0, 5))
    walks = known.plan({"a": 2}, 100.0)
    assert walks[0].mark == (0, 0)
    known.claimed(walks, [job(1, 5), job(2, 6)], 2, 100.0, 101.0)
    walks = known.plan({"a": 2}, 101.0)
    assert walks[0].mark == (6, 2)
    known.claimed(walks, [job(3, 7), job(4, 8)], 2, 101.0, 102.0)
    assert known.plan({"a": 2}, 102.0)[0].mark == (8, 4)
    assert known.plan({"a": 2}, 101.0 + WALK_SHARE)[0].mark == (0, 0)


def test_a_lane_is_empty_when_a_walk_from_its_beginning_has_come_to_its_end() -> None:
    known = lanes(("a", 0, 5))
    walks = known.plan({"a": 2}, 100.0)
    known.claimed(walks, [job(1, 5)], 2, 100.0, 100.0)
    assert known.plan({"a": 2}, 200.0) == []
    assert known.due_at({"a": 2}) == float("inf")


def test_what_lies_before_the_mark_is_looked_for_once_its_end_has_been_reached() -> None:
    known = lanes(("a", 0, 5))
    walks = known.plan({"a": 1}, 100.0)
    known.claimed(walks, [job(1, 5)], 1, 100.0, 101.0)
    walks = known.plan({"a": 1}, 101.0)
    assert walks[0].mark == (5, 1)
    known.claimed(walks, [], 1, 101.0, 101.5)
    assert known.plan({"a": 1}, 102.0) == []
    assert known.due_at({"a": 1}) == 101.0 + WALK_SHARE
    assert known.plan({"a": 1}, 101.0 + WALK_SHARE)[0].mark == (0, 0)


def test_news_of_a_lane_make_it_worth_a_walk() -> None:
    known = lanes(("a", 0, 5))
    known.claimed(known.plan({"a": 2}, 100.0), [job(1, 5)], 2, 100.0, 100.0)
    known.look_again("a", 0, 77)
    (walk,) = known.plan({"a": 2}, 100.01)
    assert (walk.mark, walk.lane.head_at) == ((5, 1), 77)
    known.claimed([walk], [], 2, 100.01, 100.02)
    assert known.plan({"a": 2}, 100.02) == [], "it has been walked from the beginning a moment ago"
    assert len(known.plan({"a": 2}, 101.0)) == 1, "a straggler may be before the mark"


def test_a_survey_that_finds_one_before_the_mark() -> None:
    known = lanes(("a", 0, 5))
    known.claimed(known.plan({"a": 2}, 100.0), [job(1, 50)], 2, 100.0, 100.0)
    known.surveyed([("a", 0, 40)])
    assert known.due_at({"a": 1}) > 100.0
    assert [walk.mark for walk in known.plan({"a": 2}, 101.0)] == [(0, 0)]


def test_lanes_behind_the_one_that_filled_a_claim_have_not_been_looked_at() -> None:
    known = lanes(("a", 1, 0), ("a", 0, 0), ("b", 0, 1))
    walks = known.plan({"a": 2, "b": 2}, 100.0)
    assert [walk.lane.type for walk in walks] == ["a", "a", "b"]
    known.claimed(walks, [job(1, 5, "a", 1), job(2, 5), job(3, 6)], 3, 100.0, 100.0)
    assert order(known, 100.0) == [("b", 0), ("a", 0)], "the first one was walked to its end"


def test_very_many_priorities_are_served_a_part_at_a_time() -> None:
    known = lanes(*(("a", priority, 0) for priority in range(3 * MOST_LANES)))
    walks = known.plan({"a": 5}, 100.0)
    assert [walk.lane.priority for walk in walks] == list(range(3 * MOST_LANES - 1, 2 * MOST_LANES - 1, -1))
