"""A job in a Flask application (extra ``flask``).

::

    jobsync = JobSync()

    def create_app():
        app = Flask(__name__)
        app.config["JOBSYNC_URL"] = "postgresql+psycopg://app@localhost/shop"
        jobsync.init_app(app)
        app.register_blueprint(health_blueprint())
        return app

    @bp.get("/mine")
    def mine():
        jobsync.job.my_tokens

Flask has no moment at which an application starts to serve, and making one is no such moment: a reloader's parent,
``flask shell`` and a server that loads the application before it forks make one too. So a process's job starts with its
first request, or with ``app.extensions["jobsync"].start()`` in a hook of the server; it is stopped when the process
ends, or with ``stop()``. ``docs/integrations.md`` says more.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import fields as dataclass_fields
from typing import TYPE_CHECKING, Unpack

from jobsync_orm.config import CoordinationConfig
from jobsync_orm.exceptions import ConfigurationError, ForkedJob, NotRunning
from jobsync_orm.integrations.hosted import Host, JobOptions, Probe
from jobsync_orm.logs import fields

try:
    from flask import Blueprint, Flask, Response, current_app, jsonify, request
except ImportError as error:
    raise ImportError("jobsync_orm.integrations.flask needs flask: pip install 'jobsync-orm[flask]'") from error

from jobsync_orm.integrations.flask_cli import command

if TYPE_CHECKING:
    from jobsync_orm.job import Job
    from jobsync_orm.worker import JobWorker

__all__ = ["JobSync", "ProcessJob", "health_blueprint"]

logger = logging.getLogger("jobsync_orm")

NAME = "jobsync"
PREFIX = "JOBSYNC_"

# Keys that are not settings of the cluster: arguments of a Host, and one of this module.
HOST_KEYS = ("node_name", "wait_on_enter")
STANDALONE = "standalone"


class JobSync:
    """The extension: ``JobSync(app)``, or ``init_app`` in an application factory.

    Parameters
    ----------
    app : Flask, optional
        The application.
    config : CoordinationConfig, optional
        Where the cluster is. None makes it of the application's configuration: each ``JOBSYNC_X`` is the setting ``x``
        of :class:`~jobsync_orm.CoordinationConfig`, and ``JOBSYNC_NODE_NAME`` and ``JOBSYNC_WAIT_ON_ENTER`` are
        arguments of the job. Where no database is named, it is Flask-SQLAlchemy's. ``JOBSYNC_STANDALONE = True``: no
        database at all, for tests.
    worker : callable, optional
        ``lambda job: JobWorker(queue, job=job)``: each process runs jobs of the queue too.
    **options
        Other arguments of :class:`~jobsync_orm.Job`: ``on_rebalance``, ``on_revoke``, ...
    """

    def __init__(
        self,
        app: Flask | None = None,
        config: CoordinationConfig | None = None,
        *,
        worker: Callable[[Job], JobWorker] | None = None,
        **options: Unpack[JobOptions],
    ) -> None:
        self._config = config
        self._worker = worker
        self._options = options
        if app is not None:
            self.init_app(app)

    def init_app(self, app: Flask) -> None:
        """Make this extension part of ``app``. Starts nothing.

        Raises
        ------
        ConfigurationError
            A key ``JOBSYNC_X`` that is no setting, or the application has a JobSync already.
        """
        if NAME in app.extensions:
            raise ConfigurationError("this application has a JobSync already")
        known = {field.name for field in dataclass_fields(CoordinationConfig) if not field.name.startswith("_")}
        for key in app.config.get_namespace(PREFIX):
            if key not in known and key not in (*HOST_KEYS, STANDALONE):
                raise ConfigurationError(
                    f"{PREFIX}{key.upper()} is no setting: there is no {key!r} in CoordinationConfig"
                )
        process = ProcessJob(lambda: self._host(app))
        app.extensions[NAME] = process

        @app.before_request
        def begin() -> None:
            if request.blueprint != NAME:  # a probe says itself what it finds
                process.begin()

        app.cli.add_command(command(lambda: self._coordination(app)))

    @property
    def job(self) -> Job:
        """The job of this process, for the application at hand; see :attr:`ProcessJob.job`."""
        return self._process().job

    @property
    def worker(self) -> JobWorker | None:
        """The worker of this process; None if there is none."""
        return self._process().worker

    def _process(self) -> ProcessJob:
        return process_of(current_app)

    def _host(self, app: Flask) -> Host:
        given = app.config.get_namespace(PREFIX)
        return Host(
            self._coordination(app),
            self._options,
            given.get("node_name"),
            given.get("wait_on_enter", 120),
            self._worker,
        )

    def _coordination(self, app: Flask) -> CoordinationConfig | None:
        """The cluster of ``app``; None for a standalone job."""
        if self._config is not None:
            return self._config
        given = app.config.get_namespace(PREFIX)
        if given.pop(STANDALONE, False):
            return None
        settings = {key: value for key, value in given.items() if key not in HOST_KEYS}
        if not settings.keys() & {"url", "engine", "host", "dbname"}:
            if "sqlalchemy" not in app.extensions:
                raise ConfigurationError(
                    f"no database: set {PREFIX}URL, or use Flask-SQLAlchemy, or give JobSync a CoordinationConfig; for "
                    f"tests without one set {PREFIX}{STANDALONE.upper()} = True"
                )
            with app.app_context():
                settings["engine"] = app.extensions["sqlalchemy"].engine
        return CoordinationConfig(**settings)


def process_of(app: Flask) -> ProcessJob:
    """What ``app`` has of this extension.

    Raises
    ------
    NotRunning
        Nothing: ``init_app`` was not called.
    """
    process = app.extensions.get(NAME)
    if not isinstance(process, ProcessJob):
        raise NotRunning("this application has no JobSync: call jobsync.init_app(app) where it is made")
    return process


class ProcessJob:
    """The job of one process of one application: ``app.extensions["jobsync"]``.

    Parameters
    ----------
    make_host : callable
        Makes what is started.
    """

    def __init__(self, make_host: Callable[[], Host]) -> None:
        self._make_host = make_host
        self._guard = threading.Lock()
        self._pid = os.getpid()
        self._host: Host | None = None
        self._started: Future[Job] | None = None
        self._stopped = False
        self._failed = False

    @property
    def job(self) -> Job:
        """The job, started if it has not been, which waits.

        Raises what :meth:`Job.start() <jobsync_orm.Job.start>` raises, too; the next call tries again.

        Raises
        ------
        ForkedJob
            It was started before this process was forked.
        NotRunning
            It has been stopped.
        """
        self._start_soon().result()
        assert self._host is not None
        return self._host.job

    @property
    def worker(self) -> JobWorker | None:
        """The worker; None if there is none, or it has not been started."""
        return None if self._host is None else self._host.worker

    def start(self) -> Job:
        """Start the job, in a hook of the server that runs after the fork; see :attr:`job`."""
        return self.job

    def begin(self) -> None:
        """Start the job without waiting for it."""
        if not self._stopped:
            self._start_soon()

    def _start_soon(self) -> Future[Job]:
        if self._started is not None and os.getpid() != self._pid:
            raise ForkedJob(
                f"this application's job was started by process {self._pid}, and this process, {os.getpid()}, is a "
                "fork of it. Start it after the fork: remove the call of start() that ran before, and leave it to the "
                "first request, or to a hook such as gunicorn's post_worker_init"
            )
        with self._guard:
            if self._stopped:
                raise NotRunning("this process's job has been stopped")
            if self._started is None:
                self._pid = os.getpid()
                self._host, self._started = self._make_host(), Future()
                threading.Thread(
                    target=self._run, args=(self._host, self._started), name="jobsync-start", daemon=True
                ).start()
            return self._started

    def _run(self, host: Host, started: Future[Job]) -> None:
        try:
            job = host.start_job()
            try:
                host.start_worker()
            except BaseException:
                host.stop_job()
                raise
        except BaseException as error:  # noqa: BLE001  # raised where it is waited for
            logger.error("the application's job could not be started: %s", error, extra=fields("start_failed"))
            with self._guard:
                self._started, self._failed = None, True
            started.set_exception(error)
        else:
            self._failed = False
            atexit.register(self.stop)
            started.set_result(job)

    def stop(self) -> None:
        """Stop the worker, hand the tokens over and leave the cluster.

        Does nothing where no job was started, and in a fork of the process that started it.
        """
        if os.getpid() != self._pid:
            return
        with self._guard:
            self._stopped = True
            host, started = self._host, self._started
        if host is None or started is None:
            return
        if not started.done():
            host.give_up()
        if started.exception() is None:
            host.stop_worker()
            host.stop_job()
        atexit.unregister(self.stop)

    def live(self) -> Probe:
        """See :meth:`Host.live() <jobsync_orm.integrations.hosted.Host.live>`; one that has not started is live."""
        return Probe(True) if self._host is None else self._host.live()

    def ready(self) -> Probe:
        """See :meth:`Host.ready() <jobsync_orm.integrations.hosted.Host.ready>`. Begins to start the job, so that a
        server which sends requests only to ready processes gets one."""
        try:
            self.begin()
        except (ForkedJob, ConfigurationError) as error:
            logger.error("not ready: %s", error, extra=fields("start_failed"))
            return Probe(False, ("the job cannot be started; the log says why",))
        if self._failed:
            return Probe(False, ("the job could not be started; the log says why, and it is tried again",))
        return Probe(False, ("the job has not been started",)) if self._host is None else self._host.ready()


def health_blueprint(prefix: str = "/health") -> Blueprint:
    """A blueprint with ``{prefix}/live`` and ``{prefix}/ready``.

    Both answer from memory, with status 200 or 503 and a JSON object ``{"status", "node", "problems"}``. ``live`` says
    no only where a restart would help; ``ready`` while this process may not say yes to its tokens.
    """
    blueprint = Blueprint(NAME, __name__, url_prefix=prefix)

    @blueprint.get("/live")
    def live() -> tuple[Response, int]:
        return _answer(process_of(current_app).live(), "live", "dead")

    @blueprint.get("/ready")
    def ready() -> tuple[Response, int]:
        return _answer(process_of(current_app).ready(), "ready", "not ready")

    return blueprint


def _answer(probe: Probe, yes: str, no: str) -> tuple[Response, int]:
    response = jsonify(probe.as_json(yes, no))
    response.headers["Cache-Control"] = "no-store"
    return response, 200 if probe.ok else 503
