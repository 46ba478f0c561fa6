"""Periodic jobs on the real database: one firing per tick, whatever happens to those who fire."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import Engine, create_engine, text

from jobsync_orm.config import CoordinationConfig
from jobsync_orm.coordinator.session import Session, StatementFailed
from jobsync_orm.naming import Names
from jobsync_orm.queue.cron import Cron
from jobsync_orm.queue.schedule import Missed, Schedule
from jobsync_orm.queue.statements import SESSION, QueueStatements
from jobsync_orm.worker.ticking import Ticking
from tests.conftest import Server

EVERY_MINUTE = "* * * * *"
# No tick comes while a test runs.
LEAP_DAY = "0 0 29 2 *"


def make(name: str = "report", cron: str = LEAP_DAY, zone: str = "UTC", **options: Any) -> Schedule:
    given: dict[str, Any] = {
        "type": "report",
        "payload": {"region": "eu"},
        "missed": "latest",
        "overlap": True,
        "tick_as": "scheduled_for",
        "priority": 5,
        "key": None,
        "max_retries": 1,
        "timeout": 60.0,
        "retry_blocks_key": False,
        "max_retries_given": True,
        "timeout_given": False,
        **options,
    }
    return Schedule(name=name, cron=Cron(cron, zone), **given)


class Worker:
    """A pump's duty with a session of its own, run by hand."""

    def __init__(self, engine: Engine, *schedules: Schedule) -> None:
        names = Names()
        self._wake, self._waker = os.pipe()
        self.session = Session(
            CoordinationConfig(engine=engine).connection_pool(), self._wake, lambda at: None, 1, SESSION
        )
        self.session.open()
        self.schedules = {schedule.name: schedule for schedule in schedules}
        self.ticking = Ticking(QueueStatements(names), self.schedules, names.queue_channel, "w1")

    def turn(self) -> None:
        self.ticking.run(self.session)

    def close(self) -> None:
        self.session.close()
        os.close(self._wake)
        os.close(self._waker)


@pytest.fixture(scope="module")
def emptied(server: Server, template: str) -> Iterator[Engine]:
    """One database for all of these tests, which leave its tables as they are."""
    url = server.create_database(template)
    engine = create_engine(url)
    yield engine
    engine.dispose()
    server.drop_database(url)


@pytest.fixture
def engine(emptied: Engine) -> Engine:
    rows(emptied, "TRUNCATE sync_job, sync_job_schedule")
    return emptied


@pytest.fixture
def worker(engine: Engine) -> Iterator[Callable[..., Worker]]:
    made: list[Worker] = []

    def make(*schedules: Schedule) -> Worker:
        made.append(Worker(engine, *schedules))
        return made[-1]

    yield make
    for one in made:
        one.close()


def rows(engine: Engine, sql: str, **values: Any) -> list[Any]:
    with engine.begin() as connection:
        result = connection.execute(text(sql), values)
        return list(result.mappings()) if result.returns_rows else []


def jobs(engine: Engine) -> list[Any]:
    return rows(engine, "SELECT * FROM sync_job ORDER BY id")


def put_back(engine: Engine, by: timedelta, name: str = "report") -> None:
    """As if nobody had been there for so long."""
    rows(engine, "UPDATE sync_job_schedule SET fired_until = fired_until - :by WHERE name = :name", by=by, name=name)


# Some leap days have passed, some minutes.
LONG, SHORT = timedelta(days=3652), timedelta(minutes=30)


def test_a_schedule_seen_for_the_first_time_begins_now(engine: Engine, worker: Callable[..., Worker]) -> None:
    one = worker(make())
    one.turn()

    [row] = rows(engine, "SELECT *, clock_timestamp() - fired_until AS age FROM sync_job_schedule")
    assert (row["name"], row["type"], row["cron"], row["timezone"]) == ("report", "report", LEAP_DAY, "UTC")
    assert timedelta(0) < row["age"] < timedelta(minutes=1)
    assert jobs(engine) == []


def test_a_tick_gets_one_job_with_what_the_schedule_says(engine: Engine, worker: Callable[..., Worker]) -> None:
    one = worker(make(zone="Asia/Kathmandu"))
    one.turn()
    put_back(engine, LONG)
    one.turn()
    one.turn()

    [job] = jobs(engine)
    [row] = rows(engine, "SELECT * FROM sync_job_schedule")
    local = Cron(LEAP_DAY, "Asia/Kathmandu").local(row["fired_until"])
    assert job["payload"] == {"region": "eu", "scheduled_for": local}
    assert local.endswith("+05:45")
    assert job["idempotency_key"] == f"periodic:report:{local}"
    assert (job["type"], job["state"], job["priority"], job["max_retries"]) == ("report", "pending", 5, 1)
    assert (job["timeout"], job["retry_blocks_key"], job["key"], job["token_id"]) == (60.0, False, None, None)
    assert (job["max_retries_given"], job["timeout_given"]) == (True, False)
    assert row["last_job_id"] == job["id"]
    assert row["fired_until"].second == row["fired_until"].microsecond == 0


def test_a_job_with_a_key_gets_its_token(engine: Engine, worker: Callable[..., Worker]) -> None:
    one = worker(make(key="eu"))
    one.turn()
    put_back(engine, LONG)
    one.turn()

    assert rows(engine, "SELECT token_id = sync_token_of('eu') AS same FROM sync_job") == [{"same": True}]


@pytest.mark.parametrize(("missed", "expected"), [("latest", 1), ("skip", 0), ("all", 3)])
def test_an_outage(engine: Engine, worker: Callable[..., Worker], missed: Missed, expected: int) -> None:
    one = worker(make(cron="30 * * * *", missed=missed))
    one.turn()
    # Three half hours have passed, and the last of them is a quarter of an hour ago.
    rows(
        engine,
        "UPDATE sync_job_schedule SET"
        " cron = to_char((clock_timestamp() - interval '15 min') AT TIME ZONE 'UTC', 'FMMI')"
        " || ' * * * *', fired_until = clock_timestamp() - interval '2 hours 30 min'",
    )
    one.turn()
    one.turn()

    assert len(jobs(engine)) == expected
    [row] = rows(engine, "SELECT clock_timestamp() - fired_until AS age FROM sync_job_schedule")
    assert row["age"] < timedelta(minutes=17)


def test_of_many_workers_one_fires(engine: Engine, worker: Callable[..., Worker]) -> None:
    workers = [worker(make(cron=EVERY_MINUTE, missed="all")) for _ in range(6)]
    for one in workers:
        one.turn()
    put_back(engine, SHORT)
    barrier = threading.Barrier(len(workers))

    def run(one: Worker) -> None:
        barrier.wait()
        for _ in range(5):
            one.turn()

    threads = [threading.Thread(target=run, args=[one]) for one in workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    ticks = [job["payload"]["scheduled_for"] for job in jobs(engine)]
    assert len(ticks) == len(set(ticks)) >= 29
    assert ticks == sorted(ticks)


def test_a_worker_that_was_paused_before_it_fired_fires_nothing(engine: Engine, worker: Callable[..., Worker]) -> None:
    slow, quick = worker(make()), worker(make())
    slow.turn()
    quick.turn()
    put_back(engine, LONG)
    look = slow.ticking._look

    def look_and_sleep(*args: Any) -> Any:
        seen = look(*args)
        quick.turn()
        # While it is unfinished its idempotency key alone would do.
        rows(engine, "UPDATE sync_job SET state = 'completed'")
        return seen

    slow.ticking._look = look_and_sleep  # type: ignore[method-assign]
    slow.turn()

    assert len(jobs(engine)) == 1


def test_a_firing_is_the_job_and_the_mark_or_neither(engine: Engine, worker: Callable[..., Worker]) -> None:
    """The one statement fails behind the insert: nothing of it stays, and the next turn fires once."""
    one = worker(make())
    one.turn()
    put_back(engine, LONG)
    rows(
        engine,
        "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE 'no'; END $$;"
        "CREATE TRIGGER refuse BEFORE UPDATE ON sync_job_schedule FOR EACH ROW EXECUTE FUNCTION refuse()",
    )
    try:
        one.turn()
        assert jobs(engine) == []
    finally:
        rows(engine, "DROP FUNCTION refuse CASCADE")
    one.turn()
    assert len(jobs(engine)) == 1


def test_a_firing_whose_mark_is_suppressed_is_none(
    engine: Engine, worker: Callable[..., Worker], caplog: pytest.LogCaptureFixture
) -> None:
    """Else each turn would fire the same tick again."""
    one = worker(make(), make("good"))
    one.turn()
    for name in ("report", "good"):
        put_back(engine, LONG, name)
    rows(
        engine,
        "CREATE FUNCTION swallow() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN"
        " IF OLD.name = 'report' THEN RETURN NULL; END IF; RETURN NEW; END $$;"
        "CREATE TRIGGER swallow BEFORE UPDATE ON sync_job_schedule FOR EACH ROW EXECUTE FUNCTION swallow()",
    )
    try:
        one.turn()
        one.turn()
        assert [job["idempotency_key"].split(":")[1] for job in jobs(engine)] == ["good"]
        assert caplog.text.count("'report' cannot be fired: a trigger") == 1
        assert "Traceback" not in caplog.text
    finally:
        rows(engine, "DROP FUNCTION swallow CASCADE")
    one.turn()
    assert [job["idempotency_key"].split(":")[1] for job in jobs(engine)] == ["good", "report"]


def test_one_that_the_database_refuses_does_not_keep_the_others(
    engine: Engine, worker: Callable[..., Worker], caplog: pytest.LogCaptureFixture
) -> None:
    one = worker(make("bad", payload={"text": "\0"}), make("good"))
    one.turn()
    for name in ("bad", "good"):
        put_back(engine, LONG, name)
    one.turn()

    assert [job["idempotency_key"].split(":")[1] for job in jobs(engine)] == ["good"]
    assert "'bad' could not be enqueued" in caplog.text


def test_without_overlap_a_tick_adds_nothing_to_an_unfinished_job(
    engine: Engine, worker: Callable[..., Worker]
) -> None:
    one = worker(make(overlap=False))
    one.turn()
    for _ in range(3):
        put_back(engine, LONG)
        one.turn()
    [job] = jobs(engine)
    rows(engine, "UPDATE sync_job SET state = 'completed'")
    put_back(engine, LONG)
    one.turn()

    assert [found["state"] for found in jobs(engine)] == ["completed", "pending"]
    [row] = rows(engine, "SELECT last_job_id FROM sync_job_schedule")
    assert row["last_job_id"] > job["id"]


def test_without_overlap_nobody_waits_for_a_job_that_is_just_ending(
    engine: Engine, worker: Callable[..., Worker]
) -> None:
    one = worker(make(overlap=False))
    one.turn()
    put_back(engine, LONG)
    one.turn()
    put_back(engine, LONG)
    with engine.connect() as ending, ending.begin():
        ending.execute(text("UPDATE sync_job SET state = 'completed'"))
        one.session.script("SET lock_timeout = '1ms'")
        one.turn()  # neither waits nor fails

    [row] = rows(engine, "SELECT clock_timestamp() - fired_until AS age FROM sync_job_schedule")
    assert row["age"] < timedelta(days=8 * 366)


def test_a_row_that_another_transaction_holds_is_left_for_the_next_turn(
    engine: Engine, worker: Callable[..., Worker]
) -> None:
    one = worker(make())
    one.turn()
    put_back(engine, LONG)
    with engine.connect() as holder, holder.begin():
        holder.execute(text("SELECT 1 FROM sync_job_schedule FOR UPDATE"))
        one.turn()
        assert jobs(engine) == []
    one.turn()

    assert len(jobs(engine)) == 1


def test_another_expression_or_time_zone_begins_anew(engine: Engine, worker: Callable[..., Worker]) -> None:
    worker(make(cron="0 0 1 2 *")).turn()
    put_back(engine, LONG)
    worker(make(cron=LEAP_DAY)).turn()
    assert jobs(engine) == []

    put_back(engine, LONG)
    worker(make(cron=LEAP_DAY, zone="Europe/Berlin")).turn()
    assert jobs(engine) == []


def test_another_type_goes_on_from_where_it_was(engine: Engine, worker: Callable[..., Worker]) -> None:
    worker(make()).turn()
    put_back(engine, LONG)
    worker(make(type="better_report")).turn()

    assert [job["type"] for job in jobs(engine)] == ["better_report"]


def test_workers_of_two_versions_go_by_the_one_that_started_last(
    engine: Engine, worker: Callable[..., Worker], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "jobsync_orm")
    old = worker(make(cron=EVERY_MINUTE))
    old.turn()
    new = worker(make(cron=LEAP_DAY))
    new.turn()
    for _ in range(3):
        put_back(engine, SHORT)
        old.turn()
        new.turn()

    assert jobs(engine) == []
    assert rows(engine, "SELECT cron FROM sync_job_schedule") == [{"cron": LEAP_DAY}]
    assert caplog.text.count("since another worker has started") == 1

    put_back(engine, LONG)
    old.turn()  # the new one may be gone by then
    new.turn()
    assert [job["payload"]["scheduled_for"][5:10] for job in jobs(engine)] == ["02-29"]


def test_a_worker_whose_type_is_not_the_rows_leaves_it_to_others(
    engine: Engine, worker: Callable[..., Worker], caplog: pytest.LogCaptureFixture
) -> None:
    old, new = worker(make()), worker(make(type="better_report"))
    old.turn()
    new.turn()
    put_back(engine, LONG)
    old.turn()
    old.turn()
    assert jobs(engine) == []
    assert caplog.text.count("leaves it to others") == 1

    new.turn()
    assert [job["type"] for job in jobs(engine)] == ["better_report"]


def test_a_row_that_was_removed_begins_anew(engine: Engine, worker: Callable[..., Worker]) -> None:
    one = worker(make())
    one.turn()
    put_back(engine, LONG)
    rows(engine, "DELETE FROM sync_job_schedule")
    one.turn()
    one.turn()

    assert rows(engine, "SELECT name FROM sync_job_schedule") == [{"name": "report"}]
    assert jobs(engine) == []


def test_a_row_that_is_ahead_of_the_clock_is_complained_about(
    engine: Engine, worker: Callable[..., Worker], caplog: pytest.LogCaptureFixture
) -> None:
    one = worker(make())
    one.turn()
    put_back(engine, -LONG)
    one.turn()
    one.turn()

    assert jobs(engine) == []
    assert caplog.text.count("forget_schedule('report')") == 1


def test_it_is_to_be_called_at_the_next_tick(
    engine: Engine, worker: Callable[..., Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = worker(make(cron="* * * * * *"))
    monkeypatch.setattr("jobsync_orm.worker.ticking.now", lambda: 1000.0)
    assert one.ticking.due_at() == 0
    one.turn()
    assert 1000 < one.ticking.due_at() <= 1001

    one.schedules["other"] = make("other", cron=LEAP_DAY)
    assert one.ticking.due_at() == 0
    del one.schedules["report"]
    one.turn()
    assert one.ticking.due_at() == 1015

    one.schedules.clear()
    one.turn()
    assert one.ticking.due_at() == float("inf")


def test_after_a_failure_it_does_not_come_back_at_once(
    engine: Engine, worker: Callable[..., Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = worker(make())
    monkeypatch.setattr("jobsync_orm.worker.ticking.now", lambda: 1000.0)
    rows(engine, "ALTER TABLE sync_job_schedule RENAME TO elsewhere")
    try:
        with pytest.raises(StatementFailed):
            one.turn()
    finally:
        rows(engine, "ALTER TABLE elsewhere RENAME TO sync_job_schedule")
    assert one.ticking.due_at() == 1001


def test_workers_hear_of_a_firing(engine: Engine, worker: Callable[..., Worker]) -> None:
    one, other = worker(make()), worker()
    one.turn()
    other.session.script(f'LISTEN "{Names().queue_channel}"')
    put_back(engine, LONG)
    one.turn()

    assert other.session.wait(60) == {Names().queue_channel}


def test_names_with_quotes_and_backslashes(engine: Engine, worker: Callable[..., Worker]) -> None:
    name = 'a "b" \\ {c}, NULL'
    one = worker(make(name), make("NULL"))
    one.turn()
    put_back(engine, LONG, name)
    one.turn()

    assert {row["name"] for row in rows(engine, "SELECT name FROM sync_job_schedule")} == {name, "NULL"}
    assert [job["idempotency_key"].split(":")[1] for job in jobs(engine)] == [name]
