"""The audit: every task that was put down has a row, and one row for each time it was put down."""

from __future__ import annotations

import threading

import pytest
from sqlalchemy import Engine, text
from sqlalchemy.exc import DBAPIError

from jobsync_orm import ClaimRefused, ConfigurationError, Job, OwnershipLost
from tests.integration.claiming import answer_lost, audit, claims, counted, give_away, run


def keys(engine: Engine) -> list[str]:
    return [row[1] for row in audit(engine)]


def test_many_are_added_and_written_in_one_statement_each(job: Job, own_engine: Engine, engine: Engine) -> None:
    with counted(own_engine) as sent:
        assert job.add_tasks([3, 1, 2, 3]) == ["3", "1", "2"]
        assert len(claims(engine)) == 3
        job.write_audit()
        job.write_audit()
    assert len(sent) == 2
    assert (keys(engine), claims(engine)) == (["3", "1", "2"], [])
    with pytest.raises(ConfigurationError, match="is one task"):
        job.add_tasks("abc")


def test_one_is_added_in_one_statement(job: Job, own_engine: Engine) -> None:
    with counted(own_engine) as sent:
        assert job.add_task("t")
    assert len(sent) == 1


def test_a_write_whose_answer_was_lost_counts_once(job: Job, own_engine: Engine, engine: Engine) -> None:
    job.add_tasks(["t", "u"])
    with answer_lost(own_engine):
        job.write_audit()
    job.write_audit()
    assert keys(engine) == ["t", "u"]


def test_a_task_whose_claim_was_ended_is_written_all_the_same(job: Job, engine: Engine) -> None:
    """It was put down because it was done."""
    job.add_tasks(["t", "u", "v"])
    job.release_claim("t")
    give_away(engine, job.task_to_token("u"), "w9")
    job.write_audit()
    assert sorted(keys(engine)) == ["t", "u", "v"]
    assert claims(engine) == []


def test_a_task_added_twice_has_two_rows(job: Job, engine: Engine) -> None:
    assert job.add_task("t")
    assert job.add_task("t")
    job.write_audit()
    assert (keys(engine), claims(engine)) == (["t", "t"], [])
    job.claim_task("t").complete()


def test_a_row_has_the_moment_at_which_the_task_was_added(job: Job, engine: Engine) -> None:
    job.add_task("t")
    with engine.connect() as connection:
        claimed_at = connection.execute(text("SELECT claimed_at FROM sync_claim")).scalar_one()
    job.write_audit()
    with engine.connect() as connection:
        assert connection.execute(text("SELECT created_on FROM sync_audit")).scalar_one() == claimed_at


def test_what_could_not_be_written_stays_down(job: Job, engine: Engine) -> None:
    job.add_tasks(["t", "u"])
    run(engine, "ALTER TABLE sync_audit RENAME TO elsewhere")
    with pytest.raises(DBAPIError):
        job.write_audit()
    with pytest.raises(ClaimRefused):
        job.claim_task("t")
    assert job.add_task("v")
    run(engine, "ALTER TABLE elsewhere RENAME TO sync_audit")
    job.write_audit()
    assert keys(engine) == ["t", "u", "v"]
    job.claim_task("t").release()


def test_what_is_added_and_not_written_is_written_as_the_job_stops(job: Job, engine: Engine) -> None:
    job.add_task("t")
    job.stop()
    assert keys(engine) == ["t"]


def test_nothing_twice_and_nothing_lost_among_threads(job: Job, engine: Engine) -> None:
    """Two threads claim and complete, one adds, one writes, all on the same tasks."""
    done: list[str] = []
    over = threading.Event()
    errors: list[BaseException] = []

    def guarded(work: object) -> threading.Thread:
        def loop() -> None:
            try:
                work()  # type: ignore[operator]
            except BaseException as error:
                errors.append(error)

        return threading.Thread(target=loop)

    def claimer() -> None:
        for _ in range(10):
            for claim in job.claim_tasks(range(20)):
                claim.complete()
                done.append(str(claim.task_id))

    def adder() -> None:
        for _ in range(10):
            done.extend(job.add_tasks(range(20)))

    def writer() -> None:
        while not over.is_set():
            job.write_audit()

    working = [guarded(claimer), guarded(claimer), guarded(adder)]
    writing = guarded(writer)
    for thread in (*working, writing):
        thread.start()
    for thread in working:
        thread.join(60)
    over.set()
    writing.join(60)
    job.write_audit()
    assert errors == []
    assert len(done) > 100
    assert sorted(keys(engine)) == sorted(done)
    assert claims(engine) == []


def test_a_lost_completion_leaves_no_row(job: Job, engine: Engine) -> None:
    claim = job.claim_task("t")
    give_away(engine, claim.token, "w9")
    with pytest.raises(OwnershipLost):
        claim.complete()
    job.write_audit()
    assert keys(engine) == []
