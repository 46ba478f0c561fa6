"""Each confirmed fault of the library this one continues, shown not to be here.

Faults of pure parts are covered beside those: LIKE in unit/test_like.py and integration/test_like_sql.py, unusual task
ids in unit/test_hashing.py, passwords and appnames in unit/test_config.py and unit/test_naming.py, pinned load in
unit/test_planner.py, twelve upgrades at once in migration/.
"""

from __future__ import annotations

import datetime
import json
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from sqlalchemy import URL, Engine, create_engine, text

from jobsync_orm import (
    ClusterMismatch,
    CoordinationConfig,
    Job,
    LockConflict,
    NodeNameInUse,
    Task,
    UnstableTaskId,
    embedded,
    migrate,
)
from tests.conftest import Server
from tests.integration.cluster import QUICK, Cluster, wait_for


@pytest.fixture
def config(database: URL) -> CoordinationConfig:
    return CoordinationConfig(url=database, **QUICK)


@pytest.fixture
def own_server() -> Iterator[tuple[URL, Callable[[], object], Callable[[], object]]]:
    """A server of this test's own: its URL, a function that stops it and one that starts it."""
    # Short path: a UNIX socket's name has little room.
    folder = Path(tempfile.mkdtemp(prefix="jobsync-pg-"))
    data = folder / "data"
    try:
        yield embedded.server_url(data), partial(embedded.stop, data), partial(embedded.server_url, data)
    finally:
        embedded.stop(data)
        shutil.rmtree(folder, ignore_errors=True)


def test_database_away_for_longer_than_the_lease(
    own_server: tuple[URL, Callable[[], object], Callable[[], object]], make_cluster: Callable[..., Cluster]
) -> None:
    url, stop_server, start_server = own_server
    engine = create_engine(url)
    migrate.upgrade(engine)
    engine.dispose()
    cluster = make_cluster(url)
    cluster.start("w1", "w2", "w3")
    before = {node: worker.held() for node, worker in cluster.workers.items()}
    stop_server()
    wait_for(lambda: not any(w.held() for w in cluster.workers.values()), "all say no once their leases have ended")
    start_server()
    cluster.wait_shared("w1", "w2", "w3")
    assert {node: worker.held() for node, worker in cluster.workers.items()} == before, "nobody was evicted"
    assert all(worker.alive for worker in cluster.workers.values())
    assert cluster.overlaps() == {}


def test_error_of_the_database_during_a_redistribution(cluster: Cluster, engine: Engine) -> None:
    cluster.start("w1", "w2", "w3")
    with engine.begin() as connection:
        connection.execute(
            text("CREATE FUNCTION fail() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE 'on purpose'; END $$")
        )
        connection.execute(
            text("CREATE TRIGGER fail BEFORE UPDATE ON sync_token FOR EACH STATEMENT EXECUTE FUNCTION fail()")
        )
    cluster.workers["w3"].signal(signal.SIGKILL)
    wait_for(lambda: any("on purpose" in line for line in cluster.workers["w1"].log), "the leader has met the error")
    with engine.begin() as connection:
        connection.execute(text("DROP TRIGGER fail ON sync_token"))
    cluster.wait_shared("w1", "w2")


def test_leader_killed_while_it_distributes(cluster: Cluster, engine: Engine) -> None:
    cluster.start("w1", "w2", "w3")
    with engine.begin() as connection:
        # Holds the leader inside its publishing statement for as long as this test wants.
        connection.execute(text("CREATE TABLE gate ()"))
        connection.execute(
            text("""CREATE FUNCTION hold() RETURNS trigger LANGUAGE plpgsql AS
                $$ BEGIN PERFORM 1 FROM gate; RETURN NULL; END $$""")
        )
        connection.execute(
            text("CREATE TRIGGER hold BEFORE UPDATE ON sync_token FOR EACH STATEMENT EXECUTE FUNCTION hold()")
        )
    gate = engine.connect()
    try:
        gate.execute(text("LOCK TABLE gate"))
        cluster.add("w4")
        with engine.connect() as looking:
            wait_for(
                lambda: looking.execute(
                    text("SELECT count(*) FROM pg_locks WHERE NOT granted AND relation = 'gate'::regclass")
                ).scalar(),
                "the leader is inside its plan",
            )
        cluster.workers["w1"].signal(signal.SIGKILL)
    finally:
        gate.rollback()
        gate.close()
    cluster.wait_shared("w2", "w3", "w4")
    assert cluster.overlaps() == {}


def test_first_start_of_several_workers_on_an_empty_database(
    empty_database: URL, make_cluster: Callable[..., Cluster]
) -> None:
    cluster = make_cluster(empty_database, create_tables=True)
    nodes = [f"w{i}" for i in range(6)]
    for node in nodes:
        cluster.add(node)
    cluster.wait_shared(*nodes, timeout=60)
    assert not any(worker.seen("error") for worker in cluster.workers.values())


def test_start_beside_an_open_transaction_that_wrote_the_node_table(cluster: Cluster, engine: Engine) -> None:
    cluster.start("w1")
    with engine.connect() as other:
        other.execute(text("UPDATE sync_node SET version = version WHERE name = 'nobody'"))  # takes the table's lock
        cluster.add("w2")
        cluster.wait_shared("w1", "w2")
        other.rollback()


def test_late_pin_moves_its_task_at_once_and_a_cleared_one_frees_it(config: CoordinationConfig) -> None:
    with Job("w1", config) as one, Job("w2", config) as two:
        task = next(t for t in range(1000) if two.can_claim_task(t))
        one.register_lock(task, "w1", "late")
        wait_for(lambda: one.can_claim_task(task), "the pinned node has the task")
        assert not two.can_claim_task(task)
        one.register_lock(task, "w2")
        wait_for(lambda: two.can_claim_task(task), "the new pin counts")
        one.register_lock(task, "nobody")
        wait_for(lambda: one.get_coordination_status()["parked_tokens"] == 1, "the task is parked and reported")
        assert not one.can_claim_task(task)
        assert not two.can_claim_task(task)
        assert one.clear_all_locks() == 1
        wait_for(lambda: one.can_claim_task(task) or two.can_claim_task(task), "somebody has the task again")


def test_expired_pin_lets_go_when_it_expires(config: CoordinationConfig) -> None:
    with Job("w1", config) as one, Job("w2", config) as two:
        one.register_locks_bulk([(f"t{i}", "w1", "x") for i in range(4000)], expires_in_days=3 / 86400)
        wait_for(lambda: len(one.my_tokens) == 5000 and len(one.list_locks()) == 4000, "pins, in balance")
        pinned = {one.task_to_token(f"t{i}") for i in range(4000)}
        wait_for(lambda: pinned <= one.my_tokens or not one.list_locks(), "pinned tokens are where they belong")
        one.register_lock("extra", ["w2"], expires_in_days=1 / 86400)
        token = one.task_to_token("extra")
        wait_for(lambda: not one.list_locks(), "all expired")
        wait_for(lambda: abs(len(one.my_tokens) - len(two.my_tokens)) <= 1, "balance holds")
        assert token in one.my_tokens | two.my_tokens


def test_pins_of_a_dead_node_stay_unless_they_were_ephemeral(cluster: Cluster, config: CoordinationConfig) -> None:
    with Job("w1", config) as one:
        with Job("w2", config) as two:
            two.register_lock("stays", "w1")
            two.register_lock("goes", "w1", ephemeral=True)
        assert {lock["task_id"]: lock["created_by"] for lock in one.list_locks()} == {"stays": "w2"}


def test_same_node_name_twice_is_refused(cluster: Cluster, config: CoordinationConfig) -> None:
    cluster.start("w1")
    with pytest.raises(NodeNameInUse, match="'w1' is in use by a live process"):
        Job("w1", config, wait_on_enter=20).start()
    assert cluster.shared("w1"), "the first one goes on"


def test_pins_that_share_a_token(config: CoordinationConfig) -> None:
    with Job("w1", config) as job:
        seen: dict[int, str] = {}
        for number in range(10_000):
            task = f"task-{number}"
            first = seen.setdefault(job.task_to_token(task), task)
            if first != task:
                break
        job.register_lock(first, ["gpu%", "w_"])
        job.register_lock(task, "w%")  # w1 matches both
        with pytest.raises(LockConflict) as caught:
            job.register_locks_bulk([("innocent", "w1", None), (task, "other", None)])
        assert set(caught.value.task_ids) == {first, task}
        assert {lock["task_id"]: lock["node_patterns"] for lock in job.list_locks()} == {
            first: ["gpu%", "w_"],
            task: ["w%"],
        }, "nothing half-written"
        wait_for(lambda: job.can_claim_task(task), "pins that agree are satisfied together")


@pytest.mark.parametrize("ahead", [60, -60])
def test_a_worker_with_a_wrong_clock(cluster: Cluster, ahead: int) -> None:
    cluster.start("w1", "w2")
    cluster.add("w3", CLOCK_AHEAD=str(ahead))
    cluster.wait_shared("w1", "w2", "w3")
    cluster.workers["w2"].signal(signal.SIGKILL)
    cluster.wait_shared("w1", "w3")
    assert cluster.overlaps() == {}


def test_slow_callback_delays_neither_heartbeat_nor_exit(cluster: Cluster) -> None:
    cluster.start("w1", "w2")
    slow = cluster.add("w3", CALLBACK="sleep:60")
    wait_for(lambda: slow.seen("ready"), "entering does not wait for the callback without end")
    first_callback = next(e for e in slow.events if e["event"] == "callback")
    assert first_callback["t"] < slow.seen("ready")["t"], "the application hears of its tokens before it may claim"
    cluster.wait_shared("w1", "w2", "w3")
    slow.signal(signal.SIGTERM)
    cluster.wait_shared("w1", "w2")
    assert slow.process.wait(60) == 0


def test_raising_callback_is_logged_and_nothing_else(cluster: Cluster) -> None:
    cluster.start("w1")
    cluster.add("w2", CALLBACK="raise")
    cluster.wait_shared("w1", "w2")
    assert any("on purpose" in line for line in cluster.workers["w2"].log)


def test_two_hash_settings_are_refused(config: CoordinationConfig, database: URL) -> None:
    with Job("w1", config):
        for wrong in ({"hash_function": "md5"}, {"total_tokens": 500}):
            ((name, value),) = wrong.items()
            theirs = getattr(config, name)
            with pytest.raises(ClusterMismatch, match=f"{name} is {value} .* and {theirs} in the cluster"):
                Job("w2", CoordinationConfig(url=database, **QUICK, **wrong)).start()


def test_a_claim_is_exclusive(config: CoordinationConfig, engine: Engine) -> None:
    with Job("w1", config) as one, Job("w2", config) as two:
        assert one.set_claim("t") == ["t"]
        assert two.set_claim("t") == []
        assert one.set_claim(["t", Task("u")]) == ["t", "u"], "its own claim is kept"
        with pytest.raises(UnstableTaskId):
            one.set_claim(b"ab")
        with pytest.raises(UnstableTaskId):
            one.set_claim({"a": 1})
        with engine.connect() as connection:
            rows = connection.execute(text("SELECT task_id, node FROM sync_claim ORDER BY 1")).all()
        assert rows == [("t", "w1"), ("u", "w1")]
        assert one.release_claim("t") == ["t"]
        assert two.set_claim("t") == ["t"]
    with engine.connect() as connection:
        assert connection.execute(text("SELECT count(*) FROM sync_claim")).scalar() == 0, "claims end with their node"


def test_audit_loses_nothing_while_tasks_are_added(config: CoordinationConfig) -> None:
    with Job("w1", config) as job:
        done = threading.Event()

        def flush() -> None:
            while not done.is_set():
                job.write_audit()

        flusher = threading.Thread(target=flush)
        flusher.start()
        try:
            assert all(job.add_task(number) for number in range(400))
        finally:
            done.set()
            flusher.join()
        job.write_audit()
        assert sorted(int(row["task_id"]) for row in job.get_audit()) == list(range(400))


def test_audit_date_is_the_day_the_task_was_done(config: CoordinationConfig, engine: Engine) -> None:
    yesterday = datetime.date.today() - datetime.timedelta(days=1)
    with Job("w1", config, date=yesterday) as fixed:
        fixed.add_task("old")
        fixed.write_audit()
        assert fixed.get_audit() == [{"node": "w1", "task_id": "old"}]
    with Job("w1", config) as job:
        job.add_task("new")
        with engine.begin() as connection:  # what was written on another day is not of today
            connection.execute(text("UPDATE sync_audit SET date = date - 1"))
        job.write_audit()
        assert job.get_audit() == [{"node": "w1", "task_id": "new"}]


def test_a_role_that_may_not_create_tables(config: CoordinationConfig, engine: Engine, server: Server) -> None:
    role = "jobsync_dml"
    with server.connect() as admin:
        admin.execute(f"DROP ROLE IF EXISTS {role}")
        admin.execute(f"CREATE ROLE {role} LOGIN PASSWORD 'x'")
    with engine.begin() as connection:
        connection.execute(text("REVOKE CREATE ON SCHEMA public FROM PUBLIC"))
        connection.execute(text(f"GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA public TO {role}"))
        connection.execute(text(f"GRANT USAGE ON ALL SEQUENCES IN SCHEMA public TO {role}"))
    try:
        limited = CoordinationConfig(url=engine.url.set(username=role, password="x"), create_tables=True, **QUICK)
        with Job("w1", limited) as job:
            assert job.add_task("t")
            job.register_lock("t", "w1")
            job.write_audit()
            assert len(job.my_tokens) == 10_000
    finally:
        with engine.begin() as connection:
            connection.execute(text(f"DROP OWNED BY {role}"))
        with server.connect() as admin:
            admin.execute(f"DROP ROLE {role}")


def test_pinned_load_counts_in_the_balance(config: CoordinationConfig) -> None:
    with Job("w1", config) as one:
        one.register_locks_bulk([(number, "w1", None) for number in range(3000)])
        pinned = {one.task_to_token(number) for number in range(3000)}
        with Job("w2", config) as two, Job("w3", config) as three:
            wait_for(
                lambda: sorted(len(job.my_tokens) for job in (one, two, three)) == [3333, 3333, 3334],
                "all three carry the same load",
            )
            assert pinned <= one.my_tokens


def test_more_nodes_than_tokens(empty_database: URL) -> None:
    config = CoordinationConfig(url=empty_database, total_tokens=2, create_tables=True, **QUICK)
    with Job("w1", config) as one, Job("w2", config) as two, Job("w3", config) as three:
        wait_for(lambda: sorted(len(job.my_tokens) for job in (one, two, three)) == [0, 1, 1], "two have one each")


def test_interrupt_while_entering_leaves_nothing(cluster: Cluster, engine: Engine) -> None:
    cluster.config["minimum_nodes"] = 2
    worker = cluster.add("w1", JOB=json.dumps({"wait_on_enter": 60}))

    def nodes() -> list[str]:
        with engine.connect() as connection:
            return list(connection.execute(text("SELECT name FROM sync_node")).scalars())

    wait_for(lambda: nodes() == ["w1"], "it has registered")
    worker.signal(signal.SIGINT)
    worker.process.wait(60)
    wait_for(lambda: (worker.seen("error") or {}).get("kind") == "KeyboardInterrupt", "it was interrupted")
    assert nodes() == []


def test_minimum_nodes_names_who_is_there(config: CoordinationConfig, database: URL) -> None:
    demanding = CoordinationConfig(url=database, minimum_nodes=3, **QUICK)
    with Job("w1", config):
        began = time.monotonic()
        with pytest.raises(TimeoutError, match=r"minimum_nodes=3.* only 2 were there: w1, w2"):
            Job("w2", demanding, wait_on_enter=2).start()
        assert time.monotonic() - began >= 2
