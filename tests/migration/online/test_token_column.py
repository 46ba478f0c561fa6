"""add_token_column and drop_token_column on a real table: what is there afterwards, what is refused, what goes on."""

from __future__ import annotations

import logging
import threading
import uuid
from typing import Any

import psycopg
import pytest
from sqlalchemy import Engine, create_engine, event, text
from sqlalchemy.exc import DBAPIError, IntegrityError

from jobsync_orm import migrate
from jobsync_orm.exceptions import ConfigurationError, LockNotAcquired
from jobsync_orm.hashing import task_to_token
from jobsync_orm.migrate import online
from jobsync_orm.migrate.fence import create_ownership_fence, drop_ownership_fence
from jobsync_orm.naming import quote
from tests.conftest import dsn
from tests.migration.conftest import Role, wait_until
from tests.migration.online.conftest import finished, tokens
from tests.migration.test_upgrade import AWKWARD_SCHEMA, objects


class Interrupted(Exception):
    pass


def interrupt(engine: Engine, statement: str, at: int = 1) -> Engine:
    """An engine whose connection breaks before it sends ``statement`` for the ``at``-th time."""
    broken = create_engine(engine.url)
    seen = 0

    @event.listens_for(broken, "before_cursor_execute")
    def cut(connection: Any, cursor: Any, sent: str, *_: Any) -> None:
        nonlocal seen
        seen += statement in sent
        if seen == at and statement in sent:
            raise Interrupted

    return broken


class TestTheColumn:
    def test_rows_that_are_there_and_rows_that_come(self, shop: Engine) -> None:
        online.add_token_column(shop, "item", key="sku", batch_rows=7)
        assert tokens(shop) == (250, 250)
        assert finished(shop)
        with shop.begin() as connection:
            connection.execute(text("INSERT INTO item (id, sku) VALUES (251, 'new')"))
            connection.execute(
                text("INSERT INTO item (id, sku, token_id) VALUES (252, 'wrong', 7), (253, 'null', NULL)")
            )
            connection.execute(text("UPDATE item SET sku = 'moved' WHERE id = 1"))
            connection.execute(text("UPDATE item SET token_id = 7 WHERE id = 2"))
            connection.execute(text("UPDATE item SET token_id = NULL, done = true WHERE id = 3"))
            with connection.connection.cursor() as cursor, cursor.copy("COPY item (id, sku) FROM STDIN") as copy:
                copy.write_row((254, "copied"))
            found = connection.execute(
                text("SELECT sku, token_id FROM item WHERE id < 3 OR id > 250 ORDER BY id")
            ).all()
        assert tokens(shop) == (254, 254)
        assert [tuple(row) for row in found] == [
            (key, task_to_token(key, 10_000)) for key in ("moved", "k2", "new", "wrong", "null", "copied")
        ]

    def test_whoever_gets_past_the_trigger_is_refused(self, shop: Engine) -> None:
        online.add_token_column(shop, "item", key="sku")
        writes = {
            "UPDATE item SET token_id = 7": "sync_token_id_item",
            "UPDATE item SET sku = 'x' WHERE id = 1": "sync_token_id_item",
            "INSERT INTO item (id, sku) VALUES (0, 'x')": "null value",
        }
        with shop.connect() as connection:
            connection.execute(text("ALTER TABLE item DISABLE TRIGGER USER"))
            for write, refusal in writes.items():
                with pytest.raises(DBAPIError, match=refusal), connection.begin_nested():
                    connection.execute(text(write))

    def test_a_trigger_of_the_application_changes_the_key_first(self, shop: Engine) -> None:
        with shop.begin() as connection:
            connection.execute(
                text(
                    "CREATE FUNCTION lower_sku() RETURNS trigger LANGUAGE plpgsql AS"
                    " $$ BEGIN NEW.sku := lower(NEW.sku); RETURN NEW; END $$"
                )
            )
            connection.execute(
                text("CREATE TRIGGER touch_z BEFORE INSERT ON item FOR EACH ROW EXECUTE FUNCTION lower_sku()")
            )
        online.add_token_column(shop, "item", key="sku")
        with shop.begin() as connection:
            connection.execute(text("INSERT INTO item (id, sku) VALUES (0, 'LOUD')"))
            assert connection.scalar(text("SELECT token_id FROM item WHERE id = 0")) == task_to_token("loud", 10_000)

    @pytest.mark.parametrize(
        ("type_", "value", "key"),
        [
            ("smallint", "-7", -7),
            ("bigint", "1099511627776", 2**40),
            ("text", "'a%b''é :x'", "a%b'é :x"),
            ("uuid", "'00000000-0000-0000-0000-000000000007'", uuid.UUID(int=7)),
        ],
    )
    def test_types_of_keys(self, engine: Engine, type_: str, value: str, key: Any) -> None:
        with engine.begin() as connection:
            connection.execute(text(f'CREATE TABLE "T" ("Key :of %s" {type_} PRIMARY KEY)'.replace(":", r"\:")))
            connection.execute(text(f'INSERT INTO "T" VALUES ({value})'.replace(":", r"\:")))
        online.add_token_column(engine, "T", key="Key :of %s")
        with engine.begin() as connection:
            assert connection.scalar(text('SELECT token_id FROM "T"')) == task_to_token(key, 10_000)

    def test_sql_as_the_key(self, shop: Engine) -> None:
        online.add_token_column(shop, "item", key_sql="lower(email) || ':%s'")
        assert tokens(shop, key="lower(email) || '\\:%s'") == (250, 250)
        with shop.begin() as connection:
            connection.execute(text("UPDATE item SET email = 'B' WHERE id = 1"))
            assert connection.scalar(text("SELECT token_id FROM item WHERE id = 1")) == task_to_token("b:%s", 10_000)

    def test_names_that_must_be_quoted(self, engine: Engine) -> None:
        schema, table = quote(AWKWARD_SCHEMA), quote('it\'em $body$ "x" %s :y ' + "é" * 18)
        migrate.upgrade(engine, appname="x_", schema=AWKWARD_SCHEMA, total_tokens=7)
        with engine.begin() as connection:
            made = f'CREATE TABLE {schema}.{table} (a text, "b:k0" int, PRIMARY KEY ("b:k0", a), sku text NOT NULL)'
            connection.execute(text(made.replace(":", r"\:")))
            fill = f"INSERT INTO {schema}.{table} SELECT chr(n + 60), n % 3, n FROM generate_series(1, 30) n"
            connection.execute(text(fill.replace(":", r"\:")))
        bare = table[1:-1].replace('""', '"')
        before = objects(engine)
        online.add_token_column(
            engine, bare, AWKWARD_SCHEMA, key="sku", appname="x_", token_schema=AWKWARD_SCHEMA, batch_rows=4
        )
        with engine.connect() as connection:
            rows = connection.execute(text(f"SELECT sku, token_id FROM {schema}.{table}".replace(":", r"\:"))).all()
        assert {row.sku: row.token_id for row in rows} == {str(n): task_to_token(n, 7) for n in range(1, 31)}
        online.drop_token_column(engine, bare, AWKWARD_SCHEMA, appname="x_", token_schema=AWKWARD_SCHEMA)
        assert objects(engine) == before

    def test_a_partitioned_table(self, engine: Engine) -> None:
        with engine.begin() as connection:
            connection.execute(
                text("CREATE TABLE item (id int PRIMARY KEY, sku text NOT NULL) PARTITION BY RANGE (id)")
            )
            for number in range(3):
                bounds = f"FROM ({100 * number}) TO ({100 * number + 100})"
                connection.execute(text(f"CREATE TABLE item_{number} PARTITION OF item FOR VALUES {bounds}"))
            connection.execute(text("INSERT INTO item SELECT n, n FROM generate_series(0, 199) n"))
        online.add_token_column(engine, "item", key="sku", batch_rows=30)
        assert tokens(engine) == (200, 200)
        assert finished(engine)
        with engine.begin() as connection:
            connection.execute(text("INSERT INTO item VALUES (250, 'x')"))
        assert tokens(engine) == (201, 201)

    def test_a_table_without_rows(self, shop: Engine) -> None:
        with shop.begin() as connection:
            connection.execute(text("DELETE FROM item"))
        online.add_token_column(shop, "item", key="sku")
        assert finished(shop)

    def test_limits_of_the_session_are_what_they_were(self, shop: Engine) -> None:
        limited = create_engine(
            shop.url, pool_size=1, connect_args={"options": "-c statement_timeout=9s -c lock_timeout=8s"}
        )
        online.add_token_column(limited, "item", key="sku")
        with limited.connect() as connection:
            ask = "SELECT current_setting('statement_timeout'), current_setting('lock_timeout')"
            assert connection.execute(text(ask)).one() == ("9s", "8s")
        limited.dispose()


class TestInterrupted:
    @pytest.mark.parametrize(
        ("statement", "at"),
        [("DO ", 2), ("SKIP LOCKED", 1), ("SKIP LOCKED", 4), ("VALIDATE", 1), ("DO ", 3), ("ANALYZE", 1)],
    )
    def test_the_next_run_goes_on(self, shop: Engine, statement: str, at: int) -> None:
        broken = interrupt(shop, statement, at)
        with pytest.raises(Interrupted):
            online.add_token_column(broken, "item", key="sku", batch_rows=30)
        broken.dispose()
        with shop.begin() as connection:  # the application has gone on writing meanwhile
            connection.execute(text("INSERT INTO item (id, sku) VALUES (0, 'meanwhile')"))
            connection.execute(text("UPDATE item SET done = true WHERE id IN (5, 100, 250)"))
            connection.execute(text("DELETE FROM item WHERE id IN (7, 200)"))
        online.add_token_column(shop, "item", key="sku", batch_rows=30)
        assert tokens(shop) == (249, 249)
        assert finished(shop)

    def test_rows_that_are_done_are_not_written_again(self, shop: Engine) -> None:
        broken = interrupt(shop, "SKIP LOCKED", 4)
        with pytest.raises(Interrupted):
            online.add_token_column(broken, "item", key="sku", batch_rows=30)
        broken.dispose()
        ask = text("SELECT id, CAST(CAST(xmin AS text) AS bigint) AS x FROM item WHERE token_id IS NOT NULL")
        with shop.connect() as connection:
            before = {row.id: row.x for row in connection.execute(ask)}
        assert sorted(before) == [*range(1, 91)]
        online.add_token_column(shop, "item", key="sku", batch_rows=30)
        with shop.connect() as connection:
            after = {row.id: row.x for row in connection.execute(ask)}
        assert {row: after[row] for row in before} == before

    def test_again_when_all_is_done_changes_nothing(self, shop: Engine) -> None:
        online.add_token_column(shop, "item", key="sku")
        before = objects(shop)
        online.add_token_column(shop, "item", key="sku")
        assert objects(shop) == before
        assert tokens(shop) == (250, 250)

    def test_two_at_once(self, shop: Engine) -> None:
        errors: list[BaseException] = []

        def run() -> None:
            try:
                online.add_token_column(shop, "item", key="sku", batch_rows=5)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=run) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert errors == []
        assert tokens(shop) == (250, 250)
        assert finished(shop)


class TestOthers:
    def test_a_table_in_use_is_named_with_who_uses_it(self, shop: Engine, other: psycopg.Connection) -> None:
        other.execute("SELECT FROM item")
        before = objects(shop)
        with pytest.raises(
            LockNotAcquired, match=rf'"public"."item" was in use.*pid {other.info.backend_pid} \(idle in'
        ):
            online.add_token_column(shop, "item", key="sku", lock_timeout=0.01, patience=0.3)
        assert objects(shop) == before
        other.rollback()
        online.add_token_column(shop, "item", key="sku")

    def test_it_waits_for_the_table(self, shop: Engine, other: psycopg.Connection, caplog: Any) -> None:
        other.execute("SELECT FROM item")
        caplog.set_level(logging.INFO, "jobsync_orm.migrate")
        thread = threading.Thread(target=online.add_token_column, args=(shop, "item"), kwargs={"key": "sku"})
        thread.start()
        wait_until(lambda: "is in use by pid" in caplog.text)
        other.rollback()
        thread.join()
        assert tokens(shop) == (250, 250)

    def test_rows_that_others_lock_are_passed_over_and_done_later(
        self, shop: Engine, other: psycopg.Connection, caplog: Any
    ) -> None:
        caplog.set_level(logging.INFO, "jobsync_orm.migrate")
        errors: list[BaseException] = []

        def run() -> None:
            try:
                online.add_token_column(shop, "item", key="sku", batch_rows=50)
            except BaseException as error:
                errors.append(error)

        broken = interrupt(shop, "SKIP LOCKED")
        with pytest.raises(Interrupted):  # the trigger is there, and no row has a token
            online.add_token_column(broken, "item", key="sku")
        broken.dispose()
        other.execute("SELECT FROM item WHERE id IN (3, 77, 250) FOR UPDATE")
        thread = threading.Thread(target=run)
        thread.start()
        wait_until(lambda: tokens(shop) == (250, 247))
        other.rollback()
        thread.join()
        assert errors == []
        assert tokens(shop) == (250, 250)
        assert finished(shop)

    def test_rows_that_stay_locked(self, shop: Engine, other: psycopg.Connection) -> None:
        broken = interrupt(shop, "SKIP LOCKED")
        with pytest.raises(Interrupted):
            online.add_token_column(broken, "item", key="sku")
        broken.dispose()
        other.execute("SELECT FROM item WHERE id = 3 FOR UPDATE")
        with pytest.raises(LockNotAcquired, match=r"1 row of .* that others had locked for 0.1 s"):
            online.add_token_column(shop, "item", key="sku", patience=0.1)
        assert tokens(shop) == (250, 249)

    def test_old_code_writes_all_the_time(self, shop: Engine) -> None:
        stop = threading.Event()
        errors: list[BaseException] = []

        def write(number: int) -> None:
            try:
                with psycopg.connect(dsn(shop.url), autocommit=True) as connection:
                    row = 1000 * number
                    while not stop.is_set():
                        row += 1
                        connection.execute("INSERT INTO item (id, sku) VALUES (%s, %s)", (row, f"w{row}"))
                        connection.execute("UPDATE item SET sku = sku || 'x' WHERE id = %s", (row % 250 + 1,))
                        connection.execute("DELETE FROM item WHERE id = %s - 3", (row,))
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=write, args=(number,)) for number in (1, 2, 3)]
        for thread in threads:
            thread.start()
        online.add_token_column(shop, "item", key_sql="sku", batch_rows=10)
        stop.set()
        for thread in threads:
            thread.join()
        assert errors == []
        number, right = tokens(shop)
        assert number == right > 250


class TestRefused:
    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({}, r"needs one of key= .* got None and None"),
            ({"key": "sku", "key_sql": "sku"}, r"needs one of key="),
            ({"key": "nothing"}, r"key='nothing' is no column of \"public\".\"item\""),
            ({"key": "email"}, r"key='email' .* may be NULL"),
            ({"key": "done"}, r"is of type bool, whose text need not be str\(\)"),
            ({"key_sql": "nullif(sku, 'k9')"}, r"is NULL for rows of"),
            ({"table": "nothing", "key": "sku"}, r'no table "nothing"'),
            ({"schema": "nowhere", "key": "sku"}, r'no table "nowhere"."item"'),
            ({"table": "", "key": "sku"}, r"table='' must be a name"),
            ({"table": "a\0b", "key": "sku"}, r"must be a name of 1 to 63 bytes"),
            ({"key": "sku", "appname": "x_"}, r'no function "x_token_of"\(text\): run'),
            ({"key": "sku", "token_schema": "x"}, r'no function "x"."sync_token_of"'),
            ({"key": "sku", "batch_rows": 0}, r"batch_rows=0 must be"),
            ({"key": "sku", "rest": -1}, r"rest=-1 must be"),
            ({"key": "sku", "lock_timeout": 0}, r"lock_timeout=0 must be"),
            ({"key": "sku", "patience": -1}, r"patience=-1 must be"),
        ],
    )
    def test_before_anything_is_changed(self, unchanged: Engine, arguments: dict[str, Any], message: str) -> None:
        before = objects(unchanged)
        with pytest.raises(ConfigurationError, match=message):
            online.add_token_column(unchanged, **{"table": "item", **arguments})
        assert objects(unchanged) == before

    @pytest.mark.parametrize("key_sql", ["clock_timestamp()::text", "id", "nothing", "sku; DROP TABLE item"])
    def test_sql_that_postgresql_could_not_generate_from(self, unchanged: Engine, key_sql: str) -> None:
        before = objects(unchanged)
        with pytest.raises(DBAPIError):
            online.add_token_column(unchanged, "item", key_sql=key_sql)
        assert objects(unchanged) == before

    @pytest.mark.parametrize(
        ("prepare", "message"),
        [
            ("ALTER TABLE item DROP CONSTRAINT item_pkey", "has no primary key"),
            ("ALTER TABLE item ADD token_id integer", "none of this library's"),
            (
                "ALTER TABLE item ADD token_id integer GENERATED ALWAYS AS (sync_token_of(sku)) STORED",
                "is a generated column already",
            ),
            ("CREATE TABLE child () INHERITS (item)", "a trigger is not inherited"),
            ("ALTER TABLE item RENAME TO base; CREATE VIEW item AS SELECT * FROM base", "is no table"),
        ],
    )
    def test_tables(self, shop: Engine, prepare: str, message: str) -> None:
        with shop.begin() as connection:
            connection.execute(text(prepare))
        before = objects(shop)
        with pytest.raises(ConfigurationError, match=message):
            online.add_token_column(shop, "item", key="sku")
        assert objects(shop) == before

    def test_a_key_that_is_generated_itself(self, shop: Engine) -> None:
        with shop.begin() as connection:
            connection.execute(text("ALTER TABLE item ADD low text NOT NULL GENERATED ALWAYS AS (lower(sku)) STORED"))
        with pytest.raises(DBAPIError, match="cannot use generated column"):
            online.add_token_column(shop, "item", key="low")

    def test_another_key_than_before(self, shop: Engine) -> None:
        online.add_token_column(shop, "item", key="sku")
        with pytest.raises(ConfigurationError, match="computed from another key"):
            online.add_token_column(shop, "item", key="id")

    def test_a_role_that_writes_and_could_not_call_the_function(self, shop: Engine, role: Role) -> None:
        with shop.begin() as connection:
            connection.execute(text(f"GRANT INSERT ON item TO {role.name}"))
            connection.execute(text("REVOKE EXECUTE ON FUNCTION sync_token_of(text) FROM PUBLIC"))
        with pytest.raises(ConfigurationError, match="each write would fail") as caught:
            online.add_token_column(shop, "item", key="sku")
        with shop.begin() as connection:
            for grant in str(caught.value).partition("would fail: ")[2].split("; "):
                connection.execute(text(grant))
        online.add_token_column(shop, "item", key="sku")
        with role.engine.begin() as connection:
            connection.execute(text("INSERT INTO item (id, sku) VALUES (0, 'of the role')"))
        assert tokens(shop) == (251, 251)

    def test_an_owner_that_has_been_granted_nothing(self, shop: Engine, role: Role) -> None:
        with shop.begin() as connection:
            connection.execute(text("CREATE SCHEMA apart; ALTER FUNCTION sync_token_of(text) SET SCHEMA apart"))
            connection.execute(text(f"ALTER TABLE item OWNER TO {role.name}"))
        with pytest.raises(ConfigurationError, match=f"{role.name} may write .* each write would fail") as caught:
            online.add_token_column(shop, "item", key="sku", token_schema="apart")
        with shop.begin() as connection:
            for grant in str(caught.value).partition("would fail: ")[2].split("; "):
                connection.execute(text(grant))
        online.add_token_column(shop, "item", key="sku", token_schema="apart")
        with role.engine.begin() as connection:
            connection.execute(text("INSERT INTO item (id, sku) VALUES (0, 'of the owner')"))
            right = "SELECT count(*) FROM item WHERE token_id = apart.sync_token_of(sku)"
            assert connection.scalar(text(right)) == 251

    def test_everybody_may_write(self, shop: Engine, role: Role) -> None:
        with shop.begin() as connection:
            connection.execute(text("GRANT INSERT ON item TO PUBLIC"))
            connection.execute(text("REVOKE EXECUTE ON FUNCTION sync_token_of(text) FROM PUBLIC"))
        with pytest.raises(ConfigurationError, match=r"PUBLIC may write .* TO PUBLIC$"):
            online.add_token_column(shop, "item", key="sku")

    def test_a_connection(self, shop: Engine) -> None:
        with shop.connect() as connection, pytest.raises(ConfigurationError, match="give its engine"):
            online.add_token_column(connection, "item", key="sku")


class TestDropped:
    def test_nothing_is_left(self, shop: Engine) -> None:
        before = objects(shop)
        online.add_token_column(shop, "item", key="sku")
        online.drop_token_column(shop, "item")
        assert objects(shop) == before
        with shop.begin() as connection:
            connection.execute(text("INSERT INTO item (id, sku) VALUES (0, 'x')"))

    def test_a_generated_column(self, shop: Engine) -> None:
        before = objects(shop)
        generated = "ALTER TABLE item ADD token_id integer GENERATED ALWAYS AS (sync_token_of(sku)) STORED"
        with shop.begin() as connection:
            connection.execute(text(generated))
        online.drop_token_column(shop, "item")
        assert objects(shop) == before

    def test_none(self, shop: Engine) -> None:
        with pytest.raises(ConfigurationError, match="has no column token_id to drop"):
            online.drop_token_column(shop, "item")

    def test_not_under_a_fence(self, shop: Engine) -> None:
        online.add_token_column(shop, "item", key="sku")
        create_ownership_fence(shop, "item")
        with pytest.raises(ConfigurationError, match="drop_ownership_fence first"):
            online.drop_token_column(shop, "item")
        drop_ownership_fence(shop, "item")
        online.drop_token_column(shop, "item")

    def test_the_library_cannot_leave_under_it(self, shop: Engine) -> None:
        online.add_token_column(shop, "item", key="sku")
        with pytest.raises(DBAPIError, match="sync_token_id_item"):
            migrate.downgrade(shop)


def test_rows_that_others_write_meanwhile_under_another_isolation_level(shop: Engine) -> None:
    """With the database's default a batch would end where somebody has written one of its rows since its snapshot."""
    strict = create_engine(
        shop.url, connect_args={"options": r"-c default_transaction_isolation=repeatable\ read"}, pool_size=1
    )
    with shop.begin() as connection:
        # Stands for the writer who comes between a batch's snapshot and its locks.
        connection.execute(
            text(
                "CREATE FUNCTION seen() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN"
                " IF current_setting('transaction_isolation') <> 'read committed' THEN"
                " RAISE serialization_failure; END IF; RETURN NEW; END $$;"
                "CREATE TRIGGER seen BEFORE UPDATE ON item FOR EACH ROW EXECUTE FUNCTION seen()"
            )
        )
    try:
        online.add_token_column(strict, "item", key="sku")
        with strict.connect() as connection:
            assert connection.scalar(text("SHOW default_transaction_isolation")) == "repeatable read"
    finally:
        strict.dispose()
    assert finished(shop)
    assert tokens(shop) == (250, 250)


def test_where_triggers_do_not_fire_only_right_tokens_are_taken(engine: Engine) -> None:
    """As where logical replication applies rows: see docs/adopting.md."""
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE item (id int PRIMARY KEY, sku text NOT NULL)"))
    online.add_token_column(engine, "item", key="sku")

    def apply(values: str) -> None:
        with engine.begin() as connection:
            connection.execute(text("SET LOCAL session_replication_role = replica"))
            connection.execute(text(f"INSERT INTO item {values}"))

    apply("VALUES (1, 'a', sync_token_of('a'))")
    for wrong in ("VALUES (2, 'b', sync_token_of('a'))", "(id, sku) VALUES (2, 'b')"):
        with pytest.raises(IntegrityError, match="token_id"):
            apply(wrong)
    with engine.begin() as connection:
        connection.execute(text("ALTER TABLE item ENABLE ALWAYS TRIGGER zz_sync_token_id_item"))
    apply("(id, sku) VALUES (2, 'b')")
    with engine.connect() as connection:
        right = connection.scalars(text("SELECT token_id = sync_token_of(sku) FROM item")).all()
    assert right == [True, True]
