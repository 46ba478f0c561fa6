"""``flask jobsync ...``: the commands of ``jobsync-orm``, on the cluster of the application (extra ``cli`` too).

What stands behind ``flask jobsync`` is handed on as it is, with the application's database in the environment, and its
``appname`` and ``schema`` where they are not the usual ones.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import click

from jobsync_orm.config import CoordinationConfig
from jobsync_orm.naming import DEFAULT_APPNAME

__all__ = ["command"]

# Of the command line: where a database is looked for if --url is not given.
ENVIRONMENT = "JOBSYNC_DATABASE_URL"

# Commands that do not work on the application's cluster: one has its queue's, the other makes its own.
ELSEWHERE = ("worker", "demo")


def command(coordination: Callable[[], CoordinationConfig | None]) -> click.Command:
    """The command for an application's ``app.cli``.

    Parameters
    ----------
    coordination : callable
        The application's cluster; None if its job is standalone.
    """

    @click.command(
        "jobsync",
        short_help="Look at and steer the cluster: status, nodes, locks, worker, ...",
        context_settings={"ignore_unknown_options": True, "help_option_names": []},
    )
    @click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
    def jobsync(arguments: tuple[str, ...]) -> None:
        try:
            from jobsync_orm.cli import application

            app = application()
        except ImportError as error:
            raise click.ClickException("needs the extra 'cli': pip install 'jobsync-orm[cli]'") from error
        given = list(arguments)
        if given and given[0] not in ELSEWHERE and "--help" not in given and "--url" not in given:
            config = coordination()
            if config is None:
                raise click.ClickException("the application's job is standalone: there is no cluster to look at")
            os.environ[ENVIRONMENT] = config.sqlalchemy_url().render_as_string(hide_password=False)
            if config.appname != DEFAULT_APPNAME and "--appname" not in given:
                given += ["--appname", config.appname]
            if config.schema is not None and "--schema" not in given:
                given += ["--schema", config.schema]
        app(given, prog_name="flask jobsync")

    return jobsync
