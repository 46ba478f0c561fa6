"""Which job of a key may be claimed, and by whom: order, exclusivity and affinity, as the database keeps them."""

from __future__ import annotations

import json
import random
import threading
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest
from sqlalchemy import Engine, create_engine

from jobsync_orm.coordinator.session import StatementFailed
from jobsync_orm.queue.statements import COLLIDED
from tests.conftest import Server
from tests.integration.cluster import wait_for
from tests.integration.queue.keyed import BEGINNING, Board, Claimer


@pytest.fixture(scope="module")
def shared_engine(server: Server, template: str) -> Iterator[Engine]:
    """One database for all tests of this file: they are many, and small."""
    url = server.create_database(template)
    engine = create_engine(url)
    yield engine
    engine.dispose()
    server.drop_database(url)


@pytest.fixture
def board(shared_engine: Engine) -> Iterator[Board]:
    board = Board(shared_engine)
    board.clear()
    yield board
    board.close()


@pytest.fixture
def claimer(board: Board) -> Claimer:
    """The only worker, owner of every token."""
    return board.claimer("w1", tokens="true")


def ids(found: Any) -> list[int]:
    return [job.id for job in found.jobs]


def connect(board: Board) -> psycopg.Connection[Any]:
    return psycopg.connect(board.engine.url.set(drivername="postgresql").render_as_string(hide_password=False))


# -- one at a time, in order ---------------------------------------------------------------------------------------


def test_one_job_of_each_key_the_oldest_first(board: Board, claimer: Claimer) -> None:
    jobs = {key: [board.add(key) for _ in range(3)] for key in ("a", "b")}
    found = claimer.heads("b", "a", "c")
    assert sorted(ids(found)) == sorted([jobs["a"][0], jobs["b"][0]])
    assert found.left == {"c": "empty"}
    assert {key: place[:2] for key, place in found.more.items()} == {"a": ["t", 0], "b": ["t", 0]}
    assert {(job.key, job.attempt) for job in found.jobs} == {("a", 1), ("b", 1)}
    assert claimer.heads("a", "b").left == {"a": "processing", "b": "processing"}
    for job in found.jobs:
        claimer.settle(job)
    assert sorted(ids(claimer.heads("a", "b"))) == sorted([jobs["a"][1], jobs["b"][1]])


def test_the_last_in_line_is_said_to_be_the_last(board: Board, claimer: Claimer) -> None:
    board.add("a"), board.add("b"), board.add("b", state="completed")
    assert claimer.heads("a", "b").more == {}


@pytest.mark.parametrize("state", ["completed", "failed", "cancelled"])
def test_a_head_that_has_ended_frees_its_key(board: Board, claimer: Claimer, state: str) -> None:
    first, second = board.add("a"), board.add("a")
    (job,) = claimer.heads("a").jobs
    claimer.settle(job, state)
    assert board.state(first) == state
    assert ids(claimer.heads("a")) == [second]


def test_a_head_that_backs_off_holds_its_key(board: Board, claimer: Claimer) -> None:
    first, _ = board.add("a"), board.add("a")
    (job,) = claimer.heads("a").jobs
    claimer.settle(job, "retrying", 60)
    found = claimer.heads("a")
    assert found.left == {"a": "retrying"}
    assert 50 < (found.waits["a"] or 0) <= 60
    board.execute("UPDATE sync_job SET state = 'pending' WHERE id = %s", first)
    assert ids(claimer.heads("a")) == [first]


def test_a_head_that_lets_others_by_does(board: Board, claimer: Claimer) -> None:
    first, second, third = board.add("a", retry_blocks_key=False), board.add("a"), board.add("a")
    (job,) = claimer.heads("a").jobs
    claimer.settle(job, "retrying", 60)
    (job,) = claimer.heads("a").jobs
    assert job.id == second
    board.execute("UPDATE sync_job SET state = 'pending' WHERE id = %s", first)
    claimer.settle(job)
    assert ids(claimer.heads("a")) == [first]
    assert board.state(third) == "pending"


@pytest.mark.parametrize("state", ["scheduled", "blocked"])
def test_a_job_for_later_takes_its_place_when_it_is_ready(board: Board, claimer: Claimer, state: str) -> None:
    later, _, third = board.add("a", state=state), board.add("a"), board.add("a")
    (job,) = claimer.heads("a").jobs
    board.execute("UPDATE sync_job SET state = 'pending' WHERE id = %s", later)
    assert claimer.heads("a").left == {"a": "processing"}
    claimer.settle(job)
    (job,) = claimer.heads("a").jobs
    assert job.id == later
    claimer.settle(job)
    assert ids(claimer.heads("a")) == [third]


def test_a_type_that_may_not_be_taken_keeps_its_place(board: Board, claimer: Claimer) -> None:
    board.add("a", type="paused"), board.add("a")
    assert claimer.heads("a").left == {"a": "type"}


def test_a_job_of_a_worker_that_died_goes_first_again(board: Board, claimer: Claimer) -> None:
    dead = board.claimer("w0")
    board.execute("UPDATE sync_token SET node = 'w0'")
    first, _ = board.add("a"), board.add("a")
    assert ids(dead.heads("a")) == [first]
    board.execute("UPDATE sync_token SET node = 'w1'")
    assert claimer.heads("a").left == {"a": "processing"}
    board.execute("DELETE FROM sync_node WHERE name = 'w0'")
    claimer.session.execute(claimer.sql.rescue, 10, timeout=10)
    (job,) = claimer.heads("a").jobs
    assert (job.id, job.attempt, job.failures) == (first, 2, 1)


# -- with others at the same time ----------------------------------------------------------------------------------


def test_a_head_that_another_is_just_claiming_is_not_passed_by(board: Board, claimer: Claimer) -> None:
    first, _ = board.add("a"), board.add("a")
    with connect(board) as other:
        other.execute("SELECT 1 FROM sync_job WHERE id = %s FOR UPDATE", [first])
        assert claimer.heads("a").left == {"a": "taken"}
    assert ids(claimer.heads("a")) == [first]


def test_a_straggler_waits_for_the_one_that_was_seen_before_it(board: Board, claimer: Claimer) -> None:
    with connect(board) as late:
        straggler = board.add("a", on=late)
        second = board.add("a")
        (job,) = claimer.heads("a").jobs
        assert job.id == second
    assert claimer.heads("a").left == {"a": "processing"}
    claimer.settle(job)
    assert ids(claimer.heads("a")) == [straggler]


def test_of_two_that_claim_different_jobs_of_a_key_one_is_refused(board: Board, claimer: Claimer) -> None:
    other = board.claimer("w2", works=False)
    with connect(board) as late, connect(board) as first:
        straggler = board.add("a", on=late)
        second = board.add("a")
        raw = psycopg.RawCursor(first)
        unsaid = [[None]] * 3
        raw.execute(claimer.sql.heads, [claimer.name, claimer.incarnation, claimer.types, True, ["a"], *unsaid])
        late.commit()
        with ThreadPoolExecutor(1) as pool:
            # Sees the straggler at the head of the line, and cannot see the claim.
            other.affinity = False
            refused = pool.submit(other.heads, "a")
            waiting = "SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
            wait_for(lambda: board.execute(waiting), "the second claim waits")
            first.commit()
            with pytest.raises(StatementFailed) as error:
                refused.result(20)
    assert error.value.sqlstate in COLLIDED
    assert other.heads("a").left == {"a": "processing"}
    assert (board.state(straggler), board.state(second)) == ("pending", "processing")


def test_what_was_enqueued_after_another_was_committed_runs_after_it(board: Board, claimer: Claimer) -> None:
    """However far the reader has come meanwhile: the first one was written before the mark, and committed past it."""
    with connect(board) as late:
        first = board.add("a", on=late)
        board.add("b")
        (mark,), found = claimer.discover()
        assert [key for key, *_ in found] == ["b"]
    second = board.add("a")
    _, found = claimer.discover([tuple(mark[:3])])
    assert [key for key, *_ in found] == ["a"]
    (job,) = claimer.heads("a").jobs
    assert job.id == first
    claimer.settle(job)
    assert ids(claimer.heads("a")) == [second]


def test_many_claimers_at_once(board: Board) -> None:
    """Each key's jobs are claimed in the order of its commits, one at a time, each once, whoever claims."""
    keys, each = [f"key {n}" for n in range(12)], 12
    claimers = [board.claimer(f"w{n}") for n in range(4)]
    guard = threading.Lock()
    live: dict[str, int] = {}
    done: dict[str, list[int]] = defaultdict(list)
    wrong: list[str] = []
    enqueued: dict[str, list[int]] = defaultdict(list)
    rivals: list[int] = []
    stop = threading.Event()

    def produce(part: int) -> None:
        """Each key's jobs one after another, each beside a straggler that commits after the next one."""
        mine = keys[part::3]
        with connect(board) as connection, connect(board) as late:
            for n in range(each):
                for key in mine:
                    if n % 3 == 1:
                        rivals.append(board.add(key, on=late))
                    enqueued[key].append(board.add(key, on=connection))
                    connection.commit()
                late.commit()

    def claim(claimer: Claimer) -> None:
        claimer.affinity = False
        rng = random.Random(claimer.name)
        while not stop.is_set():
            try:
                found = claimer.heads(*rng.sample(keys, 8))
            except StatementFailed as error:
                if error.sqlstate not in COLLIDED:
                    wrong.append(str(error))
                continue
            with guard:
                wrong.extend(
                    f"{job.key}: {job.id} beside {live[str(job.key)]}"
                    for job in found.jobs
                    if live.setdefault(str(job.key), job.id) != job.id
                )
            for job in found.jobs:
                with guard:
                    done[str(job.key)].append(job.id)
                    del live[str(job.key)]
                while not claimer.settle(job):  # another, which was too late to claim it, has its row for a moment
                    pass

    total = len(keys) * (each + each // 3)
    with ThreadPoolExecutor(8) as pool:
        try:
            work = [pool.submit(claim, claimer) for claimer in claimers] + [pool.submit(produce, n) for n in range(3)]
            wait_for(
                lambda: sum(map(len, done.values())) >= total or any(w.done() and w.exception() for w in work),
                "all jobs",
            )
        finally:
            stop.set()
        for future in work:
            future.result()
    assert wrong == []
    late = set(rivals)
    for key in keys:
        assert len(done[key]) == len(set(done[key]))
        assert [job for job in done[key] if job not in late] == enqueued[key]
    assert sum(map(len, done.values())) == total


# -- whose key -----------------------------------------------------------------------------------------------------


def test_a_key_is_claimed_by_the_owner_of_its_token(board: Board) -> None:
    mine, other = board.claimer("w1"), board.claimer("w2")
    board.add("a")
    board.owner("a", "w1")
    assert other.heads("a").left == {"a": "elsewhere"}
    assert (other.discover()[1], other.lines()[0]) == ([], [])
    assert [key for key, *_ in mine.discover()[1]] == [key for key, *_ in mine.lines()[0]] == ["a"]
    assert len(mine.heads("a").jobs) == 1


def test_while_a_token_is_handed_over_nobody_claims(board: Board) -> None:
    workers = [board.claimer("w1"), board.claimer("w2")]
    board.add("a")
    board.owner("a", "w1", "w2")
    assert [worker.heads("a").left for worker in workers] == [{"a": "elsewhere"}] * 2
    board.owner("a", "w2")
    assert len(workers[1].heads("a").jobs) == 1


@pytest.mark.parametrize("owner", [None, "web", "another type", "silent", "gone"])
def test_keys_of_an_owner_that_does_not_do_this_work_are_shared(board: Board, owner: str | None) -> None:
    workers = [board.claimer(f"w{n}") for n in range(3)]
    board.claimer("web", works=False)
    board.claimer("another type", "x")
    board.claimer("silent")
    board.execute("UPDATE sync_job_worker SET seen_at = seen_at - interval '1 hour' WHERE node = 'silent'")
    board.execute("UPDATE sync_token SET node = %s", owner)
    keys = [f"k{n}" for n in range(30)]
    for key in keys:
        board.add(key)
    shares = [{key for key, *_ in worker.discover()[1]} for worker in workers]
    assert sorted(key for share in shares for key in share) == sorted(keys)
    assert all(shares)
    for worker, share in zip(workers, shares, strict=True):
        assert {key for key, *_ in worker.lines()[0]} == share
        found = worker.heads(*keys)
        assert {job.key for job in found.jobs} == share
        assert set(found.left.values()) <= {"elsewhere", "processing"}


def test_a_pinned_key_waits_for_its_owner(board: Board) -> None:
    worker = board.claimer("w1")
    board.add("a")
    board.pin("a", "gpu-%")
    for owner in (None, "web"):
        board.owner("a", owner)
        assert worker.heads("a").left == {"a": "elsewhere"}
    board.execute("UPDATE sync_lock SET expires_at = clock_timestamp()")
    assert len(worker.heads("a").jobs) == 1


def test_a_pinned_key_is_claimed_by_its_owner(board: Board) -> None:
    worker = board.claimer("gpu-1")
    board.add("a")
    board.pin("a", "gpu-%")
    board.owner("a", "gpu-1")
    assert len(worker.heads("a").jobs) == 1


def test_one_that_is_no_member_any_more_claims_nothing(board: Board, claimer: Claimer) -> None:
    board.add("a")
    board.execute("UPDATE sync_node SET state = 'away'")
    assert claimer.heads("a").left == {"a": "elsewhere"}
    board.execute("UPDATE sync_node SET state = 'active', incarnation = gen_random_uuid()")
    assert claimer.heads("a").left == {"a": "elsewhere"}
    assert (claimer.discover()[1], claimer.lines()[0]) == ([], [])


def test_without_affinity_anybody_claims(board: Board) -> None:
    board.claimer("w1", tokens="true")
    stranger = Claimer(board.engine, "by hand", None, ["t"])
    board.claimers.append(stranger)
    stranger.affinity = False
    job = board.add("a")
    assert [key for key, *_ in stranger.discover()[1]] == [key for key, *_ in stranger.lines()[0]] == ["a"]
    assert ids(stranger.heads("a")) == [job]


# -- finding keys --------------------------------------------------------------------------------------------------


def test_discover_goes_on_where_it_stopped(board: Board, claimer: Claimer) -> None:
    for n in range(5):
        board.add(f"k{n}")
        board.add("hot")
    mark, seen, rows = (0, BEGINNING, 0), [], 0
    while True:
        marks, found = claimer.discover([mark], 3)
        if not marks:
            break
        ((*place, count),) = marks
        mark, rows = tuple(place), rows + count
        seen += [key for key, *_ in found]
    assert rows == 10
    assert [key for key in seen if key != "hot"] == [f"k{n}" for n in range(5)]
    assert 1 < seen.count("hot") < 5


def test_discover_looks_at_each_priority_by_itself(board: Board, claimer: Claimer) -> None:
    for n in range(3):
        for priority in (10, 0, -10):
            board.add(f"{priority}/{n}", priority=priority)
    ((_, at, _, _),), _ = claimer.discover([(10, BEGINNING, 0)], 2)
    marks, found = claimer.discover([(10, at, 10**15), (0, BEGINNING, 0), (-5, BEGINNING, 0)], 2)
    assert {mark[0]: mark[3] for mark in marks} == {10: 1, 0: 2}
    assert [(key, priority) for key, _, priority, _ in found] == [("0/0", 0), ("0/1", 0), ("10/2", 10)]


def test_lines_shows_each_key_once_however_long_its_line(board: Board, claimer: Claimer) -> None:
    for key in ("b", "a", "c", "d"):
        for _ in range(4):
            board.add(key)
    board.add("e", type="x"), board.add("f", state="retrying", run_at="2100-01-01"), board.add("f")
    claimer.heads("a")
    found, last = claimer.lines("", 3)
    assert ([key for key, *_ in found], last) == (["b", "c"], "c")
    found, last = claimer.lines("c", 4)
    assert ([key for key, *_ in found], last) == (["d"], None)


def test_lines_begins_with_the_empty_key(board: Board, claimer: Claimer) -> None:
    for key in ("", "", "a", "ab", "b"):
        board.add(key)
    assert [key for key, *_ in claimer.lines()[0]] == ["", "a", "ab", "b"]
    assert [key for key, *_ in claimer.lines("a")[0]] == ["ab", "b"]


def test_what_it_costs_does_not_grow_with_a_hot_key(board: Board, claimer: Claimer) -> None:
    """Whatever the planner thinks of the table: the index is walked from key to key, never along one."""
    add = "INSERT INTO sync_job (type, state, key, token_id) SELECT 't', %s, %s, sync_token_of(%s)"
    board.execute(add + " FROM generate_series(1, 3000)", "pending", "hot", "hot")
    board.execute(add + " FROM generate_series(1, 3000)", "completed", "hot", "hot")
    for n in range(20):
        board.add(f"cold {n}")
    keys = "{hot," + ",".join(f'"cold {n}"' for n in range(20)) + "}"

    def rows_read(sql: str, *more: object) -> int:
        rows = claimer.session.execute(
            "EXPLAIN (ANALYZE, FORMAT JSON) " + sql, claimer.name, claimer.incarnation, "{t}", True, *more, timeout=30
        )
        board.execute("UPDATE sync_job SET state = 'pending', deadline = NULL WHERE state = 'processing'")

        def walk(plan: dict[str, Any]) -> int:
            own = 0
            if plan.get("Relation Name") == "sync_job" and "Scan" in plan["Node Type"]:
                removed = plan.get("Rows Removed by Filter", 0) + plan.get("Rows Removed by Join Filter", 0)
                own = round((plan["Actual Rows"] + removed) * plan["Actual Loops"])
            return own + sum(walk(child) for child in plan.get("Plans", ()))

        return walk(json.loads(rows[0][0] or "")[0]["Plan"])

    for _ in range(2):
        assert rows_read(claimer.sql.heads, keys, "{NULL}", "{NULL}", "{NULL}") < 200
        assert rows_read(claimer.sql.lines, "", 100) < 50
        assert rows_read(claimer.sql.discover, "{0}", f"{{{BEGINNING}}}", "{0}", "{10}") < 50
        board.execute("VACUUM ANALYZE sync_job")
