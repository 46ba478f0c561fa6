"""``jobsync-orm worker``: run the jobs of a queue until SIGTERM or SIGINT."""

from __future__ import annotations

import importlib
import logging
import os
import sys
import threading
import time
from pathlib import Path
from typing import Annotated

import typer
from sqlalchemy.exc import DBAPIError

from jobsync_orm import JobQueue, JobWorker
from jobsync_orm.cli.logs import log_to_stderr
from jobsync_orm.cli.probes import serve_probes
from jobsync_orm.exceptions import JobsyncError
from jobsync_orm.logs import fields
from jobsync_orm.terminal import several_lines

__all__ = ["worker"]

logger = logging.getLogger("jobsync_orm")

# Seconds that Python has to end once the worker has.
EXIT_SEC = 2.0


class NoQueue(Exception):
    """The queue named on the command line is not to be had; the message says why."""


class NoProbes(Exception):
    """Probes cannot be answered; the message says why."""


class NoMetrics(Exception):
    """They cannot be served; the message says why."""


def worker(
    queue: Annotated[str, typer.Argument(metavar="MODULE:QUEUE", help="Where the JobQueue is, as shop.jobs:queue.")],
    concurrency: Annotated[int, typer.Option(help="How many jobs run at once in threads.")] = 8,
    processes: Annotated[
        int | None,
        typer.Option(help="How many run at once in child processes; one per CPU if not given."),
    ] = None,
    async_concurrency: Annotated[int, typer.Option(help="How many coroutine handlers run at once.")] = 100,
    types: Annotated[
        str | None, typer.Option(help="Job types to run, separated by commas; all with a handler if not given.")
    ] = None,
    node_name: Annotated[
        str | None, typer.Option(help="Name of this worker; the first free HOST-1, HOST-2, ... if not given.")
    ] = None,
    grace: Annotated[
        float, typer.Option(help="Seconds that stopping takes at most; what still runs 2 s before is given back.")
    ] = 30,
    metrics_port: Annotated[
        int | None, typer.Option(help="Serve metrics for Prometheus on this port (extra prometheus).", min=1, max=65535)
    ] = None,
    metrics_host: Annotated[str, typer.Option(help="Address that the port is on.")] = "0.0.0.0",
    health_port: Annotated[
        int | None, typer.Option(help="Answer /health/live and /health/ready on this port.", min=1, max=65535)
    ] = None,
    health_host: Annotated[str, typer.Option(help="Address that this port is on.")] = "0.0.0.0",
    app_dir: Annotated[Path, typer.Option(help="Folder from which MODULE is imported.")] = Path(),
    log_level: Annotated[
        str, typer.Option(help="DEBUG, INFO, WARNING or ERROR, unless the application sets up logging itself.")
    ] = "INFO",
) -> None:
    """Run the jobs of a queue until SIGTERM or Ctrl-C.

    It then claims nothing more, waits for what runs, gives back what has not ended by then, and exits with 0. A second
    signal does not wait. Give the supervisor more time than --grace before it kills.
    """
    level = logging.getLevelNamesMapping().get(log_level.upper())
    if level is None:
        raise typer.BadParameter(f"{log_level!r} is none of DEBUG, INFO, WARNING, ERROR", param_hint="--log-level")
    try:
        found = find_queue(queue, app_dir)
    except NoQueue as error:
        typer.echo(several_lines(f"error: {error}"), err=True)
        raise typer.Exit(2) from error
    log_to_stderr(level)
    # Of no use to anybody who runs a worker, and in front of all that is.
    logging.getLogger("alembic.runtime.plugins").setLevel(logging.WARNING)
    try:
        chosen = None if types is None else [name.strip() for name in types.split(",") if name.strip()]
        worker = JobWorker(
            found,
            concurrency,
            processes=processes,
            async_concurrency=async_concurrency,
            types=chosen,
            node_name=node_name,
            grace_sec=grace,
        )
        if metrics_port is not None:
            _serve_metrics(worker, metrics_host, metrics_port)
        if health_port is not None:
            _serve_probes(worker, health_host, health_port)
        worker.run()
        _end_in_any_case()
    except (JobsyncError, TimeoutError, NoMetrics, NoProbes) as error:
        typer.echo(several_lines(f"error: {error}"), err=True)
        raise typer.Exit(2) from error
    except DBAPIError as error:
        typer.echo(several_lines(f"error: {error.orig}"), err=True)
        raise typer.Exit(2) from error


def _serve_probes(worker: JobWorker, host: str, port: int) -> None:
    try:
        serve_probes(worker, host, port)
    except OSError as error:
        raise NoProbes(f"--health-port: {host}:{port} is not to be had: {error}") from error


def _serve_metrics(worker: JobWorker, host: str, port: int) -> None:
    try:
        from prometheus_client import start_http_server

        from jobsync_orm.integrations import prometheus
    except ImportError as error:
        raise NoMetrics("--metrics-port needs prometheus-client: pip install 'jobsync-orm[prometheus]'") from error
    try:
        start_http_server(port, host)
    except OSError as error:
        raise NoMetrics(f"--metrics-port: {host}:{port} is not to be had: {error}") from error
    prometheus.register(worker)


def _end_in_any_case() -> None:
    """End this process also where a handler has left a thread that Python would wait for, such as a call that hangs in
    ``asyncio.to_thread``."""

    def end() -> None:
        time.sleep(EXIT_SEC)
        logger.warning("threads of handlers go on: ending without them", extra=fields("handlers_left_behind"))
        logging.shutdown()
        os._exit(0)

    threading.Thread(target=end, name="jobsync-exit", daemon=True).start()


def find_queue(target: str, app_dir: Path) -> JobQueue:
    """Import the queue that ``target`` names.

    Parameters
    ----------
    target : str
        ``module:attribute``; the attribute may have dots.
    app_dir : Path
        Put in front of ``sys.path``.

    Raises
    ------
    NoQueue
        There is none. An error that the module raises itself comes out as it is.
    """
    module_name, colon, attribute = target.partition(":")
    if not (module_name and colon and attribute) or module_name.startswith("."):
        raise NoQueue(f"{target!r} must be MODULE:QUEUE, as in shop.jobs:queue")
    folder = app_dir.resolve()
    if not folder.is_dir():
        raise NoQueue(f"--app-dir: there is no folder {folder}")
    sys.path.insert(0, str(folder))
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        # One that the module itself misses is an error of the application's, and is shown with where it comes from.
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise
        raise NoQueue(f"there is no module {error.name!r} in {folder} or where Python looks; see --app-dir") from error
    found: object = module
    for name in attribute.split("."):
        if not hasattr(found, name):
            queues = sorted(name for name, value in vars(module).items() if isinstance(value, JobQueue))
            raise NoQueue(
                f"module {module_name!r} has no {attribute!r}; "
                + (f"its queues are: {', '.join(queues)}" if queues else "it has no JobQueue at all")
            )
        found = getattr(found, name)
    if not isinstance(found, JobQueue):
        raise NoQueue(f"{target} is of type {type(found).__name__}, not a JobQueue")
    return found
