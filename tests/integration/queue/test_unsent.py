"""A plain job waits until its session's transaction begins; nobody can tell but by when the database hears of it."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
from psycopg.errors import InvalidSqlStatementName
from sqlalchemy import URL, Connection, Engine, create_engine, event, text
from sqlalchemy.exc import DBAPIError, InternalError, InvalidRequestError, OperationalError
from sqlalchemy.orm import Session, sessionmaker

from jobsync_orm import CoordinationConfig, migrate, observe
from jobsync_orm.exceptions import ConfigurationError, NotEnqueued
from jobsync_orm.models.states import JobState
from jobsync_orm.observe import JobsEnqueued
from jobsync_orm.queue import Enqueued, JobQueue, one_message
from jobsync_orm.queue.one_message import PlainInsert
from jobsync_orm.queue.unsent import MOST, UnsentJob
from tests.integration.cluster import wait_for
from tests.integration.queue.rows import Listener
from tests.integration.queue.stored import jobs, run


@pytest.fixture(autouse=True)
def seen(queue: JobQueue, store: Engine) -> None:
    """The engine has been seen to have transactions."""
    with Session(store) as session:
        queue.enqueue(session, "first")
        assert store.pool.checkedout() == 1  # type: ignore[attr-defined]


@pytest.fixture
def messages() -> Iterator[list[tuple[int, bool]]]:
    """Of each message with plain jobs: how many, and whether it was the whole transaction."""
    found: list[tuple[int, bool]] = []
    put = PlainInsert.put

    def put_and_note(self: PlainInsert, connection: Connection, jobs: Any, *, alone: bool = False) -> list[int]:
        found.append((len(jobs), alone))
        return put(self, connection, jobs, alone=alone)

    with patch.object(PlainInsert, "put", put_and_note):
        yield found


@pytest.fixture
def refused(store: Engine) -> Iterator[str]:
    """A job type that the table does not take."""
    run(store, "ALTER TABLE sync_job ADD CONSTRAINT no_bad_ones CHECK (type <> 'bad')")
    yield "bad"
    run(store, "ALTER TABLE sync_job DROP CONSTRAINT no_bad_ones")


def waiting(engine: Engine) -> bool:
    """Whether no session has a connection."""
    return engine.pool.checkedout() == 0  # type: ignore[attr-defined, no-any-return]


Messages = list[tuple[int, bool]]


def test_alone_it_is_the_whole_transaction(queue: JobQueue, store: Engine, messages: Messages) -> None:
    with Session(store) as session:
        job = queue.enqueue(session, "a", {"n": 1}, key="k", priority=3)
        assert waiting(store)
        assert (job.created, job.state, job.stuck_behind) == (True, JobState.PENDING, ())
        assert jobs(store) == []
        session.commit()
        assert jobs(store, "id, type, payload, key, priority") == [(job.id, "a", {"n": 1}, "k", 3)]
    assert messages == [(1, True)]
    assert job == Enqueued(job.id, True, JobState.PENDING)


def test_several_are_one_message(queue: JobQueue, store: Engine, messages: Messages) -> None:
    with Session(store) as session, session.begin():
        made = [queue.enqueue(session, f"t{number}") for number in range(3)]
        assert waiting(store)
    assert messages == [(3, True)]
    assert jobs(store, "id, type") == [(job.id, f"t{number}") for number, job in enumerate(made)]


def test_many_do_not_wait_for_ever(queue: JobQueue, store: Engine, messages: Messages) -> None:
    with Session(store) as session, session.begin():
        made = [queue.enqueue(session, "a", {"n": number}) for number in range(MOST + 2)]
        assert not waiting(store)
    assert messages == [(MOST, False), (1, False), (1, False)]
    assert jobs(store) == [job.id for job in made]


def test_they_come_before_whatever_the_session_does(queue: JobQueue, store: Engine, messages: Messages) -> None:
    with Session(store) as session:
        queue.enqueue(session, "a")
        queue.enqueue(session, "b")
        assert session.scalars(text("SELECT type FROM sync_job ORDER BY id")).all() == ["a", "b"]
        assert jobs(store) == []
        queue.enqueue(session, "c")
        session.commit()
    assert messages == [(2, False), (1, False)]
    assert jobs(store, "type") == ["a", "b", "c"]


def test_the_order_is_that_of_the_calls(queue: JobQueue, store: Engine) -> None:
    with Session(store) as session, session.begin():
        queue.enqueue(session, "a")
        queue.enqueue(session, "b", idempotency_key="i")
        queue.enqueue_many(session, "c", [{}, {}])
        queue.enqueue(session, "d")
    assert jobs(store, "type") == ["a", "b", "c", "c", "d"]


def test_a_job_after_one_that_waits(queue: JobQueue, store: Engine) -> None:
    with Session(store) as session, session.begin():
        first = queue.enqueue(session, "a")
        queue.enqueue(session, "b", after=first)
    assert jobs(store, "state") == ["pending", "blocked"]


def test_the_id_is_there_when_it_is_read(queue: JobQueue, store: Engine, messages: Messages) -> None:
    with Session(store) as session:
        job = queue.enqueue(session, "a")
        id = job.id
        assert session.scalar(text("SELECT id FROM sync_job")) == id
        assert jobs(store) == []
        session.commit()
    assert messages == [(1, False)]
    assert jobs(store) == [id]


@pytest.mark.parametrize("end", [Session.rollback, Session.close, Session.reset])
def test_what_is_not_committed_never_was(queue: JobQueue, store: Engine, messages: Messages, end: Any) -> None:
    with Session(store) as session:
        job = queue.enqueue(session, "a")
        end(session)
        session.commit()
        later = queue.enqueue(session, "b")
        session.commit()
        with pytest.raises(NotEnqueued, match="rolled back, or closed"):
            _ = job.id
    assert messages == [(1, True)]
    assert jobs(store, "id, type") == [(later.id, "b")]


def test_a_session_that_is_forgotten(queue: JobQueue, store: Engine) -> None:
    job = queue.enqueue(Session(store), "a")
    gc.collect()
    with pytest.raises(NotEnqueued):
        _ = job.id
    assert jobs(store) == []


def test_looking_at_one_does_not_send_it(queue: JobQueue, store: Engine) -> None:
    with Session(store) as session:
        job = queue.enqueue(session, "a")
        assert "not sent" in repr(job)
        assert waiting(store)
        session.commit()
        assert repr(job) == repr(Enqueued(job.id, True, JobState.PENDING))


@pytest.mark.parametrize("kind", [copy.copy, copy.deepcopy, lambda job: pickle.loads(pickle.dumps(job))])
def test_a_copy_is_of_what_was_sent(queue: JobQueue, store: Engine, kind: Any) -> None:
    with Session(store) as session:
        job = queue.enqueue(session, "a")
        other = kind(job)
        session.commit()
    assert type(other) is Enqueued
    assert other == job
    assert job == other
    assert hash(other) == hash(job)
    assert {job} == {other}
    assert jobs(store) == [other.id]


def test_nothing_of_it_can_be_set(queue: JobQueue, store: Engine) -> None:
    with Session(store) as session:
        job = queue.enqueue(session, "a")
        with pytest.raises(AttributeError):
            job.id = 3  # type: ignore[misc]
        with pytest.raises(AttributeError):
            job.created = False  # type: ignore[misc]


def test_savepoints(queue: JobQueue, store: Engine) -> None:
    with Session(store) as session, session.begin():
        queue.enqueue(session, "stays")
        with session.begin_nested() as savepoint:
            assert waiting(store)
            savepoint.rollback()
        with session.begin_nested() as savepoint:
            queue.enqueue(session, "taken back")
            savepoint.rollback()
        with session.begin_nested():
            queue.enqueue(session, "stays too")
    assert jobs(store, "type") == ["stays", "stays too"]


def test_a_savepoint_that_is_released_commits_nothing(queue: JobQueue, store: Engine) -> None:
    with Session(store) as session:
        queue.enqueue(session, "a")
        with session.begin_nested():
            pass
        assert jobs(store) == []
        session.rollback()
    assert jobs(store) == []


def test_a_commit_of_all_with_a_savepoint_open(queue: JobQueue, store: Engine) -> None:
    with Session(store) as session:
        whole = session.begin()
        queue.enqueue(session, "a")
        session.begin_nested()
        whole.commit()
    assert jobs(store, "type") == ["a"]


def test_who_listens_to_a_transactions_making_may_enqueue_and_write(queue: JobQueue, store: Engine) -> None:
    with Session(store) as session:

        @event.listens_for(session, "after_transaction_create", once=True)
        def created(session: Session, transaction: Any) -> None:
            queue.enqueue(session, "first")

        queue.enqueue(session, "second")
        session.commit()

        @event.listens_for(session, "after_transaction_create", once=True)
        def created_again(session: Session, transaction: Any) -> None:
            session.execute(text("SELECT 1"))

        queue.enqueue(session, "third")
        assert session.scalar(text("SELECT count(*) FROM sync_job")) == 3
        session.commit()
    assert jobs(store, "type") == ["first", "second", "third"]


class Setting(Session):
    """Says something to each connection before it is used."""

    def connection(self, *arguments: Any, **options: Any) -> Connection:
        connection = super().connection(*arguments, **options)
        connection.execute(text("SET LOCAL application_name = 'tenant 7'"))
        return connection


class Beginning(Session):
    """Its begin() is no SQLAlchemy one."""

    @contextmanager
    def begin(self) -> Iterator[None]:  # type: ignore[override]
        yield


@pytest.mark.parametrize("kind", [Setting, Beginning])
def test_a_session_of_another_kind(queue: JobQueue, store: Engine, kind: type[Session]) -> None:
    with kind(store) as session:
        queue.enqueue(session, "a")
        assert not waiting(store)
        session.commit()
    assert jobs(store, "type") == ["a"]


def test_each_job_goes_where_the_session_says(queue: JobQueue, store: Engine, empty_database: URL) -> None:
    other = create_engine(empty_database)
    migrate.upgrade(CoordinationConfig(engine=other))
    bound = [store]

    class Sharded(Session):
        def get_bind(self, *arguments: Any, **options: Any) -> Any:
            return options.get("bind") or bound[0]

    bound[0] = other
    with Sharded() as session, session.begin():
        queue.enqueue(session, "warm")
    with Sharded() as session, session.begin():
        bound[0] = store
        queue.enqueue(session, "here")
        bound[0] = other
        queue.enqueue(session, "there")
    assert jobs(store, "type") == ["here"]
    assert jobs(other, "type") == ["warm", "there"]
    other.dispose()


def test_a_connection_that_is_given_later(queue: JobQueue, store: Engine) -> None:
    with store.connect() as connection, connection.begin(), Session(store) as session:
        job = queue.enqueue(session, "a")
        with pytest.raises(ConfigurationError, match="another transaction"):
            session.execute(text("SELECT 1"), bind_arguments={"bind": connection})
        with pytest.raises(NotEnqueued, match="another transaction"):
            session.commit()
        session.rollback()
        with pytest.raises(NotEnqueued):
            _ = job.id
    assert jobs(store) == []


def test_autocommit_that_is_asked_for_later(queue: JobQueue, store: Engine) -> None:
    with Session(store) as session:
        queue.enqueue(session, "a")
        with pytest.raises(ConfigurationError, match="AUTOCOMMIT"):
            session.connection(execution_options={"isolation_level": "AUTOCOMMIT"})
        session.rollback()
    assert jobs(store) == []


def test_what_is_done_to_a_connection_that_leaves_the_pool_is_not_put_off(queue: JobQueue, store: Engine) -> None:
    tenants = []
    event.listen(store, "checkout", lambda *_: tenants.append("now"))
    with Session(store) as session:
        queue.enqueue(session, "a")
        assert tenants == ["now"]


def test_one_that_was_interrupted_is_not_sent_again(queue: JobQueue, store: Engine) -> None:
    with Session(store) as session:
        queue.enqueue(session, "a")
        with patch.object(UnsentJob, "sent", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
            session.commit()
        with pytest.raises(NotEnqueued, match="interrupted"):
            session.commit()
    assert jobs(store, "type") == ["a"]


def test_a_failure_keeps_no_session(queue: JobQueue, store: Engine, refused: str) -> None:
    session = Session(store)
    queue.enqueue(session, refused)
    with pytest.raises(DBAPIError):
        session.commit()
    session.close()
    gone = weakref.ref(session)
    del session
    gc.collect()
    assert gone() is None


def test_a_child_process_sends_nothing_of_its_parents(queue: JobQueue, store: Engine) -> None:
    with Session(store) as session:
        queue.enqueue(session, "a")
        child = os.fork()
        if child == 0:
            try:
                store.dispose(close=False)
                session.commit()
            except NotEnqueued:
                os._exit(7)
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        session.commit()
    assert jobs(store, "type") == ["a"]


def test_who_listens_to_the_commit_may_write(queue: JobQueue, store: Engine, messages: Messages) -> None:
    """And what it writes, and enqueues, is of the same transaction."""
    with Session(store) as session:
        queue.enqueue(session, "a")

        @event.listens_for(session, "before_commit")
        def committing(session: Session) -> None:
            queue.enqueue(session, "b")
            session.execute(text("SELECT 1 / (SELECT count(*) - 2 FROM sync_job)"))

        with pytest.raises(DBAPIError, match="division by zero"):
            session.commit()
        session.rollback()
    assert jobs(store) == []
    assert messages == [(1, False), (1, False)]


def test_who_listens_to_the_commit_may_enqueue(queue: JobQueue, store: Engine) -> None:
    with Session(store) as session:
        event.listen(session, "before_commit", lambda session: queue.enqueue(session, "b"))
        session.commit()
        queue.enqueue(session, "a")
        session.commit()
    assert jobs(store, "type") == ["b", "a", "b"]


def test_who_listens_to_the_beginning_comes_first(queue: JobQueue, store: Engine) -> None:
    """It may set what the INSERT depends on: a role, a tenant, a search path."""
    run(store, "CREATE TABLE IF NOT EXISTS tenant_seen (tenant text)")
    run(
        store,
        """CREATE OR REPLACE FUNCTION note_tenant() RETURNS trigger LANGUAGE plpgsql AS
           $$ BEGIN INSERT INTO tenant_seen VALUES (current_setting('app.tenant', true)); RETURN NEW; END $$""",
    )
    run(store, "CREATE TRIGGER note_tenant BEFORE INSERT ON sync_job FOR EACH ROW EXECUTE FUNCTION note_tenant()")
    make = sessionmaker(store)

    @event.listens_for(make, "after_begin")
    def begun(session: Session, transaction: Any, connection: Connection) -> None:
        connection.execute(text("SELECT set_config('app.tenant', 'blue', true)"))

    try:
        with make.begin() as session:
            queue.enqueue(session, "a")
        with store.connect() as connection:
            assert connection.scalars(text("SELECT tenant FROM tenant_seen")).all() == ["blue"]
    finally:
        run(store, "DROP TRIGGER note_tenant ON sync_job")
        run(store, "DROP TABLE tenant_seen")


def test_pending_objects_are_flushed_first(queue: JobQueue, store: Engine) -> None:
    with Session(store) as session, session.begin():
        session.add(queue.models.QueuedJob(type="by hand", payload={}))
        queue.enqueue(session, "a")
        assert not waiting(store)
    assert jobs(store, "type") == ["by hand", "a"]


def test_what_is_added_later_is_of_the_same_transaction(queue: JobQueue, store: Engine, messages: Messages) -> None:
    with Session(store) as session, session.begin():
        queue.enqueue(session, "a")
        session.add(queue.models.QueuedJob(type="by hand", payload={}))
    assert messages == [(1, False)]
    assert jobs(store, "type") == ["a", "by hand"]


def test_who_listens_to_a_flush_may_enqueue(queue: JobQueue, store: Engine) -> None:
    """Even in the flush of a commit, and if nothing is left to be flushed then."""
    with Session(store) as session:

        @event.listens_for(session, "before_flush")
        def flushing(session: Session, *_: Any) -> None:
            session.expunge_all()
            queue.enqueue(session, "a")

        session.add(queue.models.QueuedJob(type="by hand", payload={}))
        session.commit()
    assert jobs(store, "type") == ["a"]


def test_it_is_too_late_in_a_transaction_that_is_committed(queue: JobQueue, store: Engine) -> None:
    with Session(store) as session:
        event.listen(session, "after_commit", lambda session: queue.enqueue(session, "a"))
        with pytest.raises(InvalidRequestError, match="committed"):
            session.commit()
    assert jobs(store) == []


def test_a_job_with_conditions_does_not_wait(queue: JobQueue, store: Engine) -> None:
    with Session(store) as session, session.begin():
        assert queue.enqueue(session, "a", delay=60).state == JobState.SCHEDULED
    with Session(store) as session, session.begin():
        queue.enqueue(session, "waits")
        first = queue.enqueue(session, "b", idempotency_key="i")
        assert queue.enqueue(session, "b", idempotency_key="i").id == first.id
    assert jobs(store, "type, state") == [("a", "scheduled"), ("waits", "pending"), ("b", "pending")]


def test_an_engine_that_is_listened_to_hears_at_once(queue: JobQueue, store: Engine) -> None:
    heard: list[str] = []
    with Session(store) as session, session.begin():
        queue.enqueue(session, "a")
        event.listen(store, "before_cursor_execute", lambda _c, _k, sql, *_: heard.append(sql))
    assert len(heard) == 1
    with Session(store) as session, session.begin():
        queue.enqueue(session, "b")
        assert len(heard) == 2
    assert jobs(store, "type") == ["a", "b"]


def test_in_autocommit_nothing_waits(queue: JobQueue, store: Engine) -> None:
    by_option = store.execution_options(isolation_level="AUTOCOMMIT")
    by_driver = create_engine(store.url, connect_args={"autocommit": True})
    for number, engine in enumerate([by_option, by_option, by_driver, by_driver], 1):
        with Session(engine) as session:
            queue.enqueue(session, "a")
            assert len(jobs(store)) == number
    by_driver.dispose()


def test_an_isolation_level_of_its_own_is_said(queue: JobQueue, store: Engine, messages: Messages) -> None:
    engine = create_engine(store.url, isolation_level="SERIALIZABLE")
    for _ in range(2):
        with Session(engine) as session, session.begin():
            queue.enqueue(session, "a")
    assert messages == [(1, False)] * 2
    assert len(jobs(store)) == 2
    engine.dispose()


def test_a_transaction_that_may_not_write(queue: JobQueue, store: Engine) -> None:
    @event.listens_for(store, "connect")
    def connected(connection: Any, *_: Any) -> None:
        connection.read_only = True

    store.dispose()
    with Session(store) as session:
        queue.enqueue(session, "a")
        with pytest.raises(InternalError, match="read-only"):
            session.commit()
    event.remove(store, "connect", connected)
    store.dispose()
    assert jobs(store) == []


def test_a_connection_that_was_in_autocommit_is_as_any(queue: JobQueue, store: Engine, messages: Messages) -> None:
    with store.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(text("SELECT 1"))
    with Session(store) as session, session.begin():
        queue.enqueue(session, "a")
    assert messages == [(1, True)]


@pytest.mark.parametrize("alone", [True, False])
def test_a_commit_that_could_not_send_it_is_none(queue: JobQueue, store: Engine, refused: str, alone: bool) -> None:
    with Session(store) as session:
        job = queue.enqueue(session, refused)
        queue.enqueue(session, "good")
        if not alone:
            event.listen(session, "before_commit", lambda _: None)
        with pytest.raises(DBAPIError, match="no_bad_ones"):
            session.commit()
        with pytest.raises(NotEnqueued, match="must be rolled back"):
            session.commit()
        with pytest.raises(NotEnqueued):
            _ = job.id
        session.rollback()
        queue.enqueue(session, "later")
        session.commit()
    assert jobs(store, "type") == ["later"]


def test_an_error_that_a_query_is_blamed_for_is_not_lost(queue: JobQueue, store: Engine, refused: str) -> None:
    with Session(store) as session:
        queue.enqueue(session, refused)
        with pytest.raises(DBAPIError, match="no_bad_ones"):
            session.execute(text("SELECT 1"))
        with pytest.raises(NotEnqueued, match="must be rolled back"):
            session.commit()
        session.rollback()
        session.commit()
    assert jobs(store) == []


def test_a_connection_that_breaks_on_the_way(queue: JobQueue, store: Engine) -> None:
    with Session(store) as session:
        pid = session.scalar(text("SELECT pg_backend_pid()"))
        session.commit()
        job = queue.enqueue(session, "a")
        other = create_engine(store.url)
        run(other, "SELECT pg_terminate_backend(:pid, 5000)", pid=pid)
        other.dispose()
        with pytest.raises(OperationalError) as raised:
            session.commit()
        assert raised.value.connection_invalidated
        session.rollback()
        with pytest.raises(NotEnqueued, match="not known whether"):
            _ = job.id
        queue.enqueue(session, "b")
        session.commit()
    assert jobs(store, "type") == ["b"]


def test_told_after_the_commit(queue: JobQueue, store: Engine, listener: Listener) -> None:
    with Session(store) as session:
        queue.enqueue(session, "a")
        queue.enqueue(session, "b", priority=-3, key="k")
        assert listener.heard() == []
        session.commit()
        assert wait_for(listener.heard, "a notification") == [[["a", 0, False], ["b", -3, True]]]
        queue.enqueue(session, "c")
        session.execute(text("SELECT 1"))
        other = JobQueue(engine=store)
        other.submit("last")
        assert wait_for(listener.heard, "what is told of later") == [[["last", 0, False]]]
        session.commit()
        assert wait_for(listener.heard, "a notification") == [[["c", 0, False]]]
        other.dispose()


def test_observers_are_told_when_it_is_sent(queue: JobQueue, store: Engine) -> None:
    told: list[Any] = []
    queue.audience.add(told.append)
    with Session(store) as session:
        queue.enqueue(session, "taken back")
        session.rollback()
        queue.enqueue(session, "a")
        session.commit()
        queue.enqueue(session, "b")
        session.execute(text("SELECT 1"))
    assert observe.flush(10)
    assert told == [JobsEnqueued("a", 1), JobsEnqueued("b", 1)]


def test_two_queues_in_one_transaction(queue: JobQueue, store: Engine) -> None:
    other = JobQueue(engine=store)
    told: list[Any] = []
    other.audience.add(told.append)
    with Session(store) as session, session.begin():
        queue.enqueue(session, "a")
        other.enqueue(session, "b")
        queue.enqueue(session, "c")
    assert jobs(store, "type") == ["a", "b", "c"]
    assert observe.flush(10)
    assert told == [JobsEnqueued("b", 1)]
    other.dispose()


def test_a_session_of_two_engines(queue: JobQueue, store: Engine, messages: Messages) -> None:
    other = create_engine(store.url)
    with Session(binds={queue.models.QueuedJob: store, queue.models.Node: other}) as session:
        queue.enqueue(session, "a")
        session.connection(bind_arguments={"mapper": queue.models.Node})
        assert messages == []
        session.commit()
        assert messages == [(1, False)]
        queue.enqueue(session, "b")
        session.commit()
    assert messages == [(1, False), (1, True)]
    assert jobs(store, "type") == ["a", "b"]
    other.dispose()


def test_a_session_that_does_not_begin_by_itself(queue: JobQueue, store: Engine) -> None:
    with Session(store, autobegin=False) as session:
        with pytest.raises(InvalidRequestError, match="begin"):
            queue.enqueue(session, "a")
        with session.begin():
            queue.enqueue(session, "b")
            assert waiting(store)
    assert jobs(store, "type") == ["b"]


def kept(engine: Engine) -> list[str]:
    """Names of the statements that the server keeps for the connection in the pool."""
    with engine.connect() as connection:
        return list(connection.scalars(text("SELECT name FROM pg_prepared_statements WHERE name LIKE 'jobsync%'")))


def commit(queue: JobQueue, engine: Engine, many: int, **options: Any) -> None:
    for number in range(many):
        with Session(engine) as session, session.begin():
            queue.enqueue(session, "a", {"n": number, "odd": "it's \\ %s $1 ü"}, **options)


def test_its_statement_is_kept(queue: JobQueue, store: Engine) -> None:
    commit(queue, store, 5)
    assert kept(store) == []
    commit(queue, store, 3)
    commit(queue, store, 8, key="k'", priority=-2)
    assert len(kept(store)) == 2
    assert jobs(store, "payload ->> 'odd', key, priority") == (
        [("it's \\ %s $1 ü", None, 0)] * 8 + [("it's \\ %s $1 ü", "k'", -2)] * 8
    )
    assert jobs(store, "token_id IS NULL") == [True] * 8 + [False] * 8


def test_a_server_that_has_been_made_to_forget_it(queue: JobQueue, store: Engine) -> None:
    """It is made to keep it again; but where it always forgets, not for ever."""

    def forget() -> None:
        with store.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            connection.execute(text("DISCARD ALL"))

    commit(queue, store, 7)
    forget()
    commit(queue, store, 3)
    assert len(kept(store)) == 1
    with patch.object(one_message, "send_kept", wraps=one_message.send_kept) as asked:
        for _ in range(4):
            forget()
            commit(queue, store, 1)
    assert asked.call_count == 4
    with patch.object(one_message, "send_kept", side_effect=InvalidSqlStatementName) as asked:
        commit(queue, store, 7)
    assert asked.call_count == one_message.MOST_MISSES
    assert jobs(store, "payload -> 'n'") == [*range(7), *range(3), 0, 0, 0, 0, *range(7)]


def test_an_id_of_another_type(queue: JobQueue, store: Engine) -> None:
    commit(queue, store, 7)
    run(store, "ALTER TABLE sync_job ALTER id TYPE int")
    commit(queue, store, 3)
    run(store, "ALTER TABLE sync_job ALTER id TYPE bigint")
    commit(queue, store, 3)
    assert len(jobs(store)) == 13


def test_a_server_that_keeps_it_already(queue: JobQueue, store: Engine) -> None:
    """Behind a pooler another client has had it kept."""
    commit(queue, store, 7)
    with store.connect() as connection:
        ((name, statement),) = connection.execute(
            text("SELECT name, statement FROM pg_prepared_statements WHERE name LIKE 'jobsync%'")
        )
    store.dispose()
    run(store, f"PREPARE {name} AS {statement.replace(':', chr(92) + ':')}")
    with patch.object(one_message, "send_kept", wraps=one_message.send_kept) as asked:
        commit(queue, store, 7)
    assert asked.call_count == 2
    assert jobs(store, "payload -> 'n'") == [*range(7), *range(7)]


def test_not_more_statements_are_kept_than_a_few(
    queue: JobQueue, store: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(one_message, "MOST_KEPT", 1)
    commit(queue, store, 7)
    commit(queue, store, 7, priority=1)
    assert len(kept(store)) == 1
    assert len(jobs(store)) == 14


def test_no_statement_is_kept_where_psycopg_may_not(queue: JobQueue, store: Engine) -> None:
    engine = create_engine(store.url, connect_args={"prepare_threshold": None})
    commit(queue, engine, 9)
    assert kept(engine) == []
    assert len(jobs(store)) == 9
    engine.dispose()


def test_another_column_is_no_reason_to_fail(queue: JobQueue, store: Engine) -> None:
    """As a migration adds one, beside running producers."""
    commit(queue, store, 7)
    run(store, "ALTER TABLE sync_job ADD COLUMN more int DEFAULT 3")
    commit(queue, store, 1)
    run(store, "ALTER TABLE sync_job DROP COLUMN more")
    commit(queue, store, 1)
    assert len(jobs(store)) == 9
