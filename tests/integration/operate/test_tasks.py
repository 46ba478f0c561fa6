"""Where a task is, and why."""

from __future__ import annotations

import pytest
from sqlalchemy import Engine, text

from jobsync_orm import Job
from jobsync_orm.exceptions import InvalidTaskId, LockConflict
from jobsync_orm.hashing import task_to_token
from jobsync_orm.naming import Names
from jobsync_orm.operate import add_pin, explain, list_pins, where
from tests.integration.cluster import wait_for

NAMES = Names()
TOKEN = task_to_token("7", 10_000)
# Another task of the same token.
TWIN = next(n for n in range(8, 1_000_000) if task_to_token(n, 10_000) == TOKEN)


def test_a_task_nobody_has(engine: Engine) -> None:
    found = where(engine, NAMES, 7)
    assert (found.task_id, found.token_id, found.node, found.live, found.pinned) == ("7", TOKEN, None, False, False)
    assert where(engine, NAMES, "7") == found
    with pytest.raises(InvalidTaskId):
        where(engine, NAMES, "a\0b")


def test_a_task_a_worker_has_and_has_claimed(engine: Engine, job: Job) -> None:
    claim = job.claim_task(7)
    found = where(engine, NAMES, 7)
    assert (found.node, found.live, found.draining_to, found.parking) == ("w1", True, None, False)
    assert found.claim is not None
    assert (found.claim.node, found.claim.fence) == ("w1", claim.fence)
    claim.release()
    assert where(engine, NAMES, 7).claim is None
    assert explain(engine, NAMES, 7).why == (
        f"task '7' hashes to token {TOKEN}",
        "no pin is on the token: balance alone decides",
        f"w1 has the token since epoch {found.epoch}",
    )


def test_which_pattern_of_a_pin_counts(engine: Engine, job: Job) -> None:
    job.register_lock(7, ["gpu-%", "w_", "%"], reason="big")
    found = explain(engine, NAMES, 7)
    (pin,) = found.pins
    assert [(one.pattern, one.nodes, one.chosen) for one in pin.patterns] == [
        ("gpu-%", (), False),
        ("w_", ("w1",), True),
        ("%", ("w1",), False),
    ]
    assert (pin.own, pin.reason, pin.created_by, pin.expired) == (True, "big", "w1", False)
    assert found.allowed == ("w1",)
    assert found.why[1] == "its pin allows w1, by pattern 'w_', since no live node matches 'gpu-%'"


def test_a_pin_of_another_task_of_the_token_parks_it(engine: Engine, job: Job) -> None:
    add_pin(engine, NAMES, TWIN, "gpu-%", created_by="me")
    found = wait_for(lambda: (e := explain(engine, NAMES, 7)).place.node is None and e, "the token is parked")
    assert (found.place.pinned, found.allowed) == (True, ())
    assert found.pins[0].own is False
    assert found.why[1:] == (
        f"the pin of task '{TWIN}', which shares the token, matches no live node: 'gpu-%'",
        "no live node is allowed: the token is parked, and nobody works on the task",
        "nobody has the token now",
    )


def test_several_pins_and_an_expired_one(engine: Engine, job: Job) -> None:
    add_pin(engine, NAMES, 7, ["gpu-%", "w%"], created_by="me")
    add_pin(engine, NAMES, TWIN, "%1", created_by="me", expires_in_days=1)
    found = explain(engine, NAMES, TWIN)
    assert [pin.own for pin in found.pins] == [True, False]
    assert found.allowed == ("w1",)
    assert "together the pins allow w1" in found.why
    with engine.begin() as connection:
        connection.execute(text("UPDATE sync_lock SET expires_at = now() WHERE task_id = :t"), {"t": str(TWIN)})
    found = explain(engine, NAMES, TWIN)
    assert [pin.expired for pin in found.pins] == [True, False]
    assert found.why[1] == "its pin has expired and does not count"
    assert [pin.task_id for pin in list_pins(engine, NAMES)] == ["7"]
    assert [pin.task_id for pin in list_pins(engine, NAMES, expired=True, created_by="me")] == [str(TWIN), "7"]
    assert len(list_pins(engine, NAMES, expired=True, limit=1)) == 1
    assert list_pins(engine, NAMES, created_by="somebody") == []


def test_pins_that_cannot_meet_are_refused(engine: Engine) -> None:
    add_pin(engine, NAMES, 7, "gpu-%", created_by="me")
    with pytest.raises(LockConflict):
        add_pin(engine, NAMES, TWIN, "cpu-%", created_by="me")
    assert [pin.task_id for pin in list_pins(engine, NAMES)] == ["7"]


def test_a_token_under_a_dead_name_and_on_its_way(engine: Engine) -> None:
    with engine.begin() as connection:
        connection.execute(
            text("UPDATE sync_token SET node = 'gone', next_node = 'w9', drain_deadline = now() WHERE token_id = :t"),
            {"t": TOKEN},
        )
    found = explain(engine, NAMES, 7)
    assert (found.place.node, found.place.live, found.place.draining_to) == ("gone", False, "w9")
    assert found.why[-2:] == (
        "the token is under the name of gone, which is not live: nobody works on the task",
        "it is on its way to w9",
    )
    with engine.begin() as connection:
        connection.execute(text("UPDATE sync_token SET next_node = '' WHERE token_id = :t"), {"t": TOKEN})
    place = where(engine, NAMES, 7)
    assert (place.draining_to, place.parking) == (None, True)


def test_a_pattern_nobody_could_have_registered(engine: Engine, job: Job) -> None:
    with engine.begin() as connection:
        connection.execute(
            text(
                "INSERT INTO sync_lock (task_id, token_id, node_patterns, created_by) VALUES"
                " ('7', :t, '[\"w\\\\\"]', 'sql'), ('x', :t, '5', 'sql')"
            ),
            {"t": TOKEN},
        )
    found = explain(engine, NAMES, 7)
    assert found.allowed == ()
    assert [len(pin.patterns) for pin in found.pins] == [1, 0]
