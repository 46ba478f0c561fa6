"""docs/adopting.md walked in an application with Alembic: its env.py, both migrations, and the way back."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from alembic import command
from alembic.config import Config
from sqlalchemy import URL, text

from jobsync_orm import migrate
from tests.docs.test_code_blocks import ROOT, blocks

PAGE = ROOT / "docs" / "adopting.md"
PYTHON = [block.text for block in blocks(PAGE) if block.language == "python"]


def the(part: str) -> str:
    """The one block of the page with ``part`` in it."""
    (found,) = [code for code in PYTHON if part in code]
    return found


BEFORE = the("class Item(Base)")
ENV = the("def run_migrations_online")
SMALL = the("sa.Computed(")
LARGE = the('op.add_token_column("item", key="sku")')
CHECK = the("AND NOT convalidated")
AFTER = the("class Item(TokenOwned, Base)")

MAKO = """
from alembic import op
import sqlalchemy as sa
${imports if imports else ""}
revision = "2"
down_revision = None

def upgrade():
    ${upgrades}

def downgrade():
    ${downgrades}
"""


class Application:
    """The page's application, at a point on its way."""

    def __init__(self, url: URL, folder: Path) -> None:
        self.url, self.folder = url, folder
        (folder / "versions").mkdir()
        (folder / "script.py.mako").write_text(MAKO)
        self.before = self.models(BEFORE)
        migrate.upgrade(self.before["engine"])

    def models(self, code: str, **given: Any) -> dict[str, Any]:
        namespace: dict[str, Any] = {**given}
        exec(compile(code, str(PAGE), "exec", dont_inherit=True), namespace)  # its annotations are no strings
        return namespace

    def after(self) -> dict[str, Any]:
        """With the mixin in its models."""
        return self.models(
            AFTER, **{name: self.before[name] for name in ("DeclarativeBase", "Mapped", "mapped_column")}
        )

    def alembic(self, models: dict[str, Any], env: str = ENV) -> Config:
        (self.folder / "env.py").write_text(
            "from alembic import context\nengine, Base = context.config.attributes['application']\n"
            f"{env}\nrun_migrations_online()\n"
        )
        config = Config()
        config.attributes["application"] = (self.before["engine"], models["Base"])
        config.set_main_option("script_location", str(self.folder))
        return config

    def migration(self, code: str) -> None:
        (self.folder / "versions" / "1.py").write_text(f"revision = '1'\ndown_revision = None\n{code}")

    def old_code_writes(self, sku: str) -> None:
        with self.before["engine"].begin() as connection:
            connection.execute(self.before["Item"].__table__.insert(), [{"sku": sku, "done": False}])

    def columns(self) -> set[str]:
        with self.before["engine"].connect() as connection:
            return {*connection.scalars(text("SELECT attname FROM pg_attribute WHERE attrelid = 'item'::regclass"))}


@pytest.fixture
def application(empty_database: URL, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Application]:
    monkeypatch.setenv("JOBSYNC_DATABASE_URL", empty_database.render_as_string(hide_password=False))
    application = Application(empty_database, tmp_path)
    yield application
    application.before["engine"].dispose()


@pytest.mark.parametrize("migration", [SMALL, LARGE], ids=["small", "large"])
def test_there_and_back(application: Application, migration: str) -> None:
    application.migration(migration)
    config = application.alembic(application.before)
    command.upgrade(config, "head")
    application.old_code_writes("after the migration")
    exec(CHECK, {"engine": application.before["engine"], "text": text})
    command.downgrade(config, "base")
    assert "token_id" not in application.columns()
    application.old_code_writes("after the way back")


def written(application: Application, env: str) -> str:
    """What autogenerate writes for the page's models on the application's database."""
    script: Any = command.revision(application.alembic(application.after(), env), autogenerate=True)
    return Path(script.path).read_text()


def test_autogenerate_writes_the_operation(application: Application) -> None:
    assert "op.add_token_column('item', key='sku')" in written(application, ENV)


def test_autogenerate_writes_the_generated_column_without_the_hook(application: Application) -> None:
    without = "\n".join(line for line in ENV.split("\n") if "process_revision_directives" not in line)
    upgrade = written(application, without)
    assert "sa.Computed('sync_token_of((sku)::text)', persisted=True)" in upgrade
    assert "op.add_column('item'" in upgrade


def test_autogenerate_has_nothing_to_say_afterwards(application: Application) -> None:
    # The index of the page is none of the model's.
    lines = [line for line in LARGE.split("\n") if "create_online_index" not in line]
    application.migration("\n".join(lines))
    config = application.alembic(application.after())
    command.upgrade(config, "head")
    command.check(config)


def test_the_librarys_tables_come_first_wherever_the_migrations_run(application: Application) -> None:
    migrate.downgrade(application.before["engine"])
    application.migration(SMALL)
    command.upgrade(application.alembic(application.before), "head")
    assert "token_id" in application.columns()
