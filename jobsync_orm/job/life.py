"""The life of a job: start, stop, and what lasts from one to the other."""

from __future__ import annotations

import asyncio
import datetime
import logging
import os
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from sqlalchemy import Engine

from jobsync_orm.config import CoordinationConfig
from jobsync_orm.coordinator import Coordinator
from jobsync_orm.exceptions import ConfigurationError, ForkedJob, NotRunning
from jobsync_orm.hashing import hasher
from jobsync_orm.logs import fields
from jobsync_orm.naming import Names, is_storable
from jobsync_orm.observe import Audience, NodeStopped

__all__ = ["Life", "check_node_name"]

logger = logging.getLogger("jobsync_orm")


def check_node_name(node_name: Any) -> None:
    """Raise ConfigurationError if no node may have this name."""
    if not isinstance(node_name, str) or not 0 < len(node_name) <= 200 or not is_storable(node_name):
        raise ConfigurationError(
            f"node_name {node_name!r} must be text of 1 to 200 characters without NUL and lone surrogates"
        )


class Life:
    """See :class:`~jobsync_orm.Job`."""

    def __init__(
        self,
        node_name: str,
        coordination_config: CoordinationConfig | None = None,
        date: datetime.date | datetime.datetime | None = None,
        wait_on_enter: float = 120,
        wait_on_exit: float = 0,
        lock_provider: Callable[[Any], object] | None = None,
        clear_existing_locks: bool = False,
        on_rebalance: Callable[..., object] | None = None,
        on_revoke: Callable[..., object] | None = None,
    ) -> None:
        check_node_name(node_name)
        if isinstance(date, datetime.datetime):
            date = date.date()
        elif date is not None and not isinstance(date, datetime.date):
            raise TypeError(f"date must be None, datetime.date or datetime.datetime, not {type(date).__name__}")
        if not isinstance(coordination_config, CoordinationConfig | None):
            raise ConfigurationError(
                f"Job needs a CoordinationConfig, not {type(coordination_config).__name__}: "
                "write CoordinationConfig(url=...) or CoordinationConfig(engine=...)"
            )
        self.node_name = node_name
        self.coordination_config = coordination_config
        self._wait_on_enter = abs(wait_on_enter)
        self._wait_on_exit = abs(wait_on_exit)
        self._lock_provider = lock_provider
        self._clear_existing_locks = clear_existing_locks
        self._on_rebalance = on_rebalance
        self._on_revoke = on_revoke
        self._date = date
        self._lifecycle = threading.RLock()
        self._stopped = self._given_up = False
        self._pid = os.getpid()
        self.audience = Audience()
        """Who is told what happens to this node; see :mod:`jobsync_orm.observe`."""
        self._coordinator: Coordinator | None = None
        config = coordination_config
        self.names: Names | None = config.names if config else None
        self.total_tokens = config.total_tokens if config else CoordinationConfig.total_tokens
        self.hash_function = config.hash_function if config else CoordinationConfig.hash_function
        self._token_of = hasher(self.total_tokens, self.hash_function)
        # What owned_by has made for this job, by class. It goes with the job, since it refers to it.
        self.owned_by_made: dict[type, Any] = {}
        self._engine: Engine | None = None
        self._engine_guard = threading.RLock()  # a signal handler may stop the job in the middle of a call
        self._reset()
        if config is None and on_rebalance is not None:
            logger.warning(
                "%s is standalone: on_rebalance will never be called", node_name, extra=fields("standalone", node_name)
            )

    def start(self) -> Self:
        """Join the cluster and wait until this node is a full member with its tokens.

        Raises
        ------
        TimeoutError
            ``wait_on_enter`` has passed; the message names who was there.
        NodeNameInUse, ClusterMismatch, SchemaNotReady, PooledConnection
            Why this node may not join.
        NotRunning
            It has been started before.
        ForkedJob
            By the process that this one is a fork of.

        Whatever is raised, Ctrl-C included, this node has left the cluster again.
        """
        config = self.coordination_config
        if config is None:
            return self
        self.check_process()
        with self._lifecycle:
            self._pid = os.getpid()  # a job made before a fork lives in the process that starts it
            if self._coordinator is not None or self._stopped:
                raise NotRunning(f"{self.node_name} has been started or stopped before; make a new Job for a new start")
            self._coordinator = Coordinator(
                config, self.node_name, self._on_rebalance, self._on_revoke, audience=self.audience
            )
        try:
            deadline = time.monotonic() + self._wait_on_enter
            if config.create_tables:
                from jobsync_orm import migrate

                migrate.upgrade(config)
            self._before_joining()
            if self._given_up:
                raise NotRunning(f"{self.node_name} was stopped while it was starting")
            self._coordinator.start(max(0.0, deadline - time.monotonic()))
            if self._given_up:
                raise NotRunning(f"{self.node_name} was stopped while it was starting")
        except BaseException:
            self.stop()
            raise
        return self

    def stop(self) -> None:
        """Leave the cluster: write the audit, say no to everything, run ``on_revoke``, hand the tokens over.

        May be called more than once, without ``start``, and in a forked child, where it does nothing.
        """
        if os.getpid() != self._pid:
            return
        with self._lifecycle:
            first, self._stopped = not self._stopped, True
            coordinator = self._coordinator
            try:
                if first:
                    self._before_leaving()
            finally:
                if coordinator is not None:
                    coordinator.stop()
                with self._engine_guard:
                    engine, self._engine = self._engine, None
                    self._reset()
                if engine is not None and engine is not getattr(self.coordination_config, "engine", None):
                    engine.dispose()
                if first:
                    self.audience.tell(NodeStopped(self.node_name))

    def give_up(self) -> None:
        """Make a :meth:`start` that waits in another thread leave the cluster and raise :class:`NotRunning`. Returns at
        once."""
        self._given_up = True
        if self._coordinator is not None:
            self._coordinator.give_up()

    # What the parts of a job have to do at these moments.

    def _reset(self) -> None:
        """Forget what was made with the engine."""

    def _before_joining(self) -> None:
        """Runs before this node is a member."""

    def _before_leaving(self) -> None:
        """Runs while this node is still a member."""

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._wait_on_exit and self.coordination_config is not None and exc_type is None:
            time.sleep(self._wait_on_exit)
        self.stop()

    async def __aenter__(self) -> Self:
        starting = asyncio.ensure_future(asyncio.to_thread(self.start))
        try:
            return await asyncio.shield(starting)
        except asyncio.CancelledError:
            # The thread cannot be cancelled, and there may be no other one to spare: tell start() to give up, which
            # leaves the cluster, and wait for it.
            self.give_up()
            await asyncio.gather(starting, return_exceptions=True)
            raise

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._wait_on_exit and self.coordination_config is not None and exc_type is None:
            await asyncio.sleep(self._wait_on_exit)
        await asyncio.to_thread(self.stop)

    @property
    def is_running(self) -> bool:
        """Whether this job may own rows: it has been started and not stopped. Always True in standalone mode."""
        if self.coordination_config is None:
            return True
        return self._coordinator is not None and self._coordinator.state not in ("new", "stopped")

    @property
    def incarnation(self) -> str:
        """This life of the node in its cluster, a UUID; another one after the node was taken for dead and has joined
        anew. Empty while it is no member, and in standalone mode."""
        return "" if self._coordinator is None else self._coordinator.incarnation

    @property
    def last_heartbeat_at(self) -> float | None:
        """``time.time()`` of the last heartbeat that was answered; None if none was, and in standalone mode."""
        return None if self._coordinator is None else self._coordinator.last_beat_at

    def check_process(self) -> None:
        """Raise ForkedJob in a fork of the process that started this job."""
        if self._coordinator is not None and os.getpid() != self._pid:
            raise ForkedJob(
                f"{self.node_name} was started by process {self._pid}, and this process, {os.getpid()}, is a fork of "
                "it, in which it has neither thread nor connection and owns nothing. Make and start a Job in each "
                "process after the fork: in gunicorn's post_worker_init, uWSGI's @postfork, the initializer of a pool"
            )

    def _running(self) -> Coordinator:
        self.check_process()
        if self._coordinator is None:
            raise NotRunning(f"{self.node_name} has not been started: use `with Job(...) as job:` or job.start()")
        return self._coordinator

    def _application_engine(self) -> Engine:
        config = self.coordination_config
        if config is None:
            raise NotRunning(f"{self.node_name} is standalone and has no database")
        self.check_process()
        with self._engine_guard:
            if self._engine is None:
                self._engine = config.application_engine()
            return self._engine
