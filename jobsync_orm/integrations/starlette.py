"""A job in a Starlette application (extra ``starlette``); FastAPI has more, see :mod:`.fastapi`.

::

    app = Starlette(lifespan=jobsync_lifespan(config), routes=[Mount("/health", routes=health_routes())])

The job starts when the server starts the application, and leaves its cluster when it is shut down. With several
worker processes each has a job of its own. Nothing here waits in the event loop.
"""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, nullcontext
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar, Unpack

from jobsync_orm.exceptions import NotRunning
from jobsync_orm.integrations.hosted import Host, JobOptions, Probe

try:
    from starlette.requests import HTTPConnection, Request
    from starlette.responses import JSONResponse
    from starlette.routing import Route
except ImportError as error:
    raise ImportError(
        "jobsync_orm.integrations.starlette needs starlette: pip install 'jobsync-orm[starlette]' (or "
        "'jobsync-orm[fastapi]')"
    ) from error

if TYPE_CHECKING:
    from starlette.applications import Starlette

    from jobsync_orm.config import CoordinationConfig
    from jobsync_orm.job import Job
    from jobsync_orm.worker import JobWorker

__all__ = ["answer", "current_host", "current_job", "health_routes", "jobsync_lifespan"]

# Where the application's state, and that of each request, has this process's Host.
STATE = "jobsync"

App = TypeVar("App", bound="Starlette")


def jobsync_lifespan(
    config: CoordinationConfig | None,
    *,
    node_name: str | None = None,
    wait_on_enter: float = 120,
    worker: Callable[[Job], JobWorker] | None = None,
    lifespan: Callable[[App], AbstractAsyncContextManager[Any]] | None = None,
    **options: Unpack[JobOptions],
) -> Callable[[App], AbstractAsyncContextManager[dict[str, Any]]]:
    """A lifespan in which a job runs.

    Parameters
    ----------
    config : CoordinationConfig, optional
        Where the cluster is. None makes a standalone job, which owns everything: for tests without a database.
    node_name : str, optional
        This process's name. None takes the first of ``{hostname}-1``, ``{hostname}-2``, ... that no live process has:
        right for several worker processes, which a name given here is not.
    wait_on_enter : float
        Seconds that starting may take, until the database is reached and this node has its tokens.
    worker : callable, optional
        ``lambda job: JobWorker(queue, job=job)``: also run jobs in this process.
    lifespan : callable, optional
        The application's own lifespan. It runs inside: the job runs already when it starts (``current_job(app)``), and
        still when it ends; the worker starts after it and stops before it.
    **options
        Other arguments of :class:`~jobsync_orm.Job`: ``on_rebalance``, ``on_revoke``, ...

    Raises
    ------
    ConfigurationError
        A value that cannot be. What joining the cluster raises is raised when the application starts, and ends the
        server.
    """
    Host(config, options, node_name, wait_on_enter, worker)  # what is wrong with it is said here

    @asynccontextmanager
    async def within(app: App) -> AsyncIterator[dict[str, Any]]:
        # A host for each start: tests start one application several times.
        host = Host(config, options, node_name, wait_on_enter, worker)
        with _told_of_signals(host):
            await _in_thread(host.start_job, host.give_up)
        try:
            setattr(app.state, STATE, host)
            async with nullcontext() if lifespan is None else lifespan(app) as state:
                try:
                    await _in_thread(host.start_worker)
                    yield {**(state or {}), STATE: host}
                finally:
                    await _in_thread(host.stop_worker)
        finally:
            await _in_thread(host.stop_job)

    return within


@contextmanager
def _told_of_signals(host: Host) -> Iterator[None]:
    """Have ``host`` give up its start when the process is to end.

    A server takes note of the signal, and then waits for the lifespan to have started: it neither cancels it nor tells
    it. So its handlers are called as ever, and ``host`` is told besides.
    """
    if threading.current_thread() is not threading.main_thread():  # nobody else may set handlers; a test client, say
        yield
        return
    loop = asyncio.get_running_loop()
    before: dict[signal.Signals, Callable[[int, FrameType | None], Any]] = {}

    def told(number: int, frame: FrameType | None) -> None:
        loop.call_soon_threadsafe(host.give_up)
        before[signal.Signals(number)](number, frame)

    for number in (signal.SIGINT, signal.SIGTERM):
        if callable(handler := signal.getsignal(number)):
            before[number] = handler
            signal.signal(number, told)
    try:
        yield
    finally:
        for number, handler in before.items():
            if signal.getsignal(number) is told:
                signal.signal(number, handler)


async def _in_thread(call: Callable[[], object], on_cancel: Callable[[], object] = lambda: None) -> None:
    """Run ``call`` beside the event loop and wait for its end, also where this is cancelled meanwhile."""
    task = asyncio.ensure_future(asyncio.to_thread(call))
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        on_cancel()
        await asyncio.gather(task, return_exceptions=True)
        raise


def current_host(connection: HTTPConnection | Starlette) -> Host:
    """The :class:`~jobsync_orm.integrations.hosted.Host` of this process: its job, worker and probes.

    Raises
    ------
    NotRunning
        The application has no :func:`jobsync_lifespan`, or its lifespan has not run.
    """
    # A request's state is also that of applications mounted in this one, whose own state is empty.
    host = getattr(connection.state, STATE, None)
    if not isinstance(host, Host):
        raise NotRunning(
            "this application has no job: give it lifespan=jobsync_lifespan(config), and let its lifespan run (a "
            "server does; a test client only in a `with` block)"
        )
    return host


def current_job(connection: HTTPConnection) -> Job:
    """The job of the process that answers this request; a dependency for FastAPI. Takes the application as well.

    Raises
    ------
    NotRunning
        There is none, or it is leaving.
    """
    return current_host(connection).job


def health_routes() -> list[Route]:
    """Routes ``/live`` and ``/ready``, for ``Mount("/health", routes=health_routes())``.

    Both answer from memory, with status 200 or 503 and a JSON object ``{"status", "node", "problems"}``. ``/live`` says
    no only where a restart would help; ``/ready`` while this process may not say yes to its tokens.
    """

    async def live(request: Request) -> JSONResponse:
        return answer(current_host(request).live(), "live", "dead")

    async def ready(request: Request) -> JSONResponse:
        return answer(current_host(request).ready(), "ready", "not ready")

    return [Route("/live", live), Route("/ready", ready)]


def answer(probe: Probe, yes: str, no: str) -> JSONResponse:
    """The answer to a probe."""
    return JSONResponse(
        probe.as_json(yes, no), status_code=200 if probe.ok else 503, headers={"Cache-Control": "no-store"}
    )
