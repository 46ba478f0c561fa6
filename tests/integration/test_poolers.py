"""What may go through a connection pooler and what may not, with a real pgbouncer."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
from sqlalchemy import URL, Engine, create_engine, select, text
from sqlalchemy.orm import Session, sessionmaker

from jobsync_orm import (
    CoordinationConfig,
    Job,
    JobContext,
    JobQueue,
    JobState,
    JobWorker,
    OwnedSession,
    OwnershipLost,
    migrate,
)
from jobsync_orm.exceptions import PooledConnection
from tests.integration.cluster import QUICK, wait_for
from tests.integration.orm.models import Base, Item
from tests.integration.pooler import needs_pgbouncer, pooled

pytestmark = needs_pgbouncer


@pytest.fixture
def through(database: URL) -> Iterator[URL]:
    """``database`` by way of a pgbouncer in transaction mode."""
    with pooled(database, "transaction") as url:
        yield url


@pytest.fixture
def pool(through: URL) -> Iterator[Engine]:
    """The application's engine, as docs/operations.md says it has to be behind such a pooler."""
    engine = create_engine(through, connect_args={"prepare_threshold": None})
    yield engine
    engine.dispose()


def advisory_locks(engine: Engine) -> int:
    with engine.connect() as connection:
        sql = """SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'
            AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"""
        return int(connection.execute(text(sql)).scalar_one())


# -- coordination ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["transaction", "session"])
def test_coordination_refuses_a_pooler_and_leaves_nothing_behind(engine: Engine, database: URL, mode: str) -> None:
    """No lock, no channel listened to and no setting on a connection that the pooler gives to others next."""
    with pooled(database, mode) as url:
        with pytest.raises(PooledConnection, match="reaches PostgreSQL directly"):
            Job("w1", CoordinationConfig(url=url, **QUICK)).start()
        assert advisory_locks(engine) == 0
        other = create_engine(url)
        with other.connect() as next_client, engine.connect() as direct:
            assert next_client.execute(text("SELECT count(*) FROM pg_listening_channels()")).scalar() == 0
            for setting in "lock_timeout", "statement_timeout", "default_transaction_isolation", "jit":
                show = text(f"SHOW {setting}")
                assert next_client.execute(show).scalar() == direct.execute(show).scalar()
        other.dispose()
    with engine.connect() as connection:
        assert connection.execute(text("SELECT count(*) FROM sync_node")).scalar() == 0


# -- migrations ------------------------------------------------------------------------------------------------


def test_migrations_through_a_pooler_take_turns_and_leave_no_lock(empty_database: URL) -> None:
    """More of them than the pooler has connections."""
    failures: list[BaseException] = []

    def upgrade(url: URL) -> None:
        engine = create_engine(url, connect_args={"prepare_threshold": None})
        try:
            migrate.upgrade(engine)
        except BaseException as error:
            failures.append(error)
        finally:
            engine.dispose()

    with pooled(empty_database, "transaction") as url:
        threads = [threading.Thread(target=upgrade, args=(url,)) for _ in range(5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failures == []
        direct = create_engine(empty_database)
        assert migrate.current(direct) == migrate.head()
        assert advisory_locks(direct) == 0
        direct.dispose()


# -- the application's sessions ---------------------------------------------------------------------------------


@pytest.fixture
def items(engine: Engine) -> None:
    """Forty rows."""
    Base.metadata.create_all(engine)
    with Session(engine) as session, session.begin():
        session.add_all(Item(sku=f"s{n}") for n in range(40))


def owned(session: Session, job: Job) -> set[str]:
    return set(session.scalars(select(Item.sku).where(Item.owned_by(job))))


def test_owned_rows_through_a_pooler(items: None, database: URL, pool: Engine) -> None:
    """More sessions than the pooler has connections, each often enough for psycopg to want to prepare."""
    config: Any = {"url": database, **QUICK}
    with Job("w1", CoordinationConfig(**config)) as one, Job("w2", CoordinationConfig(**config)) as two:
        sessions = [Session(pool) for _ in range(4)]
        for _ in range(10):
            for session in sessions:
                with session.begin():
                    mine, theirs = owned(session, one), owned(session, two)
                assert mine
                assert theirs
                assert mine.isdisjoint(theirs)
                assert len(mine | theirs) == 40
        for session in sessions:
            session.close()


def test_the_fence_holds_through_a_pooler(items: None, engine: Engine, database: URL, pool: Engine) -> None:
    """Each commit is checked for its own job, whichever server connection it has; nothing stays behind on one."""
    config: Any = {"url": database, **QUICK}
    with Job("w1", CoordinationConfig(**config)) as one, Job("w2", CoordinationConfig(**config)) as two:
        sessions = [OwnedSession(pool, job=job) for job in (one, two, one, two)]
        jobs = [one, two, one, two]
        for turn in range(8):
            for job, session in zip(jobs, sessions, strict=True):
                for item in session.scalars(select(Item).where(Item.owned_by(job))):
                    item.note = f"{turn} {job.node_name}"
                session.commit()
        with Session(engine) as session:
            notes = session.scalars(select(Item.note)).all()
        assert set(notes) == {"7 w1", "7 w2"}

        mine = sessions[0].scalars(select(Item).where(Item.owned_by(one))).first()
        assert mine is not None
        mine.note = "late"
        sessions[0].flush()
        with engine.begin() as connection:
            move = "UPDATE sync_token SET node = 'w2', epoch = epoch + 1 WHERE token_id = :token"
            connection.execute(text(move), {"token": mine.token_id})
        with pytest.raises(OwnershipLost) as lost:
            sessions[0].commit()
        assert lost.value.owners == {lost.value.tokens[0]: "w2"}
        for session in sessions:
            session.close()
    with pool.connect() as left, pool.connect() as right:
        for connection in (left, right):
            assert connection.execute(text("SELECT current_setting('jobsync.node', true)")).scalar() in ("", None)
    with Session(engine) as session:
        assert session.scalars(select(Item.note).where(Item.note == "late")).all() == []


# -- the queue ---------------------------------------------------------------------------------------------------


def test_jobs_are_enqueued_and_their_handlers_work_through_a_pooler(
    items: None, engine: Engine, database: URL, pool: Engine
) -> None:
    """The queue itself has the direct URL, as docs/queue.md says; the sessions are the pooled engine's."""
    queue = JobQueue(CoordinationConfig(url=database, **QUICK), session_factory=sessionmaker(pool))

    @queue.handler("note")
    def note(ctx: JobContext, sku: str) -> None:
        ctx.session.scalars(select(Item).where(Item.sku == sku)).one().note = "done"
        ctx.enqueue("follow", {})

    @queue.handler("follow")
    def follow(ctx: JobContext) -> None: ...

    sessions = [Session(pool) for _ in range(4)]
    for n in range(20):
        session = sessions[n % 4]
        with session.begin():
            queue.enqueue(session, "note", {"sku": f"s{n}"}, key=f"k{n % 3}", idempotency_key=n)
    with sessions[0].begin():
        queue.enqueue_many(sessions[0], "note", [{"sku": f"s{n}"} for n in range(20, 40)])
    with JobWorker(queue, 4):
        wait_for(lambda: queue.stats().counts[JobState.COMPLETED] == 80, "all are done")
    queue.dispose()
    for session in sessions:
        session.close()
    with engine.connect() as connection:
        assert connection.scalars(select(Item.note).distinct()).all() == ["done"]


def test_a_process_that_only_enqueues_may_have_no_other_way(database: URL, pool: Engine) -> None:
    """Workers hear of its jobs, and nothing it sets is left to others."""
    engine = create_engine(database, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        connection.execute(text(f'ALTER DATABASE "{database.database}" SET synchronous_commit = local'))
    engine.dispose()
    queue, producer = JobQueue(CoordinationConfig(url=database, **QUICK)), JobQueue(engine=pool)
    queue.register("note", lambda ctx: None)
    with JobWorker(queue, 1, poll_sec=3600):
        for n in range(1, 4):
            producer.submit("note")
            wait_for(lambda n=n: queue.stats().counts[JobState.COMPLETED] == n, "it has run")  # type: ignore[misc]
    with pool.connect() as one, pool.connect() as two:
        settings = text("SELECT current_setting('synchronous_commit'), current_setting('application_name')")
        assert {tuple(connection.execute(settings).one()) for connection in (one, two)} == {("local", "")}
    producer.dispose()
    queue.dispose()


def test_a_worker_refuses_a_pooler(through: URL) -> None:
    queue = JobQueue(CoordinationConfig(url=through, **QUICK))
    queue.register("note", lambda ctx: None)
    with pytest.raises(PooledConnection, match="reaches PostgreSQL directly"):
        JobWorker(queue, node_name="w1").start()
    with pytest.raises(PooledConnection, match="reaches PostgreSQL directly"):
        JobWorker(queue).start()
    queue.dispose()
