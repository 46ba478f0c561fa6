"""Workers run the jobs of a key one at a time, in order, where the key's token is."""

from __future__ import annotations

import json
import threading
import time
from collections import defaultdict
from collections.abc import Callable

import pytest

from jobsync_orm import Backoff, JobContext, JobQueue, JobWorker
from tests.integration.cluster import wait_for
from tests.integration.worker.conftest import Jobs

Start = Callable[..., JobWorker]


class Log:
    """What ran, by key: numbers in the order of their starts, and whether two ever ran at once."""

    def __init__(self, queue: JobQueue, type: str = "step", seconds: float = 0.0) -> None:
        self._guard = threading.Lock()
        self._running: set[str] = set()
        self.overlaps: list[str] = []
        self.starts: dict[str, list[int]] = defaultdict(list)
        self.everything: list[tuple[str, int]] = []
        self.workers: dict[str, set[str]] = defaultdict(set)
        self.go = threading.Event()
        self.go.set()

        def step(ctx: JobContext, i: int) -> None:
            key = str(ctx.key)
            with self._guard:
                if ctx.key is not None and key in self._running:
                    self.overlaps.append(f"{key} {i}")
                self._running.add(key)
                self.starts[key].append(i)
                self.everything.append((key, i))
                self.workers[key].add(ctx.worker)
            self.go.wait(60)
            time.sleep(seconds)
            with self._guard:
                self._running.discard(key)

        queue.register(type, step)


def add(jobs: Jobs, key: str, many: int, type: str = "step", **columns: object) -> list[int]:
    ((token,),) = jobs.sql("SELECT sync_token_of(%s)", key)
    return jobs.add(type, many, key=key, token_id=token, **columns)


def wake(queue: JobQueue, jobs: Jobs, *places: list[object]) -> None:
    jobs.sql("SELECT pg_notify(%s, %s)", queue.names.queue_channel, json.dumps(places))


def test_jobs_of_a_key_run_one_at_a_time_and_in_order(queue: JobQueue, jobs: Jobs, start_worker: Start) -> None:
    log = Log(queue)
    keys = [f"order:{n}" for n in range(30)]
    workers = [start_worker(), start_worker()]
    wait_for(lambda: jobs.sql("SELECT count(*) FROM sync_job_worker") == [(2,)], "each knows of the other")
    for key in keys:
        add(jobs, key, 20)
    jobs.wait(completed=600)
    assert log.overlaps == []
    assert log.starts == {key: list(range(1, 21)) for key in keys}
    owners = {worker.job.node_name: worker.job for worker in workers}
    for key in keys:
        (name,) = log.workers[key]
        assert owners[name].can_claim_task(key)
    assert {name for names in log.workers.values() for name in names} == owners.keys()


def test_a_job_is_run_as_soon_as_it_is_enqueued(queue: JobQueue, jobs: Jobs, start_worker: Start) -> None:
    log = Log(queue)
    start_worker(poll_sec=60)
    for i in range(5):
        queue.submit("step", {"i": i}, key="a", priority=i % 2)
        wake(queue, jobs, ["step", i % 2, True])
        jobs.wait(completed=i + 1)
    assert log.starts == {"a": list(range(5))}


def test_a_hot_key_does_not_slow_the_others(queue: JobQueue, jobs: Jobs, start_worker: Start) -> None:
    log = Log(queue)
    add(jobs, "hot", 3000)
    for n in range(100):
        add(jobs, f"cold:{n}", 2)
    worker = start_worker(concurrency=2)
    cold = "SELECT count(*) FROM sync_job WHERE key <> 'hot' AND state = 'completed'"
    wait_for(lambda: jobs.sql(cold) == [(200,)], "the others are done")
    ((hot,),) = jobs.sql("SELECT count(*) FROM sync_job WHERE key = 'hot' AND state = 'completed'")
    assert hot < 1000
    assert worker._pump is not None
    keyed = worker._pump.keyed
    assert keyed is not None
    wait_for(lambda: len(keyed.keys) <= 1, "the others are forgotten")
    assert log.overlaps == []


def test_urgent_and_old_jobs_go_first_with_a_key_or_without(queue: JobQueue, jobs: Jobs, start_worker: Start) -> None:
    log = Log(queue)
    log.go.clear()
    worker = start_worker(concurrency=1)
    add(jobs, "first", 1)
    jobs.wait(processing=1)
    jobs.add("step", 1, priority=-10)
    add(jobs, "a", 1)
    jobs.add("step", 1, priority=10)
    add(jobs, "b", 1, priority=20)
    jobs.sql("UPDATE sync_job SET payload = '{\"i\": 2}', ready_at = ready_at - interval '1 hour' WHERE priority = -10")
    wake(queue, jobs, ["step", -10, False], ["step", 10, False], ["step", 0, True], ["step", 20, True])
    assert worker._pump is not None
    turn = worker._pump.turned_at
    wait_for(lambda: worker._pump and worker._pump.turned_at > turn + 3, "it has looked")
    log.go.set()
    jobs.wait(completed=5)
    assert log.everything == [("first", 1), ("None", 2), ("b", 1), ("None", 1), ("a", 1)]


@pytest.mark.parametrize("blocks", [True, False])
def test_a_job_that_fails_holds_its_key_or_lets_others_by(
    queue: JobQueue, jobs: Jobs, start_worker: Start, blocks: bool
) -> None:
    ran: list[tuple[int, int]] = []

    @queue.handler("step", retry_blocks_key=blocks, backoff=Backoff(base=0.5, jitter=0))
    def step(ctx: JobContext, i: int) -> None:
        ran.append((i, ctx.attempt))
        if i == 0 and ctx.attempt < 3:
            raise ValueError("not yet")

    for i in range(4):
        queue.submit("step", {"i": i}, key="a")
    start_worker()
    jobs.wait(completed=4)
    if blocks:
        assert ran == [(0, 1), (0, 2), (0, 3), (1, 1), (2, 1), (3, 1)]
    else:
        assert ran == [(0, 1), (1, 1), (2, 1), (3, 1), (0, 2), (0, 3)]


def test_a_key_goes_on_after_a_job_that_failed_for_good(queue: JobQueue, jobs: Jobs, start_worker: Start) -> None:
    @queue.handler("step", max_retries=0)
    def step(ctx: JobContext, i: int) -> None:
        if i == 0:
            raise ValueError("never")

    for i in range(3):
        queue.submit("step", {"i": i}, key="a")
    start_worker()
    jobs.wait(completed=2, failed=1)


def test_a_cancelled_job_frees_its_key(queue: JobQueue, jobs: Jobs, start_worker: Start) -> None:
    log = Log(queue)
    log.go.clear()
    ids = [queue.submit("step", {"i": i}, key="a").id for i in range(3)]
    start_worker()
    jobs.wait(processing=1, pending=2)
    queue.cancel(ids[1])
    log.go.set()
    jobs.wait(completed=2, cancelled=1)
    assert log.starts == {"a": [0, 2]}


def test_a_job_whose_transaction_was_slow_is_found(queue: JobQueue, jobs: Jobs, start_worker: Start) -> None:
    log = Log(queue)
    start_worker(poll_sec=60)
    with queue.engine.connect() as late:
        queue.enqueue(late, "step", {"i": 1}, key="late")
        queue.submit("step", {"i": 1}, key="in time")
        wake(queue, jobs, ["step", 0, True])
        jobs.wait(completed=1)
        late.commit()
    wake(queue, jobs, ["step", 0, True])
    jobs.wait(completed=2)
    assert set(log.starts) == {"late", "in time"}


def test_keys_go_with_their_tokens(queue: JobQueue, jobs: Jobs, start_worker: Start) -> None:
    """Workers join and leave while there is work: nothing is lost, doubled or out of order."""
    log = Log(queue, seconds=0.005)
    keys = [f"order:{n}" for n in range(40)]
    first = start_worker()
    for key in keys:
        add(jobs, key, 30)
    wait_for(lambda: len(log.everything) > 200, "the first worker is at work")
    start_worker()
    wait_for(lambda: len(set().union(*log.workers.values())) == 2, "the second one too")
    start_worker()
    first.stop()
    jobs.wait(completed=1200)
    assert log.overlaps == []
    assert log.starts == {key: list(range(1, 31)) for key in keys}
    assert jobs.outcomes() == {"completed": 1200} or jobs.outcomes().keys() == {"completed", "released"}


def test_a_pinned_key_runs_where_it_is_pinned(queue: JobQueue, jobs: Jobs, start_worker: Start) -> None:
    log = Log(queue)
    cpu = start_worker(node_name="cpu-1")
    keys = [f"image:{n}" for n in range(10)]
    cpu.job.register_locks_bulk([(key, "gpu-%", "needs a GPU") for key in keys])
    wait_for(lambda: not any(cpu.job.can_claim_task(key) for key in keys), "the tokens are parked")
    for key in keys:
        queue.submit("step", {"i": 1}, key=key)
    add(jobs, "other", 3)
    jobs.wait(completed=3, pending=10)
    start_worker(node_name="gpu-1")
    jobs.wait(completed=13)
    assert {name for key in keys for name in log.workers[key]} == {"gpu-1"}


def test_an_owner_that_does_not_run_the_type_stands_in_nobodys_way(
    queue: JobQueue, jobs: Jobs, start_worker: Start
) -> None:
    """A line of two types, handled by two workers: each job runs where its type is, in the order of the line."""
    one, two = Log(queue, "one"), Log(queue, "two")
    start_worker(types=["one"], node_name="w1")
    start_worker(types=["two"], node_name="w2")
    keys = [f"k{n}" for n in range(6)]
    for i in range(4):
        for key in keys:
            queue.submit("one" if i % 2 else "two", {"i": i}, key=key)
    jobs.wait(completed=24)
    assert one.starts == {key: [1, 3] for key in keys}
    assert two.starts == {key: [0, 2] for key in keys}


def test_a_worker_that_stops_holds_up_no_other_keys(queue: JobQueue, jobs: Jobs, start_worker: Start) -> None:
    """What it has begun it finishes; the rest of its keys others take at once, in order."""
    slow, quick = Log(queue, "slow"), Log(queue, "quick")
    slow.go.clear()
    leaving, staying = start_worker(node_name="w1"), start_worker(node_name="w2")
    wait_for(lambda: len(staying.job.my_tokens) == len(leaving.job.my_tokens), "no token moves any more")
    keys = [f"k{n}" for n in range(20)]
    first = next(key for key in keys if leaving.job.can_claim_task(key))
    add(jobs, first, 1, "slow")
    jobs.wait(processing=1)
    stopping = threading.Thread(target=leaving.stop)
    stopping.start()
    try:
        for key in keys:
            add(jobs, key, 2, "quick")
        jobs.wait(completed=38, processing=1, pending=2)
    finally:
        slow.go.set()
        stopping.join()
    jobs.wait(completed=41)
    assert slow.workers == {first: {"w1"}}
    assert quick.workers == {key: {"w2"} for key in keys}
    assert quick.starts == {key: [1, 2] for key in keys}
