"""Pins: tie tasks to nodes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from jobsync_orm.hashing import task_key
from jobsync_orm.job.ownership import OwnershipCalls
from jobsync_orm.pins import Pin, PinBoard, patterns_of, reason_of
from jobsync_orm.status import ClusterReader
from jobsync_orm.tasks import Task

__all__ = ["PinCalls"]


class PinCalls(OwnershipCalls):
    """See :class:`~jobsync_orm.Job`."""

    _pins: PinBoard | None

    def _reset(self) -> None:
        super()._reset()
        self._pins = None

    def _before_joining(self) -> None:
        super()._before_joining()
        config = self.coordination_config
        if config is not None and (self._clear_existing_locks or self._lock_provider is not None):
            # Pins hashed by other settings would tie down other tasks.
            ClusterReader(self._application_engine(), config.names, 0).check_settings(config)
        if self._clear_existing_locks:
            self.clear_locks_by_creator(self.node_name)
        if self._lock_provider is not None:
            self._lock_provider(self)

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
        ClusterMismatch
            The cluster's number of tokens has been changed since this job read it; nothing is stored.
        InvalidPattern, UnstableTaskId, InvalidTaskId, ConfigurationError
            Nothing is stored.
        """
        pin = self._pin(task_id, node_patterns, reason)
        if self.coordination_config is not None:
            self._register([pin], expires_in_days, ephemeral)

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
        LockConflict, ClusterMismatch, InvalidPattern, UnstableTaskId, InvalidTaskId, ConfigurationError
            As in :meth:`register_lock`; nothing is stored.
        """
        pins = []
        for entry in locks:
            if len(entry) != 3:
                raise ValueError(f"{entry!r} must be (task_id, node_patterns, reason)")
            pins.append(self._pin(*entry))
        if self.coordination_config is not None:
            self._register(pins, expires_in_days, ephemeral)

    def _register(self, pins: Sequence[Pin], expires_in_days: float | None, ephemeral: bool) -> None:
        self._pin_board().register(pins, self.total_tokens, expires_in_days=expires_in_days, ephemeral=ephemeral)

    def _pin(self, task_id: Any, node_patterns: str | Sequence[str], reason: str | None) -> Pin:
        id = task_id.id if isinstance(task_id, Task) else task_id
        key = task_key(id)
        return Pin(key, self._token_of(id), patterns_of(key, node_patterns), reason_of(key, reason))

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
