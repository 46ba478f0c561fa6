"""An overdue mark is forced in the statement that publishes, and only if it is still the mark that is overdue."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest
from sqlalchemy import URL, Engine, text

from jobsync_orm.coordinator.session import array
from jobsync_orm.coordinator.statements import PARK, Statements
from jobsync_orm.coordinator.steps import FORCE
from jobsync_orm.naming import Names
from tests.integration.coordinator.backstage import add_node, open_session

TOKEN = 7


def mark(engine: Engine, epoch: int, *, overdue: bool = True, target: str = "b") -> None:
    """The token is to go from ``a`` to ``target``, asked for at this epoch."""
    with engine.begin() as connection:
        connection.execute(
            text(
                "UPDATE sync_token SET node = 'a', epoch = 3, next_node = :target, next_epoch = :epoch,"
                " drain_deadline = clock_timestamp() + :late * interval '1 hour' WHERE token_id = :token"
            ),
            {"target": target, "epoch": epoch, "late": -1 if overdue else 1, "token": TOKEN},
        )


def stored(engine: Engine) -> tuple[Any, ...]:
    with engine.connect() as connection:
        row = connection.execute(
            text("SELECT node, epoch, next_node, next_epoch FROM sync_token WHERE token_id = :token"), {"token": TOKEN}
        ).one()
        return tuple(row)


@pytest.fixture
def force(engine: Engine, database: URL) -> Any:
    """Executes the leader's forced move of the token from ``a`` to ``b``, or to nobody."""
    with engine.begin() as connection:
        life = add_node(connection, "a", ordinal=1, applied_epoch=5)
        add_node(connection, "b", ordinal=2)
        connection.execute(text("UPDATE sync_cluster SET epoch = 20"))
        revision = connection.execute(text("SELECT revision FROM sync_cluster")).scalar_one()

    def execute(target: str | None = "b") -> list[Any]:
        table = ["a", target or PARK]
        steps = [array([TOKEN]), array([TOKEN]), "{1}", "{2}", array(table), array([FORCE])]
        with open_session(database) as session:
            return session.execute(
                Statements(Names()).publish,
                *("a", life, revision, "{}", *steps, "{2}" if target else "{NULL}", 3),
                *(datetime.now(UTC).isoformat(), "pins or repair", 2, 2, "{}", 0),
                timeout=10,
            )

    return execute


def test_in_time_it_moves(engine: Engine, force: Any) -> None:
    mark(engine, 5)
    ((epoch, steps, _, _),) = force()
    assert (epoch, steps) == ("21", "1")
    assert stored(engine) == ("b", 21, None, None)


def test_in_time_it_is_parked(engine: Engine, force: Any) -> None:
    mark(engine, 5, target=PARK)
    assert len(force(None)) == 1
    assert stored(engine) == (None, 21, None, None)


def test_late_after_the_mark_was_withdrawn_and_made_anew_it_changes_nothing(engine: Engine, force: Any) -> None:
    """The owner has applied the first mark and not yet heard of the second: it says yes."""
    mark(engine, 9)
    assert force() == []
    assert stored(engine) == ("a", 3, "b", 9)


def test_before_the_deadline_it_changes_nothing(engine: Engine, force: Any) -> None:
    mark(engine, 5, overdue=False)
    assert force() == []
    assert stored(engine) == ("a", 3, "b", 5)
