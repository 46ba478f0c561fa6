"""What a job can tell about its cluster."""

from __future__ import annotations

import datetime
from typing import Any

from jobsync_orm.job.ownership import OwnershipCalls
from jobsync_orm.status import ClusterReader

__all__ = ["ClusterCalls"]


class ClusterCalls(OwnershipCalls):
    """See :class:`~jobsync_orm.Job`."""

    def am_i_healthy(self) -> bool:
        """Whether this node's lease is running and its connection works. True in standalone mode. Never raises."""
        if self.coordination_config is None:
            return True
        return self._coordinator is not None and self._coordinator.healthy

    def am_i_drained(self) -> bool:
        """Whether an operator has drained this node: it gives up its tokens and takes nothing new. From memory, as of
        the last heartbeat."""
        coordinator = self._coordinator
        return coordinator is not None and coordinator.drained

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
