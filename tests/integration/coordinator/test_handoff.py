"""The owner lets go in its own time, and nobody waits for an application's locks."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from sqlalchemy import URL, Engine, text

from jobsync_orm import CoordinationConfig, Job, RebalanceEvent, RevokeEvent
from tests.integration.cluster import QUICK, wait_for


@pytest.fixture
def config(database: URL) -> CoordinationConfig:
    return CoordinationConfig(url=database, **QUICK)


@contextmanager
def joining(job: Job) -> Iterator[threading.Thread]:
    """``job`` starts in a thread."""
    thread = threading.Thread(target=job.start)
    thread.start()
    try:
        yield thread
    finally:
        thread.join()
        job.stop()


def marked(engine: Engine) -> int:
    with engine.connect() as connection:
        return connection.execute(text("SELECT count(*) FROM sync_token WHERE next_node IS NOT NULL")).scalar_one()


def test_revoke_comes_after_the_no_and_before_the_hand_over(config: CoordinationConfig, engine: Engine) -> None:
    entered, let_go = threading.Event(), threading.Event()
    events: list[RevokeEvent] = []

    def on_revoke(event: RevokeEvent) -> None:
        events.append(event)
        entered.set()
        let_go.wait(60)

    slow = CoordinationConfig(url=config.url, **{**QUICK, "drain_timeout_sec": 60})
    with Job("w1", slow, on_revoke=on_revoke) as one:
        two = Job("w2", slow, wait_on_enter=60)
        with joining(two):
            assert entered.wait(60)
            (event,) = events
            assert len(event.tokens) == 5000
            assert not event.lost
            assert event.deadline_sec == 60
            assert not event.tokens & one.my_tokens, "it has stopped saying yes"
            assert not two.my_tokens, "nobody else says yes yet"
            assert marked(engine) == 5000
            let_go.set()
            wait_for(lambda: two.my_tokens == event.tokens, "the tokens have been handed over")
        let_go.set()


def test_revoke_that_does_not_return_is_overruled_at_the_deadline(config: CoordinationConfig) -> None:
    forever = threading.Event()
    with Job("w1", config, on_revoke=lambda: forever.wait(60)), Job("w2", config) as two:
        wait_for(lambda: len(two.my_tokens) == 5000, "the leader has forced the move")
        forever.set()


def test_tokens_with_open_claims_wait_for_their_end(config: CoordinationConfig) -> None:
    patient = CoordinationConfig(url=config.url, **{**QUICK, "drain_timeout_sec": 60})
    with Job("w1", patient) as one:
        tasks = list(range(300))
        assert sorted(map(int, one.set_claim(tasks))) == tasks
        with Job("w2", patient, wait_on_enter=30) as two:
            claimed = {one.task_to_token(task) for task in tasks}
            wait_for(lambda: len(two.my_tokens) > 4000, "tokens without claims have moved")
            assert not two.my_tokens & claimed
            assert not any(one.can_claim_task(task) and two.can_claim_task(task) for task in tasks)
            one.release_claim(tasks)
            wait_for(lambda: len(two.my_tokens) == 5000, "the rest follows")


def test_claims_that_do_not_end_are_overruled_at_the_deadline(config: CoordinationConfig) -> None:
    with Job("w1", config) as one:
        one.set_claim(range(300))
        with Job("w2", config) as two:
            wait_for(lambda: len(two.my_tokens) == 5000, "the leader has forced the move")


def test_token_rows_locked_by_an_application_hold_up_nobody_else(config: CoordinationConfig, engine: Engine) -> None:
    with Job("w1", config) as one, engine.connect() as application:
        application.execute(text("SELECT 1 FROM sync_token WHERE token_id % 100 = 0 FOR SHARE"))
        with Job("w2", config) as two:
            wait_for(lambda: len(two.my_tokens) >= 4900, "what is not locked has moved")
            assert len(one.my_tokens) + len(two.my_tokens) == 10_000 or marked(engine) > 0
            assert one.am_i_healthy()
            application.rollback()
            wait_for(lambda: len(two.my_tokens) == 5000, "the rest follows")
            wait_for(lambda: len(one.my_tokens) == 5000, "in balance")


def test_rebalance_events_add_up(config: CoordinationConfig) -> None:
    events: list[RebalanceEvent] = []
    with Job("w1", config, on_rebalance=events.append) as one:
        assert events == [RebalanceEvent(True, one.token_version, 10_000, 0)], "before entering returns"
        with Job("w2", config):
            wait_for(lambda: len(one.my_tokens) == 5000, "w2 has its half")
        wait_for(lambda: sum(e.tokens_added - e.tokens_removed for e in events) == 10_000, "w1 has all again")
        versions = [event.token_version for event in events]
        assert versions == sorted(versions)
        assert not any(event.is_initial for event in events[1:])


def test_weights(config: CoordinationConfig) -> None:
    heavy = CoordinationConfig(url=config.url, weight=3, **QUICK)
    with Job("w1", config) as one, Job("w2", heavy) as two:
        wait_for(lambda: (len(one.my_tokens), len(two.my_tokens)) == (2500, 7500), "shares by weight")


def test_moves_are_recorded(config: CoordinationConfig, engine: Engine) -> None:
    with Job("w1", config), Job("w2", config), engine.connect() as connection:
        rows = connection.execute(
            text(
                "SELECT trigger_reason, leader_node, nodes_before, nodes_after, tokens_moved FROM sync_rebalance"
                " ORDER BY id"
            )
        ).all()
    assert [tuple(row) for row in rows] == [("initial", "w1", 0, 1, 10_000), ("join", "w1", 1, 2, 5_000)]
