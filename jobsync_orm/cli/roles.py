"""``jobsync-orm db roles|grants``: print SQL for whoever administers the database. Nothing is connected to."""

from __future__ import annotations

from typing import Annotated

import typer

from jobsync_orm.cli.output import Output
from jobsync_orm.migrate import roles as scripts
from jobsync_orm.naming import DEFAULT_APPNAME

__all__ = ["grants", "roles"]

Worker = Annotated[str, typer.Option(help="Role of the workers.")]
Monitor = Annotated[str | None, typer.Option(help="Role that only looks.")]
Schema = Annotated[str, typer.Option(help="Schema of the library's tables.")]


def roles(
    owner: Annotated[str, typer.Option(help="Role that the tables belong to, and that migrates.")],
    worker: Worker,
    monitor: Monitor = None,
    database: Annotated[str | None, typer.Option(help="Let nobody else connect to this database.")] = None,
    schema: Schema = "public",
) -> None:
    """Print the SQL that makes the roles and the schema: for an administrator, once, before the first migration."""
    with Output(json=False).errors():
        typer.echo(
            scripts.setup(owner=owner, worker=worker, monitor=monitor, database=database, schema=schema), nl=False
        )


def grants(
    worker: Worker,
    monitor: Monitor = None,
    owner: Annotated[
        str | None, typer.Option(help="Also hand over to this role tables that another one has made.")
    ] = None,
    appname: Annotated[str, typer.Option(help="Prefix of each table.")] = DEFAULT_APPNAME,
    schema: Schema = "public",
    tables: Annotated[
        list[str] | None,
        typer.Option("--table", metavar="[SCHEMA.]TABLE", help="Of the application; may be given several times."),
    ] = None,
) -> None:
    """Print the SQL that grants the roles what they need: for the owner of the tables, after each migration."""
    with Output(json=False).errors():
        named = [_table(table) for table in tables or ()]
        typer.echo(
            scripts.grants(worker=worker, monitor=monitor, owner=owner, appname=appname, schema=schema, tables=named),
            nl=False,
        )


def _table(name: str) -> str | tuple[str, str]:
    """A name with a dot is that of a schema and a table."""
    schema, dot, table = name.partition(".")
    return (schema, table) if dot else name
