"""`jobsync-orm db roles` and `db grants` print what `migrate.roles` writes, and need no database."""

from __future__ import annotations

from typer.testing import CliRunner, Result

from jobsync_orm.cli import application
from jobsync_orm.migrate import roles


def run(*arguments: str) -> Result:
    return CliRunner().invoke(application(), ("db", *arguments), env={"JOBSYNC_DATABASE_URL": None})


def test_the_roles() -> None:
    assert run("roles", "--owner", "o", "--worker", "w").stdout == roles.setup(owner="o", worker="w")
    given = ("--owner", "o", "--worker", "w", "--monitor", "m", "--database", "shop", "--schema", "jobs")
    made = roles.setup(owner="o", worker="w", monitor="m", database="shop", schema="jobs")
    assert run("roles", *given).stdout == made


def test_the_grants() -> None:
    assert run("grants", "--worker", "w").stdout == roles.grants(worker="w")
    given = ("--monitor", "m", "--owner", "o", "--appname", "shop_", "--schema", "jobs", "--table", "public.item")
    made = roles.grants(
        worker="w", monitor="m", owner="o", appname="shop_", schema="jobs", tables=[("public", "item"), "parcel"]
    )
    assert run("grants", "--worker", "w", *given, "--table", "parcel").stdout == made


def test_what_cannot_be_is_named() -> None:
    twice = run("roles", "--owner", "o", "--worker", "o")
    assert (twice.exit_code, twice.stdout) == (2, "")
    assert "names one role twice" in twice.stderr
    assert "table='' must be a name" in run("grants", "--worker", "w", "--table", "public.").stderr
