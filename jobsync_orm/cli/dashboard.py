"""``jobsync-orm dashboard``: serve the dashboard by itself. Needs the extra ``web``."""

from __future__ import annotations

import importlib
import logging
import socket
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from sqlalchemy import create_engine

from jobsync_orm.cli.connection import Cluster, on_cluster
from jobsync_orm.cli.logs import log_to_stderr
from jobsync_orm.cli.output import INTERRUPTED
from jobsync_orm.exceptions import ConfigurationError

__all__ = ["dashboard"]

# Names by which a browser on this machine reaches it. Others are refused there: a page of another site could have its
# own name point to this machine, and so read what is shown.
LOOPBACK = ("localhost", "127.0.0.1", "::1")


@on_cluster
def dashboard(
    cluster: Cluster,
    host: Annotated[str, typer.Option(help="Where to listen; others than this machine need another address.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option(min=0, max=65_535, help="The port; 0: a free one.")] = 8090,
    root_path: Annotated[str, typer.Option(help="Path under which a proxy shows it.")] = "",
    allow_writes: Annotated[
        bool, typer.Option("--allow-writes", help="Let those whom --auth knows retry, cancel, pause and drain.")
    ] = False,
    auth: Annotated[
        str | None,
        typer.Option(metavar="MODULE:FUNCTION", help="Given a request, returns the name of who may write, or None."),
    ] = None,
    read_auth: Annotated[
        str | None, typer.Option(metavar="MODULE:FUNCTION", help="The same for who may look; everybody if not given.")
    ] = None,
) -> None:
    """Show the cluster and its queue in a browser, until it is interrupted."""
    try:
        import uvicorn
        from starlette.middleware.trustedhost import TrustedHostMiddleware

        from jobsync_orm import web
    except ImportError as error:
        raise ConfigurationError("the dashboard needs the extra 'web': pip install 'jobsync-orm[web]'") from error
    # Nothing is prepared, so that it works through any pooler.
    engine = create_engine(
        cluster.engine.url,
        pool_size=web.THREADS,
        connect_args={"prepare_threshold": None, "application_name": "jobsync-orm dashboard"},
    )
    app = web.dashboard(
        engine,
        appname=cluster.names.appname,
        schema=cluster.names.schema,
        allow_writes=allow_writes,
        auth=None if auth is None else _function(auth),
        read_auth=None if read_auth is None else _function(read_auth),
    )
    if host in LOOPBACK:
        app.add_middleware(TrustedHostMiddleware, allowed_hosts=["localhost", "127.0.0.1", "[::1]"])
    log_to_stderr(logging.INFO)
    try:
        with _listening(host, port) as listener:
            url = f"http://{f'[{host}]' if ':' in host else host}:{listener.getsockname()[1]}{root_path}/"
            cluster.output.show({"url": url}, f"the dashboard is at {url}")
            sys.stdout.flush()
            config = uvicorn.Config(app, root_path=root_path, log_config=None, access_log=False, server_header=False)
            uvicorn.Server(config).run(sockets=[listener])
    except KeyboardInterrupt:  # uvicorn has stopped in order, and passes it on
        raise typer.Exit(INTERRUPTED) from None
    finally:
        engine.dispose()


def _listening(host: str, port: int) -> socket.socket:
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        raise ConfigurationError(f"cannot listen at {host}, port {port}: {error.strerror or error}") from error


def _function(named: str) -> Any:
    module, _, name = named.partition(":")
    if not module or not name:
        raise ConfigurationError(f"{named!r} must be MODULE:FUNCTION, as shop.auth:who")
    if (folder := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, folder)
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ConfigurationError(f"{named!r} cannot be had: {error}") from error
