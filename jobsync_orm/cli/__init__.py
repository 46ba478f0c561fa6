"""``jobsync-orm``: the library's commands. Needs the extra ``cli``.

Each group of commands is a file beside this one that offers a ``typer.Typer`` called ``app``, and a line in
:func:`application`; a single command is a file with a function of its name.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import typer

__all__ = ["application", "main"]


def application() -> typer.Typer:
    """The whole command line."""
    import typer

    from jobsync_orm.cli import (
        cluster,
        dashboard,
        db,
        demo,
        doctor,
        locks,
        members,
        planning,
        queue,
        resharding,
        tasks,
        top,
        worker,
    )

    app = typer.Typer(
        help="Share one PostgreSQL table between several workers.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )
    app.command()(cluster.status)
    app.command()(cluster.nodes)
    app.command()(cluster.tokens)
    app.command()(cluster.rebalances)
    app.command()(top.top)
    app.command()(doctor.doctor)
    app.command()(tasks.where)
    app.command()(tasks.audit)
    app.add_typer(locks.app, name="locks")
    app.command()(planning.rebalance)
    app.command()(members.drain)
    app.command()(members.undrain)
    app.command()(members.evict)
    app.command()(resharding.reshard)
    app.add_typer(queue.app, name="queue")
    app.command()(dashboard.dashboard)
    app.add_typer(db.app, name="db")
    app.command()(demo.demo)
    app.command()(worker.worker)

    def show_version(wanted: bool) -> None:
        if wanted:
            typer.echo(f"jobsync-orm {_version()}")
            raise typer.Exit

    @app.callback()
    def options(
        version: bool = typer.Option(
            False, "--version", callback=show_version, is_eager=True, help="Print the version and exit."
        ),
    ) -> None:
        pass

    return app


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("jobsync-orm")
    except PackageNotFoundError:
        return "(a checkout that is not installed)"


def main() -> None:
    """Entry point of ``jobsync-orm``."""
    try:
        import typer  # noqa: F401
    except ImportError:
        print("jobsync-orm needs the extra 'cli': pip install 'jobsync-orm[cli]'", file=sys.stderr)
        sys.exit(2)
    if "--json" in sys.argv[1:]:
        sys.exit(_in_json())
    application()()


def _in_json() -> int:
    """Run the command line; an error of usage is JSON too."""
    from jobsync_orm.terminal import json_line

    try:
        code = application()(standalone_mode=False)
    except Exception as error:
        # Some releases of typer have a click of their own, others import it: the class has no one name.
        message = getattr(error, "format_message", None)
        if message is None:
            raise
        print(json_line({"error": {"type": "Usage", "message": message()}}), file=sys.stderr)
        return 2
    return code if isinstance(code, int) else 0
