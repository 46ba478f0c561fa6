"""What Prometheus gets to see of real nodes, queues and workers."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from sqlalchemy import URL, Engine, create_engine, event, text

from jobsync_orm import ConfigurationError, CoordinationConfig, Discard, Job, JobQueue, JobWorker, OwnershipLost
from jobsync_orm.integrations import prometheus
from jobsync_orm.integrations.catalogue import METRICS, OTHER, Types
from jobsync_orm.integrations.readings import appname_of
from jobsync_orm.naming import Names
from jobsync_orm.orm import OwnedSession
from tests.conftest import Server
from tests.integration.claiming import give_away
from tests.integration.cluster import QUICK, ROOT, Cluster, wait_for
from tests.integration.coordinator.backstage import add_node
from tests.integration.orm.models import Base, Item
from tests.integration.queue.rows import SQL, put


class Scrape:
    """Samples of a registry, as its HTTP server would send them."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.families = list(text_string_to_metric_families(generate_latest(registry).decode()))
        self.samples = [sample for family in self.families for sample in family.samples]

    def all(self, name: str, **labels: str) -> dict[frozenset[tuple[str, str]], float]:
        return {
            frozenset(sample.labels.items()): sample.value
            for sample in self.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        }

    def one(self, name: str, **labels: str) -> float | None:
        """The value of the only such sample; None if there is none."""
        found = self.all(name, **labels)
        assert len(found) <= 1, found
        return next(iter(found.values()), None)


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


def test_a_cluster_of_two_one_of_which_is_killed(
    config: CoordinationConfig, cluster: Cluster, engine: Engine, registry: CollectorRegistry
) -> None:
    job = Job("w1", config)
    prometheus.register(job, registry=registry, read_every_sec=0.01)
    assert Scrape(registry).one("jobsync_tokens_owned") is None, "it has not been started"
    with job:
        found = Scrape(registry)
        w1 = {"appname": "sync_", "node": "w1"}
        assert found.one("jobsync_tokens_owned", **w1) == 10_000
        assert found.one("jobsync_healthy", **w1) == 1
        assert found.one("jobsync_leader", **w1) == 1
        assert found.one("jobsync_live_nodes", **w1) == 1
        assert found.one("jobsync_epoch", **w1) == found.one("jobsync_applied_epoch", **w1) == job.token_version
        assert 0 < (found.one("jobsync_lease_remaining_seconds", **w1) or 0) <= QUICK["heartbeat_timeout_sec"]
        assert abs((found.one("jobsync_last_heartbeat_timestamp_seconds", **w1) or 0) - time.time()) < 30
        assert found.one("jobsync_rebalances_total", reason="initial", **w1) == 1
        assert found.one("jobsync_tokens_moved_total", **w1) == 10_000
        assert (found.one("jobsync_heartbeat_duration_seconds_count", **w1) or 0) > 0
        assert found.one("jobsync_cluster_nodes") == 1
        assert found.one("jobsync_parked_tokens") == found.one("jobsync_draining_tokens") == 0
        assert found.one("jobsync_handoff_duration_seconds_count") is None
        assert found.one("jobsync_failover_duration_seconds_count") is None

        other = cluster.add("w2")
        wait_for(lambda: len(other.held()) > 0, "w2 has joined")
        wait_for(lambda: Scrape(registry).one("jobsync_cluster_nodes") == 2, "the tables are read again")
        found = Scrape(registry)
        assert found.one("jobsync_tokens_owned", **w1) == 5_000
        assert found.one("jobsync_handoff_duration_seconds_count", **w1) == 1
        assert found.one("jobsync_tokens_lost_total", **w1) == 5_000

        other.signal(signal.SIGKILL)
        wait_for(lambda: Scrape(registry).one("jobsync_failover_duration_seconds_count", **w1) == 1, "it is counted")
        wait_for(lambda: len(job.my_tokens) == 10_000, "w1 has all")
        found = Scrape(registry)
        assert 0 < (found.one("jobsync_failover_duration_seconds_sum", **w1) or 0) < 30
        assert found.one("jobsync_nodes_taken_for_dead_total", **w1) == 1
        assert found.one("jobsync_rebalances_total", reason="leave", **w1) == 1

        Base.metadata.create_all(engine)
        with OwnedSession(engine, job=job) as session:
            session.add(Item(sku="k1"))
            session.flush()
            give_away(engine, job.task_to_token("k1"), "w2")
            with pytest.raises(OwnershipLost):
                session.commit()
        job.claim_task("t").release()
        found = Scrape(registry)
        assert found.one("jobsync_fence_rejections_total", where="commit", **w1) == 1
        assert found.one("jobsync_task_claims_total", result="taken", **w1) == 1
        assert found.one("jobsync_task_claims_total", result="released", **w1) == 1
    wait_for(lambda: not list(registry.collect()), "nothing of a stopped job is left in the registry")
    assert not job.audience.observers


def test_a_worker(queue: JobQueue, registry: CollectorRegistry) -> None:
    @queue.handler("work", max_retries=1, backoff=lambda failures, error: 0.01)
    def work(ctx: Any, then: str = "") -> None:
        if then == "fail":
            raise ValueError("as it is to")
        if then == "discard":
            raise Discard("no use")

    worker = JobWorker(queue, node_name="w1", concurrency=2)
    prometheus.register(worker, registry=registry, read_every_sec=0.01)
    with worker:
        wait_for(lambda: worker.health().turn_sec is not None, "it turns")
        ids = [queue.submit("work", {"then": then}).id for then in ("", "fail", "discard")]
        queue.submit("work", delay=3600)
        wait_for(lambda: all(queue.status(id).finished_at for id in ids), "all have finished")
        # What is written down is told a moment later, and the tables may have been read a moment before.
        wait_for(lambda: sum(Scrape(registry).all("jobsync_attempts_total").values()) == 4, "all are counted")
        wait_for(lambda: Scrape(registry).one("jobsync_queue_jobs", state="retrying") == 0, "the tables are read again")
        found = Scrape(registry)
        of_type = {"appname": "sync_", "node": "w1", "type": "work"}
        assert found.one("jobsync_jobs_enqueued_total", appname="sync_", type="work") == 4
        assert found.one("jobsync_jobs_claimed_total", **of_type) == 4
        assert found.one("jobsync_attempts_total", outcome="failed", **of_type) == 2
        assert found.one("jobsync_attempts_total", outcome="discarded", **of_type) == 1
        assert found.one("jobsync_retries_total", **of_type) == 1
        assert found.one("jobsync_attempt_duration_seconds_count", **of_type) == 4
        assert found.one("jobsync_pickup_latency_seconds_count", **of_type) == 4
        assert (found.one("jobsync_pickup_latency_seconds_sum", **of_type) or 0) < 30
        assert (found.one("jobsync_wake_ups_total", node="w1") or 0) > 0
        assert found.one("jobsync_worker_healthy", node="w1") == 1
        assert found.one("jobsync_worker_running_attempts", node="w1") == 0
        assert found.one("jobsync_worker_abandoned_attempts", node="w1") == 0
        assert found.one("jobsync_queue_jobs", type="work", state="scheduled") == 1
        assert found.one("jobsync_queue_jobs", type="work", state="pending") == 0
        assert found.all("jobsync_queue_jobs", state="failed") == {}, "finished jobs are not counted"
        assert found.one("jobsync_queue_oldest_pending_seconds", type="work") == 0
        assert found.one("jobsync_tokens_owned", node="w1") == 10_000
    wait_for(lambda: not list(registry.collect()), "nothing of a stopped worker is left in the registry")
    assert not queue.audience.observers
    assert not worker.audience.observers


def test_a_worker_that_stops_before_its_job(
    config: CoordinationConfig, queue: JobQueue, registry: CollectorRegistry
) -> None:
    queue.register("work", lambda ctx: None)
    with Job("w1", config) as job:
        prometheus.register(job, registry=registry)
        with JobWorker(queue, job=job) as worker:
            prometheus.register(worker, registry=registry)
            assert Scrape(registry).one("jobsync_worker_healthy", node="w1") is not None
        wait_for(lambda: Scrape(registry).one("jobsync_worker_healthy") is None, "the worker is out")
        assert Scrape(registry).one("jobsync_tokens_owned", node="w1") == 10_000
        assert not queue.audience.observers
    wait_for(lambda: not list(registry.collect()), "the job is out")


def test_a_queue_whose_worker_stops(queue: JobQueue, registry: CollectorRegistry) -> None:
    """The worker itself has not been registered, but its attempts are the queue's."""
    queue.register("work", lambda ctx: None)
    registration = prometheus.register(queue, registry=registry)
    with JobWorker(queue, node_name="w1"):
        queue.submit("work")
        wait_for(lambda: Scrape(registry).one("jobsync_attempts_total", node="w1") == 1, "it has run")
    wait_for(lambda: Scrape(registry).one("jobsync_attempts_total", node="w1") is None, "w1 is forgotten")
    assert Scrape(registry).one("jobsync_jobs_enqueued_total", type="work") == 1
    registration.unregister()


def test_a_node_that_comes_again_is_counted_from_zero(queue: JobQueue, registry: CollectorRegistry) -> None:
    queue.register("work", lambda ctx: None)
    registration = prometheus.register(queue, registry=registry)
    for _ in range(2):
        with JobWorker(queue, node_name="w1"):
            queue.submit("work")
            wait_for(lambda: Scrape(registry).one("jobsync_attempts_total", node="w1") == 1, "it has run")
        wait_for(lambda: Scrape(registry).one("jobsync_attempts_total", node="w1") is None, "w1 is forgotten")
    registration.unregister()


def test_what_is_registered_twice_is_counted_once_until_both_are_out(
    queue: JobQueue, registry: CollectorRegistry
) -> None:
    one, two = (prometheus.register(queue, registry=registry, reads="always") for _ in range(2))
    queue.submit("mail")
    assert Scrape(registry).one("jobsync_jobs_enqueued_total", type="mail") == 1
    assert Scrape(registry).one("jobsync_queue_jobs", type="mail", state="pending") == 1
    one.unregister()
    queue.submit("mail")
    assert Scrape(registry).one("jobsync_jobs_enqueued_total", type="mail") == 2
    two.unregister()
    assert list(registry.collect()) == []
    again = prometheus.register(queue, registry=registry)
    assert Scrape(registry).one("jobsync_jobs_enqueued_total", type="mail") is None, "it begins anew"
    again.unregister()


def test_what_the_tables_say_of_the_cluster(job: Job, engine: Engine, registry: CollectorRegistry) -> None:
    prometheus.register(job, registry=registry, read_every_sec=0.01)
    job.register_locks_bulk([("a", "gpu-%", None), ("b", "gpu-%", None)])
    with engine.begin() as connection:
        add_node(connection, "rests", state="away", rejoin_grace_sec=600, ordinal=-1)
    wait_for(lambda: Scrape(registry).one("jobsync_parked_tokens", appname="sync_") == 2, "two are parked")
    found = Scrape(registry)
    assert found.one("jobsync_draining_tokens", appname="sync_") == 0
    assert found.one("jobsync_cluster_nodes", appname="sync_") == 1, "who is away is no member"


def test_types_beyond_the_most_are_told_of_together(
    queue: JobQueue, engine: Engine, registry: CollectorRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prometheus, "Types", lambda: Types(1))
    for type, many, seconds in (("a", 1, 5), ("b", 1, 900), ("c", 2, 500)):
        put(engine, type=type, count=many, ready_at=SQL(f"now() - interval '{seconds} seconds'"))
    registration = prometheus.register(queue, registry=registry, reads="always")
    found = Scrape(registry)
    counts = found.all("jobsync_queue_jobs", state="pending")
    ages = found.all("jobsync_queue_oldest_pending_seconds")
    registration.unregister()
    assert len(counts) == len(ages) == 2
    assert OTHER in {dict(labels)["type"] for labels in counts}
    assert found.one("jobsync_queue_jobs", type=OTHER, state="pending") == max(counts.values())
    assert found.one("jobsync_queue_oldest_pending_seconds", type=OTHER) == max(ages.values())
    assert max(ages.values()) >= 900


def test_a_node_without_its_database_says_that_it_owns_nothing(
    database: URL, server: Server, registry: CollectorRegistry
) -> None:
    own = create_engine(database)
    with Job("w1", CoordinationConfig(engine=own, **QUICK)) as job:
        prometheus.register(job, registry=registry, reads="never")
        assert Scrape(registry).one("jobsync_tokens_owned", node="w1") == 10_000
        with server.connect() as admin:
            admin.execute(f"ALTER DATABASE {database.database} ALLOW_CONNECTIONS false")
            admin.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s", [database.database]
            )
            wait_for(lambda: Scrape(registry).one("jobsync_healthy", node="w1") == 0, "its connection is gone")
            assert Scrape(registry).one("jobsync_tokens_owned", node="w1") == 0
            wait_for(lambda: Scrape(registry).one("jobsync_connections_lost_total", node="w1"), "it is counted")
            admin.execute(f"ALTER DATABASE {database.database} ALLOW_CONNECTIONS true")
        wait_for(lambda: Scrape(registry).one("jobsync_tokens_owned", node="w1") == 10_000, "it has them again")
    own.dispose()


def test_attempts_that_run_now(queue: JobQueue, registry: CollectorRegistry) -> None:
    go_on = threading.Event()
    queue.register("work", lambda ctx: go_on.wait(30))
    worker = JobWorker(queue, node_name="w1", concurrency=2)
    prometheus.register(worker, registry=registry)
    with worker:
        for _ in range(2):
            queue.submit("work")
        wait_for(lambda: Scrape(registry).one("jobsync_worker_running_attempts", node="w1") == 2, "two run")
        assert Scrape(registry).one("jobsync_worker_abandoned_attempts", node="w1") == 0
        go_on.set()


def test_a_cluster_is_called_by_its_schema_too() -> None:
    config = CoordinationConfig(url="postgresql://h/d", appname="shop_", schema="prod")
    assert appname_of(config.names) == "prod.shop_"
    assert appname_of(Names("shop_")) == "shop_"


def test_a_forked_child_counts_and_reads_for_itself(queue: JobQueue, registry: CollectorRegistry) -> None:
    registration = prometheus.register(queue, registry=registry, reads="always", read_every_sec=0.01)
    queue.submit("mail")
    assert Scrape(registry).one("jobsync_queue_jobs", type="mail", state="pending") == 1
    child = os.fork()
    if child == 0:
        try:
            queue.submit("mail")
            time.sleep(0.02)
            found = Scrape(registry)
            counted = found.one("jobsync_jobs_enqueued_total", type="mail")
            os._exit(0 if (counted, found.one("jobsync_queue_jobs", state="pending")) == (2, 2) else 1)
        finally:
            os._exit(2)
    wait_for(lambda: (ended := os.waitpid(child, os.WNOHANG)) != (0, 0) and ended[1] == 0, "the child sees its own")
    assert Scrape(registry).one("jobsync_jobs_enqueued_total", type="mail") == 1
    registration.unregister()


def test_one_that_only_enqueues_and_one_that_only_exports(queue: JobQueue, registry: CollectorRegistry) -> None:
    exporter = CollectorRegistry()
    kept = prometheus.register(queue, registry=registry)
    reads = prometheus.register(queue, registry=exporter, reads="always")
    queue.submit("mail")
    found = Scrape(registry)
    assert found.one("jobsync_jobs_enqueued_total", type="mail") == 1
    assert found.one("jobsync_queue_jobs", type="mail", state="pending") is None
    found = Scrape(exporter)
    assert found.one("jobsync_queue_jobs", type="mail", state="pending") == 1
    assert (found.one("jobsync_queue_oldest_pending_seconds", type="mail") or 0) > 0
    kept.unregister()
    kept.unregister()
    assert list(registry.collect()) == []
    assert len(queue.audience.observers) == 1
    reads.unregister()
    assert not queue.audience.observers
    prometheus.register(queue, registry=registry).unregister()


def test_several_in_one_registry(config: CoordinationConfig, registry: CollectorRegistry) -> None:
    with Job("w1", config) as one:
        prometheus.register(one, registry=registry)
        with Job("w2", config) as two:
            prometheus.register(two, registry=registry)
            found = Scrape(registry)
            assert [found.one("jobsync_tokens_owned", node=node) for node in ("w1", "w2")] == [5_000, 5_000]
            assert [found.one("jobsync_leader", node=node) for node in ("w1", "w2")] == [1, 0]
            assert found.one("jobsync_cluster_nodes") == 2, "the leader has read it"
            names = [family.name for family in found.families]
            assert len(names) == len(set(names)), "each metric is told of once"
        wait_for(lambda: Scrape(registry).one("jobsync_tokens_owned", node="w2") is None, "w2 is out")
        assert not Scrape(registry).all("jobsync_tokens_gained_total", node="w2")
        assert Scrape(registry).one("jobsync_tokens_owned", node="w1") is not None


def test_one_that_does_not_lead_reads_no_tables(config: CoordinationConfig, engine: Engine) -> None:
    mine = create_engine(engine.url)
    with Job("w1", config), Job("w2", CoordinationConfig(engine=mine, **QUICK)) as follower:
        registry = CollectorRegistry()
        prometheus.register(follower, registry=registry)
        sent: list[str] = []
        event.listen(mine, "before_cursor_execute", lambda *arguments: sent.append(arguments[2]))
        found = Scrape(registry)
        assert found.one("jobsync_tokens_owned", node="w2") == 5_000
        assert found.one("jobsync_cluster_nodes") is None
        assert sent == []
    mine.dispose()


def test_the_tables_are_read_at_most_so_often(config: CoordinationConfig, engine: Engine) -> None:
    mine = create_engine(engine.url)
    with Job("w1", CoordinationConfig(engine=mine, **QUICK)) as job:
        registry = CollectorRegistry()
        prometheus.register(job, registry=registry, read_every_sec=3600)
        sent: list[str] = []
        event.listen(mine, "before_cursor_execute", lambda *arguments: sent.append(arguments[2]))
        for _ in range(5):
            assert Scrape(registry).one("jobsync_cluster_nodes") == 1
        assert len([sql for sql in sent if "sync_token" in sql]) == 1
        assert len(sent) == 3, "and what limits its time"
    mine.dispose()


def test_a_database_that_does_not_answer(queue: JobQueue, engine: Engine, registry: CollectorRegistry) -> None:
    """Neither a scrape nor the server waits for long, and figures that are too old are not told."""
    registration = prometheus.register(queue, registry=registry, reads="always", read_every_sec=0.1, deadline_sec=0.5)
    queue.submit("mail")
    assert Scrape(registry).one("jobsync_queue_jobs", type="mail", state="pending") == 1
    with engine.begin() as other:
        other.execute(text("LOCK TABLE sync_job"))
        time.sleep(0.1)
        began = time.monotonic()
        found = Scrape(registry)
        assert time.monotonic() - began < 5
        assert found.one("jobsync_jobs_enqueued_total", type="mail") is not None, "what needs no tables is told"
        wait_for(lambda: Scrape(registry).one("jobsync_queue_jobs", type="mail", state="pending") is None, "it is old")
        wait_for(
            lambda: (Scrape(registry).one("jobsync_database_read_failures_total") or 0) >= 1, "the server has given up"
        )
    wait_for(lambda: Scrape(registry).one("jobsync_queue_jobs", type="mail", state="pending") == 1, "it is back")
    registration.unregister()


def test_what_is_forgotten_goes(config: CoordinationConfig, registry: CollectorRegistry) -> None:
    queue = JobQueue(config)
    prometheus.register(queue, registry=registry)
    queue.dispose()
    del queue
    gc.collect()
    list(registry.collect())
    assert list(registry.collect()) == []


@pytest.mark.parametrize(
    ("things", "settings", "message"),
    [
        ((), {}, "needs a Job"),
        (("w1",), {}, "'w1' has no metrics"),
        ((Job("alone"),), {}, "standalone"),
        ((Job("w1", CoordinationConfig(url="postgresql://h/d")),), {"reads": "sometimes"}, "reads='sometimes'"),
        ((Job("w1", CoordinationConfig(url="postgresql://h/d")),), {"read_every_sec": 0}, "read_every_sec=0"),
        ((Job("w1", CoordinationConfig(url="postgresql://h/d")),), {"deadline_sec": True}, "deadline_sec=True"),
    ],
)
def test_what_cannot_be(things: Any, settings: Any, message: str, registry: CollectorRegistry) -> None:
    with pytest.raises(ConfigurationError, match=message):
        prometheus.register(*things, registry=registry, **settings)
    assert list(registry.collect()) == []


def test_everything_in_the_list_is_described(queue: JobQueue, registry: CollectorRegistry) -> None:
    registration = prometheus.register(queue, registry=registry)
    assert {family.name for family in registry.collect()} == {metric.prometheus_name for metric in METRICS}
    registration.unregister()


CHILD = """
    import sys
    import prometheus_client
    from jobsync_orm import CoordinationConfig, JobQueue, observe
    from jobsync_orm.integrations import prometheus

    queue = JobQueue(CoordinationConfig(url=sys.argv[1]))
    prometheus.register(queue, registry=prometheus_client.CollectorRegistry())
    queue.submit("mail")
    assert observe.flush(10)
    queue.dispose()
"""

PARENT = """
    from prometheus_client import CollectorRegistry, generate_latest
    from prometheus_client.multiprocess import MultiProcessCollector

    registry = CollectorRegistry()
    MultiProcessCollector(registry)
    print(generate_latest(registry).decode())
"""


def test_several_processes_behind_one_port(database: URL, tmp_path: Path) -> None:
    environment = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)}

    def run(program: str, *arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, "-W", "error", "-c", textwrap.dedent(program), *arguments],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    for _ in range(2):
        run(CHILD, database.render_as_string(hide_password=False))
    assert 'jobsync_jobs_enqueued_total{appname="sync_",type="mail"} 2.0' in run(PARENT)
