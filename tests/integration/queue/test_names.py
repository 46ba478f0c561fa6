"""A schema whose name is full of what SQL, SQLAlchemy and drivers read as something else: every call of the queue."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from sqlalchemy import URL, create_engine, text
from sqlalchemy.orm import Session

from jobsync_orm import CoordinationConfig, JobQueue, JobState, NewJob, migrate
from jobsync_orm.naming import quote

SCHEMA = "a$1 %(p1)s %b :c ::d 'e \\f \"g"


@pytest.fixture
def queue(database: URL) -> Iterator[JobQueue]:
    engine = create_engine(database)
    with engine.begin() as connection:
        connection.exec_driver_sql(f"CREATE SCHEMA {quote(SCHEMA)}".replace("%", "%%"))
    migrate.upgrade(engine, schema=SCHEMA)
    made = JobQueue(CoordinationConfig(engine=engine, schema=SCHEMA))
    yield made
    made.dispose()
    engine.dispose()


def test_every_call_reads_the_name_as_it_is(queue: JobQueue) -> None:
    first = queue.submit("t").id
    with Session(queue.engine) as session:
        second = queue.enqueue(session, "t", key="k", idempotency_key="i", after=first).id
        third, fourth = queue.enqueue_many(session, "t", [{}, {}])
        fifth, sixth = queue.enqueue_many(session, [NewJob("t", key="k", after=first), NewJob("t", delay=0.01)])
        session.commit()
    assert queue.cancel(sixth) is JobState.CANCELLED
    assert queue.retry(sixth) is JobState.PENDING
    assert queue.reprioritise(sixth, 5) is JobState.PENDING
    queue.pause("t")
    assert [pause.type for pause in queue.paused()] == ["t"]
    assert queue.dequeue("t", "w") == []
    assert queue.resume("t")

    taken = {job.id: job for job in queue.dequeue("t", "w", limit=10)}
    assert set(taken) == {first, third, fourth, sixth}
    assert queue.extend(taken[first], 60)
    queue.complete(taken[first])
    assert queue.fail(taken[third], "no", retry=False) is JobState.FAILED
    queue.release(taken[fourth])
    assert queue.cleanup_stale(0) == 1
    assert queue.status(second).state is queue.status(fifth).state is JobState.PENDING
    assert queue.stats().counts[JobState.PENDING] == 4
    assert queue.retry_many() == 1
    assert queue.cancel_many(type="t") == 5
    assert queue.prune(0, [JobState.COMPLETED, JobState.CANCELLED]) == 6
    assert queue.worker_stats() == queue.schedules() == []
    assert queue.forget_schedule("t") is False
    with queue.engine.connect() as connection:
        assert connection.execute(text(f"SELECT count(*) FROM {queue.names.text('job_dependency')}")).scalar() == 0
