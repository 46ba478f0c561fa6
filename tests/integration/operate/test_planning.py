"""What a plan made now would do."""

from __future__ import annotations

from sqlalchemy import Engine, text

from jobsync_orm import Job
from jobsync_orm.naming import Names
from jobsync_orm.operate import Operations, PlannedLoad, PlannedMove, plan_soon, preview
from tests.integration.cluster import wait_for

NAMES = Names()


def add_node(engine: Engine, name: str, **columns: object) -> None:
    columns = {"name": name, "state": "active", **columns}
    listed, values = ", ".join(columns), ", ".join(f":{column}" for column in columns)
    with engine.begin() as connection:
        connection.execute(
            text(f"INSERT INTO sync_node (incarnation, {listed}) VALUES (gen_random_uuid(), {values})"), columns
        )


def give(engine: Engine, where: str, node: str | None, aim: str | None = None) -> None:
    with engine.begin() as connection:
        connection.execute(
            text(f"UPDATE sync_token SET node = :node, next_node = :aim, next_epoch = 1 WHERE {where}"),
            {"node": node, "aim": aim},
        )


def test_nobody_there(engine: Engine) -> None:
    found = preview(engine, NAMES)
    assert (found.moves, found.moved, found.loads, found.resting) == ((), 0, (), False)


def test_first_tokens_are_assigned_at_once(engine: Engine) -> None:
    add_node(engine, "a")
    add_node(engine, "b", weight=3)
    found = preview(engine, NAMES)
    assert found.moves == (PlannedMove(None, "a", 2500, "assign"), PlannedMove(None, "b", 7500, "assign"))
    assert found.loads == (PlannedLoad("a", 0, 2500), PlannedLoad("b", 0, 7500))
    assert found.moved == 10_000


def test_owners_are_asked_and_marks_count(engine: Engine) -> None:
    add_node(engine, "a")
    add_node(engine, "b")
    give(engine, "token_id < 4000", "a", "b")
    give(engine, "token_id >= 4000", "a")
    found = preview(engine, NAMES)
    assert found.moves == (PlannedMove("a", "b", 1000, "hand over"),)
    assert found.loads == (PlannedLoad("a", 6000, 5000), PlannedLoad("b", 4000, 5000))


def test_a_pin_takes_a_mark_back_and_another_parks(engine: Engine) -> None:
    add_node(engine, "a")
    add_node(engine, "b")
    give(engine, "token_id < 5000", "a")
    give(engine, "token_id >= 5000", "b")
    give(engine, "token_id = 1", "a", "b")
    with engine.begin() as connection:
        connection.execute(
            text(
                "INSERT INTO sync_lock (task_id, token_id, node_patterns, created_by) VALUES"
                " ('x', 1, '[\"a\"]', 'me'), ('y', 2, '[\"nobody\"]', 'me')"
            )
        )
    found = preview(engine, NAMES)
    assert PlannedMove("a", "a", 1, "take back") in found.moves
    assert PlannedMove("a", None, 1, "hand over") in found.moves
    assert sum(load.then for load in found.loads) == 9999


def test_the_leader_can_be_told_to_plan(engine: Engine, job: Job) -> None:
    before = preview(engine, NAMES)
    assert (before.moves, before.loads) == ((), (PlannedLoad("w1", 10_000, 10_000),))
    with engine.begin() as connection:  # what no change of a revision has announced
        connection.execute(text("UPDATE sync_token SET node = NULL WHERE token_id < 10"))
    assert preview(engine, NAMES).moves == (PlannedMove(None, "w1", 10, "assign"),)
    plan_soon(engine, NAMES)
    wait_for(lambda: Operations(engine, NAMES).tokens().unowned == 0, "the leader has planned", 10)
