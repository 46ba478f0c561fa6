"""job.claim: which rows it returns, which it leaves alone, and what it refuses."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import psycopg
import pytest
from sqlalchemy import Engine, Row, Select, create_engine, func, select, text, union, update
from sqlalchemy.exc import OperationalError
from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session, async_sessionmaker, create_async_engine
from sqlalchemy.orm import (
    Session,
    aliased,
    contains_eager,
    joinedload,
    load_only,
    scoped_session,
    selectinload,
    sessionmaker,
    with_polymorphic,
)

from jobsync_orm import CoordinationConfig, Job
from jobsync_orm.exceptions import ConfigurationError, FilterNotApplicable, NotRunning, OwnershipLost
from jobsync_orm.naming import Names
from jobsync_orm.orm import OwnedSession, claiming, enable_sqlite
from tests.conftest import dsn
from tests.integration.cluster import wait_for
from tests.integration.orm.conftest import KEYS, MINE, stock
from tests.integration.orm.fence.conftest import HeldJob, take, token, view_of
from tests.integration.orm.models import Base, FakeJob, Invoice, Item, Part, Shop, Truck, Vehicle

OTHERS = tuple(key for key in KEYS if key not in MINE)


def claim(session: Any, job: Any, statement: Any, limit: int = 100) -> list[Any]:
    return cast("list[Any]", claiming.claim(session, job, statement, limit))


def skus(rows: Sequence[Item]) -> tuple[str, ...]:
    return tuple(row.sku for row in rows)


@pytest.fixture
def job() -> HeldJob:
    return HeldJob()


@pytest.fixture
def engine(shop_engine: Engine) -> Engine:
    stock(shop_engine)
    return shop_engine


@pytest.fixture
def session(engine: Engine) -> Iterator[Session]:
    with Session(engine) as session:
        yield session


def locked(engine: Engine, table: str) -> list[Any]:
    """Keys of the rows that some transaction has locked FOR UPDATE."""
    key = {"vehicle": "plate", "truck": "id", "item": "sku", "sync_token": "token_id", "shop": "id"}[table]
    with engine.connect() as connection:
        every = set(connection.scalars(text(f"SELECT {key} FROM {table}")))
        free = set(connection.scalars(text(f"SELECT {key} FROM {table} FOR UPDATE SKIP LOCKED")))
    return sorted(every - free)


class TestWhatIsReturned:
    def test_owned_rows_in_order_up_to_the_limit(self, engine: Engine, session: Session, job: HeldJob) -> None:
        newest = select(Item).order_by(Item.id.desc())
        assert skus(claim(session, job, newest, limit=2)) == MINE[:0:-1]
        assert locked(engine, "item") == sorted(MINE[1:])
        assert skus(claim(session, job, newest)) == MINE[::-1]
        assert skus(claim(session, job, newest.where(Item.sku == MINE[1]))) == MINE[1:2]
        assert claim(session, job, newest.where(Item.sku == OTHERS[0])) == []
        assert locked(engine, "sync_token") == []
        session.rollback()
        assert locked(engine, "item") == []

    def test_rows_that_others_have_locked_are_passed_over(self, engine: Engine, session: Session, job: HeldJob) -> None:
        with Session(engine) as first:
            assert skus(claim(first, job, select(Item).order_by(Item.id), limit=1)) == MINE[:1]
            assert skus(claim(session, job, select(Item).order_by(Item.id), limit=1)) == MINE[1:2]
            assert skus(claim(session, job, select(Item).order_by(Item.id))) == MINE[1:]

    def test_columns_and_expressions(self, session: Session, job: HeldJob) -> None:
        assert claim(session, job, select(Item.sku).order_by(Item.id)) == list(MINE)
        assert claim(session, job, select(func.upper(Item.sku)).order_by(Item.id)) == [key.upper() for key in MINE]
        pairs = claim(session, job, select(Item.id, Item.sku.label("key")).order_by(Item.id), limit=2)
        assert pairs == [(2, "k2"), (4, "k4")]
        assert isinstance(pairs[0], Row)
        assert (pairs[0]._fields, pairs[0].key) == (("id", "key"), "k2")
        ((item, shop),) = claim(session, job, select(Item, Shop).join(Item.shop).order_by(Item.id), limit=1)
        assert (item.sku, shop.id) == ("k2", 1)
        ((item, one),) = claim(session, job, select(Item, func.length(Item.sku)).order_by(Item.id), limit=1)
        assert (item.sku, one) == ("k2", 2)

    def test_equal_values_of_different_rows(self, engine: Engine, session: Session, job: HeldJob) -> None:
        with engine.begin() as connection:
            connection.execute(text("INSERT INTO item (id, sku, note) VALUES (100, 'k2', '')"))
        assert claim(session, job, select(Item.note)) == ["", "", "", ""]
        assert claim(session, job, select(Item.note, Item.sku).where(Item.sku == "k2")) == [("", "k2"), ("", "k2")]

    def test_an_alias(self, engine: Engine, session: Session, job: HeldJob) -> None:
        other = aliased(Item)
        statement = select(other).join(Item, Item.id == other.id - 1).order_by(other.id)
        assert skus(claim(session, job, statement, limit=2)) == MINE[:2]
        assert locked(engine, "item") == list(MINE[:2])
        assert skus(claim(session, job, select(Item).select_from(Shop).outerjoin(Shop.items).order_by(Item.id))) == MINE

    def test_joined_inheritance(self, engine: Engine, session: Session, job: HeldJob) -> None:
        flat = aliased(Truck, flat=True)
        for statement in (select(Truck), select(flat)):
            assert sorted(truck.plate for truck in claim(session, job, statement)) == list(MINE)
            assert locked(engine, "vehicle") == list(MINE)
            assert len(locked(engine, "truck")) == len(MINE)
            session.rollback()
        everything = with_polymorphic(Vehicle, "*")
        for statement in (select(Vehicle), select(everything)):
            assert sorted(vehicle.plate for vehicle in claim(session, job, statement)) == list(MINE)
            assert locked(engine, "vehicle") == list(MINE)
            assert locked(engine, "truck") == []
            session.rollback()
        assert sorted(invoice.number for invoice in claim(session, job, select(Invoice))) == list(MINE)

    def test_loader_options(self, engine: Engine, session: Session, job: HeldJob) -> None:
        with engine.begin() as connection:
            # A second part of one item, whose token is that of another node.
            connection.execute(text("INSERT INTO part (serial, item_id) VALUES ('k1', 2)"))
        for option in (joinedload(Item.parts), selectinload(Item.parts), joinedload(Item.shop)):
            items = claim(session, job, select(Item).options(option).order_by(Item.id), limit=2)
            assert skus(items) == MINE[:2]
            assert [part.serial for part in items[0].parts] == ["k2", "k1"]
            assert locked(engine, "item") == list(MINE[:2])
            assert locked(engine, "shop") == []
            session.rollback()
        joined = select(Item).join(Item.parts).options(contains_eager(Item.parts)).order_by(Item.id)
        assert skus(claim(session, job, joined)) == MINE
        assert skus(claim(session, job, select(Item).options(load_only(Item.sku)).order_by(Item.id))) == MINE

    def test_objects_of_the_session_are_as_the_database_has_them(
        self, engine: Engine, session: Session, job: HeldJob
    ) -> None:
        seen = session.scalars(select(Item).where(Item.sku == "k2")).one()
        with engine.begin() as connection:
            connection.execute(text("UPDATE item SET note = 'changed' WHERE sku = 'k2'"))
        assert claim(session, job, select(Item).where(Item.note == "changed")) == [seen]
        assert seen.note == "changed"

    @pytest.mark.parametrize("autoflush", [True, False])
    def test_changes_not_flushed_yet_are_not_lost(self, engine: Engine, job: HeldJob, autoflush: bool) -> None:
        with Session(engine, autoflush=autoflush) as session:
            item = session.scalars(select(Item).where(Item.sku == "k2")).one()
            item.note = "mine"
            assert claim(session, job, select(Item).where(Item.note == "mine")) == [item]
            assert item.note == "mine"

    def test_the_whole_session_filter_beside_it(self, session: Session, job: HeldJob) -> None:
        from jobsync_orm.orm import filter_session

        filter_session(session, job)
        assert skus(claim(session, job, select(Item).order_by(Item.id))) == MINE

    def test_two_statements_however_many_rows(self, session: Session, job: HeldJob) -> None:
        from tests.integration.orm.fence.conftest import Statements

        session.connection()
        sent = Statements(session.get_bind().engine)
        assert len(claim(session, job, select(Item))) == 3
        assert len(sent.sent) == 2
        assert "FOR UPDATE OF item SKIP LOCKED" in sent.sent[0]
        assert claim(session, job, select(Item).where(Item.id < 0)) == []
        assert len(sent.sent) == 3
        session.commit()
        assert len(sent.sent) == 3, "a claim alone gives the commit nothing to check"


class TestTokensOnTheMove:
    def test_marked_tokens_are_left(self, engine: Engine, session: Session, job: HeldJob) -> None:
        with engine.begin() as connection:
            connection.execute(
                text("UPDATE sync_token SET next_node = 'other' WHERE token_id = :t"), {"t": token("k2")}
            )
        assert skus(claim(session, job, select(Item).order_by(Item.id))) == MINE[1:]

    def test_tokens_of_which_this_node_has_not_heard_yet_are_left(
        self, engine: Engine, session: Session, job: HeldJob
    ) -> None:
        """They could not be committed."""
        take(engine, "k1", node="me", epoch=7)  # not in the view
        take(engine, "k2", node="me", epoch=8)  # in the view, but newer
        assert skus(claim(session, job, select(Item).order_by(Item.id))) == MINE[1:]

    @pytest.mark.parametrize("change", ["moved", "marked", "moved and back"])
    def test_tokens_that_move_while_the_statement_runs(
        self, engine: Engine, session: Session, job: HeldJob, change: str
    ) -> None:
        """The statement has its snapshot and waits; the token is moved and committed; only then it goes on."""
        mover = psycopg.connect(dsn(engine.url))
        gate = func.pg_advisory_xact_lock(17).is_not(None)
        try:
            mover.execute("SELECT pg_advisory_lock(17)")
            with ThreadPoolExecutor(1) as pool:
                answer = pool.submit(claim, session, job, select(Item).where(gate).order_by(Item.id))
                wait_for(lambda: waits_for_advisory_lock(engine), "the claim waits in the middle of its statement")
                set_ = {
                    "moved": "node = 'other', epoch = 8",
                    "marked": "next_node = 'other', next_epoch = 8",
                    "moved and back": "epoch = 9",
                }[change]
                mover.execute(f"UPDATE sync_token SET {set_} WHERE token_id = %s", (token("k4"),))
                mover.commit()
                mover.execute("SELECT pg_advisory_unlock(17)")
                mover.commit()
                assert skus(answer.result(30)) == ("k2", "k6")
        finally:
            mover.close()
        # The first statement found it, and it stays locked for the rest of the transaction.
        assert locked(engine, "item") == list(MINE)

    @pytest.mark.parametrize("outcome", ["commit", "rollback"])
    def test_a_move_that_is_not_committed_yet_is_met_by_the_fence(
        self, engine: Engine, session: Session, job: HeldJob, outcome: str
    ) -> None:
        mover = psycopg.connect(dsn(engine.url))
        try:
            mover.execute("UPDATE sync_token SET node = 'other', epoch = 8 WHERE token_id = %s", (token("k4"),))
            items = claim(session, job, select(Item).order_by(Item.id))
            assert skus(items) == MINE
            for item in items:
                item.note = "done"
            session.flush()
            with ThreadPoolExecutor(1) as pool:
                commit = pool.submit(session.commit)
                wait_for(lambda: waits_for_a_row(engine), "the commit waits for the mover")
                getattr(mover, outcome)()
                if outcome == "commit":
                    with pytest.raises(OwnershipLost) as caught:
                        commit.result(30)
                    assert (caught.value.tokens, caught.value.owners) == ((token("k4"),), {token("k4"): "other"})
                else:
                    commit.result(30)
        finally:
            mover.close()
        with Session(engine) as reader:
            notes = reader.scalars(select(Item.note).where(Item.sku.in_(MINE))).all()
        assert notes == (["done"] * 3 if outcome == "rollback" else [""] * 3)

    def test_a_claim_keeps_no_token_from_moving(self, engine: Engine, session: Session, job: HeldJob) -> None:
        for isolation in ("READ COMMITTED", "REPEATABLE READ"):
            session.connection(execution_options={"isolation_level": isolation})
            assert skus(claim(session, job, select(Item).order_by(Item.id))) == MINE
            assert locked(engine, "sync_token") == []
            session.rollback()

    @pytest.mark.parametrize("isolation", ["REPEATABLE READ", "SERIALIZABLE"])
    def test_at_the_higher_isolation_levels(
        self, engine: Engine, session: Session, job: HeldJob, isolation: str
    ) -> None:
        session.connection(execution_options={"isolation_level": isolation})
        assert session.scalar(select(func.count()).select_from(Item)) == len(KEYS)  # the snapshot
        assert skus(claim(session, job, select(Item).order_by(Item.id))) == MINE
        with engine.connect() as mover:
            mover.execute(text("SELECT FROM sync_token WHERE token_id = :t FOR UPDATE"), {"t": token("k6")})
            assert skus(claim(session, job, select(Item).order_by(Item.id))) == MINE[:2]
        take(engine, "k4")
        with pytest.raises(OperationalError) as caught:
            claim(session, job, select(Item))
        assert caught.value.orig.sqlstate == "40001"  # type: ignore[union-attr]
        session.rollback()
        assert skus(claim(session, job, select(Item).order_by(Item.id))) == ("k2", "k6")


def waits_for_advisory_lock(engine: Engine) -> bool:
    with engine.connect() as connection:
        asked = text(
            "SELECT 1 FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"
            " AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"
        )
        return connection.scalar(asked) is not None


def waits_for_a_row(engine: Engine) -> bool:
    with engine.connect() as connection:
        asked = "SELECT 1 FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
        return connection.scalar(text(asked)) is not None


class TestSeveralWorkers:
    def test_no_row_is_claimed_twice(self, engine: Engine, job: HeldJob) -> None:
        """Four threads take rows until there are none left, while rows are being locked and unlocked by others."""
        with Session(engine) as session, session.begin():
            session.add_all([Item(id=number, sku=MINE[number % 3], note="todo") for number in range(100, 400)])
        done: list[int] = []
        start = threading.Barrier(4)

        def work() -> None:
            start.wait()
            while True:
                with Session(engine) as session, session.begin():
                    items = claim(session, job, select(Item).where(Item.note == "todo").order_by(Item.id), limit=7)
                    for item in items:
                        item.note = "done"
                    mine = [item.id for item in items]
                done.extend(mine)
                if not mine:
                    return

        with ThreadPoolExecutor(4) as pool:
            for worker in [pool.submit(work) for _ in range(4)]:
                worker.result(60)
        assert len(done) == len(set(done))
        with Session(engine) as session:
            left = session.scalars(select(Item.id).where(Item.note == "todo")).all()
            # A thread ends when all rows left are locked by the others, whose commits then do them.
            assert left == []
        assert len(done) == 300

    def test_a_row_done_by_another_worker_in_between_is_not_returned(
        self, engine: Engine, session: Session, job: HeldJob
    ) -> None:
        """It was pending in the snapshot, and free again when its turn came, but done."""
        other = psycopg.connect(dsn(engine.url))
        gate = func.pg_advisory_xact_lock(17).is_not(None)
        try:
            other.execute("SELECT pg_advisory_lock(17)")
            with ThreadPoolExecutor(1) as pool:
                statement = select(Item).where(gate, Item.note == "").order_by(Item.id)
                answer = pool.submit(claim, session, job, statement)
                wait_for(lambda: waits_for_advisory_lock(engine), "the claim waits in the middle of its statement")
                other.execute("UPDATE item SET note = 'done' WHERE sku = 'k4'")
                other.commit()
                other.execute("SELECT pg_advisory_unlock(17)")
                other.commit()
                assert skus(answer.result(30)) == ("k2", "k6")
        finally:
            other.close()


class TestSessions:
    def test_the_session_is_bound(self, engine: Engine, session: Session, job: HeldJob) -> None:
        (item,) = claim(session, job, select(Item), limit=1)
        item.note = "done"
        session.flush()
        take(engine, item.sku)
        with pytest.raises(OwnershipLost):
            session.commit()
        with pytest.raises(ConfigurationError, match="bound to the job me already"):
            claim(session, HeldJob("another"), select(Item))

    def test_scoped_and_owned_sessions(self, engine: Engine, job: HeldJob) -> None:
        registry = scoped_session(sessionmaker(engine))
        assert skus(claim(registry, job, select(Item).order_by(Item.id))) == MINE
        registry.remove()
        with OwnedSession(engine, job=job) as owned:
            assert skus(claim(owned, job, select(Item).order_by(Item.id))) == MINE

    def test_async_sessions(self, engine: Engine, job: HeldJob) -> None:
        async def run() -> None:
            async_engine = create_async_engine(engine.url)
            try:
                registry = async_scoped_session(async_sessionmaker(async_engine), scopefunc=lambda: 1)
                for session in (AsyncSession(async_engine), registry):
                    pending: Any = claiming.claim(session, job, select(Item).order_by(Item.id), 2)
                    items = await pending
                    assert skus(items) == MINE[:2]
                    items[0].note = "done"
                    assert locked(engine, "item") == list(MINE[:2])
                    await session.flush()
                    take(engine, "k2")
                    with pytest.raises(OwnershipLost):
                        await session.commit()
                    take(engine, "k2", node="me", epoch=7)
                    await session.close()
                pending = claiming.claim(AsyncSession(async_engine), job, select(Item), 0)
                with pytest.raises(ConfigurationError, match="limit=0"):
                    await pending
            finally:
                await async_engine.dispose()

        asyncio.run(run())

    def test_a_standalone_job_claims_any_row(self, engine: Engine, session: Session) -> None:
        job = Job("alone")
        assert skus(job.claim(session, select(Item).order_by(Item.id), limit=4)) == KEYS[:4]
        assert locked(engine, "item") == list(KEYS[:4])
        with Session(engine) as second:
            assert skus(job.claim(second, select(Item).order_by(Item.id))) == KEYS[4:]

    def test_on_sqlite(self) -> None:
        engine = enable_sqlite(create_engine("sqlite://"))
        Base.metadata.create_all(engine)
        stock(engine)
        with Session(engine) as session:
            assert skus(Job("alone").claim(session, select(Item).order_by(Item.id), limit=3)) == KEYS[:3]
        engine.dispose()

    def test_a_running_job(self, engine: Engine, session: Session) -> None:
        with Job("solo", coordination_config=CoordinationConfig(engine=engine, minimum_nodes=1)) as job:
            items = job.claim(session, select(Item).order_by(Item.id), limit=4)
            assert skus(items) == KEYS[:4]
            items[0].note = "done"
            session.commit()
        with pytest.raises(NotRunning):
            job.claim(session, select(Item))


BAD: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (lambda: select(Shop), FilterNotApplicable, "one TokenOwned entity, and this statement returns none"),
    (lambda: select(func.count()).select_from(Shop), FilterNotApplicable, "returns none"),
    (lambda: select(Item.__table__), FilterNotApplicable, "returns none"),
    (lambda: select(Item, Part).join(Item.parts), FilterNotApplicable, "this statement returns .*Item.*, .*Part"),
    (lambda: select(Item, aliased(Item)), FilterNotApplicable, "this statement returns .*Item.*, .*Item"),
    (lambda: select(aliased(Item, select(Item).subquery())), FilterNotApplicable, "stands for a subquery"),
    (lambda: select(aliased(Item, select(Item).cte())), FilterNotApplicable, "stands for a subquery"),
    (lambda: select(aliased(Truck)), FilterNotApplicable, "flat=True"),
    (lambda: union(select(Item.id), select(Item.id)), FilterNotApplicable, "not CompoundSelect"),
    (lambda: text("SELECT 1"), FilterNotApplicable, "not TextClause"),
    (lambda: update(Item).values(note="x"), FilterNotApplicable, "not Update"),
    (lambda: select(Item).from_statement(text("SELECT * FROM item")), FilterNotApplicable, "not FromStatement"),
    (lambda: Item, FilterNotApplicable, "takes a select"),
    (lambda: Session().query(Item), FilterNotApplicable, "not Query"),
    (lambda: select(Item).limit(5), ConfigurationError, "has a LIMIT: pass limit="),
    (lambda: select(Item).fetch(5), ConfigurationError, "has a FETCH"),
    (lambda: select(Item).offset(0), ConfigurationError, "has an OFFSET"),
    (lambda: select(Item).slice(1, 2), ConfigurationError, "has a LIMIT"),
    (lambda: select(Item).with_for_update(), ConfigurationError, "has FOR UPDATE"),
    (lambda: select(Item).distinct(), ConfigurationError, "has DISTINCT"),
    (lambda: select(Item).group_by(Item.id), ConfigurationError, "has GROUP BY"),
    (lambda: select(Item).having(Item.id > 1), ConfigurationError, "has HAVING"),
    (lambda: select(func.count(Item.id)), FilterNotApplicable, "cannot lock the rows of this statement: .*aggregate"),
    (lambda: select(Item, func.row_number().over()), FilterNotApplicable, "cannot lock the rows.*window"),
    (
        lambda: select(Item, Item.id).options(joinedload(Item.parts)),
        FilterNotApplicable,
        r"joinedload\(\) loads: use selectinload",
    ),
]


class TestWhatIsRefused:
    @pytest.mark.parametrize(("make", "error", "message"), BAD)
    def test_statements(
        self, stocked: Engine, job: HeldJob, make: Callable[[], Select[Any]], error: type[Exception], message: str
    ) -> None:
        with Session(stocked) as session, pytest.raises(error, match=f"(?s){message}"):
            claim(session, job, make())

    @pytest.mark.parametrize("limit", [0, -1, True, 1.0, "10", None])
    def test_limits(self, stocked: Engine, job: HeldJob, limit: Any) -> None:
        with Session(stocked) as session:
            with pytest.raises(ConfigurationError, match=r"limit=.* must be a whole number, 1 or more"):
                claim(session, job, select(Item), limit)
            assert not session.in_transaction()

    def test_autocommit(self, engine: Engine, job: HeldJob) -> None:
        for who in (job, Job("alone")):
            for options in ({"isolation_level": "AUTOCOMMIT"}, {"isolation_level": "READ COMMITTED"}):
                with Session(engine.execution_options(**options)) as session:
                    if options["isolation_level"] == "AUTOCOMMIT":
                        with pytest.raises(ConfigurationError, match="AUTOCOMMIT"):
                            claim(session, who, select(Item))
                    else:
                        assert claim(session, who, select(Item))
            with psycopg.connect(dsn(engine.url), autocommit=True) as raw:
                made = create_engine("postgresql+psycopg://", creator=lambda raw=raw: raw)
                with Session(made) as session, pytest.raises(ConfigurationError, match="AUTOCOMMIT"):
                    claim(session, who, select(Item))

    def test_jobs_and_sessions(self, engine: Engine, session: Session) -> None:
        for job, error in (
            (FakeJob(), "a session is bound to a Job"),
            (HeldJob(names=Names("x_")), "set __token_appname__"),
        ):
            with pytest.raises(ConfigurationError, match=error):
                claim(session, job, select(Item))
        with pytest.raises(ConfigurationError, match="is no session"):
            claim(engine, HeldJob(), select(Item))
        with pytest.raises(NotRunning):
            claim(session, HeldJob(is_running=False), select(Item))
        not_begun = HeldJob(view=None)
        with Session(engine) as early:
            with pytest.raises(NotRunning, match="was not running yet when this transaction began"):
                claim(early, not_begun, select(Item))
            not_begun.view = view_of(MINE, 7)
            early.rollback()
            assert skus(claim(early, not_begun, select(Item).order_by(Item.id))) == MINE

    def test_two_phase_transactions(self, engine: Engine, job: HeldJob) -> None:
        with Session(engine, twophase=True) as session, pytest.raises(ConfigurationError, match="two-phase"):
            claim(session, job, select(Item))
