"""The trigger that refuses commits of stale owners, by whatever SQL: what it refuses, lets pass, and leaves behind.

The node ``me`` owns the odd keys at epoch 3; ``other`` owns the even ones.
"""

from __future__ import annotations

import io
import json
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import psycopg
import pytest
from alembic import command
from alembic.autogenerate import render_python_code, renderers
from alembic.autogenerate.api import AutogenContext
from alembic.config import Config
from alembic.operations import Operations
from alembic.operations.ops import UpgradeOps
from alembic.runtime.migration import MigrationContext
from sqlalchemy import Engine, MetaData, create_engine, text
from sqlalchemy.exc import DBAPIError

from jobsync_orm import migrate
from jobsync_orm.exceptions import ConfigurationError
from jobsync_orm.hashing import task_to_token
from jobsync_orm.migrate.fence import (
    CreateOwnershipFenceOp,
    DropOwnershipFenceOp,
    create_ownership_fence,
    drop_ownership_fence,
)
from jobsync_orm.naming import Names, quote
from tests.conftest import dsn
from tests.migration.conftest import wait_until
from tests.migration.test_upgrade import AWKWARD_SCHEMA, objects

ITEM = "(id int, sku text NOT NULL, note text, token_id int NOT NULL GENERATED ALWAYS AS (sync_token_of(sku)) STORED)"
TOKEN = {key: task_to_token(key, 10_000) for key in ("k1", "k2", "k3", "k4")}
ROWS = [(1, "k1"), (2, "k2"), (3, "k3"), (4, "k4")]


def own(connection: psycopg.Connection, node: str, epoch: int, *keys: str) -> None:
    connection.execute(
        "UPDATE sync_token SET node = %s, epoch = %s WHERE token_id = ANY(%s)",
        (node, epoch, [TOKEN[key] for key in keys]),
    )


def declare(connection: psycopg.Connection, node: str = "me", epoch: int = 3) -> None:
    connection.execute(
        "SELECT set_config('jobsync.node', %s, true), set_config('jobsync.epoch', %s, true)", (node, str(epoch))
    )


def rows(engine: Engine) -> list[tuple[int, str]]:
    with engine.connect() as connection:
        return [(row.id, row.sku) for row in connection.execute(text("SELECT id, sku FROM item ORDER BY id"))]


@pytest.fixture
def bare(engine: Engine) -> Engine:
    """Four items, without the trigger."""
    with psycopg.connect(dsn(engine.url)) as connection:
        connection.execute(f"CREATE TABLE item {ITEM}")
        connection.execute("ALTER TABLE item ADD PRIMARY KEY (id)")
        connection.execute("INSERT INTO item (id, sku) VALUES (1, 'k1'), (2, 'k2'), (3, 'k3'), (4, 'k4')")
        own(connection, "me", 3, "k1", "k3")
        own(connection, "other", 3, "k2", "k4")
    return engine


@pytest.fixture
def guarded(bare: Engine) -> Engine:
    create_ownership_fence(bare, "item")
    return bare


Connect = Callable[[], psycopg.Connection]


@pytest.fixture
def connect(engine: Engine) -> Iterator[Connect]:
    made: list[psycopg.Connection] = []

    def make() -> psycopg.Connection:
        made.append(psycopg.connect(dsn(engine.url)))
        return made[-1]

    yield make
    for connection in made:
        connection.close()


def refused(connection: psycopg.Connection) -> psycopg.Error:
    """Commit, which must fail with JO001."""
    with pytest.raises(psycopg.Error) as caught:
        connection.commit()
    assert caught.value.sqlstate == "JO001"
    return caught.value


def waiting(engine: Engine) -> Callable[[], bool]:
    """Whether some session waits for another one's row lock."""

    def ask() -> bool:
        with engine.connect() as connection:
            query = "SELECT 1 FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
            return connection.scalar(text(query)) is not None

    return ask


class TestWhatIsRefused:
    @pytest.mark.parametrize(
        ("statement", "lost"),
        [
            ("INSERT INTO item (id, sku) VALUES (5, 'k2')", "k2"),
            ("INSERT INTO item (id, sku) SELECT 10 + id, sku FROM item", "k2"),
            ("INSERT INTO item (id, sku) VALUES (2, 'k1') ON CONFLICT (id) DO UPDATE SET note = 'x'", "k2"),
            ("UPDATE item SET note = 'x' WHERE id = 2", "k2"),
            ("UPDATE item SET note = 'x'", "k2"),
            ("UPDATE item SET sku = 'k2' WHERE id = 1", "k2"),  # the new token
            ("UPDATE item SET sku = 'k1' WHERE id = 2", "k2"),  # the old token
            ("DELETE FROM item WHERE id = 2", "k2"),
            ("DELETE FROM item", "k2"),
            ("WITH gone AS (DELETE FROM item WHERE id = 4) SELECT 1", "k4"),
        ],
    )
    def test_what_a_stale_owner_wrote(self, guarded: Engine, connect: Connect, statement: str, lost: str) -> None:
        connection = connect()
        declare(connection)
        connection.execute(statement)
        error = refused(connection)
        assert json.loads(error.diag.message_detail or "") == {"token": TOKEN[lost], "owner": "other"}
        assert str(error).startswith(
            f"me may not commit to token {TOKEN[lost]} of item: it belongs to other since epoch 3, and this "
            "transaction knows epoch 3"
        )
        assert rows(guarded) == ROWS

    def test_copy(self, guarded: Engine, connect: Connect) -> None:
        connection = connect()
        declare(connection)
        with connection.cursor() as cursor, cursor.copy("COPY item (id, sku) FROM STDIN") as copy:
            copy.write_row((5, "k1"))
            copy.write_row((6, "k2"))
        refused(connection)
        assert rows(guarded) == ROWS

    def test_text_through_sqlalchemy(self, guarded: Engine) -> None:
        with guarded.connect() as connection:
            connection.execute(
                text("SELECT set_config('jobsync.node', 'me', true), set_config('jobsync.epoch', '3', true)")
            )
            connection.execute(text("UPDATE item SET sku = 'k3' WHERE id = 2"))
            with pytest.raises(DBAPIError) as caught:
                connection.commit()
        assert caught.value.orig.sqlstate == "JO001"  # type: ignore[union-attr]
        assert rows(guarded) == ROWS

    def test_a_token_that_moves_between_the_write_and_the_commit(self, guarded: Engine, connect: Connect) -> None:
        connection, mover = connect(), connect()
        declare(connection)
        connection.execute("UPDATE item SET sku = 'k1' WHERE id = 1")
        own(mover, "other", 4, "k1")
        mover.commit()
        error = refused(connection)
        assert json.loads(error.diag.message_detail or "") == {"token": TOKEN["k1"], "owner": "other"}

    def test_a_token_that_went_away_and_came_back(self, guarded: Engine, connect: Connect) -> None:
        connection, mover = connect(), connect()
        declare(connection)
        connection.execute("UPDATE item SET note = 'x' WHERE id = 1")
        for node, epoch in (("other", 4), ("me", 5)):
            own(mover, node, epoch, "k1")
            mover.commit()
        error = refused(connection)
        assert "it belongs to me since epoch 5, and this transaction knows epoch 3" in str(error)

    def test_a_token_without_an_owner(self, guarded: Engine, connect: Connect) -> None:
        connection, mover = connect(), connect()
        declare(connection)
        connection.execute("UPDATE item SET note = 'x' WHERE id = 1")
        mover.execute("UPDATE sync_token SET node = NULL")
        mover.commit()
        error = refused(connection)
        assert "it belongs to nobody" in str(error)
        assert json.loads(error.diag.message_detail or "")["owner"] is None

    def test_a_node_declared_without_an_epoch(self, guarded: Engine, connect: Connect) -> None:
        connection = connect()
        connection.execute("SELECT set_config('jobsync.node', 'me', true)")
        connection.execute("UPDATE item SET note = 'x' WHERE id = 1")
        assert "jobsync.epoch is not set" in str(refused(connection))


class TestWhatPasses:
    @pytest.mark.parametrize(
        ("statement", "after"),
        [
            ("INSERT INTO item (id, sku) VALUES (5, 'k3')", [*ROWS, (5, "k3")]),
            ("UPDATE item SET note = 'x' WHERE id IN (1, 3)", ROWS),
            ("UPDATE item SET sku = 'k3' WHERE id = 1", [(1, "k3"), *ROWS[1:]]),
            ("DELETE FROM item WHERE id = 3", [*ROWS[:2], ROWS[3]]),
            ("SELECT FROM item FOR UPDATE", ROWS),
        ],
    )
    def test_what_the_owner_wrote(
        self, guarded: Engine, connect: Connect, statement: str, after: list[tuple[int, str]]
    ) -> None:
        connection = connect()
        declare(connection)
        connection.execute(statement)
        connection.commit()
        assert rows(guarded) == after

    def test_what_was_rolled_back_to_a_savepoint(self, guarded: Engine, connect: Connect) -> None:
        connection = connect()
        declare(connection)
        connection.execute("UPDATE item SET note = 'mine' WHERE id = 1")
        connection.execute("SAVEPOINT s")
        connection.execute("UPDATE item SET note = 'theirs' WHERE id = 2")
        connection.execute("ROLLBACK TO s")
        connection.commit()
        with guarded.connect() as reader:
            assert reader.scalars(text("SELECT note FROM item ORDER BY id")).all() == ["mine", None, None, None]

    def test_declared_at_the_last_moment(self, guarded: Engine, connect: Connect) -> None:
        connection = connect()
        connection.execute("UPDATE item SET note = 'x' WHERE id = 1")
        declare(connection)
        connection.commit()
        connection.execute("UPDATE item SET note = 'x' WHERE id = 2")
        declare(connection)
        refused(connection)


class TestMovers:
    """Token rows, as the coordinator of another process moves them."""

    def test_a_move_under_way_is_waited_for(self, guarded: Engine, connect: Connect) -> None:
        outcomes: dict[str, Any] = {}

        def commit(name: str, connection: psycopg.Connection) -> None:
            try:
                connection.commit()
            except psycopg.Error as error:
                outcomes[name] = error.sqlstate
            else:
                outcomes[name] = "committed"

        for name in ("moved", "stayed"):
            connection, mover = connect(), connect()
            declare(connection)
            connection.execute("UPDATE item SET note = 'x' WHERE id = 1")
            own(mover, "other", 4, "k1")
            thread = threading.Thread(target=commit, args=(name, connection))
            thread.start()
            wait_until(waiting(guarded))
            if name == "moved":
                mover.commit()
            else:
                mover.rollback()
            thread.join()
            own(mover, "me", 3, "k1")
            mover.commit()
        assert outcomes == {"moved": "JO001", "stayed": "committed"}

    def test_a_checked_token_stays_until_the_commit_is_done(self, guarded: Engine, connect: Connect) -> None:
        connection, mover = connect(), connect()
        declare(connection)
        connection.execute("UPDATE item SET note = 'x' WHERE id = 1")
        movable = (
            f"SELECT token_id FROM sync_token WHERE token_id IN ({TOKEN['k1']}, {TOKEN['k3']})"
            " ORDER BY token_id FOR UPDATE SKIP LOCKED"
        )
        both = sorted([(TOKEN["k1"],), (TOKEN["k3"],)])
        assert mover.execute(movable).fetchall() == both
        mover.rollback()
        connection.execute("SET CONSTRAINTS ALL IMMEDIATE")
        assert mover.execute(movable).fetchall() == [(TOKEN["k3"],)]
        mover.rollback()
        connection.commit()
        assert mover.execute(movable).fetchall() == both

    def test_repeatable_read(self, guarded: Engine, connect: Connect) -> None:
        for moves in (False, True):
            connection, mover = connect(), connect()
            connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
            declare(connection)
            connection.execute("UPDATE item SET note = 'x' WHERE id = 1")
            if not moves:
                connection.commit()
                continue
            own(mover, "other", 4, "k1")
            mover.commit()
            with pytest.raises(psycopg.Error) as caught:
                connection.commit()
            assert caught.value.sqlstate == "40001"


class TestUndeclared:
    def test_allowed(self, guarded: Engine, connect: Connect) -> None:
        connection = connect()
        connection.execute("DELETE FROM item WHERE id = 2")
        connection.commit()
        assert rows(guarded) == [ROWS[0], *ROWS[2:]]

    def test_refused(self, bare: Engine, connect: Connect) -> None:
        create_ownership_fence(bare, "item", undeclared="refuse")
        connection = connect()
        declare(connection)
        connection.execute("DELETE FROM item WHERE id = 1")
        connection.commit()
        # What was declared for the first transaction is an empty setting in the second.
        connection.execute("DELETE FROM item WHERE id = 3")
        with pytest.raises(
            psycopg.Error, match="rows of item were written by a transaction that does not say who"
        ) as e:
            connection.commit()
        assert e.value.sqlstate == "JO002"
        assert "jobsync.node and jobsync.epoch" in (e.value.diag.message_hint or "")
        assert rows(bare) == ROWS[1:]

    def test_a_declaration_that_is_rolled_back(self, bare: Engine, connect: Connect) -> None:
        create_ownership_fence(bare, "item", undeclared="refuse")
        connection = connect()
        connection.execute("DELETE FROM item WHERE id = 1")
        connection.execute("SAVEPOINT s")
        declare(connection)
        connection.execute("ROLLBACK TO s")
        with pytest.raises(psycopg.Error) as caught:
            connection.commit()
        assert caught.value.sqlstate == "JO002"


class TestSetConstraintsImmediate:
    """A user may have the trigger run before the commit."""

    def test_checks_at_once_and_what_follows_at_once(self, guarded: Engine, connect: Connect) -> None:
        write, check = "UPDATE item SET note = 'x' WHERE id = 2", "SET CONSTRAINTS ALL IMMEDIATE"
        for first, second in ((write, check), (check, write)):
            connection = connect()
            declare(connection)
            connection.execute(first)
            with pytest.raises(psycopg.Error) as caught:
                connection.execute(second)
            assert caught.value.sqlstate == "JO001"
            connection.rollback()

    def test_a_check_undone_by_a_savepoint_is_made_again(self, guarded: Engine, connect: Connect) -> None:
        connection, mover = connect(), connect()
        declare(connection)
        connection.execute("UPDATE item SET note = 'x' WHERE id = 1")
        connection.execute("SAVEPOINT s")
        connection.execute("SET CONSTRAINTS ALL IMMEDIATE")
        connection.execute("ROLLBACK TO s")  # gives up the lock on the token
        own(mover, "other", 4, "k1")
        mover.commit()
        refused(connection)

    def test_before_anything_is_declared(self, bare: Engine, connect: Connect) -> None:
        """Too early: nobody has said who commits. Allowed without a look, or refused."""
        for undeclared in ("allow", "refuse"):
            create_ownership_fence(bare, "item", undeclared=undeclared)  # type: ignore[arg-type]
            connection = connect()
            connection.execute("UPDATE item SET note = 'x' WHERE id = 2")
            if undeclared == "allow":
                connection.execute("SET CONSTRAINTS ALL IMMEDIATE")
                declare(connection)
                connection.commit()
                connection.execute("SELECT 1")
            else:
                with pytest.raises(psycopg.Error) as caught:
                    connection.execute("SET CONSTRAINTS ALL IMMEDIATE")
                assert caught.value.sqlstate == "JO002"
            connection.rollback()
            drop_ownership_fence(bare, "item")


class TestTables:
    def test_partitions_those_added_later_too(self, bare: Engine, connect: Connect) -> None:
        with connect() as connection:
            connection.execute(f"CREATE TABLE parted {ITEM} PARTITION BY RANGE (id)")
            connection.execute("CREATE TABLE part_a PARTITION OF parted FOR VALUES FROM (0) TO (10)")
        create_ownership_fence(bare, "parted")
        connection = connect()
        connection.execute("CREATE TABLE part_b PARTITION OF parted FOR VALUES FROM (10) TO (20)")
        connection.execute("INSERT INTO parted (id, sku) VALUES (1, 'k1'), (2, 'k2'), (11, 'k3')")
        connection.commit()
        for statement, passes in (
            ("INSERT INTO parted (id, sku) VALUES (3, 'k2')", False),
            ("INSERT INTO part_b (id, sku) VALUES (12, 'k2')", False),
            ("UPDATE parted SET id = 13, sku = 'k1' WHERE id = 2", False),  # to another partition: old token
            ("UPDATE parted SET id = 13, sku = 'k2' WHERE id = 1", False),  # and new token
            ("DELETE FROM parted", False),
            ("UPDATE parted SET id = 13, sku = 'k3' WHERE id = 1", True),
            ("DELETE FROM parted WHERE id IN (11, 13)", True),
        ):
            declare(connection)
            connection.execute(statement)
            if passes:
                connection.commit()
            else:
                refused(connection)
        assert connection.execute("SELECT id, sku FROM parted").fetchall() == [(2, "k2")]
        connection.commit()
        drop_ownership_fence(bare, "parted")
        declare(connection)
        connection.execute("DELETE FROM parted")
        connection.commit()

    @pytest.mark.parametrize("table", ["item", 'Ort\'s "x" :a %s \\ ü', "t" * 63, "ü" * 31])
    @pytest.mark.parametrize("schema", [None, AWKWARD_SCHEMA])
    def test_any_name_and_nothing_is_left_after_a_drop(
        self, engine: Engine, connect: Connect, table: str, schema: str | None
    ) -> None:
        tokens = r"""to'k\e"n :s %s"""
        names = Names("x_", tokens)
        migrate.upgrade(engine, appname="x_", schema=tokens, total_tokens=10)
        name = quote(table) if schema is None else f"{quote(schema)}.{quote(table)}"
        connection = connect()
        connection.execute(f"CREATE SCHEMA {quote(AWKWARD_SCHEMA)}".encode())
        connection.execute(f"CREATE TABLE {name} (token_id int)".encode())
        connection.commit()
        before = objects(engine)
        create_ownership_fence(engine, table, schema, appname="x_", token_schema=tokens)
        assert objects(engine) == before | {f"function {names.fence(table)}"}
        declare(connection)
        connection.execute(f"INSERT INTO {name} VALUES (1)".encode())
        assert f"token 1 of {table}: it belongs to nobody" in str(refused(connection))
        drop_ownership_fence(engine, table, schema, appname="x_", token_schema=tokens)
        assert objects(engine) == before
        declare(connection)
        connection.execute(f"INSERT INTO {name} VALUES (1)".encode())
        connection.commit()

    def test_the_tokens_are_those_found_when_it_was_made(self, guarded: Engine, connect: Connect) -> None:
        """And not those that a session's search_path happens to name."""
        migrate.upgrade(guarded, schema="tenant", total_tokens=10_000)
        connection = connect()
        connection.execute("UPDATE tenant.sync_token SET node = 'me'")
        connection.commit()
        for path in ("tenant", "pg_temp", "tenant, public"):
            connection.execute(f"SET LOCAL search_path TO {path}")
            declare(connection)
            connection.execute("UPDATE public.item SET note = 'x' WHERE id = 2")
            refused(connection)
            connection.execute(f"SET LOCAL search_path TO {path}")
            declare(connection)
            connection.execute("UPDATE public.item SET note = 'x' WHERE id = 1")
            connection.commit()

    def test_in_the_transaction_of_the_caller(self, bare: Engine) -> None:
        before = objects(bare)
        with bare.connect() as connection, connection.begin() as transaction:
            create_ownership_fence(connection, "item")
            transaction.rollback()
        assert objects(bare) == before

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"table": "nothing"}, r'no table "nothing": create it first'),
            ({"table": "item", "schema": "elsewhere"}, r'no table "elsewhere"."item"'),
            ({"table": "sync_node"}, r'"sync_node" has no column token_id'),
            ({"table": "item", "appname": "x_"}, r'no token table "x_token": run jobsync_orm.migrate.upgrade'),
            ({"table": "item", "token_schema": "x"}, r'no token table "x"."sync_token"'),
            ({"table": "item", "undeclared": "maybe"}, r'undeclared=\'maybe\' must be "allow" or "refuse"'),
            ({"table": ""}, r"table='' must be a name of 1 to 63 bytes"),
            ({"table": "ü" * 32}, r"must be a name of 1 to 63 bytes"),
            ({"table": "item", "schema": "a\0b"}, r"schema='a\\x00b' must be"),
            ({"table": "item", "appname": "X"}, r"appname 'X' must match"),
        ],
    )
    def test_what_cannot_be_guarded(self, bare: Engine, arguments: dict[str, Any], message: str) -> None:
        before = objects(bare)
        with pytest.raises(ConfigurationError, match=message):
            create_ownership_fence(bare, **arguments)
        assert objects(bare) == before

    def test_twice(self, guarded: Engine) -> None:
        with pytest.raises(DBAPIError, match="already exists"):
            create_ownership_fence(guarded, "item")
        drop_ownership_fence(guarded, "item")
        with pytest.raises(DBAPIError, match="does not exist"):
            drop_ownership_fence(guarded, "item")


ENV = """
    import os
    from alembic import context
    from sqlalchemy import NullPool, create_engine

    if context.is_offline_mode():
        context.configure(dialect_name="postgresql", literal_binds=True)
        with context.begin_transaction():
            context.run_migrations()
    else:
        engine = create_engine(context.config.get_main_option("sqlalchemy.url"), poolclass=NullPool)
        with engine.connect() as connection:
            context.configure(connection=connection)
            with context.begin_transaction():
                context.run_migrations()
"""
MIGRATION = """
    from alembic import op

    import jobsync_orm.migrate.fence

    revision, down_revision = "1", None


    def upgrade():
        op.create_ownership_fence("item", undeclared="refuse"{extra})


    def downgrade():
        op.drop_ownership_fence("item"{extra})
"""


@pytest.fixture
def application(bare: Engine, tmp_path: Path) -> Callable[..., Config]:
    """An application with an Alembic environment of its own, and one migration."""

    def make(extra: str = "") -> Config:
        (tmp_path / "versions").mkdir(exist_ok=True)
        (tmp_path / "env.py").write_text(textwrap.dedent(ENV))
        (tmp_path / "versions" / "1.py").write_text(textwrap.dedent(MIGRATION).format(extra=extra))
        config = Config(output_buffer=io.StringIO())
        config.set_main_option("script_location", str(tmp_path))
        config.set_main_option("sqlalchemy.url", bare.url.render_as_string(hide_password=False).replace("%", "%%"))
        return config

    return make


class TestAlembic:
    def test_in_a_migration_of_the_application(
        self, bare: Engine, application: Callable[..., Config], connect: Connect
    ) -> None:
        before = objects(bare)
        command.upgrade(application(), "head")
        connection = connect()
        connection.execute("DELETE FROM item")
        with pytest.raises(psycopg.Error) as caught:
            connection.commit()
        assert caught.value.sqlstate == "JO002"
        command.downgrade(application(), "base")
        assert objects(bare) == before | {"r alembic_version", "i alembic_version_pkc"}
        connection.execute("DELETE FROM item")
        connection.commit()

    def test_as_a_script(self, bare: Engine, application: Callable[..., Config], connect: Connect) -> None:
        before = objects(bare)
        for run, revision in ((command.upgrade, "head"), (command.downgrade, "1:base")):
            config = application(', token_schema="public"')
            run(config, revision, sql=True)
            connection = connect()
            connection.execute(cast("io.StringIO", config.output_buffer).getvalue().encode())
            if run is command.upgrade:
                connection.execute("DELETE FROM item")
                with pytest.raises(psycopg.Error) as caught:
                    connection.commit()
                assert caught.value.sqlstate == "JO002"
        assert objects(bare) == before | {"r alembic_version", "i alembic_version_pkc"}

    def test_a_script_cannot_look_for_the_tokens(self, application: Callable[..., Config]) -> None:
        with pytest.raises(ConfigurationError, match="give token_schema="):
            command.upgrade(application(), "head", sql=True)

    def test_reversed_it_is_the_other_one(self) -> None:
        create = CreateOwnershipFenceOp("item", "shop", "x_", "tokens", "refuse")
        drop = create.reverse()
        assert isinstance(drop, DropOwnershipFenceOp)
        assert vars(drop) == vars(create)
        assert isinstance(drop.reverse(), CreateOwnershipFenceOp)
        assert vars(drop.reverse()) == vars(create)

    def test_rendered_for_a_migration(self) -> None:
        upgrade = UpgradeOps(
            [
                CreateOwnershipFenceOp("item", None, "sync_", None, "allow"),
                CreateOwnershipFenceOp("it'em", "shop", "x_", "tokens", "refuse"),
            ]
        )
        context = MigrationContext.configure(dialect_name="postgresql")
        forth = render_python_code(upgrade, migration_context=context)
        back = render_python_code(upgrade.reverse(), migration_context=context)
        assert "op.create_ownership_fence('item')\n" in forth
        second = "_ownership_fence(\"it'em\", schema='shop', appname='x_', token_schema='tokens', undeclared='refuse')"
        assert f"op.create{second}" in forth
        assert f"op.drop{second}" in back
        assert back.index("it'em") < back.index("'item'")
        rendering = AutogenContext(context, MetaData())
        renderers.dispatch(upgrade.ops[0])(rendering, upgrade.ops[0])
        assert rendering.imports == {"import jobsync_orm.migrate.fence"}

    def test_another_database(self) -> None:
        engine = create_engine("sqlite://")
        with engine.connect() as connection:
            operations: Any = Operations(MigrationContext.configure(connection))
            for call in (operations.create_ownership_fence, operations.drop_ownership_fence):
                with pytest.raises(ConfigurationError, match="needs PostgreSQL, not 'sqlite'"):
                    call("item")
        engine.dispose()
