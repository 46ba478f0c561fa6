"""How a worker looks for keys: along the index as far as it needs, and from key to key now and then."""

from __future__ import annotations

import json
import math
import time
from operator import itemgetter
from typing import Any, cast

import pytest

from jobsync_orm.coordinator.session import Session, parse_array
from jobsync_orm.naming import Names
from jobsync_orm.queue.statements import QueueStatements
from jobsync_orm.worker import key_search
from jobsync_orm.worker.key_search import KeySearch
from jobsync_orm.worker.keys import Keys

SQL = QueueStatements(Names())


class Server:
    """Answers from a list of (key, priority, ready_at), each ready and this worker's."""

    def __init__(self) -> None:
        self.jobs: list[tuple[str, int, int]] = []
        self.asked: list[str] = []
        self.walked: list[dict[int, int]] = []

    def prepared(self, sql: str, *parameters: Any, timeout: float) -> list[tuple[str | None, ...]]:
        if sql == SQL.discover:
            self.asked.append("discover")
            priorities, marks, _, most = (parse_array(text) for text in parameters[4:])
            self.walked.append(dict(zip(priorities, marks, strict=True)))
            ends, found = [], []
            for priority, mark, rows in zip(priorities, marks, most, strict=True):
                here = [job for job in self.jobs if job[1] == priority and job[2] > mark][:rows]
                found += [[key, "t", priority, at] for key, _, at in here]
                if here:
                    ends.append([priority, here[-1][2], 1, len(here)])
            return [(json.dumps(ends), json.dumps(found))]
        assert sql == SQL.lines
        self.asked.append("lines")
        after, most = parameters[4:]
        first: dict[str, list[Any]] = {}
        for key, priority, at in self.jobs:
            first.setdefault(key, [key, "t", priority, at])
        keys = sorted(key for key in first if key > after)[:most]
        return [
            (
                json.dumps(sorted((first[key] for key in keys), key=itemgetter(3))),
                keys[-1] if len(keys) == most else None,
            )
        ]


class World:
    """A search, and what it depends on."""

    def __init__(self) -> None:
        self.server = Server()
        self.keys = Keys(60)
        self.incarnation = "life"
        self.types = {"t"}
        self.tokens = b"\1"
        self.search = KeySearch(
            SQL, self.keys, "w1", lambda: self.incarnation, lambda: self.types, lambda: self.tokens, poll_sec=60
        )

    def run(self, most: int = 50) -> None:
        """As long as something is due."""
        for _ in range(most):
            if self.search.due_at() > time.monotonic():
                return
            self.search.run(cast("Session", self.server))

    def heard(self, *places: list[Any]) -> None:
        self.search.woken({json.dumps(list(places))})


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setattr(key_search, "LEAST_SEC", 0.0)
    monkeypatch.setattr(key_search, "REST", 0.0)
    return World()


def test_what_is_there_is_found(world: World) -> None:
    world.server.jobs = [("a", 0, 1), ("b", 5, 2), ("a", 0, 3)]
    world.run()
    assert (world.keys.waiting(0), world.keys.waiting(5)) == (1, 1)
    assert time.monotonic() + 50 < world.search.due_at() < time.monotonic() + 61


def test_it_goes_on_from_where_it_has_come(world: World) -> None:
    world.server.jobs = [("a", 0, 10)]
    world.run()
    world.server.jobs.append(("b", 0, 20))
    world.heard(["t", 0, True])
    world.run()
    assert world.server.walked[-1] == {0: 10}
    assert len(world.keys) == 2


def test_what_became_ready_behind_it_is_found_when_somebody_tells(world: World) -> None:
    world.server.jobs = [("a", 0, 10)]
    world.run()
    world.server.jobs.insert(0, ("late", 0, 5))
    world.heard(["t", 0, True])
    world.run()
    assert len(world.keys) == 2


@pytest.mark.parametrize("place", [["t", 0, False], ["other", 0, True]])
def test_what_is_none_of_its_business(world: World, place: list[Any]) -> None:
    world.server.jobs = [("a", 0, 10)]
    world.run()
    asked = len(world.server.asked)
    world.heard(place)
    world.search.woken({'{"control": true}'})
    world.run()
    assert len(world.server.asked) == asked


@pytest.mark.parametrize("payload", ["", "not JSON"])
def test_it_looks_everywhere_if_it_is_not_told_where(world: World, payload: str) -> None:
    world.run()
    world.server.jobs = [("a", 7, 10)]
    world.search.woken({payload})
    world.run()
    assert world.keys.waiting(7) == 1


def test_a_long_backlog_does_not_fill_the_memory(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_search, "STEP_ROWS", 10)
    monkeypatch.setattr(key_search, "STEP_KEYS", 7)
    monkeypatch.setattr(key_search, "ENOUGH", 20)
    monkeypatch.setattr(key_search, "TOO_MANY", 30)
    world.server.jobs = [(f"k{n:03}", 0, n + 1) for n in range(300)] + [("urgent", 9, 1)]
    world.run(200)
    assert 20 <= world.keys.waiting(0) <= 40
    assert world.keys.waiting(9) == 1
    seen: set[str] = set()
    while len(seen) < 301:
        asked = world.keys.plan({"t": 10}, 0.0)
        assert asked
        seen.update(asked)
        world.keys.claimed([], [[key, "empty", None, "t", 0, 0] for key in asked], [], {"t"}, 0.0)
        world.server.jobs = [job for job in world.server.jobs if job[0] not in seen]
        world.heard(["t", 0, True])
        world.run(200)
        assert world.keys.waiting(0) <= 40


def test_one_hot_key_does_not_hide_the_others(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_search, "STEP_ROWS", 10)
    world.server.jobs = [("hot", 0, n) for n in range(1, 200)] + [("cold", 0, 200)]
    world.run(1)
    assert world.keys.plan({"t": 9}, 0.0) == ["hot", "cold"]


@pytest.mark.parametrize("what", ["tokens", "types", "incarnation"])
def test_it_begins_anew_when_other_keys_are_its_own(world: World, what: str) -> None:
    world.server.jobs = [("a", 0, 10), ("b", 0, 20)]
    world.run()
    world.server.jobs = [("b", 0, 20), ("c", 0, 30)]
    setattr(world, what, {"tokens": b"\0", "types": {"t", "u"}, "incarnation": "next life"}[what])
    world.run()
    assert {0: 0} in world.server.walked[1:]
    assert set(world.keys.plan({"t": 9}, 0.0)) == {"b", "c"}


def test_who_may_take_nothing_does_not_look(world: World) -> None:
    world.types = set()
    assert world.search.due_at() == math.inf
    world.types, world.incarnation = {"t"}, ""
    assert world.search.due_at() == math.inf


def test_priorities_where_nothing_is_are_forgotten(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_search, "MOST_KNOWN", 5)
    world.run()
    world.heard(*(["t", priority, True] for priority in range(20)))
    world.run()
    assert len(world.search._walks) <= 5
    world.server.jobs = [("a", 13, 1)]
    world.heard(["t", 13, True])
    world.run()
    assert world.keys.waiting(13) == 1
