"""What is seen by who looks again and again, and what is read anew each time."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from sqlalchemy import Engine, create_engine, event, text

from jobsync_orm.exceptions import SchemaNotReady
from jobsync_orm.naming import Names
from jobsync_orm.operate import watching
from jobsync_orm.operate.watching import Look, Watch
from jobsync_orm.queue import JobQueue
from tests.integration.cluster import wait_for
from tests.integration.queue.rows import put, tried

REBALANCE = """
    INSERT INTO sync_rebalance (triggered_at, trigger_reason, leader_node, nodes_before, nodes_after, tokens_moved,
        duration_ms, epoch) SELECT now(), 'join', 'w1', 1, 2, n, 1, n FROM generate_series({}, {}) n"""


@pytest.fixture
def watch(engine: Engine) -> Iterator[Watch]:
    own = create_engine(engine.url, pool_size=1)
    yield Watch(own, Names())
    own.dispose()


def ended(look: Look) -> tuple[int, int]:
    return sum(one.completed for one in look.ended), sum(one.failed for one in look.ended)


def test_how_attempts_ended_that_count_as_failed(watch: Watch, engine: Engine) -> None:
    (job,) = put(engine, "failed")
    outcomes = ("completed", "failed", "timeout", "discarded", "died", "snoozed", "released", "cancelled")
    for number, outcome in enumerate(outcomes, 1):
        tried(engine, job, outcome, began=40, ended=30, attempt=number)
    assert ended(watch.look()) == (1, 4)


def test_the_first_look_goes_back_a_minute_and_others_two_seconds(watch: Watch, engine: Engine) -> None:
    (job,) = put(engine, "failed")
    for number, seconds in enumerate((75, 45, 10), 1):
        tried(engine, job, began=seconds, ended=seconds, attempt=number)
    assert ended(watch.look()) == (2, 0)
    # Written down late: attempts are committed in another order than they ended in.
    tried(engine, job, began=1, ended=1, attempt=4)
    tried(engine, job, began=30, ended=30, attempt=5)
    assert ended(watch.look()) == (1, 0)


def test_rebalances_are_read_when_the_cluster_is_another_one(watch: Watch, engine: Engine) -> None:
    def write(*statements: str) -> None:
        with engine.begin() as connection:
            for sql in statements:
                connection.execute(text(sql))

    write(REBALANCE.format(1, 12))
    first = watch.look().rebalances
    assert [one.tokens_moved for one in first] == list(range(12, 2, -1)), "the latest ten, newest first"
    write(REBALANCE.format(13, 13))
    assert watch.look().rebalances == first
    write("UPDATE sync_cluster SET epoch = epoch + 1")
    assert watch.look().rebalances[0].tokens_moved == 13


def test_what_takes_long_is_read_less_often(watch: Watch, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "DEPTH_SEC", 600.0)
    queue = JobQueue(engine=engine, wake=False)
    first = watch.look()
    assert (first.queue.counts["pending"], first.paused) == (0, ())
    put(engine, count=3)
    queue.pause("t")
    assert watch.look().queue is first.queue
    monkeypatch.setattr(watching, "DEPTH_SEC", 0.1)
    again = Watch(engine, Names())
    assert again.look().queue.counts["pending"] == 3
    assert [pause.type for pause in again.look().paused] == ["t"]
    put(engine)
    wait_for(lambda: again.look().queue.counts["pending"] == 4, "it is read again")


def test_reading_that_takes_long_takes_a_tenth_of_the_time_at_most(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watching, "DEPTH_SEC", 0.0)
    slow = create_engine(engine.url, pool_size=1)

    @event.listens_for(slow, "before_cursor_execute")
    def slowly(connection: object, cursor: object, statement: str, *more: object) -> None:
        if "sync_job_pause" in statement:
            with engine.connect() as other:
                other.execute(text("SELECT pg_sleep(0.2)"))

    watch = Watch(slow, Names())
    first = watch.look().queue
    for _ in range(3):
        assert watch.look().queue is first
    slow.dispose()


def test_tables_that_are_missing(engine: Engine) -> None:
    with pytest.raises(SchemaNotReady, match="jobsync-orm db upgrade"):
        Watch(engine, Names("other_")).look()
