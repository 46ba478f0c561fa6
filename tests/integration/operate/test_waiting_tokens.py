"""Tokens that should go to a node, and that transactions of applications keep where they are."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from sqlalchemy import URL, Connection, Engine, create_engine, text

from jobsync_orm import CoordinationConfig, Job
from jobsync_orm.naming import Names
from jobsync_orm.operate import NodeTokens, Operations, TokenHolder, waiting_tokens
from jobsync_orm.operate.doctor.findings import Subject
from jobsync_orm.operate.doctor.tokens import check
from tests.integration.cluster import QUICK, wait_for

NAMES = Names()


@pytest.fixture
def operations(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Operations:
    monkeypatch.setattr(waiting_tokens, "HELD_SEC", 0.2)
    return Operations(engine, NAMES)


@contextmanager
def in_use(database: URL, how: str = "FOR SHARE") -> Iterator[Connection]:
    """A transaction of an application that uses all tokens, as ``job.claim`` does."""
    engine = create_engine(database, connect_args={"application_name": "shop"})
    try:
        with engine.connect() as connection:
            connection.execute(text(f"SELECT count(*) FROM (SELECT 1 FROM sync_token {how}) AS used"))
            yield connection
    finally:
        engine.dispose()


@contextmanager
def second(database: URL) -> Iterator[Job]:
    engine = create_engine(database)
    with Job("w2", CoordinationConfig(engine=engine, **QUICK)) as job:
        yield job
    engine.dispose()


def test_a_node_that_gets_no_tokens_because_a_transaction_uses_them(
    database: URL, engine: Engine, operations: Operations, job: Job
) -> None:
    wait_for(lambda: operations.status().healthy, "w1 has all")
    with in_use(database) as connection:
        pid = connection.scalar(text("SELECT pg_backend_pid()"))
        assert operations.status().healthy  # nobody waits for it
        with second(database):
            found = wait_for(lambda: (s := operations.status()).tokens.holders and s, "w2 waits")
            assert found.tokens.nodes == (NodeTokens("w1", 10_000, 0, 0), NodeTokens("w2", 0, 0, 0, 5000))
            (holder,) = found.tokens.holders
            assert (holder.pid, holder.application) == (pid, "shop")
            assert holder.open_sec is not None
            assert not found.healthy
            assert found.problems == (
                "5000 tokens wait to go to w2 until the end of a transaction that uses tokens: process "
                f"{pid} (shop), open for {holder.open_sec:.0f} s",
            )
            (finding,) = check(Subject(engine, NAMES))
            assert finding.what.startswith("5000 tokens wait to go to w2")
            assert f"SELECT pg_terminate_backend({pid})" in finding.remedy
            connection.rollback()
            wait_for(lambda: operations.tokens().nodes[1] == NodeTokens("w2", 5000, 0, 0), "w2 has its half")
            assert wait_for(lambda: (s := operations.status()).healthy and s, "nothing waits").tokens.holders == ()


def test_a_role_that_may_not_see_since_when_hears_of_it_still(
    database: URL, engine: Engine, operations: Operations, job: Job
) -> None:
    role = f"monitor_{database.database}"
    with engine.begin() as connection:
        connection.execute(text(f"CREATE ROLE {role}"))
        connection.execute(text(f"GRANT SELECT ON ALL TABLES IN SCHEMA public TO {role}"))
    other = create_engine(database, connect_args={"options": f"-c role={role}"})
    with in_use(database), second(database):
        looking = Operations(other, NAMES)
        found = wait_for(lambda: (s := looking.status()).tokens.holders and s, "w2 waits")
        (holder,) = found.tokens.holders
        assert holder == TokenHolder(holder.pid, "shop", None)
        assert found.problems[0].endswith(f"a transaction that uses tokens: process {holder.pid} (shop)")
    other.dispose()
    with engine.begin() as connection:
        connection.execute(text(f"DROP OWNED BY {role}"))
        connection.execute(text(f"DROP ROLE {role}"))


class TestHowManyTokensAreDue:
    def test_the_share_by_weight_of_what_is_there(self) -> None:
        assert waiting_tokens.due([("a", 1, 10), ("b", 1, 0)], 0, 0) == {"b": 5}
        assert waiting_tokens.due([("a", 1, 10), ("b", 4, 0)], 0, 0) == {"b": 8}
        assert waiting_tokens.due([("a", 1, 5), ("b", 1, 5)], 0, 0) == {}
        assert waiting_tokens.due([("a", 1, 6), ("b", 1, 5)], 0, 0) == {}

    def test_what_drained_nodes_have_is_shared_out_too(self) -> None:
        assert waiting_tokens.due([("a", 1, 5), ("b", 1, 5)], 10, 0) == {"a": 5, "b": 5}
        assert waiting_tokens.due([], 10, 0) == {}

    def test_pins_may_be_why_a_node_has_more(self) -> None:
        assert waiting_tokens.due([("a", 1, 8), ("b", 1, 2)], 0, 3) == {}
        assert waiting_tokens.due([("a", 1, 8), ("b", 1, 2)], 0, 2) == {"b": 3}
