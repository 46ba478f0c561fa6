"""The three roles of ``migrate.roles`` on a real server: what each can do, and what it cannot."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import psycopg
import pytest
from sqlalchemy import URL, Engine, create_engine, select, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column, sessionmaker

from jobsync_orm import (
    Backoff,
    CoordinationConfig,
    Job,
    JobContext,
    JobQueue,
    JobState,
    JobWorker,
    OwnedSession,
    Task,
    TokenOwned,
    migrate,
)
from jobsync_orm.coordinator.history import Operator
from jobsync_orm.exceptions import ConfigurationError
from jobsync_orm.migrate import online, roles
from jobsync_orm.migrate.autogenerate import TABLES
from jobsync_orm.migrate.fence import create_ownership_fence
from jobsync_orm.migrate.rights import HIDDEN
from jobsync_orm.migrate.rights import TABLES as RIGHTS
from jobsync_orm.naming import Names, quote
from jobsync_orm.operate import Operations
from tests.conftest import Server, dsn
from tests.integration.cluster import QUICK, wait_for


class Base(DeclarativeBase):
    pass


class Item(TokenOwned, Base):
    __tablename__ = "item"
    __token_key__ = "sku"
    id: Mapped[int] = mapped_column(primary_key=True)
    sku: Mapped[str]
    note: Mapped[str] = mapped_column(default="")


@dataclass(frozen=True)
class Place:
    """A database in which everything was made by the owner, and an engine for each role."""

    names: dict[str, str]
    admin: URL
    owner: Engine
    worker: Engine
    monitor: Engine

    def config(self) -> CoordinationConfig:
        return CoordinationConfig(engine=self.worker, **QUICK)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def place(server: Server) -> Iterator[Place]:
    url = server.create_database()
    unique = uuid.uuid4().hex[:8]
    names = {kind: f'{kind} "{unique}" $$ \\ :x %s \'é' for kind in ("owner", "worker", "monitor")}
    with psycopg.connect(dsn(url), autocommit=True) as connection:
        assert url.database is not None
        for _ in range(2):  # it can be run again
            connection.execute(roles.setup(**names, database=url.database).encode())
        for name in names.values():
            connection.execute(f"ALTER ROLE {quote(name)} LOGIN PASSWORD 'pw'".encode())
    engines = {kind: create_engine(url.set(username=name, password="pw")) for kind, name in names.items()}
    place = Place(names, url, **engines)
    migrate.upgrade(place.owner)
    with place.owner.begin() as connection:
        columns = "id serial PRIMARY KEY, sku varchar NOT NULL, note varchar NOT NULL"
        connection.execute(text(f"CREATE TABLE item ({columns})"))
        connection.execute(text(f"GRANT USAGE ON SEQUENCE item_id_seq TO {quote(names['worker'])}".replace(":", r"\:")))
    online.add_token_column(place.owner, "item", key="sku")
    create_ownership_fence(place.owner, "item", undeclared="refuse")
    grant(place)
    yield place
    for engine in engines.values():
        engine.dispose()
    server.drop_database(url)
    with server.connect() as connection:
        for name in names.values():
            connection.execute(f"DROP ROLE {quote(name)}".encode())


def grant(place: Place) -> None:
    script = roles.grants(worker=place.names["worker"], monitor=place.names["monitor"], tables=["item"])
    with place.owner.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        driver: Any = connection.connection.driver_connection
        driver.execute(script.encode())


def denied(engine: Engine, *statements: str) -> None:
    for statement in statements:
        with engine.connect() as connection, pytest.raises(DBAPIError) as caught:
            connection.execute(text(statement))
        assert getattr(caught.value.orig, "sqlstate", None) == "42501", statement


class TestWorker:
    def test_lacks_nothing(self, place: Place) -> None:
        assert migrate.check(place.worker) == []
        migrate.upgrade(place.worker)  # there is nothing to do, so it needs no right to do it

    def test_runs_jobs_with_all_they_can_do(self, place: Place) -> None:
        config = place.config()
        with Job("w1", config) as one, Job("w2", config) as two:
            one.register_lock("pinned", ["w2"], expires_in_days=1)
            one.register_locks_bulk([("also pinned", ["w1"], "a reason")])
            wait_for(lambda: two.can_claim_task(Task("pinned")), "the pin moves the token")
            task = next(Task(str(n)) for n in range(100) if one.can_claim_task(Task(str(n))))
            with one.claim_task(task) as claim:
                assert claim.fence > 0
            one.checkpoint(task, {"at": 1})
            assert one.last_checkpoint(task) == {"at": 1}
            one.clear_checkpoint(task)
            one.add_task(task)
            one.set_claim(task)
            one.write_audit()
            assert one.get_audit()
            one.clear_lock("pinned")
            one.clear_all_locks()
            assert two.get_coordination_status()["active_nodes"] == 2

    def test_works_on_rows_under_the_fences(self, place: Place) -> None:
        with Job("w1", place.config()) as job:
            session_of = sessionmaker(place.worker, class_=OwnedSession, job=job)
            with session_of.begin() as session:
                session.add_all(Item(sku=f"k{n}") for n in range(20))
            with session_of.begin() as session:
                for item in job.claim(session, select(Item), limit=100):
                    item.note = "done"
            with session_of() as session:
                found = session.scalars(select(Item).where(Item.owned_by(job), Item.note == "done")).all()
                assert len(found) == 20

    def test_runs_a_queue(self, place: Place) -> None:
        queue = JobQueue(place.config(), session_factory=sessionmaker(place.worker))
        runs: list[int] = []

        @queue.handler("note", max_retries=2, backoff=Backoff(base=0.01))
        def note(ctx: JobContext, n: int) -> int:
            runs.append(n)
            if runs.count(n) < 2:
                raise ValueError("once")
            ctx.session.add(Item(sku=f"job{n}"))
            return n

        @queue.periodic("* * * * *")
        @queue.handler("tick")
        def tick(ctx: JobContext) -> None: ...

        # The trigger of the table asks who commits, and this queue's sessions do not say.
        with place.owner.begin() as connection:
            connection.execute(text("ALTER TABLE item DISABLE TRIGGER sync_fence_item"))
        with place.worker.begin() as connection:
            first = queue.enqueue(connection, "note", {"n": 1}, key="a", idempotency_key="one")
            again = queue.enqueue(connection, "note", {"n": 1}, key="a", idempotency_key="one")
            assert again.id == first.id
            last = queue.enqueue(connection, "note", {"n": 2}, after=[first.id])
            queue.enqueue_many(connection, "note", [{"n": n} for n in range(3, 9)])
            idle = queue.enqueue(connection, "note", {"n": 99}, delay=3600)
        queue.pause("note", reason="a moment")
        assert queue.resume("note")
        with JobWorker(queue, concurrency=2):
            wait_for(lambda: queue.status(last.id).state is JobState.COMPLETED, "both are done")
            wait_for(lambda: queue.stats("note").counts[JobState.COMPLETED] == 8, "all are done")
            assert queue.worker_stats()[0]["alive"]
        assert queue.cancel(idle.id) is JobState.CANCELLED
        assert queue.retry(idle.id) is not JobState.CANCELLED
        queue.cancel(idle.id)
        mine = queue.submit("note", {"n": 50})
        (held,) = queue.dequeue("note", "by hand")
        assert held.id == mine.id
        assert queue.extend(held, 5)
        queue.release(held)
        (held,) = queue.dequeue("note", "by hand")
        queue.fail(held, "no")
        queue.cleanup_stale()
        assert queue.prune(0) >= 8
        assert {schedule.name for schedule in queue.schedules()} == {"tick"}
        assert queue.forget_schedule("tick")
        queue.dispose()

    def test_forms_the_cluster_anew(self, place: Place) -> None:
        with Job("w1", place.config()) as job:
            before = job.token_version
            operator = Operator(place.worker, Names())
            assert operator.reform(operator.look()[0], 0.1) is not None
            wait_for(lambda: job.token_version > before, "the cluster is formed anew")

    def test_without_the_right_to_set_fences_it_works_and_says_what_is_left_to_do(self, place: Place) -> None:
        """As docs/security.md says, for those who would rather not give it."""
        role = quote(place.names["worker"]).replace(":", r"\:")
        with place.owner.begin() as connection:
            connection.execute(text(f"REVOKE UPDATE ON SEQUENCE sync_claim_fence_seq FROM {role}"))
        try:
            with Job("w1", place.config()) as job:
                with job.claim_task(Task("task")) as claim:
                    before = claim.fence
                operator = Operator(place.worker, Names())
                done = operator.reform(operator.look()[0], 0.1)
                assert done is not None
                assert not done.fences_raised
            denied(place.worker, "SELECT setval('sync_claim_fence_seq', 1)")
            with place.owner.begin() as connection:
                leap = text("SELECT setval('sync_claim_fence_seq', nextval('sync_claim_fence_seq') + 1000000000)")
                assert connection.scalar(leap) > before + 1_000_000_000
        finally:
            grant(place)

    def test_can_do_no_more(self, place: Place) -> None:
        denied(
            place.worker,
            "CREATE TABLE mine (id int)",
            "DROP TABLE sync_job",
            "ALTER TABLE item DISABLE TRIGGER ALL",
            "TRUNCATE sync_job",
            "DELETE FROM sync_token",
            "INSERT INTO sync_token VALUES (10001)",
            "DELETE FROM sync_cluster",
            "UPDATE sync_audit SET node = 'x'",
            "DELETE FROM sync_audit",
            "UPDATE sync_rebalance SET tokens_moved = 0",
            "UPDATE sync_job_attempt SET outcome = 'completed'",
            "UPDATE sync_alembic_version SET version_num = 'x'",
            "CREATE OR REPLACE FUNCTION sync_token_of(text) RETURNS int LANGUAGE sql AS 'SELECT 1'",
            "SELECT setval('sync_job_id_seq', 1)",
        )


class TestMonitor:
    def test_reads_how_it_is_going(self, place: Place) -> None:
        queue = JobQueue(engine=place.worker)
        with place.worker.begin() as connection:
            queue.enqueue(connection, "secret", {"card": 4711})
        looking = JobQueue(engine=place.monitor)
        assert looking.stats().counts[JobState.PENDING] >= 1
        assert isinstance(looking.worker_stats(), list)
        assert looking.paused() == []
        operations = Operations(place.monitor, Names())
        assert operations.status() is not None
        assert isinstance(operations.nodes(), tuple)
        assert operations.tokens() is not None
        assert isinstance(operations.rebalances(), list)
        queue.dispose()
        looking.dispose()

    @pytest.mark.parametrize(("table", "column"), sorted((t, c) for t, columns in HIDDEN.items() for c in columns))
    def test_does_not_see_what_the_application_has_put_there(self, place: Place, table: str, column: str) -> None:
        denied(place.monitor, f"SELECT {column} FROM sync_{table}", f"SELECT * FROM sync_{table}")

    def test_sees_every_other_column(self, place: Place) -> None:
        visible = text(
            "SELECT table_name, column_name FROM information_schema.columns WHERE table_name LIKE 'sync%'"
            " AND NOT has_column_privilege(:role, CAST(table_name AS regclass), CAST(column_name AS text), 'SELECT')"
        )
        with place.owner.connect() as connection:
            hidden = connection.execute(visible, {"role": place.names["monitor"]}).all()
        assert {tuple(row) for row in hidden} == {(f"sync_{t}", c) for t, columns in HIDDEN.items() for c in columns}

    def test_writes_nothing(self, place: Place) -> None:
        for kind in (*TABLES, "alembic_version"):
            table = f"sync_{kind}"
            denied(place.monitor, f"INSERT INTO {table} DEFAULT VALUES", f"DELETE FROM {table}", f"TRUNCATE {table}")
        denied(
            place.monitor,
            "UPDATE sync_token SET node = 'me'",
            "UPDATE sync_job SET state = 'pending'",
            "SELECT token_id FROM sync_token FOR SHARE",
            "SELECT nextval('sync_job_id_seq')",
            "SELECT 1 FROM item",
            "CREATE TABLE mine (id int)",
            "CREATE TEMPORARY TABLE mine (id int)",
            "SELECT lo_create(0)",
            "SELECT lo_creat(-1)",
            "SELECT lo_from_bytea(0, 'x')",
            "SELECT setval('sync_claim_fence_seq', 1)",
        )

    def test_others_may_make_large_objects_still(self, place: Place) -> None:
        for engine in (place.owner, place.worker):
            with engine.begin() as connection:
                made = connection.scalar(text("SELECT lo_from_bytea(0, 'x')"))
                connection.execute(text("SELECT lo_unlink(:made)"), {"made": made})


def test_others_cannot_connect(place: Place, server: Server) -> None:
    name = f"stranger_{uuid.uuid4().hex[:8]}"
    with server.connect() as connection:
        connection.execute(f"CREATE ROLE {name} LOGIN PASSWORD 'pw'".encode())
        try:
            with pytest.raises(psycopg.OperationalError, match="permission denied for database"):
                psycopg.connect(dsn(place.admin.set(username=name, password="pw")))
        finally:
            connection.execute(f"DROP ROLE {name}".encode())


def test_run_again_it_takes_away_what_is_too_much(place: Place) -> None:
    with place.owner.begin() as connection:
        for kind, right in (
            ("worker", "DELETE ON sync_token"),
            ("worker", "UPDATE ON sync_job_id_seq"),
            ("monitor", "SELECT ON sync_job"),
            ("monitor", "USAGE ON sync_job_id_seq"),
        ):
            connection.execute(text(f"GRANT {right} TO {quote(place.names[kind])}".replace(":", r"\:")))
    grant(place)
    denied(place.worker, "DELETE FROM sync_token", "SELECT setval('sync_job_id_seq', 1)")
    denied(place.monitor, "SELECT payload FROM sync_job", "SELECT nextval('sync_job_id_seq')")


def test_tables_that_another_role_has_made(server: Server) -> None:
    url = server.create_database()
    owner, worker = (f"{kind}_{uuid.uuid4().hex[:8]}" for kind in ("owner", "worker"))
    engine = create_engine(url)
    migrate.upgrade(engine, appname="x_", schema="J 'o:bs")
    with psycopg.connect(dsn(url), autocommit=True) as connection:
        connection.execute(roles.setup(owner=owner, worker=worker, schema="J 'o:bs").encode())
        connection.execute(roles.grants(owner=owner, worker=worker, appname="x_", schema="J 'o:bs").encode())
        mine = "SELECT count(*), bool_and(pg_get_userbyid(relowner) = %s) FROM pg_class WHERE relname LIKE 'x\\_%%'"
        number, all_mine = connection.execute(mine, (owner,)).fetchone() or (0, False)
        assert number > len(TABLES)
        assert all_mine
        functions = (
            "SELECT bool_and(pg_get_userbyid(proowner) = %s) FROM pg_proc WHERE proname IN ('x_token_of', 'x_hold')"
        )
        assert connection.execute(functions, (owner,)).fetchone() == (True,)
        connection.execute(f"SET ROLE {worker}".encode())
        connection.execute('SELECT 1 FROM "J \'o:bs".x_job')
        connection.execute("RESET ROLE")
    engine.dispose()
    server.drop_database(url)
    with server.connect() as connection:
        connection.execute(f"DROP ROLE {owner}, {worker}".encode())


class TestRefused:
    @pytest.mark.parametrize("name", ["", "a\0b", "x" * 64, "\ud800", 7])
    def test_names(self, name: Any) -> None:
        with pytest.raises(ConfigurationError, match="must be a name of 1 to 63 bytes"):
            roles.setup(owner="o", worker=name)
        with pytest.raises(ConfigurationError, match="must be a name of 1 to 63 bytes"):
            roles.grants(worker="w", tables=[name])

    def test_one_role_twice(self) -> None:
        with pytest.raises(ConfigurationError, match="names one role twice"):
            roles.grants(worker="w", monitor="w")

    def test_a_right_for_every_table(self) -> None:
        assert set(RIGHTS) == set(TABLES)
