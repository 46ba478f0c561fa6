"""Another number of tokens, with everything that hangs on it."""

from __future__ import annotations

import re
import signal
import threading

import pytest
from sqlalchemy import URL, Engine, Identity, String, create_engine, event, text
from sqlalchemy.exc import DBAPIError, IntegrityError, ProgrammingError
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from jobsync_orm import CoordinationConfig, Job, JobQueue, TokenOwned, migrate
from jobsync_orm.exceptions import ClusterMismatch, ConfigurationError, LockConflict, OperationRefused
from jobsync_orm.hashing import task_to_token
from jobsync_orm.migrate import online
from jobsync_orm.migrate.fence import create_ownership_fence
from jobsync_orm.naming import Names
from jobsync_orm.operate import Operations, Resharded, add_pin, evict, find_member, list_pins, reshard, survey
from jobsync_orm.pins import PinBoard
from tests.integration.cluster import QUICK, Cluster, wait_for
from tests.integration.coordinator.backstage import add_node

NAMES = Names()
OLD, NEW = 10_000, 700


class Base(DeclarativeBase):
    pass


class Item(TokenOwned, Base):
    __tablename__ = "item"
    __token_key__ = "sku"
    id: Mapped[int] = mapped_column(primary_key=True)
    sku: Mapped[str] = mapped_column(String(40))
    touched: Mapped[int] = mapped_column(default=0)


class Order(TokenOwned, Base):
    __tablename__ = 'the "order"'
    __token_key__ = "id"
    id: Mapped[int] = mapped_column(Identity(always=True), primary_key=True)


TRIGGERS = """
    CREATE FUNCTION count_it() RETURNS trigger LANGUAGE plpgsql AS $$
        BEGIN NEW.touched := NEW.touched + 1; RETURN NEW; END $$;
    CREATE TRIGGER on_one BEFORE UPDATE ON item FOR EACH ROW EXECUTE FUNCTION count_it();
    CREATE TRIGGER on_always BEFORE UPDATE ON item FOR EACH ROW EXECUTE FUNCTION count_it();
    CREATE TRIGGER off BEFORE UPDATE ON item FOR EACH ROW EXECUTE FUNCTION count_it();
    ALTER TABLE item ENABLE ALWAYS TRIGGER on_always;
    ALTER TABLE item DISABLE TRIGGER off;
    CREATE TABLE parted (sku text, token_id int GENERATED ALWAYS AS (sync_token_of(sku)) STORED)
        PARTITION BY HASH (sku);
    CREATE TABLE parted_0 PARTITION OF parted FOR VALUES WITH (MODULUS 2, REMAINDER 0);
    CREATE TABLE parted_1 PARTITION OF parted FOR VALUES WITH (MODULUS 2, REMAINDER 1);
    INSERT INTO parted SELECT 'p' || n FROM generate_series(1, 200) n;
"""


@pytest.fixture
def tables(engine: Engine) -> Engine:
    Base.metadata.create_all(engine)
    with engine.begin() as connection:
        connection.exec_driver_sql(TRIGGERS)
        connection.execute(text("CREATE INDEX ON item (token_id)"))
    with Session(engine) as session:
        session.add_all(Item(sku=f"A{n}") for n in range(3000))
        session.add_all(Order() for _ in range(100))
        session.commit()
    create_ownership_fence(engine, Order.__tablename__, undeclared="refuse")
    return engine


def wrong(engine: Engine) -> int:
    """Rows whose token is not that of their key."""
    with engine.connect() as connection:
        return sum(
            connection.execute(
                text(f"SELECT count(*) FROM {table} WHERE token_id <> sync_token_of({key}\\:\\:text)")
            ).scalar_one()
            for table, key in (("item", "sku"), ('"the ""order"""', "id"), ("parted", "sku"), ("sync_job", "key"))
        )


def scalar(engine: Engine, sql: str) -> object:
    with engine.connect() as connection:
        return connection.execute(text(sql)).scalar_one()


def state(engine: Engine) -> tuple[object, ...]:
    return (
        scalar(engine, "SELECT total_tokens FROM sync_cluster"),
        scalar(engine, "SELECT count(*) FROM sync_token"),
        scalar(engine, "SELECT sync_token_of('A1')"),
        scalar(engine, "SELECT sum(token_id) FROM item"),
        scalar(engine, "SELECT string_agg(tgname || tgenabled\\:\\:text, ',' ORDER BY tgname) FROM pg_trigger"),
        scalar(engine, "SELECT string_agg(attidentity\\:\\:text, ',') FROM pg_attribute WHERE attidentity <> ''"),
    )


def test_everything_that_holds_a_token_gets_its_new_one(database: URL, tables: Engine) -> None:
    queue = JobQueue(engine=tables)
    with Session(tables) as session:
        for n in range(20):
            queue.enqueue(session, "work", {}, key=f"k{n}")
        queue.enqueue(session, "work", {})
        session.commit()
    add_pin(tables, NAMES, "A1", "gpu-%", created_by="me")
    with tables.begin() as connection:  # of workers that are gone
        connection.execute(text("INSERT INTO sync_claim SELECT 't', 1, 'w0', gen_random_uuid(), 1"))
        connection.execute(
            text(
                "UPDATE sync_token SET node = 'w0', next_node = 'w9', next_epoch = 1, drain_deadline = now()"
                " WHERE token_id < 5"
            )
        )
    before = state(tables)
    seen = survey(tables, NAMES, NEW)
    assert (seen.total_before, seen.total_after, seen.nodes, seen.obstacles) == (OLD, NEW, (), ())
    assert [table.table for table in seen.tables] == [
        'public."the ""order"""',
        "public.item",
        "public.parted_0",
        "public.parted_1",
    ]
    assert state(tables) == before, "a survey changes nothing"

    told: list[tuple[int, int, str]] = []
    done = reshard(tables, NAMES, NEW, lambda *progress: told.append(progress))
    assert (done.total_before, done.total_after, done.tables) == (OLD, NEW, 4)
    assert 2800 < done.rows <= 3300, "all but those few whose token is the same"
    assert 0 < done.jobs <= 20
    assert told[-1][0] == told[-1][1]
    assert [at for at, *_ in told] == sorted(at for at, *_ in told)

    assert wrong(tables) == 0
    assert scalar(tables, "SELECT token_id FROM item WHERE sku = 'A1'") == task_to_token("A1", NEW)
    assert state(tables)[:2] == (NEW, NEW)
    assert scalar(tables, "SELECT max(token_id) FROM sync_token") == NEW - 1
    of_somebody = "SELECT count(*) FROM sync_token WHERE num_nonnulls(node, next_node, next_epoch, drain_deadline) > 0"
    assert scalar(tables, of_somebody) == scalar(tables, "SELECT count(*) FROM sync_claim") == 0
    assert scalar(tables, "SELECT count(*) FROM item WHERE touched <> 0") == 0, "triggers are not for this"
    assert state(tables)[4:] == before[4:], "triggers and identities are as they were"
    (pin,) = list_pins(tables, NAMES)
    assert pin.token_id == task_to_token("A1", NEW)
    assert migrate.check(tables, total_tokens=NEW) == []
    with tables.begin() as connection:
        connection.execute(text("INSERT INTO item (sku, touched) VALUES ('new', 0)"))
    assert wrong(tables) == 0

    with pytest.raises(ClusterMismatch, match="total_tokens"), Job("w1", CoordinationConfig(url=database, **QUICK)):
        pass
    with Job("w1", CoordinationConfig(url=database, total_tokens=NEW, **QUICK)) as job:
        wait_for(lambda: Operations(tables, NAMES).tokens().owned == NEW - 1, "all but the pinned one")
        assert not job.can_claim_task("A1")
        mine = scalar(tables, "SELECT count(*) FROM item i JOIN sync_token t USING (token_id) WHERE t.node = 'w1'")
        assert mine == sum(job.can_claim_task(f"A{n}") for n in range(3000)) + job.can_claim_task("new")


def test_there_and_back(tables: Engine) -> None:
    before = state(tables)
    reshard(tables, NAMES, 25_000)
    assert wrong(tables) == 0
    assert state(tables)[:2] == (25_000, 25_000)
    epochs = scalar(tables, "SELECT min(epoch) FROM sync_token")
    reshard(tables, NAMES, OLD)
    assert state(tables) == before
    assert scalar(tables, "SELECT min(epoch) FROM sync_token") > epochs  # type: ignore[operator]
    same = reshard(tables, NAMES, OLD)
    assert same == Resharded(OLD, OLD, 0, 0, 0, same.took_sec)


def test_double_the_tokens_moves_half_of_the_rows(tables: Engine) -> None:
    done = reshard(tables, NAMES, 2 * OLD)
    assert 1300 < done.rows < 1900
    assert wrong(tables) == 0


def test_parts_of_a_table(tables: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jobsync_orm.operate.resharding.PAGES", 3)
    told: list[int] = []
    reshard(tables, NAMES, NEW, lambda at, *_: told.append(at))
    assert len(set(told)) > 8
    assert wrong(tables) == 0


def test_refused_while_a_node_is_registered(tables: Engine, job: Job) -> None:
    before = state(tables)
    assert survey(tables, NAMES, NEW).nodes == ("w1",)
    with pytest.raises(OperationRefused, match=r"1 node is registered \(w1\): stop every worker"):
        reshard(tables, NAMES, NEW)
    assert state(tables) == before


def test_refused_while_one_is_away_that_may_come_back(engine: Engine) -> None:
    with engine.begin() as connection:
        add_node(connection, "w1", state="away", rejoin_grace_sec=600)
    with pytest.raises(OperationRefused, match=r"1 node is registered \(w1\).*jobsync-orm evict"):
        reshard(engine, NAMES, NEW)
    assert scalar(engine, "SELECT total_tokens FROM sync_cluster") == OLD


@pytest.mark.parametrize(
    ("sql", "message"),
    [
        ("CREATE INDEX by_function ON item (sync_token_of(sku))", "index by_function keeps tokens"),
        ("ALTER TABLE item ADD CONSTRAINT k CHECK (sync_token_of(sku) >= 0)", "constraint k of item keeps tokens"),
        ("CREATE MATERIALIZED VIEW m AS SELECT sync_token_of(sku) FROM item", "materialized view m keeps tokens"),
    ],
)
def test_what_keeps_tokens_elsewhere_is_named(tables: Engine, sql: str, message: str) -> None:
    with tables.begin() as connection:
        connection.exec_driver_sql(sql)
    before = state(tables)
    assert [message in obstacle for obstacle in survey(tables, NAMES, NEW).obstacles] == [True]
    with pytest.raises(OperationRefused, match=message):
        reshard(tables, NAMES, NEW)
    assert state(tables) == before


def test_another_role_is_told_what_it_does_not_own(database: URL, tables: Engine) -> None:
    role = f"reader_{database.database}"
    with tables.begin() as connection:
        connection.execute(text(f"CREATE ROLE {role} LOGIN"))
        connection.execute(text(f"GRANT SELECT ON ALL TABLES IN SCHEMA public TO {role}"))
    other = create_engine(database.set(username=role))
    obstacles = survey(other, NAMES, NEW).obstacles
    other.dispose()
    with tables.begin() as connection:
        connection.execute(text(f"DROP OWNED BY {role}"))
        connection.execute(text(f"DROP ROLE {role}"))
    assert 'this role does not own the function "sync_token_of"(text)' in obstacles
    assert "this role does not own public.item" in obstacles


def test_pins_that_would_meet_are_named(tables: Engine) -> None:
    first, second = "x", next(f"y{n}" for n in range(10_000) if task_to_token(f"y{n}", 7) == task_to_token("x", 7))
    add_pin(tables, NAMES, first, "gpu-%", created_by="me")
    add_pin(tables, NAMES, second, "cpu-%", created_by="me")
    before = state(tables)
    with pytest.raises(LockConflict):
        reshard(tables, NAMES, 7)
    assert state(tables) == before


def test_a_pin_that_has_expired_meets_nobody(engine: Engine) -> None:
    add_pin(engine, NAMES, "x", "gpu-%", created_by="me")
    add_pin(engine, NAMES, "y", "cpu-%", created_by="me")
    with engine.begin() as connection:
        connection.execute(text("UPDATE sync_lock SET expires_at = now() - interval '1 s' WHERE task_id = 'y'"))
    assert reshard(engine, NAMES, 1).total_after == 1
    assert scalar(engine, "SELECT token_id FROM sync_lock WHERE task_id = 'x'") == 0


def test_a_table_that_is_made_meanwhile_is_not_left_out(tables: Engine) -> None:
    before = state(tables)[:4]
    mine = create_engine(tables.url)
    made: list[str] = []

    @event.listens_for(mine, "before_cursor_execute")
    def make(connection: object, cursor: object, statement: str, *more: object) -> None:
        if statement.startswith("LOCK TABLE") and not made:  # it has looked, and the function is what it was
            made.append(statement)
            with tables.begin() as other:
                other.exec_driver_sql(
                    "CREATE TABLE new (sku text, token_id int GENERATED ALWAYS AS (sync_token_of(sku)) STORED)"
                )

    with pytest.raises(OperationRefused, match="was made just now: try again"):
        reshard(mine, NAMES, NEW)
    mine.dispose()
    assert state(tables)[:4] == before
    assert reshard(tables, NAMES, NEW).tables == 5


def test_who_may_not_see_all_rows_changes_none(database: URL, engine: Engine) -> None:
    """An owner that row security holds for: an error rather than rows that keep their old tokens."""
    role = f"owner_{database.database}"
    everything = "SELECT format('ALTER %s %s OWNER TO ' || :role, kind, name) FROM ({}) AS o (kind, name)".format(
        "SELECT 'TABLE', oid::regclass::text FROM pg_class"
        " WHERE relkind = 'r' AND relnamespace = 'public'::regnamespace UNION ALL"
        " SELECT 'FUNCTION', oid::regprocedure::text FROM pg_proc WHERE pronamespace = 'public'::regnamespace"
    ).replace("::", r"\:\:")
    with engine.begin() as connection:
        connection.exec_driver_sql("CREATE TABLE item (sku text)")
        connection.exec_driver_sql("INSERT INTO item SELECT 'A' || n FROM generate_series(1, 50) n")
        connection.exec_driver_sql(
            "ALTER TABLE item ADD token_id int GENERATED ALWAYS AS (sync_token_of(sku)) STORED,"
            " ENABLE ROW LEVEL SECURITY, FORCE ROW LEVEL SECURITY"
        )
        connection.exec_driver_sql("CREATE POLICY few ON item USING (sku < 'A2')")
        connection.exec_driver_sql(f"CREATE ROLE {role} LOGIN")
        connection.exec_driver_sql(f"GRANT CREATE, USAGE ON SCHEMA public TO {role}")
        for (statement,) in connection.execute(text(everything), {"role": role}).all():
            connection.exec_driver_sql(statement)
    before = scalar(engine, "SELECT sum(token_id) FROM item")
    theirs = create_engine(database.set(username=role))
    try:
        with pytest.raises(ProgrammingError, match="row-level security"):
            reshard(theirs, NAMES, NEW)
        assert scalar(engine, "SELECT sum(token_id) FROM item") == before
        assert scalar(engine, "SELECT total_tokens FROM sync_cluster") == OLD
    finally:
        theirs.dispose()
        with engine.begin() as connection:
            connection.exec_driver_sql(f"DROP OWNED BY {role} CASCADE")
            connection.exec_driver_sql(f"DROP ROLE {role}")


def test_a_process_that_does_not_go_on_holds_up_nobody(tables: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jobsync_orm.operate.resharding.IDLE_SEC", 0.2)
    before = state(tables)

    def pause(at: int, all: int, what: str) -> None:
        if what == "tokens and pins":
            ended = "SELECT NOT EXISTS (SELECT 1 FROM pg_locks WHERE relation = 'item'\\:\\:regclass)"
            wait_for(lambda: scalar(tables, ended), "the server has ended the transaction", 30)

    with pytest.raises(DBAPIError, match=r"idle-in-transaction|closed"):
        reshard(tables, NAMES, NEW, pause)
    assert state(tables) == before


def test_a_pin_computed_with_the_old_number_is_refused(engine: Engine) -> None:
    job = Job("w1", CoordinationConfig(engine=engine))
    job.register_lock("before", "gpu-%")
    reshard(engine, NAMES, NEW)
    with pytest.raises(ClusterMismatch, match=r"700 tokens now.*total_tokens=10000"):
        job.register_lock("after", "gpu-%")
    assert [(pin.task_id, pin.token_id) for pin in list_pins(engine, NAMES)] == [
        ("before", task_to_token("before", NEW, "double_sha256"))
    ]
    add_pin(engine, NAMES, "after", "gpu-%", created_by="me")
    assert {pin.token_id for pin in list_pins(engine, NAMES)} == {
        task_to_token(task, NEW, "double_sha256") for task in ("before", "after")
    }


def test_a_pin_under_way_keeps_the_number_as_it_is(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jobsync_orm.operate.resharding.LOCK_SEC", 1)

    def in_the_middle(self: PinBoard, theirs: int, mine: int) -> None:
        assert (theirs, mine) == (OLD, OLD)
        with pytest.raises(OperationRefused):
            reshard(engine, NAMES, NEW)

    monkeypatch.setattr(PinBoard, "_check_total", in_the_middle)
    add_pin(engine, NAMES, "A1", "gpu-%", created_by="me")
    assert scalar(engine, "SELECT total_tokens FROM sync_cluster") == 10_000


def test_a_failure_in_the_middle_changes_nothing(tables: Engine) -> None:
    with tables.begin() as connection:
        connection.exec_driver_sql("ALTER TABLE item ADD CONSTRAINT few CHECK (token_id < 10000)")
    before = state(tables)
    with pytest.raises(IntegrityError):
        reshard(tables, NAMES, 25_000)
    assert state(tables) == before

    def interrupt(at: int, all: int, what: str) -> None:
        if what == "tokens and pins":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        reshard(tables, NAMES, NEW, interrupt)
    assert state(tables) == before


def test_who_writes_meanwhile_waits_and_gets_a_new_token(tables: Engine) -> None:
    started, threads = threading.Event(), []

    def insert() -> None:
        with tables.begin() as connection:
            started.set()
            connection.execute(text("INSERT INTO item (sku, touched) VALUES ('meanwhile', 0)"))

    def enqueue() -> None:
        with tables.begin() as connection:
            queue.enqueue(connection, "t", {}, key="meanwhile")

    queue = JobQueue(engine=tables, wake=False)

    def meanwhile(at: int, all: int, what: str) -> None:
        if not threads:
            threads.extend(threading.Thread(target=write) for write in (insert, enqueue))
            for thread in threads:
                thread.start()
            started.wait(10)
            assert scalar(tables, "SELECT count(*) FROM item") == 3000, "who reads does not wait"
            waits = (
                "SELECT count(*) = 2 FROM pg_locks WHERE NOT granted"
                " AND relation IN ('item'\\:\\:regclass, 'sync_job'\\:\\:regclass)"
            )
            wait_for(lambda: scalar(tables, waits), "they wait")

    reshard(tables, NAMES, NEW, meanwhile)
    for thread in threads:
        thread.join(10)
    assert scalar(tables, "SELECT count(*) FROM sync_job") == 1
    assert scalar(tables, "SELECT count(*) FROM item") == 3001
    assert wrong(tables) == 0


def test_who_joins_meanwhile_waits_and_is_refused(database: URL, engine: Engine) -> None:
    refused: list[ClusterMismatch] = []

    def join() -> None:
        with pytest.raises(ClusterMismatch, match="total_tokens") as caught:
            Job("w1", CoordinationConfig(url=database, **QUICK)).start()
        refused.append(caught.value)

    thread = threading.Thread(target=join)
    nodes, waiting = (
        f"SELECT count(*) FROM {what}"
        for what in ("sync_node", "pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'")
    )

    mine = create_engine(database)

    @event.listens_for(mine, "before_cursor_execute")
    def meanwhile(connection: object, cursor: object, statement: str, *more: object) -> None:
        if statement.startswith("LOCK TABLE") and thread.ident is None:  # it has seen that nobody is there
            thread.start()
            wait_for(lambda: scalar(engine, waiting) or scalar(engine, nodes), "it asks to be registered", 30)
            assert scalar(engine, nodes) == 0

    reshard(mine, NAMES, NEW)
    mine.dispose()
    thread.join(30)
    assert len(refused) == 1
    assert scalar(engine, nodes) == 0


def test_a_table_in_use_is_not_waited_for_without_end(tables: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jobsync_orm.operate.resharding.LOCK_SEC", 1)
    before = state(tables)
    with tables.connect() as writer:
        writer.execute(text("UPDATE item SET touched = 0 WHERE sku = 'A1'"))
        with pytest.raises(OperationRefused, match="somebody holds a lock for longer than 1 s"):
            reshard(tables, NAMES, NEW)
    assert state(tables) == before


def test_a_writer_that_takes_the_tables_in_another_order_makes_it_give_up(tables: Engine) -> None:
    refused: list[OperationRefused] = []

    def run() -> None:
        with pytest.raises(OperationRefused, match="locked here: stop what writes") as caught:
            reshard(tables, NAMES, NEW)
        refused.append(caught.value)

    before = state(tables)
    with tables.connect() as writer:
        writer.execute(text("SET LOCAL deadlock_timeout = '1min'"))  # the other one is the first to look
        writer.execute(text("UPDATE item SET touched = touched WHERE sku = 'A1'"))
        thread = threading.Thread(target=run)
        thread.start()
        waits = "SELECT count(*) FROM pg_locks WHERE NOT granted AND relation = 'item'\\:\\:regclass"
        wait_for(lambda: scalar(tables, waits), "it waits")
        writer.execute(text("LOCK TABLE sync_job IN ROW EXCLUSIVE MODE"))  # as who enqueues does
        thread.join()
    assert len(refused) == 1
    assert state(tables) == before


def test_a_worker_that_was_paused_all_the_time_says_no_from_then_on(tables: Engine, cluster: Cluster) -> None:
    cluster.start("w1")
    worker = cluster.workers["w1"]
    worker.signal(signal.SIGSTOP)
    member = find_member(tables, NAMES, "w1")
    assert member is not None
    assert list(evict(tables, NAMES, member))[-1].outcome == "evicted"
    reshard(tables, NAMES, NEW)
    worker.signal(signal.SIGCONT)
    wait_for(lambda: any("total_tokens is 10000" in line for line in worker.log), "it says why")
    assert worker.held() == set()
    assert find_member(tables, NAMES, "w1") is None


@pytest.mark.parametrize("total", [0, -1, True, 2**40, "7"])
def test_numbers_that_cannot_be(engine: Engine, total: object) -> None:
    with pytest.raises(ConfigurationError, match="total_tokens="):
        survey(engine, NAMES, total)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="total_tokens="):
        reshard(engine, NAMES, total)  # type: ignore[arg-type]


class TestColumnsThatATriggerKeeps:
    """As op.add_token_column makes them."""

    def test_are_computed_anew(self, engine: Engine) -> None:
        with engine.begin() as connection:
            connection.execute(text("CREATE TABLE item (id int PRIMARY KEY, sku text NOT NULL, touched int DEFAULT 0)"))
            connection.execute(text("INSERT INTO item (id, sku) SELECT n, 'k' || n FROM generate_series(1, 300) n"))
            connection.execute(text(PARTED))
        online.add_token_column(engine, "item", key="sku")
        online.add_token_column(engine, "parted", key_sql="lower(sku)")
        create_ownership_fence(engine, "item", undeclared="refuse")
        with engine.begin() as connection:
            connection.execute(text(TOUCHING))
        found = survey(engine, NAMES, NEW)
        assert found.obstacles == ()
        assert [table.table for table in found.tables] == ["public.item", "public.parted_0", "public.parted_1"]
        done = reshard(engine, NAMES, NEW)
        assert done.tables == 3
        with engine.begin() as connection:
            for table, key in (("item", "sku"), ("parted", "lower(sku)")):
                rows = connection.execute(text(f"SELECT {key} AS key, token_id FROM {table}")).all()
                assert {row.key: row.token_id for row in rows} == {row.key: task_to_token(row.key, NEW) for row in rows}
            assert connection.scalar(text("SELECT sum(touched) FROM item")) == 0
            off = "SELECT count(*) FROM pg_trigger WHERE tgrelid = CAST('item' AS regclass) AND tgenabled <> 'O'"
            assert connection.scalar(text(off)) == 0

    def test_a_check_of_the_applications_own_is_in_the_way_still(self, engine: Engine) -> None:
        with engine.begin() as connection:
            connection.execute(text("CREATE TABLE item (id int PRIMARY KEY, sku text NOT NULL)"))
        online.add_token_column(engine, "item", key="sku")
        with engine.begin() as connection:
            connection.execute(text("ALTER TABLE item ADD CONSTRAINT k CHECK (sync_token_of(sku) >= 0)"))
        (obstacle,) = survey(engine, NAMES, NEW).obstacles
        assert obstacle.startswith("constraint k of item keeps tokens")

    @pytest.mark.parametrize("table", ["item", "parted"])
    def test_one_whose_check_has_been_dropped_is_refused(self, engine: Engine, table: str) -> None:
        with engine.begin() as connection:
            connection.execute(text("CREATE TABLE item (id int PRIMARY KEY, sku text NOT NULL)"))
            connection.execute(text("INSERT INTO item SELECT n, 'k' || n FROM generate_series(1, 300) n"))
            connection.execute(text(PARTED))
        online.add_token_column(engine, table, key="sku")
        with engine.begin() as connection:
            connection.execute(text(f"ALTER TABLE {table} DROP CONSTRAINT sync_token_id_{table}"))
            stored = connection.execute(text(f"SELECT * FROM {table} ORDER BY 1")).all()
        part = {"item": "item", "parted": "parted_0"}[table]
        message = rf"trigger zz_sync_token_id_{table} keeps token_id of public\.{part}, but the CHECK .* not there"
        assert re.search(message, survey(engine, NAMES, NEW).obstacles[0])
        with pytest.raises(OperationRefused, match=message) as refused:
            reshard(engine, NAMES, NEW)
        with engine.begin() as connection:
            assert connection.execute(text(f"SELECT * FROM {table} ORDER BY 1")).all() == stored
            # The remedy that it names.
            remedy = re.search(r"ALTER TABLE .* NOT VALID", str(refused.value).split("; ")[0])
            assert remedy is not None
            add = remedy[0].replace(part, table).replace("...", "sku")
            connection.execute(text(add))
        assert reshard(engine, NAMES, NEW).rows > 0
        with engine.begin() as connection:
            for key, token in connection.execute(text(f"SELECT sku, token_id FROM {table}")):
                assert token == task_to_token(key, NEW)

    @pytest.mark.parametrize("how", ["DISABLE", "ENABLE REPLICA"])
    @pytest.mark.parametrize("table", ["item", "parted"])
    def test_one_whose_trigger_is_switched_off_is_refused(self, engine: Engine, table: str, how: str) -> None:
        with engine.begin() as connection:
            connection.execute(text("CREATE TABLE item (id int PRIMARY KEY, sku text NOT NULL)"))
            connection.execute(text("INSERT INTO item SELECT n, 'k' || n FROM generate_series(1, 300) n"))
            connection.execute(text(PARTED))
        online.add_token_column(engine, table, key="sku")
        parts = {"item": ["item"], "parted": ["parted_0", "parted_1"]}[table]
        with engine.begin() as connection:
            for part in parts:
                connection.execute(text(f"ALTER TABLE {part} {how} TRIGGER zz_sync_token_id_{table}"))
        with pytest.raises(OperationRefused) as refused:
            reshard(engine, NAMES, NEW)
        assert scalar(engine, "SELECT total_tokens FROM sync_cluster") == 10_000
        obstacles = str(refused.value).split("; ")
        assert obstacles == [
            f"the trigger zz_sync_token_id_{table} that keeps token_id of public.{part} is switched off: switch it on "
            f'(ALTER TABLE public.{part} ENABLE TRIGGER "zz_sync_token_id_{table}")'
            for part in parts
        ]
        assert survey(engine, NAMES, NEW).obstacles == tuple(obstacles)
        with engine.begin() as connection:
            for obstacle in obstacles:
                connection.execute(text(obstacle.partition("(")[2].removesuffix(")")))
        assert reshard(engine, NAMES, NEW).rows > 0


PARTED = """
    CREATE TABLE parted (id int, sku text NOT NULL, PRIMARY KEY (id)) PARTITION BY HASH (id);
    CREATE TABLE parted_0 PARTITION OF parted FOR VALUES WITH (MODULUS 2, REMAINDER 0);
    CREATE TABLE parted_1 PARTITION OF parted FOR VALUES WITH (MODULUS 2, REMAINDER 1);
    INSERT INTO parted SELECT n, 'P' || n FROM generate_series(1, 200) n;
"""
TOUCHING = """
    CREATE FUNCTION touch() RETURNS trigger LANGUAGE plpgsql AS $$
        BEGIN NEW.touched := NEW.touched + 1; RETURN NEW; END $$;
    CREATE TRIGGER on_write BEFORE UPDATE ON item FOR EACH ROW EXECUTE FUNCTION touch();
"""
