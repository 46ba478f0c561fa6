"""Forming the cluster anew: what the statement does, to whom, and what it lets nobody do for a while."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any

import psycopg
import pytest
from sqlalchemy import URL, Engine, create_engine, select, text

from jobsync_orm import CoordinationConfig, Job, OwnedSession, OwnershipLost
from jobsync_orm.coordinator.clock import now
from jobsync_orm.coordinator.handoff import Handoff
from jobsync_orm.coordinator.history import History, Operator, Standing, reform, standing
from jobsync_orm.coordinator.leadership import Leadership
from jobsync_orm.coordinator.membership import Membership
from jobsync_orm.coordinator.session import Session, array
from jobsync_orm.coordinator.statements import LEAP, Statements
from jobsync_orm.coordinator.steps import GRANT
from jobsync_orm.coordinator.view import Ownership
from jobsync_orm.migrate.fence import create_ownership_fence
from jobsync_orm.naming import Names
from tests.conftest import dsn
from tests.integration.cluster import QUICK, Cluster, wait_for
from tests.integration.coordinator.backstage import add_node, open_session
from tests.integration.orm.models import Base, Item

SQL = Statements(Names())

# The rest lasts as long as this timeout.
SOON = {**QUICK, "heartbeat_interval_sec": 0.3, "heartbeat_timeout_sec": 1.5}


@pytest.fixture
def session(database: URL) -> Iterator[Session]:
    with open_session(database) as session:
        yield session


def run(engine: Engine, sql: str, **values: object) -> None:
    with engine.begin() as connection:
        connection.execute(text(sql), values)


def ask(engine: Engine, sql: str, **values: object) -> Any:
    with engine.connect() as connection:
        rows = connection.execute(text(sql), values).all()
    return [tuple(row) for row in rows]


def form_anew(session: Session, found: Standing | None = None, **given: Any) -> Any:
    values = {"known_epoch": 0, "rest_sec": 1, "forced": True, **given}
    found = found or standing(session, SQL, 5)
    return reform(session, SQL, found, values.pop("server", None), **values)


# -- what it does ----------------------------------------------------------------------------------------------


@pytest.fixture
def populated(engine: Engine) -> Engine:
    """``a``, ``b`` (which may rest) and ``c`` (which rests), tokens, a mark, a claim, a pin."""
    with engine.begin() as connection:
        life = add_node(connection, "a", ordinal=1, applied_epoch=40)
        add_node(connection, "b", ordinal=2, rejoin_grace_sec=60, heartbeat_timeout_sec=33)
        add_node(connection, "c", ordinal=3, rejoin_grace_sec=60, state="away", silent_sec=20)
        connection.execute(text("UPDATE sync_cluster SET epoch = 50, revision = 3, history = 'old'"))
        connection.execute(text("UPDATE sync_token SET node = 'a', epoch = 40"))
        connection.execute(text("UPDATE sync_token SET next_node = 'b', next_epoch = 50 WHERE token_id = 1"))
        connection.execute(
            text(
                "INSERT INTO sync_claim (task_id, token_id, node, incarnation, epoch) VALUES ('t', 1, 'a', :life, 40)"
            ),
            {"life": life},
        )
        connection.execute(
            text("INSERT INTO sync_lock (task_id, token_id, node_patterns, created_by) VALUES ('t', 1, '[\"a\"]', 'a')")
        )
    return engine


def test_all_that_was_given_out_is_left_behind(populated: Engine, session: Session) -> None:
    before = standing(session, SQL, 5)
    ((fence,),) = ask(populated, "SELECT nextval('sync_claim_fence_seq')")
    done = form_anew(session, server="new", known_epoch=60)
    assert done.epoch == 60 + LEAP
    assert done.fences_raised
    after = standing(session, SQL, 5)
    assert (after.epoch, after.history) == (60 + LEAP, "new")
    assert after.incarnation != before.incarnation
    rows = ask(populated, "SELECT DISTINCT epoch, node, next_node, next_epoch FROM sync_token")
    assert rows == [(60 + LEAP, "a", "a", 60 + LEAP)], "on its way to the owner it has"
    assert ask(populated, "SELECT count(*) FROM sync_claim") == [(0,)]
    assert ask(populated, "SELECT task_id FROM sync_lock") == [("t",)]
    assert ask(populated, "SELECT nextval('sync_claim_fence_seq') - :fence > 999999999", fence=fence) == [(True,)]


def test_nobody_is_a_member_any_more_and_those_that_may_rest_do(populated: Engine, session: Session) -> None:
    ((since,),) = ask(populated, "SELECT last_heartbeat FROM sync_node WHERE name = 'c'")
    form_anew(session)
    rows = ask(populated, "SELECT name, state, last_heartbeat > now() - interval '9 s' FROM sync_node ORDER BY name")
    assert rows == [("b", "away", True), ("c", "away", False)]
    assert ask(populated, "SELECT last_heartbeat FROM sync_node WHERE name = 'c'") == [(since,)]


@pytest.mark.parametrize(("own", "rest"), [(1, 33), (44, 44)])
def test_it_rests_for_the_longest_lease(populated: Engine, session: Session, own: float, rest: float) -> None:
    done = form_anew(session, rest_sec=own)
    assert rest - 5 < done.rest_sec <= rest


def test_a_token_in_use_is_not_waited_for(populated: Engine, session: Session) -> None:
    with populated.connect() as application:
        application.execute(text("SELECT 1 FROM sync_token WHERE token_id = 5 FOR SHARE"))
        assert form_anew(session) is not None
        rows = ask(populated, "SELECT token_id FROM sync_token WHERE epoch < :leap", leap=LEAP)
        assert rows == [(5,)]


# -- when it does nothing --------------------------------------------------------------------------------------


def test_of_many_that_notice_at_once_one_forms_it_anew(populated: Engine, database: URL) -> None:
    ready, done = threading.Barrier(4), []

    def notice() -> None:
        with open_session(database) as session:
            found = standing(session, SQL, 5)
            ready.wait(60)
            done.append(form_anew(session, found, server="new", forced=False))

    threads = [threading.Thread(target=notice) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len([one for one in done if one is not None]) == 1
    assert ask(populated, "SELECT epoch, revision FROM sync_cluster") == [(50 + LEAP, 4)]


def test_one_that_was_paused_after_it_noticed_changes_nothing(populated: Engine, session: Session) -> None:
    found = standing(session, SQL, 5)
    form_anew(session, server="new", forced=False)
    with populated.begin() as connection:
        add_node(connection, "a", ordinal=9)
    assert form_anew(session, found, server="other", known_epoch=10**12, forced=True) is None
    assert ask(populated, "SELECT epoch, history FROM sync_cluster") == [(50 + LEAP, "new")]
    assert ask(populated, "SELECT name FROM sync_node WHERE state = 'active'") == [("a",)]


@pytest.mark.parametrize("given", [{"server": "old"}, {"server": None}, {"server": "old", "known_epoch": 50}])
def test_without_a_reason_it_changes_nothing(populated: Engine, session: Session, given: dict[str, Any]) -> None:
    assert form_anew(session, **given, forced=False) is None
    assert ask(populated, "SELECT epoch, rest_until FROM sync_cluster") == [(50, None)]


def test_a_history_is_adopted_once(engine: Engine, session: Session) -> None:
    found = standing(session, SQL, 5)
    assert found.history is None
    session.execute(SQL.adopt_history, str(uuid.uuid4()), "another cluster's", timeout=60)
    session.execute(SQL.adopt_history, found.incarnation, "first", timeout=60)
    session.execute(SQL.adopt_history, found.incarnation, "second", timeout=60)
    assert standing(session, SQL, 5).history == "first"


def test_the_history_is_the_systems_and_its_timeline(engine: Engine, session: Session) -> None:
    ((system, timeline),) = ask(
        engine,
        "SELECT (pg_control_system()).system_identifier, (pg_control_checkpoint()).timeline_id",
    )
    assert History(SQL, "w1", 4, 5).identify(session) == f"{system}/{timeline:08X}"


# -- what cannot be done while it rests -------------------------------------------------------------------------


def rest(engine: Engine, seconds: float) -> None:
    run(engine, "UPDATE sync_cluster SET rest_until = clock_timestamp() + :s * interval '1 second'", s=seconds)


@pytest.fixture
def leader(engine: Engine) -> str:
    """The incarnation of ``a``, which leads; token 7 is nobody's."""
    with engine.begin() as connection:
        life = add_node(connection, "a", ordinal=1)
        connection.execute(text("UPDATE sync_cluster SET epoch = 50"))
        connection.execute(text("UPDATE sync_token SET node = 'a', epoch = 50 WHERE token_id <> 7"))
    return life


def grant(session: Session, life: str, known_epoch: int = 0) -> int:
    """Publish that ``a`` gets token 7. Returns how many tokens moved."""
    steps = ("{7}", "{7}", "{NULL}", "{NULL}", "{a}", array([GRANT]), "{1}")
    note = (datetime.now(UTC).isoformat(), "pins or repair", 1, 1)
    rows = session.execute(SQL.publish, "a", life, 0, "{}", *steps, 3, *note, "{}", known_epoch, timeout=60)
    return int(rows[0][2] or 0) if rows else 0


def test_nothing_is_given_out(engine: Engine, session: Session, leader: str) -> None:
    rest(engine, 60)
    assert grant(session, leader) == 0
    rest(engine, -1)
    assert grant(session, leader) == 1


def test_a_leader_that_knows_of_later_epochs_gives_nothing_out(session: Session, leader: str) -> None:
    assert grant(session, leader, known_epoch=51) == 0
    assert grant(session, leader, known_epoch=50) == 1


def test_the_leader_plans_as_soon_as_the_rest_is_over(engine: Engine, session: Session, leader: str) -> None:
    run(
        engine,
        "INSERT INTO sync_lock (task_id, token_id, node_patterns, created_by, ephemeral, created_at)"
        " VALUES ('t', 1, '[\"a\"]', 'still to come back', true, now() - interval '1 hour')",
    )
    rest(engine, 1.5)
    leadership = Leadership(Names(), SQL, "a", 3)
    leadership.heard(["a"], (0, 0))
    assert leadership.plan(session, leader) is None
    rest(engine, -60)  # the server's clock is set forward
    assert leadership.plan(session, leader) is None
    assert ask(engine, "SELECT task_id FROM sync_lock") == [("t",)], "its creator may come back until then"

    def plan() -> Any:
        return leadership.plan(session, leader)

    outcome = wait_for(plan, "the rest is over")
    assert outcome.moved == 1


def test_tokens_are_taken_up_when_the_rest_is_over(engine: Engine, session: Session, leader: str) -> None:
    config = CoordinationConfig(url=engine.url)
    membership = Membership(config, "a", SQL)
    membership.incarnation = leader
    ownership = Ownership(10_000, 0)
    handoff = Handoff(SQL, membership, ownership, 60, None, None)
    run(engine, "UPDATE sync_token SET next_node = node, next_epoch = 50")
    run(
        engine,
        "INSERT INTO sync_claim (task_id, token_id, node, incarnation, epoch) VALUES ('t', 9, 'a', :life, 50)",
        life=leader,
    )
    before = now()
    rest(engine, 2.5)
    found = handoff.refresh(session, lambda: float("inf"))
    assert (found.owned, found.resting) == (0, True)
    assert not ownership.held.tokens()
    assert handoff.release_at > before + 2.4
    assert not handoff.release(session)
    rest(engine, -60)  # the server's clock is set forward
    assert handoff.refresh(session, lambda: float("inf")).resting
    assert handoff.release_at > before + 2.4
    wait_for(lambda: not handoff.refresh(session, lambda: float("inf")).resting, "the rest is over")
    assert not ownership.held.tokens()
    assert handoff.release(session), "it says that there is something new to see"
    assert handoff.refresh(session, lambda: float("inf")).owned == 10_000 - 1
    assert len(ownership.held.tokens()) == 10_000 - 1


@pytest.mark.parametrize("resting", [True, False])
def test_a_node_that_registers_gets_its_tokens_after_the_rest(engine: Engine, session: Session, resting: bool) -> None:
    """Under its name already; by ``register``, or by ``regain`` if an application held the row just then."""
    rest(engine, 60 if resting else -1)
    run(engine, "UPDATE sync_token SET node = 'a' WHERE token_id IN (7, 8)")
    membership = Membership(CoordinationConfig(url=engine.url), "a", SQL)
    with engine.connect() as application:
        application.execute(text("SELECT 1 FROM sync_token WHERE token_id = 8 FOR SHARE"))
        assert membership.register(session, now() + 5, lambda: False)
    ((regained,),) = session.execute(SQL.regain, "a", membership.incarnation, timeout=60)
    rows = ask(
        engine, "SELECT epoch > 0, next_node, next_epoch - epoch FROM sync_token WHERE node = 'a' ORDER BY token_id"
    )
    if resting:
        assert regained == "0"
        assert rows == [(True, "a", 0), (False, None, None)]
        assert session.execute(SQL.release, "a", membership.incarnation, "{1}", "{}", timeout=60) == []
    else:
        assert regained == "1"
        assert rows == [(True, None, None), (True, None, None)]


def test_a_view_older_than_what_the_process_has_seen_is_not_taken(
    session: Session, engine: Engine, leader: str
) -> None:
    membership = Membership(CoordinationConfig(url=engine.url), "a", SQL)
    membership.incarnation = leader
    ownership = Ownership(10_000, 0)
    handoff = Handoff(SQL, membership, ownership, 60, None, None)
    assert handoff.refresh(session, lambda: float("inf"), 51).state is None
    assert not ownership.held.tokens()


# -- roles -----------------------------------------------------------------------------------------------------


def test_a_worker_that_may_neither_ask_nor_set_works(server: Any, engine: Engine, database: URL) -> None:
    role = f"worker_{uuid.uuid4().hex[:8]}"
    with psycopg.connect(dsn(database), autocommit=True) as connection:
        connection.execute(f"CREATE ROLE {role} LOGIN")
        connection.execute("REVOKE EXECUTE ON FUNCTION pg_control_system() FROM PUBLIC")
        connection.execute(f"GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA public TO {role}")
        connection.execute(f"GRANT USAGE ON ALL SEQUENCES IN SCHEMA public TO {role}")
    try:
        with Job("w1", CoordinationConfig(url=database.set(username=role), **SOON)) as job:
            assert len(job.my_tokens) == 10_000
            with open_session(database.set(username=role)) as session:
                done = form_anew(session)
            assert not done.fences_raised
            wait_for(lambda: len(job.my_tokens) == 10_000 and job.token_version > LEAP, "it has them again")
        assert ask(engine, "SELECT history FROM sync_cluster") == [(None,)]
    finally:
        with psycopg.connect(dsn(database), autocommit=True) as connection:
            connection.execute(f"DROP OWNED BY {role}")
            connection.execute(f"DROP ROLE {role}")


# -- running workers ---------------------------------------------------------------------------------------------


def test_a_commit_begun_before_is_refused_after(engine: Engine, session: Session, database: URL) -> None:
    Base.metadata.create_all(engine)
    with Job("w1", CoordinationConfig(url=database, **SOON)) as job:
        with OwnedSession(engine, job=job) as application:
            application.add(Item(id=1, sku="before"))
            application.flush()
            form_anew(session, rest_sec=4)
            with pytest.raises(OwnershipLost):
                application.commit()
        with OwnedSession(engine, job=job) as application:
            assert application.scalars(select(Item).where(Item.owned_by(job))).all() == []
            application.add(Item(id=2, sku="resting"))
            with pytest.raises(OwnershipLost):
                application.commit()
        wait_for(lambda: job.token_version > LEAP and job.my_tokens, "it owns them again")
        with OwnedSession(engine, job=job) as application:
            application.add(Item(id=3, sku="after"))
            application.commit()
    assert ask(engine, "SELECT sku FROM item") == [("after",)]


def test_while_it_rests_neither_a_checkpoint_nor_raw_sql_counts(
    engine: Engine, session: Session, database: URL
) -> None:
    """The node knows the new epoch, and the tokens are under its name."""
    Base.metadata.create_all(engine)
    create_ownership_fence(engine, "item")
    with Job("w1", CoordinationConfig(url=database, **SOON)) as job:
        form_anew(session, rest_sec=60)
        wait_for(lambda: job.token_version > LEAP, "it has heard of it")
        assert ask(engine, "SELECT count(*) FROM sync_token WHERE node = 'w1'") == [(10_000,)]
        with pytest.raises(OwnershipLost):
            job.checkpoint("t", 1)
        with OwnedSession(engine, job=job) as application:
            application.execute(text("INSERT INTO item (id, sku, note) VALUES (1, 'raw', '')"))
            with pytest.raises(OwnershipLost):
                application.commit()
    assert ask(engine, "SELECT count(*) FROM item") == [(0,)]
    assert ask(engine, "SELECT count(*) FROM sync_checkpoint") == [(0,)]


def test_an_older_state_put_back_under_running_workers(cluster: Cluster, engine: Engine) -> None:
    """What is put back is from before ``w3``, and shows tokens as ``gone``'s that others have now."""
    cluster.start("w1", "gone")
    saved = ("cluster", "node", "token", "claim", "lock")
    with engine.begin() as connection:
        for kind in saved:
            connection.execute(text(f"CREATE TABLE saved_{kind} AS TABLE sync_{kind}"))
    cluster.workers["gone"].signal(15)
    cluster.wait_shared("w1")
    cluster.add("w3")
    cluster.wait_shared("w1", "w3")
    ((highest,),) = ask(engine, "SELECT epoch FROM sync_cluster")
    with engine.begin() as connection:
        for kind in saved:
            columns = ", ".join(
                row[0]
                for row in connection.execute(
                    text(
                        "SELECT quote_ident(attname) FROM pg_attribute WHERE attrelid = CAST(:table AS regclass)"
                        " AND attnum > 0 AND NOT attisdropped"
                    ),
                    {"table": f"sync_{kind}"},
                )
            )
            connection.execute(text(f"DELETE FROM sync_{kind}"))
            connection.execute(
                text(f"INSERT INTO sync_{kind} ({columns}) OVERRIDING SYSTEM VALUE SELECT {columns} FROM saved_{kind}")
            )
    wait_for(lambda: ask(engine, "SELECT 1 FROM sync_cluster WHERE epoch > :leap", leap=LEAP), "it is formed anew")
    wait_for(lambda: not cluster.workers["w1"].held(), "it rests")
    cluster.wait_shared("w1", "w3")
    ((epoch, lowest, marked),) = ask(
        engine,
        "SELECT c.epoch, min(t.epoch), count(t.next_node) FROM sync_cluster c, sync_token t GROUP BY c.epoch",
    )
    assert epoch >= lowest > highest + LEAP - 1
    assert epoch < 2 * LEAP, "once"
    assert marked == 0
    assert ask(engine, "SELECT name FROM sync_node ORDER BY name") == [("w1",), ("w3",)]
    assert cluster.overlaps() == {}


def test_an_operator_forms_it_anew_under_running_workers(make_cluster: Callable[..., Cluster], engine: Engine) -> None:
    cluster = make_cluster()
    cluster.start("w1", "w2")
    before = {node: worker.held() for node, worker in cluster.workers.items()}
    operator = Operator(engine, Names())
    found, members = operator.look()
    assert members == ["w1", "w2"]
    done = operator.reform(found, 0)
    assert done is not None
    assert done.epoch > LEAP
    assert 3 < done.rest_sec <= 4
    assert operator.reform(found, 0) is None
    wait_for(lambda: not any(worker.held() for worker in cluster.workers.values()), "they rest")
    cluster.wait_shared("w1", "w2")
    assert {node: worker.held() for node, worker in cluster.workers.items()} == before, "each has kept its tasks"
    assert cluster.overlaps() == {}


def test_a_node_that_comes_while_it_rests_says_why_it_could_not_start(engine: Engine, database: URL) -> None:
    rest(engine, 60)
    with (
        pytest.raises(TimeoutError, match="still rested after a failover"),
        Job("w1", CoordinationConfig(url=database, **QUICK), wait_on_enter=0.8),
    ):
        raise AssertionError("it started")


def test_tables_of_an_older_revision_say_what_to_run(server: Any, empty_database: URL) -> None:
    from jobsync_orm import SchemaNotReady, migrate

    engine = create_engine(empty_database)
    migrate.upgrade(engine, revision="0001")
    engine.dispose()
    with pytest.raises(SchemaNotReady, match="older revision: run `jobsync-orm db upgrade"):
        Job("w1", CoordinationConfig(url=empty_database, **QUICK)).start()
