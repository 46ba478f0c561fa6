"""Job: the handle a user holds.

    cfg = CoordinationConfig(url="postgresql+psycopg://app@localhost/shop")
    with Job("worker-01", coordination_config=cfg) as job:
        for item in session.query(Item).owned_by(job): ...

A job is one node of the cluster for as long as it runs. Everything it knows about ownership comes from its coordinator,
the one background thread; the methods below that talk to the database use the application's engine (or a small one of
their own) in the calling thread. ``coordination_config=None`` is a standalone job: no database, and everything is its
own.
"""

from __future__ import annotations

import asyncio
import datetime
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from time import clock_gettime
from types import TracebackType
from typing import Any, Self

from sqlalchemy import Engine

from jobsync_orm.config import CoordinationConfig
from jobsync_orm.coordinator import Coordinator
from jobsync_orm.coordinator.session import CLOCK
from jobsync_orm.exceptions import ConfigurationError, NotRunning
from jobsync_orm.hashing import hasher, task_key
from jobsync_orm.naming import Names
from jobsync_orm.pins import Pin, PinBoard, patterns_of
from jobsync_orm.status import ClusterReader
from jobsync_orm.tasks import Task, TaskBook, task_ids

__all__ = ["Job"]

logger = logging.getLogger("jobsync_orm")


class Job:
    """One worker among those that share a database.

    Parameters
    ----------
    node_name : str
        This worker's name, unique in its cluster.
    coordination_config : CoordinationConfig, optional
        Where and how to coordinate. None runs standalone: no database access, and every task is this job's own.
    date : datetime.date or datetime.datetime, optional
        Processing date of audit rows. None takes the database's date at the time a task is added.
    wait_on_enter : float
        Seconds that starting may take: until ``minimum_nodes`` are there and this node has its tokens.
    wait_on_exit : float
        Seconds to stay a member after the ``with`` block has ended.
    lock_provider : callable, optional
        Called with this job before it joins, to register pins.
    clear_existing_locks : bool
        Delete the pins this node created earlier, before ``lock_provider`` runs.
    on_rebalance : callable, optional
        Called after each change of this node's tokens, with a :class:`~jobsync_orm.RebalanceEvent` or without
        argument. Runs in a thread of its own, one call at a time, and may be slow or raise.
    on_revoke : callable, optional
        Called with a :class:`~jobsync_orm.RevokeEvent` (or without argument) when this node has stopped saying yes to
        tokens and is about to hand them over; the hand-over waits for it, at most ``drain_timeout_sec``.

    Raises
    ------
    TypeError
        ``date`` is no date.
    ConfigurationError
        ``node_name`` is no text of 1 to 200 characters without NUL.
    """

    def __init__(
        self,
        node_name: str,
        coordination_config: CoordinationConfig | None = None,
        date: datetime.date | datetime.datetime | None = None,
        wait_on_enter: float = 120,
        wait_on_exit: float = 0,
        lock_provider: Callable[[Job], object] | None = None,
        clear_existing_locks: bool = False,
        on_rebalance: Callable[..., object] | None = None,
        on_revoke: Callable[..., object] | None = None,
    ) -> None:
        if not isinstance(node_name, str) or not 0 < len(node_name) <= 200 or "\0" in node_name:
            raise ConfigurationError(f"node_name {node_name!r} must be text of 1 to 200 characters without NUL")
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
        self._coordinator: Coordinator | None = None
        config = coordination_config
        self.names: Names | None = config.names if config else None
        self.total_tokens = config.total_tokens if config else CoordinationConfig.total_tokens
        self.hash_function = config.hash_function if config else CoordinationConfig.hash_function
        self._token_of = hasher(self.total_tokens, self.hash_function)
        self._engine: Engine | None = None
        self._engine_guard = threading.RLock()  # a signal handler may stop the job in the middle of a call
        self._book: TaskBook | None = None
        self._pins: PinBoard | None = None
        if config is None and on_rebalance is not None:
            logger.warning("%s is standalone: on_rebalance will never be called", node_name)

    # -- life --------------------------------------------------------------------------------------------------

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

        Whatever is raised, Ctrl-C included, this node has left the cluster again.
        """
        config = self.coordination_config
        if config is None:
            return self
        with self._lifecycle:
            self._pid = os.getpid()  # a job made before a fork lives in the process that starts it
            if self._coordinator is not None or self._stopped:
                raise NotRunning(f"{self.node_name} has been started or stopped before; make a new Job for a new start")
            self._coordinator = Coordinator(config, self.node_name, self._on_rebalance, self._on_revoke)
        try:
            deadline = time.monotonic() + self._wait_on_enter
            if config.create_tables:
                from jobsync_orm import migrate

                migrate.upgrade(config)
            if self._clear_existing_locks or self._lock_provider is not None:
                # Pins hashed by other settings would tie down other tasks.
                ClusterReader(self._application_engine(), config.names, 0).check_settings(config)
            if self._clear_existing_locks:
                self.clear_locks_by_creator(self.node_name)
            if self._lock_provider is not None:
                self._lock_provider(self)
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
                if first and self._book is not None:
                    self._write_audit_in_time()
            finally:
                if coordinator is not None:
                    coordinator.stop()
                with self._engine_guard:
                    engine, self._engine = self._engine, None
                    self._book = self._pins = None
                if engine is not None and engine is not getattr(self.coordination_config, "engine", None):
                    engine.dispose()

    def _write_audit_in_time(self) -> None:
        """Write the audit, but do not wait without end for a database that does not answer: leaving matters more."""
        assert self.coordination_config is not None

        def write() -> None:
            try:
                self.write_audit()
            except Exception:
                logger.exception("%s: the audit could not be written while stopping", self.node_name)

        writer = threading.Thread(target=write, name="jobsync-audit", daemon=True)
        writer.start()
        writer.join(self.coordination_config.callback_timeout_sec)
        if writer.is_alive():
            logger.error("%s: the audit has not been written in time while stopping", self.node_name)

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
            self._given_up = True
            if self._coordinator is not None:
                self._coordinator.give_up()
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

    def _running(self) -> Coordinator:
        if self._coordinator is None:
            raise NotRunning(f"{self.node_name} has not been started: use `with Job(...) as job:` or job.start()")
        return self._coordinator

    # -- ownership ---------------------------------------------------------------------------------------------

    def can_claim_task(self, task: Task | Any) -> bool:
        """Whether this node may work on ``task`` now.

        Normally answers from memory. Where this node cannot know for a moment (its connection has just broken, the
        process has been asleep) it waits for certainty, at most ``certainty_wait_sec`` once per interruption, and
        answers False if there is none.

        Parameters
        ----------
        task : Task, int, str, UUID
            Task or task id.

        Returns
        -------
        bool
            True in standalone mode. False before ``start`` and after ``stop``.

        Raises
        ------
        UnstableTaskId, InvalidTaskId
            The id cannot be hashed to the same token by every worker.
        """
        token = self._token_of(task.id if type(task) is Task else task)
        coordinator = self._coordinator
        if coordinator is None:
            return self.coordination_config is None
        view = coordinator.ownership.view
        if clock_gettime(CLOCK) < view.valid_until:
            return view.owned[token] == 1
        return coordinator.ownership.decide(token)

    def task_to_token(self, task_id: Any) -> int:
        """The token ``task_id`` hashes to, in ``[0, total_tokens)``."""
        return self._token_of(task_id.id if isinstance(task_id, Task) else task_id)

    @property
    def my_tokens(self) -> set[int]:
        """The tokens this node owns, as a new set; all of them in standalone mode."""
        if self.coordination_config is None:
            return set(range(self.total_tokens))
        return self._coordinator.ownership.view.tokens() if self._coordinator else set()

    @property
    def token_version(self) -> int:
        """The cluster's epoch as of this node's present tokens; only grows. 0 in standalone mode."""
        return self._coordinator.ownership.held.epoch if self._coordinator else 0

    # -- claims and audit --------------------------------------------------------------------------------------

    def _application_engine(self) -> Engine:
        config = self.coordination_config
        if config is None:
            raise NotRunning(f"{self.node_name} is standalone and has no database")
        with self._engine_guard:
            if self._engine is None:
                self._engine = config.application_engine()
            return self._engine

    def _task_book(self) -> TaskBook:
        if self._book is None:
            assert self.names is not None
            self._book = TaskBook(self._application_engine(), self.names, self.node_name, self._date)
        return self._book

    def set_claim(self, task: Task | Any | Iterable[Task | Any]) -> list[str]:
        """Record an exclusive claim on each task, whether or not its token is this node's.

        Parameters
        ----------
        task : Task, task id, or an iterable of them
            Text, bytes and mappings are one id and never taken apart.

        Returns
        -------
        list of str
            Text of the ids now claimed by this node (claims it already had included), ascending. A task missing from
            it is claimed by another node. Empty in standalone mode.
        """
        tokens = {task_key(id): self._token_of(id) for id in task_ids(task)}
        if self.coordination_config is None:
            return []
        incarnation = self._running().incarnation
        if not tokens or not incarnation:
            return []
        return sorted(self._task_book().claim(tokens, incarnation, owned=False))

    def release_claim(self, task: Task | Any | Iterable[Task | Any]) -> list[str]:
        """End this node's claims on these tasks; returns the text of the ids whose claim ended."""
        keys = [task_key(id) for id in task_ids(task)]
        if self.coordination_config is None:
            return []
        incarnation = self._running().incarnation
        return sorted(self._task_book().release(keys, incarnation)) if keys and incarnation else []

    def add_task(self, task: Task | Any) -> bool:
        """Claim ``task`` and put it down for the audit, if it is this node's to do.

        Returns
        -------
        bool
            False where the task is not this node's, or is claimed by another. Always False in standalone mode, which
            has no audit.
        """
        id = task.id if isinstance(task, Task) else task
        key, token = task_key(id), self._token_of(id)
        if self.coordination_config is None or not self.can_claim_task(id):
            return False
        claimed = self._task_book().claim({key: token}, self._running().incarnation, owned=True)
        if key not in claimed:
            return False
        self._task_book().add(key, token, claimed[key])
        return True

    def write_audit(self) -> None:
        """Write the added tasks to the audit and end their claims, in one transaction.

        A database error raises, and the tasks stay down for the next call. (If the connection breaks after the database
        has committed and before it could say so, the next call writes them again.)
        """
        if self.coordination_config is not None and self._book is not None:
            self._book.write(self._running().incarnation or "00000000-0000-0000-0000-000000000000")

    def get_audit(self) -> list[dict[str, str]]:
        """Audit rows of the processing date, of all nodes, oldest first.

        Returns
        -------
        list of dict
            With keys ``node`` and ``task_id``. Empty in standalone mode.
        """
        return [] if self.coordination_config is None else self._task_book().read()

    # -- pins --------------------------------------------------------------------------------------------------

    def _pin_board(self) -> PinBoard:
        if self._pins is None:
            assert self.names is not None
            self._pins = PinBoard(self._application_engine(), self.names, self.node_name)
        return self._pins

    def register_lock(
        self,
        task_id: Task | Any,
        node_patterns: str | Sequence[str],
        reason: str | None = None,
        expires_in_days: float | None = None,
        *,
        ephemeral: bool = False,
    ) -> None:
        """Pin a task to the nodes whose names match a SQL LIKE pattern, replacing its earlier pin.

        Takes effect at once. Tasks that hash to the same token go with it.

        Parameters
        ----------
        task_id : Task, int, str, UUID
            The task, never a token.
        node_patterns : str or sequence of str
            A pattern, or several in order of preference: the first one that any live node matches decides. Where none
            matches, the task waits and is reported as parked.
        reason : str, optional
            Stored with the pin.
        expires_in_days : float, optional
            Days until the pin ends, by the database's clock. None or 0: never.
        ephemeral : bool
            Delete the pin when this node leaves or dies. Pins stay otherwise.

        Raises
        ------
        LockConflict
            Another pinned task shares the token, and no node name can match both; nothing is stored.
        InvalidPattern, UnstableTaskId, InvalidTaskId, ConfigurationError
            Nothing is stored.
        """
        pin = self._pin(task_id, node_patterns, reason)
        if self.coordination_config is not None:
            self._pin_board().register([pin], expires_in_days=expires_in_days, ephemeral=ephemeral)

    def register_locks_bulk(
        self,
        locks: Iterable[tuple[Task | Any, str | Sequence[str], str | None]],
        expires_in_days: float | None = None,
        *,
        ephemeral: bool = False,
    ) -> None:
        """Pin many tasks, all or none, in a constant number of statements.

        Parameters
        ----------
        locks : iterable of (task_id, node_patterns, reason)
            As in :meth:`register_lock`. Of two entries for one task the later counts.
        expires_in_days, ephemeral
            As in :meth:`register_lock`, for all of them.

        Raises
        ------
        ValueError
            An entry has not exactly three parts.
        LockConflict, InvalidPattern, UnstableTaskId, InvalidTaskId, ConfigurationError
            As in :meth:`register_lock`; nothing is stored.
        """
        pins = []
        for entry in locks:
            if len(entry) != 3:
                raise ValueError(f"{entry!r} must be (task_id, node_patterns, reason)")
            pins.append(self._pin(*entry))
        if self.coordination_config is not None:
            self._pin_board().register(pins, expires_in_days=expires_in_days, ephemeral=ephemeral)

    def _pin(self, task_id: Any, node_patterns: str | Sequence[str], reason: str | None) -> Pin:
        id = task_id.id if isinstance(task_id, Task) else task_id
        key = task_key(id)
        return Pin(key, self._token_of(id), patterns_of(key, node_patterns), reason)

    def clear_lock(self, task_id: Task | Any) -> bool:
        """Delete the pin of one task. Returns whether there was one; False in standalone mode."""
        key = task_key(task_id.id if isinstance(task_id, Task) else task_id)
        return self.coordination_config is not None and self._pin_board().clear_task(key) > 0

    def clear_locks_by_creator(self, creator: str) -> int:
        """Delete the pins that the node ``creator`` registered. Returns how many; 0 in standalone mode."""
        return 0 if self.coordination_config is None else self._pin_board().clear_by_creator(creator)

    def clear_all_locks(self) -> int:
        """Delete every pin of the cluster. Returns how many; 0 in standalone mode."""
        return 0 if self.coordination_config is None else self._pin_board().clear_all()

    def list_locks(self) -> list[dict[str, Any]]:
        """Unexpired pins, newest first.

        Returns
        -------
        list of dict
            With keys ``task_id``, ``node_patterns`` (list), ``reason``, ``created_at``, ``created_by`` and
            ``expires_at``. Empty in standalone mode.
        """
        return [] if self.coordination_config is None else self._pin_board().list()

    # -- the cluster -------------------------------------------------------------------------------------------

    def am_i_healthy(self) -> bool:
        """Whether this node's lease is running and its connection works. True in standalone mode. Never raises."""
        if self.coordination_config is None:
            return True
        return self._coordinator is not None and self._coordinator.healthy

    def am_i_leader(self) -> bool:
        """Whether this node leads, as of its last heartbeat. False in standalone mode."""
        return self._coordinator is not None and self._coordinator.leads

    def _reader(self) -> ClusterReader | None:
        """None in standalone mode, which has no cluster to read about."""
        config = self.coordination_config
        if config is None:
            return None
        return ClusterReader(self._application_engine(), config.names, config.heartbeat_timeout_sec)

    @property
    def nodes(self) -> list[dict[str, Any]]:
        """The live nodes, oldest first, each a dict with ``name``; in standalone mode this one."""
        reader = self._reader()
        if reader is None:
            return [{"name": self.node_name}]
        return [{"name": node["name"]} for node in sorted(reader.active_nodes(), key=lambda node: node["ordinal"])]

    def get_active_nodes(self) -> list[dict[str, Any]]:
        """The nodes whose heartbeat is fresh by the database's clock, ordered by name.

        Returns
        -------
        list of dict
            With keys ``name``, ``created_on``, ``last_heartbeat``, ``ordinal``, ``state``, ``weight`` and ``tokens``.
            Empty in standalone mode.
        """
        reader = self._reader()
        return [] if reader is None else reader.active_nodes()

    def get_dead_nodes(self) -> list[str]:
        """Names of nodes that are registered but whose heartbeat is stale, ascending. Empty in standalone mode."""
        reader = self._reader()
        return [] if reader is None else reader.dead_nodes()

    def get_coordination_status(self) -> dict[str, Any]:
        """A snapshot for people and monitoring.

        Returns
        -------
        dict
            ``{"coordination_enabled": False}`` in standalone mode; otherwise also ``node_name``, ``state`` (``new``,
            ``joining``, ``active``, ``reconnecting``, ``leaving`` or ``stopped``), ``is_leader``, ``my_tokens``
            (count), ``token_version``, ``total_tokens``, ``last_heartbeat`` (datetime, UTC, or None), and of the
            cluster ``active_nodes``, ``parked_tokens``, ``draining_tokens`` (counts) and ``recent_events`` (the last 20
            rebalances, newest first).
        """
        reader = self._reader()
        if reader is None:
            return {"coordination_enabled": False}
        coordinator = self._running()
        beat = coordinator.last_beat_at
        return {
            "coordination_enabled": True,
            "node_name": self.node_name,
            "state": coordinator.state,
            "is_leader": coordinator.leads,
            "my_tokens": coordinator.ownership.view.count,
            "token_version": coordinator.ownership.held.epoch,
            "total_tokens": self.total_tokens,
            "last_heartbeat": None if beat is None else datetime.datetime.fromtimestamp(beat, datetime.UTC),
            **reader.counts(),
            "recent_events": reader.rebalances(20),
        }
