"""``jobsync-orm demo``: three workers share a table while one is killed, joins, is paused, or leaves."""

from __future__ import annotations

from typing import Annotated

import typer
from sqlalchemy.exc import DBAPIError

from jobsync_orm.exceptions import JobsyncError
from jobsync_orm.terminal import several_lines

__all__ = ["demo"]


def demo(
    workers: Annotated[int, typer.Option(min=2, max=20, help="Workers at the start.")] = 3,
    url: Annotated[
        str | None,
        typer.Option(
            help="postgresql://user:password@host:port/dbname to play in, in a schema of its own that is removed "
            "afterwards; if not given, an embedded PostgreSQL in a temporary folder."
        ),
    ] = None,
    files: Annotated[int | None, typer.Option(min=1, help="Number of files; all if not given.")] = None,
    seconds: Annotated[float, typer.Option(min=0, help="Least duration of the work.")] = 20,
) -> None:
    """Three workers share a table while one is killed, joins, is paused, leaves; exit with 1 if a file suffers."""
    try:
        from jobsync_orm.demo.director import run
    except ImportError as error:
        typer.echo(f"error: {error}; the demo needs: pip install 'jobsync-orm[demo]'", err=True)
        raise typer.Exit(2) from error
    try:
        code = run(url, workers, files, seconds)
    except KeyboardInterrupt:
        typer.echo("interrupted; workers and server are stopped, nothing is left behind", err=True)
        raise typer.Exit(130) from None
    except JobsyncError as error:
        typer.echo(several_lines(f"error: {error}"), err=True)
        raise typer.Exit(2) from error
    except DBAPIError as error:
        typer.echo(several_lines(f"error: {error.orig}"), err=True)
        raise typer.Exit(2) from error
    raise typer.Exit(code)
