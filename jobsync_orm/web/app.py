"""The application: which address answers what."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from sqlalchemy import Engine
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from jobsync_orm.autocommit import bounded
from jobsync_orm.config import CoordinationConfig
from jobsync_orm.exceptions import ConfigurationError
from jobsync_orm.naming import DEFAULT_APPNAME
from jobsync_orm.queue import JobQueue
from jobsync_orm.web.access import Access, Auth
from jobsync_orm.web.acting import Acting
from jobsync_orm.web.answers import ERRORS
from jobsync_orm.web.headers import SecurityHeaders
from jobsync_orm.web.reading import Reading
from jobsync_orm.web.workbench import Workbench

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncEngine

__all__ = ["THREADS", "WITHIN_SEC", "dashboard"]

# Statements under way at once, at most, each with a connection of the engine's.
THREADS = 4

# Seconds after which the server gives up a statement.
WITHIN_SEC = 5.0

STATIC = Path(__file__).parent / "static"


def dashboard(
    source: Engine | AsyncEngine | CoordinationConfig,
    *,
    appname: str = DEFAULT_APPNAME,
    schema: str | None = None,
    allow_writes: bool = False,
    auth: Auth | None = None,
    read_auth: Auth | None = None,
) -> Starlette:
    """The dashboard of one cluster, to be mounted at any path of an ASGI application, or served by itself.

    Parameters
    ----------
    source : Engine, AsyncEngine or CoordinationConfig
        The database. A synchronous psycopg engine is used as it is, at most four of its connections at a time; of any
        other source a small engine is made.
    appname, schema : str, str or None
        The cluster in that database; a configuration names its own.
    allow_writes : bool
        Whether jobs may be retried and cancelled, the queue paused, nodes drained. Needs ``auth``.
    auth : callable, optional
        Who may write: given the ``starlette.requests.Request``, it returns the name of whoever asks, or None if that
        one may not. A plain function (called in a thread) or a coroutine function. What is done is logged with the
        name (logger ``jobsync_orm.web``). It may raise ``starlette.exceptions.HTTPException`` for an answer of its own.
    read_auth : callable, optional
        The same for looking. Without it everybody may look who can reach the application.

    Returns
    -------
    Starlette

    Raises
    ------
    ConfigurationError
        ``allow_writes`` without ``auth``, or ``auth`` without ``allow_writes``; ``appname`` or ``schema`` beside a
        configuration that says something else; no PostgreSQL.
    """
    if isinstance(source, CoordinationConfig):
        if (appname, schema) not in ((DEFAULT_APPNAME, None), (source.appname, source.schema)):
            raise ConfigurationError(
                f"appname={appname!r}, schema={schema!r}: the configuration names its cluster itself, "
                f"{source.appname!r} in {source.schema!r}"
            )
        config = source
    else:
        config = CoordinationConfig(engine=source, appname=appname, schema=schema)
    access = Access(allow_writes=allow_writes, auth=auth, read_auth=read_auth)
    connected = config.application_engine(pool_size=THREADS, max_overflow=0)
    engine = bounded(connected, WITHIN_SEC)
    queue = JobQueue(CoordinationConfig(engine=engine, appname=config.appname, schema=config.schema), wake=False)
    bench = Workbench(THREADS)
    reading = Reading(engine, queue, bench)
    acting = Acting(engine, queue, bench, reading.outdate)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        # Of the outermost application only; one that is mounted ends with its process.
        yield
        if connected is not config.engine:
            connected.dispose()

    return Starlette(
        lifespan=lifespan,
        routes=[
            Route("/", access.reader(_page)),
            Route("/api/session", access.reader(access.session)),
            Route("/api/cluster", access.reader(reading.cluster)),
            Route("/api/pins", access.reader(reading.pins)),
            Route("/api/queue", access.reader(reading.queue)),
            Route("/api/jobs", access.reader(reading.jobs)),
            Route("/api/jobs/{id:int}", access.reader(reading.job)),
            Route("/api/act/{action}", access.writer(acting.act), methods=["POST"]),
            # Styles and scripts say nothing about the cluster.
            Mount("/static", StaticFiles(directory=STATIC)),
        ],
        middleware=[Middleware(SecurityHeaders)],
        exception_handlers=ERRORS,
    )


async def _page(request: Request) -> Response:
    return FileResponse(STATIC / "index.html", media_type="text/html", headers={"Cache-Control": "no-cache"})
