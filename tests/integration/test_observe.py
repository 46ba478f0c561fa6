"""What observers are told, of real nodes, queues and workers."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import pytest
from sqlalchemy import URL, Engine, text
from sqlalchemy.orm import Session

from jobsync_orm import (
    ClaimRefused,
    CoordinationConfig,
    Discard,
    Job,
    JobQueue,
    JobWorker,
    NewJob,
    OwnershipLost,
    Snooze,
    observe,
)
from jobsync_orm.observe import (
    AttemptsEnded,
    EndedAttempt,
    Event,
    Evicted,
    FailedOver,
    FenceRejected,
    Heartbeat,
    JobsClaimed,
    JobsEnqueued,
    JobsRescued,
    NodesTakenForDead,
    NodeStopped,
    OwnershipChanged,
    Rebalanced,
    SessionBroke,
    TaskClaims,
    TokensReleased,
    WokenUp,
    WorkerStopped,
)
from tests.integration.claiming import give_away
from tests.integration.cluster import QUICK, Cluster, wait_for

T = TypeVar("T")


class Heard:
    """The events of some audiences."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def __call__(self, event: Event) -> None:
        self.events.append(event)

    def of(self, kind: type[T]) -> list[T]:
        return [event for event in list(self.events) if isinstance(event, kind)]

    def wait(self, kind: type[T], timeout: float = 30) -> T:
        wait_for(lambda: self.of(kind), kind.__name__, timeout)
        return self.of(kind)[-1]


@pytest.fixture
def heard() -> Heard:
    return Heard()


@pytest.fixture
def config(database: URL) -> CoordinationConfig:
    return CoordinationConfig(url=database, **QUICK)


def test_join_crash_and_leave(config: CoordinationConfig, cluster: Cluster, heard: Heard) -> None:
    job = Job("w1", config)
    job.audience.add(heard)
    with job:
        assert observe.flush(10)
        assert heard.of(OwnershipChanged)[-1] == OwnershipChanged("w1", job.token_version, 10_000, 0)
        (first,) = heard.of(Rebalanced)
        assert (first.node, first.reason, first.moved) == ("w1", "initial", 10_000)
        assert 0 < first.seconds < 30

        other = cluster.add("w2")
        wait_for(lambda: len(other.held()) > 0, "w2 has joined")
        released = heard.wait(TokensReleased)
        assert (released.node, released.tokens) == ("w1", 5_000)
        assert 0 <= released.seconds < 30
        assert [(e.gained, e.lost) for e in heard.of(OwnershipChanged)] == [(10_000, 0), (0, 5_000)]
        assert heard.of(Rebalanced)[-1].reason == "join"
        assert not heard.of(FailedOver)

        other.signal(signal.SIGKILL)
        failed_over = heard.wait(FailedOver)
        assert heard.of(NodesTakenForDead) == [NodesTakenForDead("w1", 1)]
        # From when its lock was first seen free: at least what the leader waits for to be certain.
        assert 2.4 * QUICK["connection_grace_sec"] < failed_over.seconds < 30
        assert heard.of(Rebalanced)[-1].reason == "leave"
        taken = heard.events.index(NodesTakenForDead("w1", 1))
        assert heard.events[taken + 1] in heard.of(Rebalanced), "it plans at once, not after another heartbeat"
        wait_for(lambda: len(job.my_tokens) == 10_000, "w1 has all tokens again")
        beats = heard.of(Heartbeat)
        assert len(beats) > 2
        assert all(0 <= beat.seconds < 10 for beat in beats)
    assert observe.flush(10)
    assert heard.events[-1] == NodeStopped("w1")


def test_death_of_the_leader(config: CoordinationConfig, cluster: Cluster, heard: Heard) -> None:
    """Whoever comes next takes it out, leads, and gives its tokens away: the time counts from the death."""
    leader = cluster.add("w1")
    wait_for(lambda: len(leader.held()) > 0, "w1 leads")
    job = Job("w2", config)
    job.audience.add(heard)
    with job:
        wait_for(lambda: len(job.my_tokens) == 5_000, "they share the tokens")
        assert not heard.of(Rebalanced), "it does not lead"
        leader.signal(signal.SIGKILL)
        assert 0 < heard.wait(FailedOver).seconds < 30
        assert heard.of(NodesTakenForDead) == [NodesTakenForDead("w2", 1)]
        wait_for(lambda: len(job.my_tokens) == 10_000, "w2 has all tokens")
        assert observe.flush(10)
        assert len(heard.of(FailedOver)) == 1
        assert sum(event.moved for event in heard.of(Rebalanced)) == 5_000


def test_broken_connection_and_eviction(config: CoordinationConfig, engine: Engine, heard: Heard) -> None:
    job = Job("w1", config)
    job.audience.add(heard)
    with job:
        with engine.begin() as connection:
            connection.execute(
                text("SELECT pg_terminate_backend(backend_pid) FROM sync_node WHERE name = 'w1'"),
            )
        assert heard.wait(SessionBroke) == SessionBroke("w1")
        wait_for(job.am_i_healthy, "it is back")
        assert not heard.of(Evicted)
        with engine.begin() as connection:
            connection.execute(text("DELETE FROM sync_node WHERE name = 'w1'"))
        assert heard.wait(Evicted) == Evicted("w1")
        wait_for(lambda: len(job.my_tokens) == 10_000, "it has joined anew")


def test_claims_and_checkpoints(config: CoordinationConfig, engine: Engine, heard: Heard) -> None:
    job = Job("w1", config)
    job.audience.add(heard)

    def claims() -> list[tuple[str, int]]:
        assert observe.flush(10)
        found = [(event.result, event.many) for event in heard.of(TaskClaims)]
        heard.events.clear()
        return found

    with job:
        first = job.claim_task("a")
        with pytest.raises(ClaimRefused):
            job.claim_task("a")
        assert claims() == [("taken", 1), ("refused", 1)]
        first.release()
        assert claims() == [("released", 1)]
        many = job.claim_tasks(["a", "b", "c"])
        job.complete_claims(many[:2])
        assert claims() == [("taken", 3), ("completed", 2)]
        with Session(engine) as session:
            many[2].complete(session)
            assert claims() == [], "not before it is committed"
            session.commit()
        assert claims() == [("completed", 1)]
        lost = job.claim_task("d")
        give_away(engine, lost.token, "w2")
        with pytest.raises(OwnershipLost):
            lost.complete()
        with pytest.raises(OwnershipLost):
            job.checkpoint("d", {"row": 1})
        assert observe.flush(10)
        assert [event.where for event in heard.of(FenceRejected)] == ["claim", "checkpoint"]
        assert claims() == [("taken", 1), ("lost", 1)]


class TestQueue:
    @pytest.fixture
    def queue(self, config: CoordinationConfig, heard: Heard) -> Iterator[JobQueue]:
        queue = JobQueue(config)
        queue.audience.add(heard)
        yield queue
        queue.dispose()

    @pytest.fixture
    def start_worker(self, queue: JobQueue) -> Iterator[Callable[..., JobWorker]]:
        started: list[JobWorker] = []

        def start(**options: Any) -> JobWorker:
            worker = JobWorker(queue, **options)
            started.append(worker)
            return worker.start()

        yield start
        for worker in started:
            worker.stop(0)

    def test_enqueued(self, queue: JobQueue, engine: Engine, heard: Heard) -> None:
        queue.submit("mail", idempotency_key="once")
        queue.submit("mail", idempotency_key="once")
        with Session(engine) as session:
            queue.enqueue_many(session, "resize", [{}, {}])
            queue.enqueue_many(session, [NewJob("mail", idempotency_key="once"), NewJob("mail"), NewJob("pay")])
            session.commit()
        assert observe.flush(10)
        assert heard.events == [
            JobsEnqueued("mail", 1),
            JobsEnqueued("resize", 2),
            JobsEnqueued("mail", 1),
            JobsEnqueued("pay", 1),
        ]

    def test_attempts(self, queue: JobQueue, heard: Heard, start_worker: Callable[..., JobWorker]) -> None:
        @queue.handler("work", max_retries=1, backoff=lambda failures, error: 0.01)
        def work(ctx: Any, then: str) -> None:
            if then == "fail":
                raise ValueError("as it is to")
            if then == "discard":
                raise Discard("no use")
            if then == "snooze" and ctx.attempt == 1:
                raise Snooze(seconds=0.01)

        worker = start_worker(node_name="w1", concurrency=2)
        wait_for(lambda: worker.health().turn_sec is not None, "it turns")
        ids = [queue.submit("work", {"then": then}).id for then in ("go on", "fail", "discard", "snooze")]
        wait_for(lambda: all(queue.status(id).finished_at for id in ids), "all have finished")
        heard.wait(WokenUp)  # it may have found them before it was told of them
        worker.stop()
        assert observe.flush(10)
        ended = [attempt for event in heard.of(AttemptsEnded) for attempt in event.attempts]
        assert sorted((attempt.outcome, attempt.state) for attempt in ended) == [
            ("completed", "completed"),
            ("completed", "completed"),
            ("discarded", "failed"),
            ("failed", "failed"),
            ("failed", "retrying"),
            ("snoozed", "scheduled"),
        ]
        assert {attempt.type for attempt in ended} == {"work"}
        assert all(attempt.took is not None and 0 <= attempt.took < 10 for attempt in ended)
        assert all(attempt.waited is not None and 0 <= attempt.waited < 10 for attempt in ended)
        assert sum(event.by_type["work"] for event in heard.of(JobsClaimed)) == 6
        assert heard.events[-1] == WorkerStopped("w1")

    def test_jobs_of_the_dead(
        self, queue: JobQueue, engine: Engine, heard: Heard, start_worker: Callable[..., JobWorker]
    ) -> None:
        queue.register("work", lambda ctx: None)
        job = queue.submit("work")
        with engine.begin() as connection:
            connection.execute(
                text(
                    "UPDATE sync_job SET state = 'processing', attempt = 1, worker = 'gone', started_at = now(),"
                    " deadline = now() + interval '1 hour', incarnation = gen_random_uuid()"
                )
            )
        worker = start_worker(node_name="w1")
        wait_for(lambda: queue.status(job.id).finished_at, "it has been rescued and run")
        worker.stop()
        assert observe.flush(10)
        assert heard.of(JobsRescued) == [JobsRescued("w1", 1)]

    def test_attempt_that_ends_too_late(
        self, queue: JobQueue, engine: Engine, heard: Heard, start_worker: Callable[..., JobWorker]
    ) -> None:
        @queue.handler("work")
        def work(ctx: Any) -> None:
            with engine.begin() as connection:
                connection.execute(text("DELETE FROM sync_job"))

        queue.submit("work")
        worker = start_worker(node_name="w1")
        wait_for(lambda: worker.health().lost == 1, "it has been lost")
        worker.stop()
        assert observe.flush(10)
        (event,) = heard.of(AttemptsEnded)
        (attempt,) = event.attempts
        assert (attempt.type, attempt.outcome, attempt.took) == ("work", "lost", None)
        assert isinstance(attempt, EndedAttempt)


def test_worker_tells_of_its_own_node(config: CoordinationConfig, heard: Heard) -> None:
    queue = JobQueue(config)
    queue.register("work", lambda ctx: None)
    worker = JobWorker(queue, node_name="w1")
    worker.audience.add(heard)
    with worker:
        assert heard.wait(OwnershipChanged).gained == 10_000
        with_job = JobWorker(queue, job=worker.job)
        assert with_job.audience is worker.job.audience is worker.audience
    queue.dispose()
    assert observe.flush(10)
    assert NodeStopped("w1") in heard.events
