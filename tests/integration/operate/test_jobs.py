"""Lists of jobs, and why a job waits."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from sqlalchemy import Engine, create_engine, text

from jobsync_orm.exceptions import InvalidJob
from jobsync_orm.models.states import JobState
from jobsync_orm.naming import Names
from jobsync_orm.operate import JobFilter, JobFinder, why_it_waits
from jobsync_orm.queue import JobQueue
from tests.integration.queue.rows import LATER, SQL, depend, put


@pytest.fixture
def finder(engine: Engine) -> JobFinder:
    return JobFinder(engine, Names())


@pytest.fixture
def queue(engine: Engine) -> Iterator[JobQueue]:
    made = JobQueue(engine=engine)
    yield made
    made.dispose()


def test_pages_go_both_ways_and_meet_no_job_twice(finder: JobFinder, engine: Engine) -> None:
    ids = put(engine, count=7)
    put(engine, "failed", type="other")
    wanted = JobFilter(types=("t",))
    pages, edge = [], None
    while page := finder.page(wanted, 3, before=edge):
        pages.append([job.id for job in page])
        edge = page[-1].id
    assert pages == [ids[:3:-1], ids[3:0:-1], ids[:1]]
    assert [job.id for job in finder.page(wanted, 3, after=ids[2])] == ids[3:6]
    assert finder.count(wanted) == 7
    assert finder.ids(wanted) == ids
    assert finder.span() == (ids[0], ids[-1] + 1)


def test_each_filter(finder: JobFinder, engine: Engine) -> None:
    (pending,) = put(engine, key="k")
    (failed,) = put(engine, "failed", error="OperationalError: Disk full 100%")
    (later,) = put(engine, "scheduled", type="mail")

    def found(**given: object) -> list[int]:
        return finder.ids(JobFilter(**given))  # type: ignore[arg-type]

    assert found() == [pending, failed, later]
    assert found(states=("failed", JobState.SCHEDULED)) == [failed, later]
    assert found(key="k") == [pending]
    assert found(error="disk FULL 100%") == [failed]
    assert found(error="disk_full") == []
    assert found(types=("mail", "none")) == [later]
    assert found(types=("mail",), key="k") == []
    (job,) = finder.page(JobFilter(types=("mail",)))
    assert (job.state, job.run_at is not None, job.error) == (JobState.SCHEDULED, True, None)


def test_a_moment_is_told_of_jobs_that_wait_for_it(finder: JobFinder, engine: Engine) -> None:
    waiting = {put(engine, state, run_at=LATER)[0] for state in ("scheduled", "retrying", "blocked")}
    for state in ("pending", "processing", "completed", "failed", "cancelled"):
        put(engine, state, run_at=LATER)
    assert {job.id for job in finder.page(JobFilter()) if job.run_at is not None} == waiting


def test_ids_of_a_queue_that_has_run_for_long(finder: JobFinder, engine: Engine) -> None:
    (first,), (last,) = put(engine), put(engine, id=2**62)
    assert [job.id for job in finder.page(JobFilter())] == [last, first]
    assert finder.span() == (first, last)


def test_every_job_is_meant_only_where_nothing_is_said() -> None:
    assert JobFilter().empty
    for given in ({"types": ("t",)}, {"states": ("failed",)}, {"key": "k"}, {"error": "e"}):
        assert not JobFilter(**given).empty  # type: ignore[arg-type]


def test_what_cannot_be_asked(finder: JobFinder) -> None:
    for given in ({"states": ("gone",)}, {"types": ("",)}, {"key": ""}, {"error": "a\0"}):
        with pytest.raises(InvalidJob):
            JobFilter(**given)  # type: ignore[arg-type]
    with pytest.raises(InvalidJob, match="limit=0"):
        finder.page(JobFilter(), 0)
    with pytest.raises(InvalidJob, match="two directions"):
        finder.page(JobFilter(), before=1, after=1)


def why(queue: JobQueue, id: int) -> tuple[str, ...]:
    return why_it_waits(queue, queue.status(id))


def test_why_a_job_waits(queue: JobQueue, engine: Engine) -> None:
    first, second = put(engine, key="k", count=2, token_id=1)
    nobody = "no live worker runs jobs of type 't': is it spelled right, is its worker started?"
    assert why(queue, first)[0] == nobody
    assert f"jobs of key 'k' run one at a time: job {first} goes first, which is pending" in why(queue, second)
    assert any("belongs to nobody" in reason for reason in why(queue, first))

    queue.pause("t", reason="the disk")
    assert why(queue, first)[0].startswith("type 't' is paused since ")
    assert why(queue, first)[0].endswith(": the disk")
    queue.resume("t")

    with engine.begin() as connection:  # a worker that runs it, and has all tokens
        connection.execute(
            text(
                "INSERT INTO sync_node (name, incarnation, state) VALUES"
                " ('w1', '00000000-0000-0000-0000-000000000001', 'active')"
            )
        )
        connection.execute(
            text(
                "INSERT INTO sync_job_worker (node, incarnation, types, concurrency) VALUES"
                " ('w1', '00000000-0000-0000-0000-000000000001', '{t}', 1)"
            )
        )
        connection.execute(text("UPDATE sync_token SET node = 'w1'"))
    assert why(queue, first) == ()
    assert why(queue, second) == (f"jobs of key 'k' run one at a time: job {first} goes first, which is pending",)

    (bad,) = put(engine, "failed")
    (blocked,) = put(engine, "blocked")
    depend(engine, blocked, bad)
    assert why(queue, blocked) == (
        f"it is to run after job {bad} (t), which is failed: retry that one, or cancel job {blocked}",
    )
    (free, behind) = put(engine, type="t", count=2)
    assert why(queue, free) == ()
    assert why(queue, behind) == ("1 job goes before it, of its type and priority",)
    (later,) = put(engine, "scheduled")
    assert why(queue, later)[0].startswith("it is for later: it is ready at ")
    assert why(queue, bad) == ()


def test_why_a_job_is_still_processed(queue: JobQueue, engine: Engine) -> None:
    (running,) = put(engine, "processing", cancel_requested=True)
    assert [reason.split(" since ")[0] for reason in why(queue, running)] == ["w1 has it", "it has been told to stop"]
    (late,) = put(engine, "processing", deadline=SQL("now() - interval '1 minute'"))
    assert why(queue, late)[-1] == "its time is over: the next worker that looks gives it to others"
    (orphan,) = put(engine, "processing", incarnation="00000000-0000-0000-0000-000000000009")
    assert why(queue, orphan)[-1] == "that life of w1 has ended: a live worker gives the job to others"


def test_tables_that_are_missing(empty_database) -> None:
    from jobsync_orm.exceptions import SchemaNotReady

    engine = create_engine(empty_database)
    with pytest.raises(SchemaNotReady, match="jobsync-orm db upgrade"):
        JobFinder(engine, Names()).page(JobFilter())
    engine.dispose()
