"""``ctx.session``: what a handler writes, its completion and its result are stored together or not at all."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import psycopg
import pytest
from sqlalchemy import URL, Engine, create_engine, event, select, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, scoped_session, sessionmaker

from jobsync_orm import CoordinationConfig
from jobsync_orm.exceptions import ConfigurationError, JobCancelled, LeaseLost, SessionMisused
from jobsync_orm.models.states import AttemptOutcome, JobState
from jobsync_orm.queue import CancelFlag, Ending, JobContext, JobQueue, Retry, Snooze
from jobsync_orm.queue.execution import execute_async
from tests.conftest import Server
from tests.integration.queue.attempts import attempts, run, settle, stored, taken, taken_again


class Base(DeclarativeBase):
    pass


class Order(Base):
    __tablename__ = "orders"
    id: Mapped[int] = mapped_column(primary_key=True)
    paid: Mapped[int] = mapped_column(default=0)


@pytest.fixture
def orders(store: Engine) -> Callable[[], dict[int, int]]:
    """Id -> how often it was paid, of what is committed."""
    Base.metadata.drop_all(store)
    Base.metadata.create_all(store)

    def read() -> dict[int, int]:
        with Session(store) as session:
            return {order.id: order.paid for order in session.scalars(select(Order))}

    return read


@pytest.fixture
def queue(kept_database: URL) -> Iterator[JobQueue]:
    queue = JobQueue(CoordinationConfig(url=kept_database))
    yield queue
    queue.dispose()


Orders = Callable[[], dict[int, int]]


def test_writes_completion_and_result_are_committed_together(store: Engine, queue: JobQueue, orders: Orders) -> None:
    @queue.handler("pay")
    def pay(ctx: JobContext, id: int) -> dict[str, int]:
        assert ctx.session is ctx.session
        ctx.session.add(Order(id=id, paid=1))
        return {"paid": id}

    job = taken(store, "pay", {"id": 3}, error="of an earlier attempt")
    waiting = taken(store, "pay", {"id": 4})
    with store.begin() as connection:
        connection.execute(text(f"INSERT INTO sync_job_dependency VALUES ({job.id}, {waiting.id})"))
    ending = run(queue, job)
    assert (ending.outcome, ending.state, ending.written) == (AttemptOutcome.COMPLETED, JobState.COMPLETED, True)
    assert ending.waiting == (waiting.id,)
    assert orders() == {3: 1}
    row = stored(store, job.id)
    assert (row["state"], row["result"], row["error"], row["failures"]) == ("completed", {"paid": 3}, None, 0)
    assert (row["deadline"], row["incarnation"], row["worker"]) == (None, None, "w1")
    (attempt,) = attempts(store, job.id)
    assert (attempt["attempt"], attempt["outcome"], attempt["worker"]) == (1, "completed", "w1")
    assert row["started_at"] <= attempt["started_at"] <= attempt["ended_at"]
    assert settle(store, queue, ending) == []


def test_session_that_is_not_touched_costs_nothing(store: Engine, queue: JobQueue) -> None:
    queue.register("t", lambda ctx: None)
    ending = run(queue, taken(store, "t"))
    assert not ending.written
    assert queue.engine.pool.checkedin() == 0  # type: ignore[attr-defined]


@pytest.mark.parametrize("error", [ValueError("x"), Retry(5), Snooze(5), JobCancelled("x"), SystemExit(1)], ids=repr)
def test_handler_that_raises_leaves_nothing(
    store: Engine, queue: JobQueue, orders: Orders, error: BaseException
) -> None:
    @queue.handler("pay")
    def pay(ctx: JobContext) -> None:
        ctx.session.add(Order(id=1))
        ctx.session.flush()
        raise error

    job = taken(store, "pay")
    ending = run(queue, job)
    assert not ending.written
    assert orders() == {}
    assert stored(store, job.id)["state"] == "processing"
    assert settle(store, queue, ending) == [[job.id, 1, ending.state]]
    assert queue.engine.pool.checkedout() == 0  # type: ignore[attr-defined]


@pytest.mark.parametrize("what", ["taken over", "finished"])
def test_attempt_that_lost_its_job_in_the_middle_leaves_nothing(
    store: Engine, queue: JobQueue, orders: Orders, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    runs: list[int] = []

    @queue.handler("pay")
    def pay(ctx: JobContext) -> None:
        runs.append(ctx.attempt)
        order = ctx.session.get(Order, 1)
        assert order is not None
        order.paid += 1
        if ctx.attempt > 1:
            return
        if what == "finished":
            with store.begin() as connection:
                connection.execute(text("UPDATE sync_job SET state = 'cancelled', deadline = NULL, incarnation = NULL"))
            return
        # This worker stands still here, past its deadline: another takes the job and does it.
        ending = run(queue, taken_again(store, ctx.id, "w2"))
        assert ending.written
        assert ending.state == JobState.COMPLETED

    with Session(store) as session, session.begin():
        session.add(Order(id=1))
    job = taken(store, "pay")
    ending = run(queue, job)
    assert (ending.written, ending.outcome) == (True, AttemptOutcome.DIED)
    assert f"attempt 1 of job {job.id} is over" in caplog.text
    if what == "taken over":
        assert runs == [1, 2]
        assert orders() == {1: 1}
        assert [row["attempt"] for row in attempts(store, job.id)] == [2]
        assert stored(store, job.id)["state"] == "completed"
    else:
        assert orders() == {1: 0}
        assert attempts(store, job.id) == []


@pytest.mark.parametrize("error", [None, ValueError("x")], ids=repr)
def test_follow_up_job(store: Engine, queue: JobQueue, orders: Orders, error: Exception | None) -> None:
    @queue.handler("pay")
    def pay(ctx: JobContext) -> None:
        follow_up = ctx.enqueue("mail", {"order": 1}, key="order:1")
        ctx.session.add(Order(id=follow_up.id))
        if error is not None:
            raise error

    ending = run(queue, taken(store, "pay"))
    assert ending.written is (error is None)
    with store.connect() as connection:
        mails = connection.execute(text("SELECT id, payload, key FROM sync_job WHERE type = 'mail'")).all()
    assert [mail.id for mail in mails] == list(orders())
    assert [tuple(mail)[1:] for mail in mails] == ([] if error else [({"order": 1}, "order:1")])


@pytest.mark.parametrize("error", [None, ValueError("x")], ids=repr)
def test_follow_up_job_of_a_coroutine(store: Engine, queue: JobQueue, error: Exception | None) -> None:
    @queue.handler("pay")
    async def pay(ctx: JobContext) -> None:
        assert (await ctx.enqueue("mail")).created
        if error is not None:
            raise error

    ending = run_async(queue, taken(store, "pay"))
    assert ending.written is (error is None)
    with store.connect() as connection:
        mails = connection.execute(text("SELECT count(*) FROM sync_job WHERE type = 'mail'")).scalar()
    assert mails == (error is None)


def test_two_attempts_at_the_same_moment_pay_once(store: Engine, queue: JobQueue, orders: Orders) -> None:
    """A zombie and its successor, both about to commit."""
    both_there = threading.Barrier(2)

    @queue.handler("pay")
    def pay(ctx: JobContext) -> None:
        ctx.session.add(Order(id=ctx.attempt, paid=1))
        ctx.session.flush()
        both_there.wait(60)

    first = taken(store, "pay")
    second = taken_again(store, first.id, "w2")
    endings: list[Ending] = []
    threads = [threading.Thread(target=lambda job=job: endings.append(run(queue, job))) for job in (first, second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(ending.outcome for ending in endings) == ["completed", "died"]
    assert orders() == {2: 1}


def test_completion_waits_for_somebody_who_looks_at_the_job(store: Engine, queue: JobQueue, orders: Orders) -> None:
    """A row that is locked for a moment is no lost one."""

    @queue.handler("pay")
    def pay(ctx: JobContext) -> None:
        ctx.session.add(Order(id=1))

    job = taken(store, "pay")
    endings: list[Ending] = []
    with store.connect() as other:
        other.execute(text("SELECT 1 FROM sync_job FOR UPDATE"))
        thread = threading.Thread(target=lambda: endings.append(run(queue, job)))
        thread.start()
        while True:
            with store.connect() as watcher:
                if watcher.execute(
                    text(
                        "SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
                    )
                ).all():
                    break
        other.execute(text("UPDATE sync_job SET cancel_requested = true"))
        other.commit()
    thread.join(60)
    assert endings[0].written
    assert stored(store, job.id)["state"] == "completed"


def test_savepoint(store: Engine, queue: JobQueue, orders: Orders) -> None:
    @queue.handler("pay")
    def pay(ctx: JobContext) -> None:
        ctx.session.add(Order(id=1))
        with suppress(ZeroDivisionError), ctx.session.begin_nested():
            ctx.session.add(Order(id=2))
            ctx.session.flush()
            raise ZeroDivisionError
        with ctx.session.begin_nested():
            ctx.session.add(Order(id=3))
        ctx.session.begin_nested()  # left open
        ctx.session.add(Order(id=4))

    assert run(queue, taken(store, "pay")).written
    assert orders() == {1: 0, 3: 0, 4: 0}


def test_rollback_of_the_handlers_own(store: Engine, queue: JobQueue, orders: Orders) -> None:
    @queue.handler("pay")
    def pay(ctx: JobContext) -> None:
        ctx.session.add(Order(id=1))
        ctx.session.flush()
        ctx.session.rollback()
        ctx.session.add(Order(id=2))

    job = taken(store, "pay")
    assert run(queue, job).written
    assert orders() == {2: 0}
    assert stored(store, job.id)["state"] == "completed"


def commit(session: Session) -> None:
    session.add(Order(id=1))
    session.commit()


def commit_and_catch(session: Session) -> None:
    session.add(Order(id=1))
    try:
        session.commit()
    except Exception:
        session.rollback()


def begin(session: Session) -> None:
    with session.begin():
        session.add(Order(id=1))


def close(session: Session) -> None:
    with session:
        session.add(Order(id=1))


def close_and_go_on(session: Session) -> None:
    with session:
        session.add(Order(id=1))
        session.flush()
    session.add(Order(id=2))


def close_after_savepoint(session: Session) -> None:
    session.begin_nested().rollback()
    session.add(Order(id=1))
    session.close()


@pytest.mark.parametrize(
    ("misuse", "message"),
    [
        (commit, "Leave out commit"),
        (commit_and_catch, "Leave out commit"),
        (begin, "Leave out commit"),
        (close, "has closed ctx.session"),
        (close_and_go_on, "has closed ctx.session"),
        (close_after_savepoint, "has closed ctx.session"),
    ],
)
def test_session_that_the_handler_ends_itself(
    store: Engine, queue: JobQueue, orders: Orders, misuse: Callable[[Session], None], message: str
) -> None:
    queue.register("pay", lambda ctx: misuse(ctx.session))
    job = taken(store, "pay")
    ending = run(queue, job)
    assert (ending.state, ending.written) == (JobState.RETRYING, False)
    assert (ending.error or "").startswith("SessionMisused: ")
    assert message in (ending.error or "")
    assert orders() == {}
    assert queue.engine.pool.checkedout() == 0  # type: ignore[attr-defined]


def test_work_that_is_refused_at_commit_is_a_failure(store: Engine, queue: JobQueue, orders: Orders) -> None:
    with store.begin() as connection:
        connection.execute(text("ALTER TABLE orders ADD CONSTRAINT one UNIQUE (paid) DEFERRABLE INITIALLY DEFERRED"))

    @queue.handler("pay")
    def pay(ctx: JobContext) -> None:
        ctx.session.add_all([Order(id=1, paid=1), Order(id=2, paid=1)])

    job = taken(store, "pay")
    ending = run(queue, job)
    assert (ending.state, ending.written) == (JobState.RETRYING, False)
    assert (ending.error or "").startswith("IntegrityError: ")
    assert orders() == {}
    assert settle(store, queue, ending) == [[job.id, 1, "retrying"]]


def test_error_that_the_handler_has_caught_without_a_savepoint_is_a_failure(
    store: Engine, queue: JobQueue, orders: Orders
) -> None:
    @queue.handler("pay")
    def pay(ctx: JobContext) -> None:
        with suppress(DBAPIError):
            ctx.session.execute(text("SELECT 1/0"))

    job = taken(store, "pay")
    ending = run(queue, job)
    assert ending.state == JobState.RETRYING
    assert stored(store, job.id)["state"] == "processing"


def test_commit_whose_answer_is_lost_is_not_done_again(store: Engine, queue: JobQueue, orders: Orders) -> None:
    @queue.handler("pay")
    def pay(ctx: JobContext) -> None:
        ctx.session.add(Order(id=1, paid=1))

    def lose(connection: Any) -> None:
        """COMMIT is done, and its answer never arrives."""
        raw = connection.connection.dbapi_connection
        raw.execute("COMMIT")
        raw.close()

    event.listen(queue.engine, "commit", lose)
    job = taken(store, "pay")
    ending = run(queue, job)
    event.remove(queue.engine, "commit", lose)
    assert not ending.written
    assert ending.state == JobState.RETRYING
    assert ending.delay is not None
    assert ending.delay <= 1
    assert orders() == {1: 1}
    assert settle(store, queue, ending) == []
    row = stored(store, job.id)
    assert (row["state"], row["failures"]) == ("completed", 0)
    assert [attempt["outcome"] for attempt in attempts(store, job.id)] == ["completed"]


def test_connection_that_breaks_in_the_middle(store: Engine, queue: JobQueue, orders: Orders) -> None:
    @queue.handler("pay")
    def pay(ctx: JobContext) -> None:
        ctx.session.add(Order(id=1, paid=1))
        ctx.session.flush()
        pid = ctx.session.scalar(text("SELECT pg_backend_pid()"))
        with store.connect() as connection:
            connection.execute(text("SELECT pg_terminate_backend(:pid, 10000)"), {"pid": pid})

    job = taken(store, "pay")
    ending = run(queue, job)
    assert (ending.state, ending.written) == (JobState.RETRYING, False)
    assert orders() == {}
    assert settle(store, queue, ending) == [[job.id, 1, "retrying"]]


def test_serialization_failure_is_tried_again_soon(store: Engine, kept_database: URL, orders: Orders) -> None:
    strict = create_engine(kept_database, isolation_level="REPEATABLE READ")
    queue = JobQueue(engine=strict)

    @queue.handler("pay")
    def pay(ctx: JobContext) -> None:
        order = ctx.session.get(Order, 1)
        assert order is not None
        with store.begin() as connection:
            connection.execute(text("UPDATE orders SET paid = paid + 1"))
        order.paid += 10

    with Session(store) as session, session.begin():
        session.add(Order(id=1))
    ending = run(queue, taken(store, "pay"))
    assert ending.state == JobState.RETRYING
    assert ending.delay is not None
    assert ending.delay <= 1
    assert orders() == {1: 1}
    strict.dispose()


def test_result_that_cannot_be_stored(store: Engine, queue: JobQueue, orders: Orders) -> None:
    @queue.handler("pay")
    def pay(ctx: JobContext) -> Any:
        ctx.session.add(Order(id=1))
        return object()

    job = taken(store, "pay")
    ending = run(queue, job)
    assert ending.written
    assert orders() == {1: 0}
    row = stored(store, job.id)
    assert (row["state"], row["result"]) == ("completed", None)
    assert row["error"].startswith("InvalidPayload: ")
    assert attempts(store, job.id)[0]["error"] == row["error"]


def test_session_factory_of_the_application(kept_database: URL, store: Engine, orders: Orders) -> None:
    class Mine(Session):
        pass

    for factory in (sessionmaker(store, class_=Mine), scoped_session(sessionmaker(store, class_=Mine))):
        queue = JobQueue(CoordinationConfig(url=kept_database), session_factory=factory)

        @queue.handler("pay")
        def pay(ctx: JobContext, id: int) -> None:
            assert isinstance(ctx.session, Mine)
            ctx.session.add(Order(id=id))

        before = orders()
        for number in (len(before) + 1, len(before) + 2):
            assert run(queue, taken(store, "pay", {"id": number})).written
        assert len(orders()) == len(before) + 2
    # The session of the thread is the application's again, also after an attempt that failed.
    queue.register("fail", lambda ctx: ctx.session.add("no object"))
    assert run(queue, taken(store, "fail")).state == JobState.RETRYING
    factory().add(Order(id=99))
    factory().commit()
    factory.remove()
    assert 99 in orders()


def test_sessions_that_cannot_be_used(kept_database: URL, store: Engine, orders: Orders) -> None:
    autocommit = store.execution_options(isolation_level="AUTOCOMMIT")
    for factory, message in (
        (sessionmaker(autocommit), "AUTOCOMMIT"),
        (lambda: AsyncSession(), "give JobQueue a sessionmaker"),
        (dict, "give JobQueue a sessionmaker"),
    ):
        queue = JobQueue(CoordinationConfig(url=kept_database), session_factory=factory)

        @queue.handler("pay")
        def pay(ctx: JobContext) -> None:
            ctx.session.add(Order(id=1))
            ctx.session.flush()

        ending = run(queue, taken(store, "pay"))
        assert (ending.error or "").startswith(ConfigurationError.__name__)
        assert message in (ending.error or "")
        assert orders() == {}


def test_session_after_the_attempt(store: Engine, queue: JobQueue) -> None:
    contexts: list[JobContext] = []
    queue.register("t", contexts.append)

    @queue.handler("u")
    def function(ctx: JobContext) -> None:
        contexts.append(ctx)
        ctx.session.execute(text("SELECT 1"))

    for name in ("t", "u"):
        run(queue, taken(store, name))
        with pytest.raises(SessionMisused, match="has ended"):
            contexts[-1].session  # noqa: B018


def test_extend(store: Engine, queue: JobQueue) -> None:
    seen: list[float] = []

    @queue.handler("t")
    def function(ctx: JobContext) -> None:
        ctx.on_extend = seen.append
        ctx.extend(7_200)
        assert ctx.limit == seen[0]
        ctx.heartbeat()

    job = taken(store, "t", timeout=100)
    assert run(queue, job).state == JobState.COMPLETED
    assert 7_090 < seen[0] - seen[1] < 7_110
    with store.connect() as connection:
        left = connection.execute(
            text("SELECT extract(epoch FROM deadline - clock_timestamp()) FROM sync_job")
        ).scalar()
    assert left is not None
    assert 100 < left <= 130


def test_extend_of_an_attempt_that_has_lost_its_job(store: Engine, queue: JobQueue) -> None:
    @queue.handler("t")
    def function(ctx: JobContext) -> None:
        taken_again(store, ctx.id)
        with pytest.raises(LeaseLost, match="another worker's"):
            ctx.extend(10)
        ctx.check()

    ending = run(queue, taken(store, "t"))
    assert (ending.written, ending.outcome) == (True, AttemptOutcome.DIED)


def test_extend_of_a_job_that_is_to_be_cancelled(store: Engine, queue: JobQueue) -> None:
    @queue.handler("t")
    def function(ctx: JobContext) -> None:
        with store.begin() as connection:
            connection.execute(text("UPDATE sync_job SET cancel_requested = true"))
        ctx.heartbeat()

    assert run(queue, taken(store, "t")).outcome == AttemptOutcome.CANCELLED


# -- coroutines


def run_async(queue: JobQueue, job: Any, flag: CancelFlag | None = None) -> Ending:
    async def main() -> Ending:
        context = JobContext(queue, job, "w1", flag or CancelFlag())
        try:
            return await execute_async(queue, queue.handlers[job.type], job, context)
        finally:
            await queue.dispose_async()

    return asyncio.run(main())


def test_async_session(store: Engine, queue: JobQueue, orders: Orders) -> None:
    @queue.handler("pay")
    async def pay(ctx: JobContext, id: int) -> dict[str, int]:
        session = await ctx.async_session()
        assert session is await ctx.async_session()
        session.add(Order(id=id))
        return {"paid": id}

    for number in (1, 2):  # in two event loops
        job = taken(store, "pay", {"id": number})
        ending = run_async(queue, job)
        assert (ending.written, ending.state) == (True, JobState.COMPLETED)
        assert stored(store, job.id)["result"] == {"paid": number}
    assert orders() == {1: 0, 2: 0}
    assert [attempt["outcome"] for attempt in attempts(store, job.id)] == ["completed"]


def test_async_session_of_a_handler_that_raises(store: Engine, queue: JobQueue, orders: Orders) -> None:
    @queue.handler("pay")
    async def pay(ctx: JobContext) -> None:
        session = await ctx.async_session()
        session.add(Order(id=1))
        await session.flush()
        raise ValueError

    ending = run_async(queue, taken(store, "pay"))
    assert (ending.written, ending.state) == (False, JobState.RETRYING)
    assert orders() == {}


def test_async_attempt_that_lost_its_job(store: Engine, queue: JobQueue, orders: Orders) -> None:
    @queue.handler("pay")
    async def pay(ctx: JobContext) -> None:
        (await ctx.async_session()).add(Order(id=1))
        taken_again(store, ctx.id)

    ending = run_async(queue, taken(store, "pay"))
    assert (ending.written, ending.outcome) == (True, AttemptOutcome.DIED)
    assert orders() == {}


async def async_commit(session: AsyncSession) -> None:
    session.add(Order(id=1))
    await session.commit()


async def async_close(session: AsyncSession) -> None:
    async with session:
        session.add(Order(id=1))
        await session.flush()


@pytest.mark.parametrize("misuse", [async_commit, async_close])
def test_async_session_that_the_handler_ends_itself(
    store: Engine, queue: JobQueue, orders: Orders, misuse: Callable[[AsyncSession], Any]
) -> None:
    @queue.handler("pay")
    async def pay(ctx: JobContext) -> None:
        await misuse(await ctx.async_session())

    ending = run_async(queue, taken(store, "pay"))
    assert ending.state == JobState.RETRYING
    assert (ending.error or "").startswith("SessionMisused: ")
    assert orders() == {}


def test_async_attempt_that_is_cancelled_in_a_statement(store: Engine, queue: JobQueue, orders: Orders) -> None:
    @queue.handler("pay")
    async def pay(ctx: JobContext) -> None:
        session = await ctx.async_session()
        session.add(Order(id=1))
        await session.flush()
        running.set()
        await session.execute(text("SELECT pg_sleep(60)"))

    running = asyncio.Event()

    async def main() -> Ending:
        job = taken(store, "pay")
        context = JobContext(queue, job, "w1", CancelFlag())
        task = asyncio.create_task(execute_async(queue, queue.handlers["pay"], job, context))
        await asyncio.wait_for(running.wait(), 60)
        context.cancelled.set("timeout")
        task.cancel()
        ending = await task
        await queue.dispose_async()
        return ending

    ending = asyncio.run(main())
    assert (ending.outcome, ending.state, ending.written) == (AttemptOutcome.TIMEOUT, JobState.RETRYING, False)
    assert orders() == {}


def test_async_session_of_the_applications_engine_and_factory(
    store: Engine, kept_database: URL, orders: Orders
) -> None:
    class Mine(AsyncSession):
        pass

    async def pay_with(factory: Any, theirs: AsyncEngine) -> None:
        queue = JobQueue(engine=theirs, session_factory=factory)

        @queue.handler("pay")
        async def pay(ctx: JobContext, id: int) -> None:
            session = await ctx.async_session()
            assert isinstance(session, Mine) is (factory is not None)
            assert (session.bind is theirs) is (factory is not None)
            session.add(Order(id=id))

        job = taken(store, "pay", {"id": len(orders()) + 1})
        ending = await execute_async(queue, queue.handlers["pay"], job, JobContext(queue, job, "w1", CancelFlag()))
        assert ending.written
        await queue.dispose_async()
        queue.dispose()

    async def main() -> None:
        theirs = create_async_engine(kept_database)
        for factory in (None, async_sessionmaker(theirs, class_=Mine)):
            await pay_with(factory, theirs)
        await theirs.dispose()

    asyncio.run(main())
    assert len(orders()) == 2


def test_each_kind_of_handler_has_its_kind_of_session(store: Engine, queue: JobQueue) -> None:
    @queue.handler("a")
    async def coroutine(ctx: JobContext) -> None:
        with pytest.raises(SessionMisused, match=r"await ctx.async_session\(\)"):
            ctx.session  # noqa: B018

    @queue.handler("b")
    def function(ctx: JobContext) -> None:
        with pytest.raises(SessionMisused, match=r"use ctx.session"):
            asyncio.run(ctx.async_session())

    assert run_async(queue, taken(store, "a")).state == JobState.COMPLETED
    assert run(queue, taken(store, "b")).state == JobState.COMPLETED


def test_worker_that_is_killed_before_commit_leaves_nothing(
    store: Engine, queue: JobQueue, orders: Orders, server: Server
) -> None:
    """The statement that completes the job has been sent, and then the process is gone."""

    @queue.handler("pay")
    def pay(ctx: JobContext) -> None:
        ctx.session.add(Order(id=1))

    def die(connection: Any) -> None:
        raw: psycopg.Connection[Any] = connection.connection.dbapi_connection
        raw.close()  # what the server sees of a process that has died
        raise KeyboardInterrupt

    event.listen(queue.engine, "commit", die)
    job = taken(store, "pay")
    with pytest.raises(KeyboardInterrupt):
        run(queue, job)
    assert orders() == {}
    assert stored(store, job.id)["state"] == "processing"
