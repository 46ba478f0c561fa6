"""The operations in an application's own Alembic: run, refused, rendered, reversed, and written by autogenerate."""

from __future__ import annotations

import textwrap
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psycopg
import pytest
from alembic import command
from alembic.autogenerate import compare_metadata, renderers
from alembic.autogenerate.api import AutogenContext
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.operations import Operations
from sqlalchemy import (
    BigInteger,
    Column,
    Engine,
    Index,
    Integer,
    MetaData,
    String,
    Table,
    create_engine,
    inspect,
    text,
)
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from jobsync_orm import migrate
from jobsync_orm.exceptions import ConfigurationError
from jobsync_orm.migrate import online
from jobsync_orm.naming import Names
from jobsync_orm.orm import TokenOwned
from tests.migration.conftest import wait_until
from tests.migration.online.conftest import finished, tokens

ENV = """
    from alembic import context
    from sqlalchemy import NullPool, create_engine

    from jobsync_orm import migrate
    from jobsync_orm.migrate import online

    options = {
        "compare_server_default": True,
        "include_name": migrate.include_name,
        "include_object": migrate.include_object,
        "target_metadata": context.config.attributes.get("metadata"),
        "transaction_per_migration": True,
        "process_revision_directives": online.write_online_operations,
    }
    if context.is_offline_mode():
        context.configure(dialect_name="postgresql", literal_binds=True, **options)
        with context.begin_transaction():
            context.run_migrations()
    else:
        engine = create_engine(context.config.get_main_option("sqlalchemy.url"), poolclass=NullPool)
        with engine.connect() as connection:
            context.configure(connection=connection, **options)
            with context.begin_transaction():
                context.run_migrations()
"""
MAKO = """
from alembic import op
import sqlalchemy as sa
${imports if imports else ""}
revision = ${repr(up_revision)}
down_revision = ${repr(down_revision)}

def upgrade():
    ${upgrades}

def downgrade():
    ${downgrades}
"""
MIGRATION = """
    from alembic import op
    from sqlalchemy import text

    import jobsync_orm.migrate.online

    revision, down_revision = "1", None


    def upgrade():
        op.execute("CREATE TABLE beside (id int)")
        op.add_token_column("item", key="sku", batch_rows=20, rest=0)
        op.create_online_index("by_token", "item", ["token_id", text("lower(sku)")], postgresql_where=text("NOT done"))
        op.execute("ALTER TABLE beside ADD other int")


    def downgrade():
        op.drop_token_column("item", key="sku")
        op.drop_table("beside")
"""

INDEXES = text("SELECT indexdef FROM pg_indexes WHERE tablename = 'item' ORDER BY indexname")


@pytest.fixture
def alembic(shop: Engine, tmp_path: Path) -> Callable[..., Config]:
    """An Alembic environment of the application's own."""

    def make(migration: str | None = MIGRATION, metadata: MetaData | None = None) -> Config:
        (tmp_path / "versions").mkdir(exist_ok=True)
        (tmp_path / "env.py").write_text(textwrap.dedent(ENV))
        (tmp_path / "script.py.mako").write_text(MAKO)
        if migration is not None:
            (tmp_path / "versions" / "1.py").write_text(textwrap.dedent(migration))
        config = Config()
        config.attributes["metadata"] = metadata
        config.set_main_option("script_location", str(tmp_path))
        config.set_main_option("sqlalchemy.url", shop.url.render_as_string(hide_password=False).replace("%", "%%"))
        return config

    return make


class Base(DeclarativeBase):
    pass


class Item(TokenOwned, Base):
    __tablename__ = "item"
    __token_key__ = "sku"
    __table_args__ = (Index("by_token", "token_id", "done"), Index("by_sku", "sku"))
    id: Mapped[int] = mapped_column(BigInteger, primary_key=True)
    sku: Mapped[str] = mapped_column(String(20))
    email: Mapped[str | None]
    done: Mapped[bool]


class TestInAMigration:
    def test_up_and_down(self, shop: Engine, alembic: Callable[..., Config]) -> None:
        command.upgrade(alembic(), "head")
        assert tokens(shop) == (250, 250)
        assert finished(shop)
        with shop.connect() as connection:
            wanted = "CREATE INDEX by_token ON public.item USING btree (token_id, lower((sku)::text)) WHERE (NOT done)"
            assert connection.scalars(INDEXES).all()[0] == wanted
            assert [column["name"] for column in inspect(connection).get_columns("beside")] == ["id", "other"]
        command.downgrade(alembic(), "base")
        with shop.connect() as connection:
            assert "token_id" not in {column["name"] for column in inspect(connection).get_columns("item")}
            assert not inspect(connection).has_table("beside")
            assert len(connection.scalars(INDEXES).all()) == 1

    def test_others_write_while_it_waits_for_the_table(
        self, shop: Engine, alembic: Callable[..., Config], other: psycopg.Connection
    ) -> None:
        other.execute("SELECT FROM item")
        thread = threading.Thread(target=command.upgrade, args=(alembic(), "head"))
        thread.start()
        beside = text("SELECT 1 FROM pg_tables WHERE tablename = 'beside'")
        with shop.connect() as connection:
            connection.execution_options(isolation_level="AUTOCOMMIT")
            wait_until(lambda: connection.scalar(beside) == 1)
            for number in range(300, 320):
                connection.execute(text(f"INSERT INTO item (id, sku) VALUES ({number}, 'x')"))
        other.rollback()
        thread.join()
        assert tokens(shop) == (270, 270)

    def test_no_script(self, alembic: Callable[..., Config]) -> None:
        with pytest.raises(ConfigurationError, match=r"cannot be written as a script \(--sql\)"):
            command.upgrade(alembic(), "head", sql=True)

    def test_not_inside_a_transaction_of_the_environment(self, shop: Engine) -> None:
        with shop.connect() as connection, connection.begin():
            operations: Any = Operations(MigrationContext.configure(connection))
            with pytest.raises(ConfigurationError, match="has begun a transaction around all migrations"):
                operations.add_token_column("item", key="sku")

    def test_another_database(self) -> None:
        engine = create_engine("sqlite://")
        with engine.connect() as connection:
            operations: Any = Operations(MigrationContext.configure(connection))
            for call in (
                lambda: operations.add_token_column("item", key="sku"),
                lambda: operations.drop_token_column("item"),
                lambda: operations.create_online_index("i", "item", ["token_id"]),
            ):
                with pytest.raises(ConfigurationError, match="needs PostgreSQL, not 'sqlite'"):
                    call()
        engine.dispose()


class TestIndexes:
    def index(self) -> Index:
        table = Table("item", MetaData(), Column("sku", Integer))
        return Index("by_sku", table.c.sku)

    def test_what_an_interrupted_attempt_left_is_made_anew(self, shop: Engine) -> None:
        with shop.connect() as connection:
            connection.execution_options(isolation_level="AUTOCOMMIT")
            connection.execute(text("INSERT INTO item (id, sku) VALUES (0, 'k1')"))
            with pytest.raises(Exception, match="could not create unique index"):
                connection.execute(text("CREATE UNIQUE INDEX CONCURRENTLY by_sku ON item (sku)"))
        index = self.index()
        online.create_online_index(shop, index)
        online.create_online_index(shop, index)  # a valid one is left alone
        assert index.dialect_options["postgresql"]["concurrently"] is False
        with shop.connect() as connection:
            valid = text("SELECT indisvalid, indisunique FROM pg_index WHERE indexrelid = CAST('by_sku' AS regclass)")
            assert connection.execute(valid).one() == (True, False)


class TestAutogenerate:
    def compare(self, connection: Any, metadata: MetaData) -> list[Any]:
        options = {
            "compare_server_default": True,
            "include_name": migrate.include_name,
            "include_object": migrate.include_object,
        }
        return compare_metadata(MigrationContext.configure(connection, opts=options), metadata)

    def test_writes_the_operations_and_then_sees_no_difference(
        self, shop: Engine, alembic: Callable[..., Config]
    ) -> None:
        config = alembic(None, Base.metadata)
        script: Any = command.revision(config, autogenerate=True, rev_id="1")
        written = Path(script.path).read_text()
        forth, back = written.split("def downgrade")
        assert "import jobsync_orm.migrate.online\n" in forth
        assert "    op.add_token_column('item', key='sku')\n" in forth
        assert "    op.create_online_index('by_token', 'item', ['token_id', 'done'], unique=False)\n" in forth
        assert "    op.create_index('by_sku', 'item', ['sku'], unique=False)\n" in forth
        assert "    op.drop_token_column('item', key='sku')\n" in back
        command.upgrade(config, "head")
        assert tokens(shop) == (250, 250)
        command.check(config)
        command.downgrade(config, "base")

    def test_a_change_of_the_key_is_noticed(self, shop: Engine) -> None:
        online.add_token_column(shop, "item", key="id")
        message = r"Computed default on item.token_id cannot be modified"
        with shop.connect() as connection, pytest.warns(UserWarning, match=message):
            self.compare(connection, Base.metadata)

    def test_a_column_that_nothing_keeps_is_noticed(self, shop: Engine) -> None:
        with shop.begin() as connection:
            connection.execute(text("ALTER TABLE item ADD token_id integer"))
            with pytest.warns(UserWarning, match=r"Computed default on item.token_id cannot be modified"):
                self.compare(connection, Base.metadata)

    def test_expressions_and_awkward_names(self, engine: Engine) -> None:
        class Other(DeclarativeBase):
            pass

        class Word(TokenOwned, Other):
            __tablename__ = "Word's"
            __token_key_sql__ = "lower(\"Key of\") || '%:x'"
            key: Mapped[str] = mapped_column("Key of", primary_key=True)

        with engine.begin() as connection:
            connection.execute(text('CREATE TABLE "Word\'s" ("Key of" varchar PRIMARY KEY)'))
        online.add_token_column(engine, "Word's", key_sql="lower(\"Key of\") || '%:x'")
        with engine.connect() as connection:
            assert self.compare(connection, Other.metadata) == []

    def test_the_check_stays_where_checks_are_compared(self) -> None:
        table = Table("item", MetaData())

        class Check:
            pass

        check: Any = Check()
        check.table = table
        assert not migrate.include_object(check, "sync_token_id_item", "check_constraint", True, None)
        assert migrate.include_object(check, "positive", "check_constraint", True, None)


class TestOperations:
    def test_reversed_it_is_the_other_one(self) -> None:
        options = {"batch_rows": 5, "rest": 1.0, "lock_timeout": 0.1, "patience": 9.0}
        add = online.AddTokenColumnOp("item", "shop", "sku", None, "x_", "tokens", options)
        drop = add.reverse()
        assert isinstance(drop, online.DropTokenColumnOp)
        assert drop.wanted == add.wanted
        assert drop.options == {"lock_timeout": 0.1, "patience": 9.0}
        assert isinstance(drop.reverse(), online.AddTokenColumnOp)
        assert drop.reverse().wanted == add.wanted

    def test_rendered(self) -> None:
        context = AutogenContext(MigrationContext.configure(dialect_name="postgresql"), MetaData())
        add = online.AddTokenColumnOp("it'em", "shop", None, "lower(a)", "x_", "tokens", {"rest": 2})
        arguments = "\"it'em\", schema='shop', key_sql='lower(a)', appname='x_', token_schema='tokens', rest=2"
        assert renderers.dispatch(add)(context, add) == f"op.add_token_column({arguments})"
        assert context.imports == {"import jobsync_orm.migrate.online"}
        assert add.wanted.names == Names("x_", "tokens")
