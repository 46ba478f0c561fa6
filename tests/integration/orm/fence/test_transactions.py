"""Transactions of every kind, and every kind of session."""

from __future__ import annotations

import gc
import threading
from typing import Any
from weakref import ref

import pytest
from sqlalchemy import URL, Connection, Engine, create_engine, event, func, insert, select, text, update
from sqlalchemy.exc import DBAPIError, IntegrityError, InvalidRequestError, OperationalError
from sqlalchemy.ext.asyncio import (
    AsyncSession,
    async_scoped_session,
    async_sessionmaker,
    create_async_engine,
)
from sqlalchemy.orm import (
    DeclarativeBase,
    Mapped,
    MappedAsDataclass,
    Session,
    mapped_column,
    scoped_session,
    sessionmaker,
)

from jobsync_orm.exceptions import ConfigurationError, FenceNotApplicable, OwnershipLost
from jobsync_orm.orm import OwnedSession, TokenOwned, fenced_transaction, filter_session
from jobsync_orm.orm.owned_session import bind
from tests.integration.orm.fence.conftest import HeldJob, Statements, take, token
from tests.integration.orm.models import Item, Part, Shop

HERE = "(SELECT oid FROM pg_database WHERE datname = current_database())"


def count(engine: Engine) -> int:
    with engine.connect() as connection:
        return connection.scalar(text("SELECT count(*) FROM item")) or 0


def lose(session: Session, engine: Engine, *, commits: bool = True) -> None:
    """Write a row of k2, lose the token, commit in vain."""
    session.add(Item(sku="k2", note="lost"))
    session.flush()
    take(engine, "k2")
    with pytest.raises(OwnershipLost):
        session.commit()


# -- savepoints ------------------------------------------------------------------------------------------------


def test_a_savepoint_keeps_what_was_touched_before(session: Session, stocked_engine: Engine) -> None:
    session.add(Item(id=100, sku="k2"))
    session.flush()
    with session.begin_nested() as nested:
        session.add(Item(id=101, sku="k4"))
        session.flush()
        nested.rollback()
    take(stocked_engine, "k2")
    with pytest.raises(OwnershipLost) as caught:
        session.commit()
    assert caught.value.tokens == (token("k2"),)


def test_a_released_savepoint_counts(session: Session, stocked_engine: Engine) -> None:
    with session.begin_nested(), session.begin_nested():
        session.add(Item(id=100, sku="k2"))
    take(stocked_engine, "k2")
    with pytest.raises(OwnershipLost):
        session.commit()


def test_what_was_rolled_back_does_not(session: Session, stocked_engine: Engine) -> None:
    session.add(Item(id=100, sku="k4"))
    with session.begin_nested() as outer:
        with session.begin_nested():
            session.add(Item(id=101, sku="k2"))
        session.execute(insert(Item).values(id=102, sku="k2"))
        outer.rollback()
    take(stocked_engine, "k2")
    session.commit()
    assert count(stocked_engine) == 7


def test_refused_in_a_savepoint_and_gone_on(session: Session, stocked_engine: Engine) -> None:
    session.add(Item(id=100, sku="k4"))
    with pytest.raises(OwnershipLost), session.begin_nested():
        session.add(Item(id=101, sku="k1"))
    session.commit()
    assert count(stocked_engine) == 7


def test_a_failed_statement_in_a_savepoint(session: Session, stocked_engine: Engine) -> None:
    with pytest.raises(IntegrityError), session.begin_nested():
        session.add(Item(id=2, sku="k2"))
    session.add(Item(id=100, sku="k4"))
    take(stocked_engine, "k2")
    session.commit()


def test_savepoints_of_the_connection(session: Session, stocked_engine: Engine) -> None:
    connection = session.connection()
    for end in ("rollback", "commit"):
        savepoint = connection.begin_nested()
        connection.execute(insert(Item.__table__), [{"id": 100, "sku": "k2"}])
        getattr(savepoint, end)()
    take(stocked_engine, "k2")
    with pytest.raises(OwnershipLost):
        session.commit()


def test_a_savepoint_after_a_rollback_to_it(session: Session, stocked_engine: Engine) -> None:
    """One name, rolled back to twice: what was written in between is not forgotten the first time only."""
    connection = session.connection()
    for _ in range(2):
        savepoint = connection.begin_nested()
        connection.execute(insert(Item.__table__), [{"id": 100, "sku": "k2"}])
        savepoint.rollback()
    take(stocked_engine, "k2")
    session.add(Item(id=101, sku="k4"))
    session.commit()


# -- isolation levels ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", ["REPEATABLE READ", "SERIALIZABLE"])
def test_snapshots(stocked_engine: Engine, job: HeldJob, level: str) -> None:
    engine = stocked_engine.execution_options(isolation_level=level)
    with OwnedSession(engine, job=job) as session:
        session.add(Item(id=100, sku="k4"))
        session.commit()
        assert session.scalar(select(func.count(Item.id))) == 7  # the snapshot, before the token is taken
        session.add(Item(id=101, sku="k2"))
        session.flush()
        take(stocked_engine, "k2")
        with pytest.raises(OwnershipLost) as caught:
            session.commit()
        assert caught.value.owners == {token("k2"): "other"}
        session.rollback()
        take(stocked_engine, "k2", node="me", epoch=0)
        assert session.scalar(select(func.count(Item.id))) == 7
        session.add(Item(id=101, sku="k2"))
        session.flush()
        # The row is another version of the same: PostgreSQL refuses, and ownership is not what is lost.
        take(stocked_engine, "k2", node="me", epoch=1)
        with pytest.raises(OperationalError, match="serialize"):
            session.commit()
        session.rollback()
        session.add(Item(id=101, sku="k2"))
        session.commit()
    assert count(stocked_engine) == 8


def test_a_mover_waits_for_no_one_and_moves_nothing_under_a_commit(stocked_engine: Engine, job: HeldJob) -> None:
    """Between fence and COMMIT the token stays."""
    skipped: list[Any] = []

    def try_to_move(*_: Any) -> None:
        with stocked_engine.connect() as connection:
            lock = text("SELECT token_id FROM sync_token WHERE token_id = :t FOR UPDATE SKIP LOCKED")
            skipped.append(connection.execute(lock, {"t": token("k2")}).all())

    with OwnedSession(stocked_engine, job=job) as session:
        session.add(Item(id=100, sku="k2"))
        session.flush()
        try_to_move()
        event.listen(stocked_engine, "commit", try_to_move)  # behind the fence's listener
        session.commit()
        event.remove(stocked_engine, "commit", try_to_move)
        try_to_move()
    assert skipped == [[(token("k2"),)], [], [(token("k2"),)]]


def test_a_write_after_the_fence(session: Session, stocked_engine: Engine) -> None:
    session.add(Item(id=100, sku="k2"))
    session.flush()

    def write(connection: Connection) -> None:
        connection.execute(insert(Item.__table__).values(sku="k4"))

    event.listen(stocked_engine, "commit", write)
    with pytest.raises(FenceNotApplicable, match="after the tokens were checked"):
        session.commit()
    event.remove(stocked_engine, "commit", write)
    session.rollback()
    event.listen(session.connection(), "commit", write)  # these come before the fence
    session.execute(text("SELECT 1"))
    take(stocked_engine, "k4")
    with pytest.raises(OwnershipLost):
        session.commit()
    session.rollback()
    assert count(stocked_engine) == 6


# -- after a refusal -------------------------------------------------------------------------------------------


def test_the_session_and_its_pool_go_on(job: HeldJob, stocked_engine: Engine) -> None:
    engine = create_engine(stocked_engine.url, pool_size=1, max_overflow=0, pool_timeout=5)
    with OwnedSession(engine, job=job) as session:
        lose(session, stocked_engine)
        session.rollback()
        session.add(Item(id=100, sku="k4"))
        session.commit()
    with engine.connect() as connection:
        assert connection.scalar(text("SELECT current_setting('jobsync.node', true)")) in (None, "")
        assert connection.scalar(text("SELECT count(*) FROM item")) == 7
        assert (
            connection.scalar(text(f"SELECT count(*) FROM pg_locks WHERE mode = 'RowShareLock' AND database = {HERE}"))
            == 0
        )
    engine.dispose()


def test_locks_end_with_the_refusal(session: Session, stocked_engine: Engine) -> None:
    """Not only when the session is rolled back: who catches the error may take his time."""
    session.scalars(select(Item).where(Item.sku == "k4")).one().note = "locked"
    lose(session, stocked_engine)
    with stocked_engine.begin() as connection:
        connection.execute(text("SET lock_timeout = '2s'"))
        connection.execute(text("UPDATE item SET note = 'free' WHERE sku = 'k4'"))
        connection.execute(text("UPDATE sync_token SET node = 'x' WHERE token_id = :t"), {"t": token("k4")})


def test_a_refused_commit_cannot_be_repeated(session: Session, stocked_engine: Engine) -> None:
    lose(session, stocked_engine)
    take(stocked_engine, "k2", node="me", epoch=0)
    with pytest.raises(InvalidRequestError):
        session.commit()
    session.rollback()
    assert count(stocked_engine) == 6


def test_a_connection_that_breaks_at_the_fence(session: Session, stocked_engine: Engine) -> None:
    session.add(Item(id=100, sku="k2"))
    session.flush()
    pid = session.scalar(text("SELECT pg_backend_pid()"))
    with stocked_engine.connect() as connection:
        connection.execute(text("SELECT pg_terminate_backend(:pid, 5000)"), {"pid": pid})
    with pytest.raises(DBAPIError):
        session.commit()
    session.rollback()
    session.add(Item(id=100, sku="k2"))
    session.commit()
    assert count(stocked_engine) == 7


# -- ways to commit --------------------------------------------------------------------------------------------


def test_begin_contexts(stocked_engine: Engine, job: HeldJob) -> None:
    factory = sessionmaker(stocked_engine, class_=OwnedSession, job=job)

    def add_and_lose(session: Session) -> None:
        session.add(Item(sku="k2"))
        session.flush()
        take(stocked_engine, "k2")

    with pytest.raises(OwnershipLost), factory.begin() as session:
        add_and_lose(session)
    take(stocked_engine, "k2", node="me", epoch=0)
    with factory() as session:
        with pytest.raises(OwnershipLost), session.begin():
            add_and_lose(session)
        with session.begin():
            session.add(Item(sku="k4"))
    assert count(stocked_engine) == 7


def test_a_commit_of_the_sessions_connection(session: Session, stocked_engine: Engine) -> None:
    """... and what the session does on it afterwards, in a transaction that the session knows nothing of."""
    connection = session.connection()
    connection.execute(insert(Item.__table__), [{"id": 100, "sku": "k4"}])
    connection.commit()
    connection.execute(insert(Item.__table__), [{"id": 101, "sku": "k2"}])
    take(stocked_engine, "k2")
    with pytest.raises(OwnershipLost):
        connection.commit()
    connection.rollback()
    session.close()
    assert count(stocked_engine) == 7


@pytest.mark.parametrize("mode", ["conditional_savepoint", "rollback_only", "control_fully", "create_savepoint"])
def test_a_session_on_a_connection(stocked_engine: Engine, job: HeldJob, mode: Any) -> None:
    """The transaction ends with the connection's, which commits after the session."""
    with stocked_engine.connect() as connection:
        for _ in range(2):  # the second time on the same connection
            transaction = connection.begin()
            with OwnedSession(connection, join_transaction_mode=mode, job=job) as session:
                session.add(Item(sku="k4"))
                if mode != "control_fully":
                    session.commit()
                else:
                    session.flush()
            with OwnedSession(connection, join_transaction_mode=mode, job=job) as session:
                if connection.in_transaction():
                    session.add(Item(sku="k2"))
                    session.flush()
                    take(stocked_engine, "k2")
                    if mode == "control_fully":
                        with pytest.raises(OwnershipLost):
                            session.commit()
                        continue
                    session.commit()
            if transaction.is_active:
                with pytest.raises(OwnershipLost):
                    transaction.commit()
                transaction.rollback()
            take(stocked_engine, "k2", node="me", epoch=0)
        with connection.begin():  # nobody's session
            connection.execute(insert(Item.__table__), [{"sku": "k1"}])
        assert fenced_transaction.transaction_of(connection) is None
    assert count(stocked_engine) == 7


def test_two_jobs_in_one_transaction(stocked_engine: Engine, job: HeldJob) -> None:
    with stocked_engine.connect() as connection, connection.begin():
        with OwnedSession(connection, job=job) as session:
            session.connection()
        other = OwnedSession(connection, job=HeldJob(node_name="other"))
        with pytest.raises(ConfigurationError, match="connection of its own"):
            other.connection()
        other.close()


def test_engines_made_of_one_another(stocked_engine: Engine, job: HeldJob) -> None:
    """Listeners of both are called; the work is done once."""
    copy = stocked_engine.execution_options(logging_token="copy")
    for engine in (copy, stocked_engine, copy):
        statements = Statements(engine)
        with OwnedSession(engine, job=job) as session, session.begin():
            session.execute(insert(Item).values([{"sku": "k4"}]))
            with session.begin_nested():
                session.execute(insert(Item), [{"sku": "k4"}, {"sku": "k4"}])
        assert len(statements.fences) == 1


@pytest.mark.parametrize("elsewhere", ["sqlite", "postgresql"])
def test_several_engines(stocked_engine: Engine, job: HeldJob, empty_database: URL, elsewhere: str) -> None:
    """Rows without tokens in another database, without the library's tables, do not matter to the fence."""
    other = create_engine("sqlite://" if elsewhere == "sqlite" else empty_database)
    Shop.__table__.create(other)
    with OwnedSession(binds={Item: stocked_engine, Shop: other}, job=job) as session:
        session.add_all([Shop(id=1), Item(id=100, sku="k2")])
        session.commit()
    assert count(stocked_engine) == 7
    other.dispose()


# -- binding ---------------------------------------------------------------------------------------------------


def test_bind(stocked_engine: Engine, job: HeldJob) -> None:
    for factory in (sessionmaker(stocked_engine), scoped_session(sessionmaker(stocked_engine))):
        session = factory()
        assert bind(session, job) is session
        assert bind(session, job) is session
        lose(session, stocked_engine)
        session.rollback()
        take(stocked_engine, "k2", node="me", epoch=0)
        with pytest.raises(ConfigurationError, match="already"):
            bind(session, HeldJob(node_name="another"))
        session.close()
    scoped = scoped_session(sessionmaker(stocked_engine))
    assert bind(scoped, job) is scoped
    lose(scoped(), stocked_engine)
    scoped.remove()
    with pytest.raises(ConfigurationError, match="no session"):
        bind(sessionmaker(stocked_engine), job)  # type: ignore[type-var]
    with pytest.raises(ConfigurationError, match="a Job"):
        OwnedSession(stocked_engine, job=object())  # type: ignore[arg-type]


def test_bind_in_the_middle_of_a_transaction(stocked_engine: Engine, job: HeldJob) -> None:
    with Session(stocked_engine) as session:
        session.scalars(select(Item)).all()
        session.add(Item(sku="k2"))
        bind(session, job)
        lose(session, stocked_engine)


def test_a_session_that_is_not_bound(stocked_engine: Engine, job: HeldJob) -> None:
    """On the same engine, while another session is."""
    with OwnedSession(stocked_engine, job=job) as owned, Session(stocked_engine) as session:
        owned.add(Item(sku="k4"))
        owned.flush()
        statements = Statements(stocked_engine)
        session.add(Item(sku="k1"))
        session.execute(update(Item).where(Item.sku == "k3").values(note="x"))
        session.execute(text("UPDATE item SET note = 'y' WHERE sku = 'k5'"))
        session.commit()
        assert not [sql for sql in statements.sent if "sync_token" in sql or "jobsync" in sql]
        assert not [sql for sql in statements.sent if sql.startswith("UPDATE item SET note=") and "RETURNING" in sql]


def test_a_standalone_job(stocked_engine: Engine) -> None:
    with OwnedSession(stocked_engine, job=HeldJob(names=None)) as session:
        statements = Statements(stocked_engine)
        session.add(Item(sku="k1"))
        session.execute(update(Item).values(sku="k3"))
        session.commit()
        assert not [sql for sql in statements.sent if "sync_token" in sql]


def test_with_the_filter(stocked_engine: Engine, job: HeldJob) -> None:
    factory = sessionmaker(stocked_engine, class_=OwnedSession, job=job)
    filter_session(factory, job)
    with factory() as session:
        assert {item.sku for item in session.scalars(select(Item))} == {"k2", "k4", "k6"}
        assert session.scalars(update(Item).values(note="x").returning(Item.sku)).all() == ["k2", "k4", "k6"]
        session.commit()
        lose(session, stocked_engine)


class DataBase(MappedAsDataclass, DeclarativeBase):
    pass


class Thing(TokenOwned, DataBase):
    __tablename__ = "thing"
    __token_key__ = "name"
    id: Mapped[int] = mapped_column(primary_key=True, init=False)
    name: Mapped[str]


def test_dataclasses(stocked_engine: Engine, job: HeldJob) -> None:
    DataBase.metadata.create_all(stocked_engine)
    with OwnedSession(stocked_engine, job=job) as session:
        session.add(Thing(name="k2"))
        session.commit()
        session.scalars(select(Thing)).one().name = "k4"
        session.flush()
        take(stocked_engine, "k4")
        with pytest.raises(OwnershipLost) as caught:
            session.commit()
        assert caught.value.tokens == (token("k4"),)


def test_a_subclass(stocked_engine: Engine, job: HeldJob) -> None:
    class Mine(OwnedSession):
        pass

    with Mine(stocked_engine, job=job) as session:
        lose(session, stocked_engine)


# -- async -----------------------------------------------------------------------------------------------------


@pytest.mark.asyncio
@pytest.mark.parametrize("how", ["class", "bind", "bind scoped"])
async def test_async(stocked_engine: Engine, job: HeldJob, how: str) -> None:
    engine = create_async_engine(stocked_engine.url, pool_size=1, max_overflow=0, pool_timeout=5)
    if how == "class":
        factory = async_sessionmaker(engine, sync_session_class=OwnedSession, job=job)
    else:
        factory = async_sessionmaker(engine)
    scoped = async_scoped_session(factory, scopefunc=lambda: 0)
    async with scoped() if how == "bind scoped" else factory() as session:
        if how == "bind":
            assert bind(session, job) is session
        elif how == "bind scoped":
            assert bind(scoped, job) is scoped
        session.add(Item(id=100, sku="k4"))
        await session.commit()
        for write in (
            lambda: session.execute(insert(Item).values(sku="k2").returning(Item)),
            lambda: session.execute(insert(Item), [{"sku": "k2"}, {"sku": "k4"}]),
            lambda: session.scalars(insert(Item).returning(Item), [{"sku": "k2"}, {"sku": "k4"}]),
            lambda: _change(session),
        ):
            await write()
            await session.flush()
            take(stocked_engine, "k2")
            with pytest.raises(OwnershipLost) as caught:
                await session.commit()
            assert caught.value.owners == {token("k2"): "other"}
            await session.rollback()
            take(stocked_engine, "k2", node="me", epoch=0)
    await engine.dispose()
    assert count(stocked_engine) == 7


async def _change(session: AsyncSession) -> None:
    for item in (await session.scalars(select(Item).where(Item.sku.in_(["k2", "k4"])))).all():
        item.sku = "k6"


# -- many and long -----------------------------------------------------------------------------------------


def test_nothing_is_left_behind(stocked_engine: Engine, job: HeldJob) -> None:
    with OwnedSession(stocked_engine, job=job) as session:
        session.add(Item(sku="k2"))
        session.commit()
        gc.collect()
        before = len(fenced_transaction._by_connection)
        for _ in range(20):
            session.add(Item(sku="k2"))
            session.commit()
        gc.collect()
        assert len(fenced_transaction._by_connection) <= before
    listeners = len(list(stocked_engine.dispatch.commit))
    assert listeners == 1
    with stocked_engine.connect() as connection:
        for _ in range(20):
            with OwnedSession(connection, job=job) as session:
                session.add(Item(sku="k2"))
                session.commit()
        assert len(list(connection.dispatch.commit)) == 1
        gone = ref(session)
        del session
        gc.collect()
        assert gone() is None


def test_threads(stocked_engine: Engine, job: HeldJob) -> None:
    """Each commits on its own; of those that write a lost token every commit fails, of the others none."""
    failures: list[str] = []
    take(stocked_engine, "k6")

    def work(key: str) -> None:
        for _ in range(20):
            with OwnedSession(stocked_engine, job=job) as session:
                session.add(Part(serial=key, item_id=2))
                try:
                    session.commit()
                except OwnershipLost:
                    failures.append(key)

    threads = [threading.Thread(target=work, args=(key,)) for key in ("k2", "k4", "k6", "k2", "k6")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures.count("k6") == len(failures) == 40
    with stocked_engine.connect() as connection:
        assert connection.scalar(text("SELECT count(*) FROM part")) == 6 + 60


def test_the_fence_travels_with_the_commit(session: Session, stocked_engine: Engine) -> None:
    """... in one message; unless a listener behind it needs the transaction: then by itself, and with one SQL text."""
    statements = Statements(stocked_engine)
    for keys in (["k2"], ["k4", "k6"]):
        session.add_all([Item(sku=key) for key in keys])
        session.commit()
    assert [sql.endswith("; COMMIT") for sql in statements.fences] == [True, True]
    statements.sent.clear()
    event.listen(stocked_engine, "commit", lambda connection: connection.execute(text("SELECT 1")))
    for keys in (["k2"], ["k4", "k6"]):
        session.add_all([Item(sku=key) for key in keys])
        session.commit()
    assert len(statements.fences) == 2
    assert len(set(statements.fences)) == 1
    assert count(stocked_engine) == 12


def test_raw_sql_is_declared_to_the_trigger(session: Session, stocked_engine: Engine) -> None:
    statements = Statements(stocked_engine)
    session.execute(text("UPDATE item SET note = 'raw' WHERE sku = 'k2'"))
    session.commit()
    assert len(statements.sent) == 2
    assert "jobsync.node" in statements.sent[1]


@pytest.mark.parametrize(
    ("set_to", "expected"), [("0", "10s"), ("1min", "10s"), ("500ms", "500ms")], ids=["none", "longer", "shorter"]
)
def test_the_server_ends_what_stops_between_fence_and_commit(
    stocked_engine: Engine, job: HeldJob, set_to: str, expected: str
) -> None:
    """Where they are two messages; the limit is that of this transaction, and a shorter one of the user's stays."""
    seen: list[str] = []
    ask = text("SELECT current_setting('idle_in_transaction_session_timeout')")
    # A listener behind the fence keeps it from travelling with the COMMIT.
    with OwnedSession(stocked_engine, job=job) as session:
        connection = session.connection()
        event.listen(stocked_engine, "commit", lambda connection: seen.append(connection.scalar(ask)))
        connection.execute(text("SELECT set_config('idle_in_transaction_session_timeout', :to, false)"), {"to": set_to})
        session.add(Item(sku="k2"))
        session.commit()
        assert seen == [expected]
        assert session.scalar(ask) == set_to
