"""``jobsync-orm db``: create, upgrade, inspect and remove the library's tables."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer
from sqlalchemy import Engine, NullPool, create_engine
from sqlalchemy.exc import DBAPIError

from jobsync_orm import migrate
from jobsync_orm.config import CoordinationConfig
from jobsync_orm.coordinator.history import Operator
from jobsync_orm.exceptions import JobsyncError
from jobsync_orm.naming import DEFAULT_APPNAME, Names

__all__ = ["app"]

app = typer.Typer(help="The library's tables.", no_args_is_help=True)

Url = Annotated[str, typer.Option(envvar="JOBSYNC_DATABASE_URL", help="postgresql://user:password@host:port/dbname")]
Appname = Annotated[str | None, typer.Option(help="Prefix of each table; sync_ if not given.")]
Schema = Annotated[str | None, typer.Option(help="Schema of the tables; if not given, search_path decides.")]
TotalTokens = Annotated[int | None, typer.Option(help="Number of tokens; 10000 for a new cluster.")]
HashFunction = Annotated[str | None, typer.Option(help="md5, sha256 or double_sha256, which is that of a new cluster.")]


@app.command()
def upgrade(
    url: Url,
    appname: Appname = None,
    schema: Schema = None,
    total_tokens: TotalTokens = None,
    hash_function: HashFunction = None,
    revision: Annotated[str, typer.Option(help="Where to go.")] = "head",
) -> None:
    """Create the tables, or bring them to the newest revision."""
    with _engine(url) as engine:
        migrate.upgrade(
            engine,
            appname=appname,
            schema=schema,
            total_tokens=total_tokens,
            hash_function=hash_function,
            revision=revision,
        )
        _print_current(engine, appname, schema)


@app.command()
def downgrade(
    url: Url,
    appname: Appname = None,
    schema: Schema = None,
    revision: Annotated[str, typer.Option(help="Where to go; base removes everything.")] = "base",
) -> None:
    """Go back to an older revision, or remove the tables. Stop every worker first."""
    with _engine(url) as engine:
        migrate.downgrade(engine, appname=appname, schema=schema, revision=revision)
        _print_current(engine, appname, schema)


@app.command()
def current(url: Url, appname: Appname = None, schema: Schema = None) -> None:
    """Print the revision the tables are at."""
    with _engine(url) as engine:
        _print_current(engine, appname, schema)


@app.command()
def check(
    url: Url,
    appname: Appname = None,
    schema: Schema = None,
    total_tokens: TotalTokens = None,
    hash_function: HashFunction = None,
) -> None:
    """Print what keeps a worker from running here as this user; exit with 1 if anything does."""
    with _engine(url) as engine:
        problems = migrate.check(
            engine, appname=appname, schema=schema, total_tokens=total_tokens, hash_function=hash_function
        )
    for problem in problems:
        typer.echo(problem)
    if problems:
        raise typer.Exit(1)
    typer.echo("ok")


@app.command()
def reform(
    url: Url,
    appname: Appname = None,
    schema: Schema = None,
    rest: Annotated[
        float,
        typer.Option(
            min=0,
            help="Least number of seconds for which nobody owns anything: the longest heartbeat_timeout_sec of the "
            "workers that may still run.",
        ),
    ] = CoordinationConfig.heartbeat_timeout_sec,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """Form the cluster anew after a restore: no epoch or fencing number from before it is ever given out again.

    Claims and hand-overs under way end, every worker registers anew by itself, and nobody owns anything for a while.
    Rows of your tables, pins, checkpoints and the audit stay. A failover needs no command: workers notice it.
    """
    with _engine(url) as engine:
        operator = Operator(engine, Names(appname or DEFAULT_APPNAME, schema))
        found, members = operator.look()
        typer.echo(f"epoch {found.epoch}, {len(members)} nodes: {', '.join(members) or 'none'}")
        if not yes:
            typer.confirm("End all claims and let nobody own anything until the cluster has rested?", abort=True)
        done = operator.reform(found, rest)
        if done is None:
            typer.echo("error: somebody else has formed it anew just now; nothing was changed", err=True)
            raise typer.Exit(1)
        typer.echo(f"formed anew at epoch {done.epoch}; nobody owns anything for {done.rest_sec:.0f} s")
        if not done.fences_raised:
            typer.echo("error: this role may not raise the fencing numbers of claims; see `db check`", err=True)
            raise typer.Exit(1)


@contextmanager
def _engine(url: str) -> Iterator[Engine]:
    """An engine; an error about the input or from the server becomes one line and exit code 2."""
    try:
        # Nothing is prepared, so that it works through any pooler.
        unprepared = {"prepare_threshold": None}
        engine = create_engine(
            CoordinationConfig(url=url).sqlalchemy_url(), poolclass=NullPool, connect_args=unprepared
        )
        try:
            yield engine
        finally:
            engine.dispose()
    except JobsyncError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from error
    except DBAPIError as error:
        typer.echo(f"error: {error.orig}", err=True)
        raise typer.Exit(2) from error


def _print_current(engine: Engine, appname: str | None, schema: str | None) -> None:
    revision = migrate.current(engine, appname=appname, schema=schema)
    typer.echo(f"{revision or 'no tables'} (newest: {migrate.head()})")
