"""Nodes that are taken out, and nodes that are stopped first."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator

import pytest
from sqlalchemy import URL, Engine, create_engine, event, text

from jobsync_orm import CoordinationConfig, Job
from jobsync_orm.exceptions import OperationRefused
from jobsync_orm.naming import Names
from jobsync_orm.operate import Member, Operations, Watched, drain, evict, expel, find_member
from tests.integration.cluster import QUICK, Cluster, wait_for

NAMES = Names()


def found(engine: Engine, node: str) -> Member:
    member = find_member(engine, NAMES, node)
    assert member is not None
    return member


def outcome(watched: Iterator[Watched]) -> str | None:
    return list(watched)[-1].outcome


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looks follow each other closely."""
    monkeypatch.setattr("jobsync_orm.operate.evicting.LOOK_SEC", 0.05)


def add(engine: Engine, name: str, **columns: object) -> None:
    values = {"name": name, "state": "active", "timeout": 1, "age": 60, "rejoin": 0, **columns}
    with engine.begin() as connection:
        connection.execute(
            text(
                "INSERT INTO sync_node (name, incarnation, state, last_heartbeat, heartbeat_timeout_sec,"
                " rejoin_grace_sec, host, pid) VALUES (:name, gen_random_uuid(), :state,"
                " clock_timestamp() - :age * interval '1 second', :timeout, :rejoin, 'h', 7)"
            ),
            values,
        )
        connection.execute(
            text(
                "INSERT INTO sync_claim (task_id, token_id, node, incarnation, epoch)"
                " SELECT name, 1, name, incarnation, 1 FROM sync_node WHERE name = :name"
            ),
            values,
        )


def claims(engine: Engine) -> int:
    with engine.connect() as connection:
        return connection.execute(text("SELECT count(*) FROM sync_claim")).scalar_one()


@pytest.mark.usefixtures("quick")
def test_a_silent_node_is_watched_and_taken_out(engine: Engine) -> None:
    """Where nobody leads."""
    add(engine, "w9")
    member = found(engine, "w9")
    assert (member.lease_left_sec, member.process, member.drained, member.expelled) == (0.0, "h:7", False, False)
    seen = list(evict(engine, NAMES, member))
    assert seen[-1].outcome == "evicted"
    assert max(one.still_sec for one in seen) > 1, "it has not been watched for its whole timeout"
    assert find_member(engine, NAMES, "w9") is None
    assert claims(engine) == 0


def test_a_heartbeat_that_goes_on_is_respected(engine: Engine) -> None:
    add(engine, "w9")
    watched = evict(engine, NAMES, found(engine, "w9"))
    assert next(watched).outcome is None
    with engine.begin() as connection:
        connection.execute(text("UPDATE sync_node SET last_heartbeat = clock_timestamp()"))
    assert outcome(watched) == "alive"
    assert claims(engine) == 1


@pytest.mark.usefixtures("quick")
def test_a_look_after_a_long_pause_is_no_evidence(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    add(engine, "w9")
    watched = evict(engine, NAMES, found(engine, "w9"))
    next(watched)
    next(watched)
    monkeypatch.setattr("jobsync_orm.operate.evicting.PATIENCE_SEC", 0)  # every pause counts as long
    assert [next(watched).still_sec for _ in range(8)] == [0] * 8
    assert find_member(engine, NAMES, "w9") is not None


def beat(engine: Engine, ago: float, **columns: object) -> None:
    """The node's heartbeat of so many seconds ago arrives just now."""
    more = "".join(f", {name} = :{name}" for name in columns)
    with engine.begin() as connection:
        connection.execute(
            text(f"UPDATE sync_node SET last_heartbeat = clock_timestamp() - :ago * interval '1 second'{more}"),
            {"ago": ago, **columns},
        )


@pytest.mark.usefixtures("quick")
def test_one_that_is_young_by_the_databases_clock_is_left_alone_however_long_it_was_watched(engine: Engine) -> None:
    """This process's clock may run fast. Nothing is even tried: each try would raise the cluster's revision."""
    add(engine, "w9", age=-60, timeout=0.1)
    versions = "SELECT epoch, revision FROM sync_cluster"
    with engine.connect() as connection:
        before = connection.execute(text(versions)).one()
    seen = [watched for watched, _ in zip(evict(engine, NAMES, found(engine, "w9")), range(8), strict=False)]
    assert seen[-1].still_sec > 2 * seen[-1].needed_sec
    assert found(engine, "w9").age_sec < 0
    with engine.connect() as connection:
        assert connection.execute(text(versions)).one() == before


@pytest.mark.usefixtures("quick")
def test_one_that_was_heard_of_at_the_last_moment_is_left_alone(database: URL, engine: Engine) -> None:
    """The heartbeat comes when the evidence is complete, before the statement that goes by it."""
    add(engine, "w9", timeout=0.3)
    mine = create_engine(database)
    late: list[str] = []

    @event.listens_for(mine, "before_cursor_execute")
    def comes_late(connection: object, cursor: object, statement: str, *more: object) -> None:
        if "DELETE" in statement and not late:
            late.append(statement)
            beat(engine, 50)

    assert outcome(evict(mine, NAMES, found(engine, "w9"))) == "alive"
    mine.dispose()
    assert len(late) == 1
    assert claims(engine) == 1


@pytest.mark.usefixtures("quick")
def test_a_heartbeat_between_finding_and_expelling_is_no_sign_that_it_goes_on(engine: Engine) -> None:
    add(engine, "w9", timeout=0.3)
    member = found(engine, "w9")
    beat(engine, 40)
    expel(engine, NAMES, member)
    assert outcome(evict(engine, NAMES, member)) == "evicted"


@pytest.mark.usefixtures("quick")
def test_what_it_is_counted_from_is_the_heartbeat_seen_last(engine: Engine) -> None:
    """Somebody else expels it while it is watched, right after another heartbeat."""
    add(engine, "w9", timeout=0.6)
    watched = evict(engine, NAMES, found(engine, "w9"))
    assert [next(watched).still_sec > 0 for _ in range(3)] == [False, True, True]
    beat(engine, 40, expelled=True)
    assert next(watched).still_sec == 0
    assert outcome(watched) == "evicted"


@pytest.mark.usefixtures("quick")
def test_the_rest_of_one_that_is_away_is_ended(engine: Engine) -> None:
    add(engine, "w9", state="away", rejoin=3600, age=1)
    assert outcome(evict(engine, NAMES, found(engine, "w9"))) == "evicted"
    assert find_member(engine, NAMES, "w9") is None


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("expelled", [False, True])
def test_one_that_would_rest_is_out_all_the_same(engine: Engine, expelled: bool) -> None:
    add(engine, "w9", rejoin=3600, timeout=0.4)
    if expelled:
        expel(engine, NAMES, found(engine, "w9"))
    assert outcome(evict(engine, NAMES, found(engine, "w9"))) == "evicted"
    assert find_member(engine, NAMES, "w9") is None


def test_one_that_runs_hears_of_it_and_joins_anew(engine: Engine, cluster: Cluster) -> None:
    cluster.start("w1")
    worker = cluster.add("w2", CLAIM="300")
    wait_for(lambda: worker.seen("ready"), "w2 is ready")
    cluster.wait_shared("w1", "w2")
    wait_for(lambda: claims(engine) > 0, "w2 has claims")
    member = found(engine, "w2")
    assert member.lease_left_sec > 0
    expel(engine, NAMES, member)
    assert outcome(evict(engine, NAMES, member)) == "rejoined"
    assert found(engine, "w2").expelled is False
    wait_for(lambda: claims(engine) == 0, "the claims of the earlier life are void")
    wait_for(lambda: Operations(engine, NAMES).status().healthy, "all is well again")
    cluster.wait_shared("w1", "w2")
    assert cluster.overlaps() == {}
    with pytest.raises(OperationRefused, match="joined anew just now"):
        expel(engine, NAMES, member)


@pytest.mark.usefixtures("quick")
def test_who_is_expelled_and_who_leads_are_told_and_need_not_look(database: URL, engine: Engine) -> None:
    seconds = {"heartbeat_interval_sec": 300, "heartbeat_timeout_sec": 900, "lock_watch_interval_sec": 300}
    blind = CoordinationConfig(url=database, **{**QUICK, **seconds, "drain_timeout_sec": 300})
    rests = text(
        "SELECT count(*) = 1 FROM sync_node n JOIN pg_stat_activity a ON a.pid = n.backend_pid"
        " WHERE a.state = 'idle' AND a.state_change < clock_timestamp() - interval '0.7 second'"
    )

    def resting() -> bool:
        with engine.connect() as connection:
            return bool(connection.execute(rests).scalar_one())

    with Job("w1", blind):
        wait_for(resting, "w1 waits for what it is told")
        before = found(engine, "w1")
        expel(engine, NAMES, before)
        wait_for(lambda: found(engine, "w1").incarnation != before.incarnation, "it has joined anew", 20)
        wait_for(resting, "w1 waits again")
        add(engine, "w9", state="away", rejoin=3600)
        with engine.begin() as connection:
            connection.execute(text("UPDATE sync_token SET node = 'w9' WHERE token_id < 9"))
        assert outcome(evict(engine, NAMES, found(engine, "w9"))) == "evicted"
        wait_for(lambda: Operations(engine, NAMES).tokens().owned == 10_000, "w1 gives them out", 20)


def test_a_drained_one_gets_nothing_when_it_joins_anew(engine: Engine, cluster: Cluster) -> None:
    cluster.start("w1", "w2")
    assert drain(engine, NAMES, "w2", by="me")
    member = found(engine, "w2")
    assert member.drained
    expel(engine, NAMES, member)
    assert outcome(evict(engine, NAMES, member)) == "rejoined"
    wait_for(
        lambda: {n.node: n.owned for n in Operations(engine, NAMES).tokens().nodes} == {"w1": 10_000, "w2": 0},
        "w1 has all",
    )
    cluster.wait_shared("w1")
    assert cluster.overlaps() == {}


def test_one_that_is_paused_loses_its_tokens_when_its_lease_has_ended(engine: Engine, cluster: Cluster) -> None:
    cluster.start("w1", "w2")
    member = found(engine, "w1")  # the leader
    cluster.workers["w1"].signal(signal.SIGSTOP)
    expel(engine, NAMES, member)
    watched = evict(engine, NAMES, member)
    assert outcome(watched) == "evicted"
    cluster.wait_shared("w2")
    cluster.workers["w1"].signal(signal.SIGCONT)
    cluster.wait_shared("w1", "w2")
    assert cluster.overlaps() == {}


def test_a_worker_that_does_not_heed_it_is_told_of(engine: Engine) -> None:
    """Of a release that knows nothing of expelling."""
    add(engine, "w9", age=0, timeout=15)
    member = found(engine, "w9")
    expel(engine, NAMES, member)
    watched = evict(engine, NAMES, member)
    assert next(watched).outcome is None
    with engine.begin() as connection:
        connection.execute(text("UPDATE sync_node SET last_heartbeat = clock_timestamp()"))
    assert outcome(watched) == "alive"


@pytest.mark.usefixtures("quick")
def test_two_that_evict_one_node_do_no_harm(engine: Engine) -> None:
    add(engine, "w9")
    member = found(engine, "w9")
    outcomes: list[str | None] = []
    threads = [
        threading.Thread(target=lambda: outcomes.append(outcome(evict(engine, NAMES, member)))) for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert outcomes == ["evicted"] * 3
