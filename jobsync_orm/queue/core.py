"""What every part of a queue stands on: its configuration, its names, its engine."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, WeakSet

from sqlalchemy import Engine, TextClause, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from jobsync_orm.autocommit import Autocommit, Row, limit_of
from jobsync_orm.config import POOL_SIZE, CoordinationConfig
from jobsync_orm.coordinator.admission import MISSING, not_ready
from jobsync_orm.exceptions import ConfigurationError, SchemaNotReady
from jobsync_orm.models import Models, for_app
from jobsync_orm.observe import Audience
from jobsync_orm.queue.options import LONGEST_SEC
from jobsync_orm.queue.statements import QueueStatements
from jobsync_orm.sqlstates import sqlstate
from jobsync_orm.status import WITHIN
from jobsync_orm.tracing import Tracing

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncEngine

    from jobsync_orm.queue.handlers import Handler

__all__ = ["QueueCore"]

_SETTINGS = {
    **dict.fromkeys((f"enable_{way}" for way in ("seqscan", "bitmapscan", "hashjoin", "mergejoin", "material")), "off"),
    "jit": "off",
    "idle_in_transaction_session_timeout": "10s",
}

# Those of the newer revisions that statements name.
NEWEST_COLUMNS = ("max_retries_given", "timeout_given", "trace")

WALK = text("SELECT " + ", ".join(f"set_config('{name}', '{value}', true)" for name, value in _SETTINGS.items()))


class QueueCore:
    """See :class:`~jobsync_orm.JobQueue`."""

    def __init__(
        self,
        config: CoordinationConfig | None = None,
        *,
        engine: Engine | AsyncEngine | None = None,
        session_factory: Callable[[], Any] | None = None,
        max_payload_bytes: int = 1_000_000,
        ageing_sec: float = 60,
        check_types: bool = False,
        wake: bool = True,
    ) -> None:
        if (config is None) == (engine is None):
            raise ConfigurationError("JobQueue needs either a CoordinationConfig or engine=..., to know its database")
        if config is not None and not isinstance(config, CoordinationConfig):
            raise ConfigurationError(
                f"JobQueue needs a CoordinationConfig, not {type(config).__name__}: an engine is given as engine=..."
            )
        if session_factory is not None and (isinstance(session_factory, Session) or not callable(session_factory)):
            what = type(session_factory).__name__
            raise ConfigurationError(
                f"session_factory={what} is no factory, but one object, which all handlers would share: give what "
                "makes sessions, sessionmaker(engine) say"
            )
        if not isinstance(max_payload_bytes, int) or max_payload_bytes < 1:
            raise ConfigurationError(f"max_payload_bytes={max_payload_bytes!r} must be a whole number, at least 1")
        if not isinstance(ageing_sec, int | float) or not 0 < ageing_sec <= LONGEST_SEC:
            raise ConfigurationError(
                f"ageing_sec={ageing_sec!r} must be a number of seconds above 0 and at most {LONGEST_SEC:.0f}; a large "
                "one lets priority alone decide"
            )
        self.config = config if config is not None else CoordinationConfig(engine=engine)
        self.names = self.config.names
        self.statements = QueueStatements(self.names)
        self.max_payload_bytes = max_payload_bytes
        self.ageing_sec = float(ageing_sec)
        self.check_types = bool(check_types)
        self.wakes = bool(wake)
        self.handlers: dict[str, Handler] = {}
        self.tracing: Tracing | None = None
        """Who makes spans of what this process does with the queue; see :mod:`jobsync_orm.tracing`."""
        self.audience = Audience()
        """Who is told what this process does with the queue; see :mod:`jobsync_orm.observe`."""
        self.session_factory = session_factory
        self._engine: Engine | None = None
        self._database: Autocommit | None = None
        self._async_engines: WeakKeyDictionary[asyncio.AbstractEventLoop, AsyncEngine] = WeakKeyDictionary()
        self._engine_guard = threading.RLock()
        _queues.add(self)

    def _forked(self) -> None:
        """This is a child: the connections are the parent's, and another thread may have held the lock."""
        self._engine_guard = threading.RLock()
        engine, self._engine = self._engine, None
        self._database = None
        if engine is not None and engine is not self.config.engine:
            _inherited.append(engine)
        _inherited.extend(self._async_engines.values())
        self._async_engines = WeakKeyDictionary()

    def __repr__(self) -> str:
        url = self.config.sqlalchemy_url()  # of which only this is shown: the rest may hold secrets
        place = f"{url.host or ''}{f':{url.port}' if url.port else ''}/{url.database or ''}"
        types = ", ".join(sorted(self.handlers)) or "none"
        return f"<{type(self).__name__} {self.names.sql('job')} at {place}, handlers: {types}>"

    @property
    def models(self) -> Models:
        """The mapped classes of this queue's tables: ``queue.models.QueuedJob``, ``queue.models.JobAttempt``, ..."""
        return for_app(self.names.appname, self.names.schema)

    @property
    def engine(self) -> Engine:
        """A synchronous engine on the queue's database: the application's, or one of the queue's own."""
        with self._engine_guard:
            if self._engine is None:
                # As many connections as there are handlers with a session at a time: none of them is to wait for one.
                self._engine = self.config.application_engine(POOL_SIZE, max_overflow=-1)
            return self._engine

    @property
    def _autocommit(self) -> Autocommit:
        """Where the queue's own calls send their statements."""
        with self._engine_guard:
            if self._database is None:
                self._database = Autocommit(self.engine, self._not_ready)
            return self._database

    def _walk(self, statement: TextClause, values: Mapping[str, object], within_sec: float | None = None) -> list[Row]:
        """The rows of a statement that is to walk the indexes it is written for, whatever the statistics say.

        The server gives up after ``within_sec`` seconds, or after the engine's own limit.

        The settings for that are the transaction's, as the connection is the application's. If this process stops in
        the middle, the server rolls back before long.
        """
        try:
            with self.engine.execution_options(isolation_level="READ COMMITTED").begin() as connection:
                connection.execute(WALK)
                within_sec = limit_of(self.engine) if within_sec is None else within_sec
                if within_sec is not None:
                    connection.execute(WITHIN, {"limit": f"{within_sec * 1000:.0f}"})
                return list(connection.execute(statement, values))
        except DBAPIError as error:
            if (told := self._not_ready(error)) is None:
                raise
            raise told from error

    def _not_ready(self, error: DBAPIError, callers: bool = False) -> SchemaNotReady | None:
        """What to say of an error that there is because the library's own tables are missing, or older.

        ``callers``: it has ended a transaction that is the caller's.
        """
        state, message = sqlstate(error.orig), str(error.orig)
        ours = (self.names.bare("job"), self.names.bare("token_of"), self.names.schema or "", *NEWEST_COLUMNS)
        if state not in MISSING or not any(name and name in message for name in ours):
            return None
        told = not_ready(self.config)
        if not callers:
            return told
        return SchemaNotReady(f"{told}. PostgreSQL has ended the transaction in which they were needed: roll it back")

    def async_engine(self) -> AsyncEngine:
        """An engine of the queue's own for the running event loop; see :meth:`dispose_async`."""
        loop = asyncio.get_running_loop()
        with self._engine_guard:
            engine = self._async_engines.get(loop)
            if engine is None:
                engine = self._async_engines[loop] = self.config.async_engine()
            return engine

    async def dispose_async(self) -> None:
        """Close what the queue opened in the running event loop. To be awaited before the loop ends."""
        with self._engine_guard:
            engine = self._async_engines.pop(asyncio.get_running_loop(), None)
        if engine is not None:
            await engine.dispose()

    def dispose(self) -> None:
        """Close what the queue opened itself. It may be used again afterwards."""
        with self._engine_guard:
            engine, self._engine = self._engine, None
            self._database = None
        if engine is not None and engine is not self.config.engine:
            engine.dispose()


_queues: WeakSet[QueueCore] = WeakSet()

# Of the parent process. Kept, because to drop a connection would be to end it for the parent too.
_inherited: list[Any] = []


def _forget_in_child() -> None:
    for queue in list(_queues):
        queue._forked()


os.register_at_fork(after_in_child=_forget_in_child)
