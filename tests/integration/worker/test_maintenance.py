"""Each duty of a worker, on a real database, turn by turn."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest
from sqlalchemy import URL

from jobsync_orm import CoordinationConfig
from jobsync_orm.coordinator.session import Session
from jobsync_orm.coordinator.waker import Waker
from jobsync_orm.queue.statements import SESSION, QueueStatements
from jobsync_orm.worker.chores import Duty
from jobsync_orm.worker.maintenance import (
    BATCH,
    Figures,
    Orders,
    Place,
    Presence,
    Promotion,
    Rescue,
    Unblocking,
)
from tests.conftest import dsn

ALIVE, DEAD, OTHER = (str(uuid.UUID(int=n << 64, version=4)) for n in (5, 3, 7))


class Table:
    """The queue's tables, written past the library."""

    def __init__(self, url: URL) -> None:
        self.connection = psycopg.connect(dsn(url), autocommit=True)

    def all(self, sql: str, *values: Any) -> list[tuple[Any, ...]]:
        cursor = self.connection.execute(sql.encode(), values)
        return cursor.fetchall() if cursor.description else []

    def value(self, sql: str, *values: Any) -> Any:
        return self.all(sql, *values)[0][0]

    def job(self, **columns: Any) -> int:
        """Insert one job; values in ``sql(...)`` are expressions."""
        columns = {"type": "t", **columns}
        if columns.get("key"):
            columns.setdefault("token_id", 1)
        if columns.get("state") == "processing":
            columns = {
                "attempt": 1,
                "worker": "w",
                "started_at": sql("now()"),
                "deadline": sql("now() + '1 h'"),
            } | columns
        marks = ", ".join(c if isinstance(c, sql) else "%s" for c in columns.values())
        values = [c for c in columns.values() if not isinstance(c, sql)]
        return int(self.value(f"INSERT INTO sync_job ({', '.join(columns)}) VALUES ({marks}) RETURNING id", *values))

    def jobs(self, count: int, columns: str, values: str) -> None:
        """Insert many; ``values`` may name ``n``."""
        self.all(
            f"INSERT INTO sync_job (type, {columns}) SELECT 't', {values} FROM generate_series(1, {count}) AS s (n)"
        )

    def state(self, id: int) -> str:
        return str(self.value("SELECT state FROM sync_job WHERE id = %s", id))

    def attempts(self) -> list[tuple[Any, ...]]:
        return self.all("SELECT job_id, attempt, worker, outcome, error FROM sync_job_attempt ORDER BY 1, 2")

    def node(self, name: str, incarnation: str, state: str = "active") -> None:
        self.all(
            "INSERT INTO sync_node (name, ordinal, incarnation, state, weight, can_lead, heartbeat_timeout_sec,"
            " connection_grace_sec, rejoin_grace_sec, labels, host, pid, version, registered_at, join_epoch,"
            " last_heartbeat, applied_epoch) VALUES (%s, nextval('sync_node_ordinal_seq'), %s, %s, 1, true, 15, 0.5,"
            " 0, '{}', 'h', 1, '', now(), 1, now(), 0)",
            name,
            incarnation,
            state,
        )

    def depends(self, job: int, *after: int) -> None:
        for one in after:
            self.all("INSERT INTO sync_job_dependency VALUES (%s, %s)", one, job)


class sql(str):
    """An expression, not a value."""


@pytest.fixture
def table(database: URL) -> Iterator[Table]:
    table = Table(database)
    yield table
    table.connection.close()


@pytest.fixture
def statements(database: URL) -> QueueStatements:
    return QueueStatements(CoordinationConfig(url=database).names)


@pytest.fixture
def make_session(database: URL) -> Iterator[Callable[[], Session]]:
    made: list[Session] = []
    waker = Waker()

    def make() -> Session:
        pool = CoordinationConfig(url=database).connection_pool()
        session = Session(pool, waker.descriptor, lambda _: None, 1.0, SESSION)
        session.open()
        made.append(session)
        return session

    yield make
    for session in made:
        session.close()
    waker.close()


@pytest.fixture
def session(make_session: Callable[[], Session]) -> Session:
    return make_session()


def is_due(duty: Duty) -> bool:
    return duty.due_at() <= time.monotonic()


class Ready(list[Place]):
    """Collects places, and how often it was called."""

    calls = 0

    def __call__(self, places: list[Place]) -> None:
        self.calls += 1
        self.extend(places)


class TestPromotion:
    def test_what_is_due_becomes_ready_and_the_next_moment_is_known(
        self, table: Table, session: Session, statements: QueueStatements
    ) -> None:
        ready = Ready()
        duty = Promotion(statements, ready)
        first = table.job(state="scheduled", run_at=sql("now() - interval '1 s'"), priority=3)
        second = table.job(state="retrying", run_at=sql("now()"), key="k")
        third = table.job(state="scheduled", run_at=sql("now() + interval '0.4 s'"))
        far = table.job(state="scheduled", run_at=sql("now() + interval '1 d'"))
        assert is_due(duty)
        duty.run(session)
        assert sorted(ready) == [("t", 0, True), ("t", 3, False)]
        assert [table.state(id) for id in (first, second, third, far)] == [
            "pending",
            "pending",
            "scheduled",
            "scheduled",
        ]
        assert table.value("SELECT bool_and(ready_at > run_at) FROM sync_job WHERE state = 'pending'")
        assert 0 < duty.due_at() - time.monotonic() <= 0.4
        time.sleep(duty.due_at() - time.monotonic())
        duty.run(session)
        assert (table.state(third), table.state(far)) == ("pending", "scheduled")

    def test_a_job_snoozed_until_long_ago_is_due(
        self, table: Table, session: Session, statements: QueueStatements
    ) -> None:
        jobs = [table.job(state="scheduled", run_at=sql(at)) for at in ("timestamptz '1960-01-01'", "now()")]
        duty = Promotion(statements, Ready())
        duty.run(session)
        assert {table.state(job) for job in jobs} == {"pending"}

    def test_more_than_a_batch_is_due_again_at_once(
        self, table: Table, session: Session, statements: QueueStatements
    ) -> None:
        duty = Promotion(statements, Ready())
        table.jobs(BATCH + 5, "state, run_at", "'scheduled', now() - interval '1 s'")  # all at one moment
        duty.run(session)
        assert is_due(duty)
        duty.run(session)
        assert table.value("SELECT count(*) FROM sync_job WHERE state = 'pending'") == BATCH + 5
        assert not is_due(duty)

    def test_a_job_before_the_mark_is_found_later(
        self, table: Table, session: Session, statements: QueueStatements
    ) -> None:
        duty = Promotion(statements, Ready(), poll_sec=60)
        table.job(state="scheduled", run_at=sql("now()"))
        duty.run(session)
        late = table.job(state="scheduled", run_at=sql("now() - interval '1 h'"))  # committed an hour late
        duty.run(session)
        assert table.state(late) == "scheduled"
        duty._from_start.at = 0  # as after poll_sec
        duty.run(session)
        assert table.state(late) == "pending"

    def test_looks_again_where_another_worker_was_faster(
        self, table: Table, session: Session, statements: QueueStatements
    ) -> None:
        ready = Ready()
        duty = Promotion(statements, ready)
        job = table.job(state="scheduled", run_at=sql("now() + interval '0.1 s'"))
        duty.run(session)
        assert ready.calls == 0
        table.all("UPDATE sync_job SET state = 'pending' WHERE id = %s", job)
        time.sleep(0.1)
        duty.run(session)
        assert ready.calls == 1

    def test_comes_earlier_for_a_job_it_is_told_of(self, session: Session, statements: QueueStatements) -> None:
        duty = Promotion(statements, Ready(), poll_sec=60)
        duty.run(session)
        assert duty.due_at() - time.monotonic() > 50
        duty.expect(2)
        assert 1 < duty.due_at() - time.monotonic() <= 2

    def test_a_job_that_somebody_holds_is_left(
        self, table: Table, session: Session, statements: QueueStatements, database: URL
    ) -> None:
        job = table.job(state="scheduled", run_at=sql("now()"))
        with psycopg.connect(dsn(database)) as other:
            other.execute("SELECT 1 FROM sync_job FOR UPDATE")
            Promotion(statements, Ready()).run(session)
            assert table.state(job) == "scheduled"


class TestRescue:
    @pytest.fixture
    def ready(self) -> Ready:
        return Ready()

    @pytest.fixture
    def duty(self, table: Table, statements: QueueStatements, ready: Ready) -> Rescue:
        table.node("alive", ALIVE)
        table.node("other", OTHER)
        table.all(
            "INSERT INTO sync_job_worker (node, incarnation, types, concurrency) VALUES ('alive', %s, '{}', 1)",
            ALIVE,
        )
        return Rescue(statements, "alive", ready)

    # Before, between and after the incarnations of the members.
    @pytest.mark.parametrize("n", [1, 6, 2**61])
    def test_jobs_of_the_dead_are_ready_again(
        self, table: Table, session: Session, duty: Rescue, ready: Ready, n: int
    ) -> None:
        dead, deader = str(uuid.UUID(int=n << 64, version=4)), str(uuid.UUID(int=(n << 64) + 1, version=4))
        lost = table.job(state="processing", incarnation=dead, priority=4, ready_at=sql("now() - interval '1 h'"))
        keyed = table.job(state="processing", incarnation=deader, key="k", worker="v", attempt=7)
        kept = [table.job(state="processing", incarnation=living) for living in (ALIVE, OTHER)]
        placed = table.value("SELECT ready_at FROM sync_job WHERE id = %s", lost)
        duty.run(session)
        assert [table.state(id) for id in (lost, keyed, *kept)] == ["pending", "pending", "processing", "processing"]
        assert sorted(ready) == [("t", 0, True), ("t", 4, False)]
        assert table.attempts() == [
            (lost, 1, "w", "died", "worker w died"),
            (keyed, 7, "v", "died", "worker v died"),
        ]
        row = table.all("SELECT ready_at, failures, attempt, incarnation, deadline FROM sync_job WHERE id = %s", lost)
        assert row == [(placed, 1, 1, None, None)]
        assert duty.rescued == 2
        duty.at_once()
        duty.run(session)
        assert len(table.attempts()) == 2

    def test_a_node_that_is_away_is_dead_and_one_that_joins_is_not(
        self, table: Table, session: Session, duty: Rescue
    ) -> None:
        table.all("UPDATE sync_node SET state = CASE name WHEN 'other' THEN 'away' ELSE 'joining' END")
        away, joining = (table.job(state="processing", incarnation=living) for living in (OTHER, ALIVE))
        duty.run(session)
        assert (table.state(away), table.state(joining)) == ("pending", "processing")

    def test_an_earlier_life_of_a_member_is_dead(self, table: Table, session: Session, duty: Rescue) -> None:
        job = table.job(state="processing", incarnation=OTHER)
        table.all("UPDATE sync_node SET incarnation = %s WHERE name = 'other'", str(uuid.uuid4()))
        duty.run(session)
        assert table.state(job) == "pending"

    def test_nothing_is_taken_while_the_cluster_rests(self, table: Table, session: Session, duty: Rescue) -> None:
        """All members have to join anew after a failover, and what they hold is kept for them."""
        job = table.job(state="processing", incarnation=DEAD)
        table.all("UPDATE sync_cluster SET rest_until = now() + interval '1 h'")
        duty.run(session)
        assert table.state(job) == "processing"
        table.all("UPDATE sync_cluster SET rest_until = now() - interval '1 s'")
        duty.at_once()
        duty.run(session)
        assert table.state(job) == "pending"

    def test_the_last_try_fails_the_job(self, table: Table, session: Session, duty: Rescue, ready: Ready) -> None:
        job = table.job(state="processing", incarnation=DEAD, failures=3, max_retries=3)
        last = table.job(state="processing", incarnation=DEAD, failures=2, max_retries=3)
        duty.run(session)
        assert (table.state(job), table.state(last)) == ("failed", "pending")
        found = table.all("SELECT failures, error, finished_at IS NOT NULL FROM sync_job WHERE id = %s", job)
        assert found == [(4, "worker w died", True)]
        assert ready == [("t", 0, False)]

    def test_a_job_to_be_cancelled_is_cancelled(
        self, table: Table, session: Session, duty: Rescue, ready: Ready
    ) -> None:
        job = table.job(state="processing", incarnation=DEAD, cancel_requested=True)
        duty.run(session)
        assert table.state(job) == "cancelled"
        assert table.value("SELECT finished_at FROM sync_job WHERE id = %s", job)
        assert not ready

    def test_without_an_incarnation_only_the_deadline_counts(
        self, table: Table, session: Session, duty: Rescue
    ) -> None:
        kept = table.job(state="processing", incarnation=None)
        late = table.job(state="processing", incarnation=None, deadline=sql("now() - interval '1 s'"))
        duty.run(session)
        assert (table.state(kept), table.state(late)) == ("processing", "pending")
        assert table.attempts() == [(late, 1, "w", "died", "worker w held the job past its deadline")]

    def test_the_living_may_not_hold_a_job_for_ever(self, table: Table, session: Session, duty: Rescue) -> None:
        late = table.job(state="processing", incarnation=ALIVE, deadline=sql("now() - interval '1 s'"))
        duty.run(session)
        assert table.state(late) == "pending"

    def test_deadlines_are_one_workers_work(
        self, table: Table, session: Session, statements: QueueStatements, duty: Rescue
    ) -> None:
        table.all(
            "INSERT INTO sync_job_worker (node, incarnation, types, concurrency) VALUES ('other', %s, '{}', 1)",
            OTHER,
        )
        late = table.job(state="processing", incarnation=ALIVE, deadline=sql("now() - interval '1 s'"))
        Rescue(statements, "other", Ready()).run(session)
        assert table.state(late) == "processing"
        # ... and the next one's as soon as that one is not heard of any more, though it is a member.
        table.all("UPDATE sync_job_worker SET seen_at = now() - interval '11 s' WHERE node = 'alive'")
        Rescue(statements, "other", Ready()).run(session)
        assert table.state(late) == "pending"

    def test_more_than_a_batch(self, table: Table, session: Session, duty: Rescue) -> None:
        table.jobs(
            BATCH + 5, "state, attempt, deadline, worker, started_at, incarnation",
            f"'processing', 1, now() + interval '1 h', 'w', now(), '{DEAD}'",
        )  # fmt: skip
        duty.run(session)
        assert is_due(duty)
        duty.run(session)
        assert table.value("SELECT count(*) FROM sync_job WHERE state = 'pending'") == BATCH + 5
        assert len(table.attempts()) == BATCH + 5
        assert not is_due(duty)

    def test_two_at_once_write_each_attempt_once(
        self, table: Table, make_session: Callable[[], Session], statements: QueueStatements, duty: Rescue
    ) -> None:
        total = 3 * BATCH
        table.jobs(
            total, "state, attempt, deadline, worker, started_at, incarnation",
            f"'processing', 1, now() + interval '1 h', 'w', now(), '{DEAD}'",
        )  # fmt: skip
        duties = [Rescue(statements, "alive", Ready()) for _ in range(3)]
        sessions = [make_session() for _ in duties]

        def rescue(one: Rescue, session: Session) -> None:
            for _ in range(6):
                one.at_once()
                one.run(session)

        threads = [threading.Thread(target=rescue, args=pair) for pair in zip(duties, sessions, strict=True)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sum(one.rescued for one in duties) == total
        assert table.all("SELECT DISTINCT state, failures FROM sync_job") == [("pending", 1)]
        assert len(table.attempts()) == total

    def test_a_job_that_somebody_holds_is_left(
        self, table: Table, session: Session, duty: Rescue, database: URL
    ) -> None:
        free, held = (table.job(state="processing", incarnation=DEAD) for _ in range(2))
        with psycopg.connect(dsn(database)) as other:
            other.execute("SELECT 1 FROM sync_job WHERE id = %s FOR UPDATE", (held,))
            duty.run(session)
            assert (table.state(free), table.state(held)) == ("pending", "processing")

    def test_a_job_that_a_new_member_took_meanwhile_is_its_own(
        self, table: Table, session: Session, duty: Rescue, database: URL
    ) -> None:
        """The statement goes by the world as it was when it began, but by the row as it is when it locks it."""
        job = table.job(state="processing", incarnation=DEAD)
        slow = "CREATE FUNCTION slow(uuid) RETURNS uuid LANGUAGE sql AS 'SELECT $1 FROM pg_sleep(0.4)'"
        table.all(slow)
        sql = duty._statements.rescue.replace("j.incarnation = d.incarnation", "j.incarnation = slow(d.incarnation)")
        assert "slow" in sql
        rescuer = threading.Thread(target=session.execute, args=(sql, BATCH), kwargs={"timeout": 10})
        rescuer.start()
        time.sleep(0.2)
        # The dead one's job is rescued and taken by a member that joined after the statement began.
        table.all("UPDATE sync_job SET incarnation = %s, attempt = 2 WHERE id = %s", str(uuid.UUID(int=6 << 64)), job)
        rescuer.join()
        assert table.state(job) == "processing"
        assert table.attempts() == []

    def test_the_others_are_told(
        self, table: Table, session: Session, duty: Rescue, statements: QueueStatements
    ) -> None:
        channel = CoordinationConfig(url="postgresql://").names.queue_channel
        table.all(f"LISTEN {channel}")
        table.job(state="processing", incarnation=DEAD, priority=2, key="k")
        duty.run(session)
        (heard,) = table.connection.notifies(timeout=5, stop_after=1)
        assert heard.payload == '[["t", 2, true]]'
        table.jobs(
            300, "priority, state, attempt, deadline, worker, started_at, incarnation",
            f"n, 'processing', 1, now() + interval '1 h', 'w', now(), '{DEAD}'",
        )  # fmt: skip
        duty.at_once()
        duty.run(session)
        (heard,) = table.connection.notifies(timeout=5, stop_after=1)
        assert heard.payload == ""


class TestUnblocking:
    @pytest.fixture
    def ready(self) -> Ready:
        return Ready()

    @pytest.fixture
    def waiting(self) -> set[int]:
        return set()

    @pytest.fixture
    def duty(self, table: Table, statements: QueueStatements, waiting: set[int], ready: Ready) -> Unblocking:
        table.node("w", ALIVE)
        table.all(
            "INSERT INTO sync_job_worker (node, incarnation, types, concurrency) VALUES ('w', %s, '{}', 1)", ALIVE
        )
        return Unblocking(statements, "w", waiting, ready)

    def test_named_jobs_become_ready_when_all_have_completed(
        self, table: Table, session: Session, duty: Unblocking, waiting: set[int], ready: Ready
    ) -> None:
        duty.run(session)  # a sweep with nothing to find
        done, failed, running = (table.job(state=s) for s in ("completed", "failed", "processing"))
        free, stuck, early = (table.job(state="blocked", priority=n) for n in range(3))
        later = table.job(state="blocked", run_at=sql("now() + interval '1 h'"))
        table.depends(free, done)
        table.depends(stuck, done, failed)
        table.depends(early, done, running)
        table.depends(later, done)
        assert not is_due(duty)
        waiting.update([free, stuck, early, later])
        assert is_due(duty)
        duty.run(session)
        states = [table.state(id) for id in (free, stuck, early, later)]
        assert states == ["pending", "blocked", "blocked", "scheduled"]
        assert ready == [("t", 0, False)]
        assert not is_due(duty)

    def test_of_very_many_named_jobs_a_part_at_a_time(
        self, table: Table, session: Session, duty: Unblocking, waiting: set[int]
    ) -> None:
        duty.run(session)
        done = table.job(state="completed")
        table.jobs(BATCH + 5, "state", "'blocked'")
        table.all("INSERT INTO sync_job_dependency SELECT %s, id FROM sync_job WHERE state = 'blocked'", done)
        waiting.update(id for (id,) in table.all("SELECT id FROM sync_job WHERE state = 'blocked'"))
        for ready in (BATCH, BATCH + 5):
            assert is_due(duty)
            duty.run(session)
            assert table.value("SELECT count(*) FROM sync_job WHERE state = 'pending'") == ready
        assert not is_due(duty)

    def test_the_sweep_finds_what_nobody_was_told_of_a_part_at_a_time(
        self, table: Table, session: Session, duty: Unblocking, ready: Ready
    ) -> None:
        done, running = table.job(state="completed"), table.job(state="processing")
        table.jobs(BATCH, "state", "'blocked'")
        table.all("INSERT INTO sync_job_dependency SELECT %s, id FROM sync_job WHERE state = 'blocked'", running)
        last = table.job(state="blocked")
        table.depends(last, done)
        duty.run(session)
        assert table.state(last) == "blocked"
        assert duty.due_at() - time.monotonic() < 5
        time.sleep(max(0.0, duty.due_at() - time.monotonic()))
        duty.run(session)
        assert table.state(last) == "pending"
        assert ready == [("t", 0, False)]
        assert duty.due_at() - time.monotonic() > 4
        # ... and from the beginning again.
        table.all("UPDATE sync_job SET state = 'completed', deadline = NULL WHERE id = %s", running)
        duty._sweep.at = 0
        duty.run(session)
        assert table.value("SELECT count(*) FROM sync_job WHERE state = 'blocked'") == 0

    def test_the_sweep_is_one_workers_work(
        self, table: Table, session: Session, statements: QueueStatements, duty: Unblocking
    ) -> None:
        done, last = table.job(state="completed"), table.job(state="blocked")
        table.depends(last, done)
        Unblocking(statements, "x", set(), Ready()).run(session)
        assert table.state(last) == "blocked"


class TestOrders:
    def test_pauses(self, table: Table, session: Session, statements: QueueStatements) -> None:
        told: list[frozenset[str]] = []
        duty = Orders(statements, list, told.append, lambda *_: None, lambda _: None, "w")
        duty.run(session)
        assert not told
        table.all("INSERT INTO sync_job_pause (type) VALUES ('a')")
        assert not is_due(duty)
        duty.woken({'[["a", 0, false]]', ""})
        assert not is_due(duty)
        duty.woken({'{"control": true}'})
        assert is_due(duty)
        duty.run(session)
        duty.run(session)
        table.all("INSERT INTO sync_job_pause (type) VALUES ('')")
        duty.run(session)
        table.all("DELETE FROM sync_job_pause")
        duty.run(session)
        assert told == [{"a"}, {"a", ""}, set()]

    def test_attempts_to_give_up(self, table: Table, session: Session, statements: QueueStatements) -> None:
        kept = table.job(state="processing", attempt=2)
        cancelled = table.job(state="processing", attempt=2, cancel_requested=True)
        taken = table.job(state="processing", attempt=3, cancel_requested=True)
        freed = table.job(state="pending", attempt=2)
        done = table.job(state="completed", attempt=2)  # by this attempt, whose handler is about to return
        gone = 10**9
        held = [(id, 2) for id in (kept, cancelled, taken, freed, done, gone)]
        told: set[tuple[int, int, str]] = set()
        Orders(statements, lambda: held, lambda _: None, lambda *one: told.add(one), lambda _: None, "w").run(session)
        assert told == {(cancelled, 2, "cancelled"), (taken, 2, "lost"), (freed, 2, "lost"), (gone, 2, "lost")}


class TestPresence:
    def test_the_row_says_what_the_worker_does_until_it_leaves(
        self, table: Table, session: Session, statements: QueueStatements
    ) -> None:
        table.node("w", ALIVE)
        figures = Figures(3, 40, 5, time.monotonic() - 60)
        duty = Presence(statements, "w", lambda: ALIVE, ["a", 'b"'], 8, lambda: figures, lambda: None)
        duty.run(session)
        assert 1 < duty.due_at() - time.monotonic() <= 2
        ((row),) = table.all(
            "SELECT node, incarnation::text, types, concurrency, running, completed, failed,"
            " seen_at - claimed_at BETWEEN '50 s' AND '70 s' FROM sync_job_worker"
        )
        assert row == ("w", ALIVE, ["a", 'b"'], 8, 3, 40, 5, True)
        figures = Figures(0, 41, 5, None)
        duty.run(session)
        assert table.all("SELECT running, completed, claimed_at FROM sync_job_worker") == [(0, 41, None)]
        duty.leave(session)
        assert table.all("SELECT 1 FROM sync_job_worker") == []

    def test_a_worker_that_is_no_member_writes_nothing(
        self, table: Table, session: Session, statements: QueueStatements
    ) -> None:
        incarnation = DEAD
        duty = Presence(statements, "w", lambda: incarnation, [], 8, lambda: Figures(0, 0, 0, None), lambda: None)
        duty.run(session)
        table.node("w", ALIVE, state="away")
        incarnation = ALIVE
        duty.run(session)
        incarnation = ""
        duty.run(session)
        assert table.all("SELECT 1 FROM sync_job_worker") == []

    def test_rows_of_the_dead_go(self, table: Table, session: Session, statements: QueueStatements) -> None:
        for name, incarnation, state in (("w", ALIVE, "active"), ("a", OTHER, "active"), ("x", DEAD, "away")):
            table.node(name, incarnation, state)
        for name, incarnation in (("a", OTHER), ("x", DEAD), ("gone", DEAD)):
            table.all(
                "INSERT INTO sync_job_worker (node, incarnation, types, concurrency) VALUES (%s, %s, '{}', 1)",
                name,
                incarnation,
            )
        vanished: list[bool] = []
        figures = Figures(0, 0, 0, None)
        duty = Presence(statements, "w", lambda: ALIVE, [], 8, lambda: figures, lambda: vanished.append(True))
        duty.run(session)
        assert table.all("SELECT node FROM sync_job_worker ORDER BY 1") == [("a",), ("w",)]
        duty.run(session)
        assert vanished == [True]
