"""What a cluster looks like from outside: read-only statements for people and monitoring."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Engine, Row, text
from sqlalchemy.exc import ProgrammingError

from jobsync_orm.config import CoordinationConfig
from jobsync_orm.coordinator.admission import MISSING, check_settings, not_ready
from jobsync_orm.naming import Names

__all__ = ["ClusterReader"]

# For a statement; and for how long the server keeps the transaction of a process that does not go on after one.
WITHIN = text(
    "SELECT set_config('statement_timeout', :limit, true),"
    " set_config('idle_in_transaction_session_timeout', :limit, true)"
)


class ClusterReader:
    """Reads one cluster's tables. Each method is one statement that locks nothing.

    Parameters
    ----------
    engine : Engine
        The application's engine.
    names : Names
        The cluster.
    heartbeat_timeout_sec : float
        Age from which a heartbeat counts as stale.
    """

    def __init__(self, engine: Engine, names: Names, heartbeat_timeout_sec: float) -> None:
        self._engine = engine
        self._timeout = heartbeat_timeout_sec
        self._node, self._token, self._rebalance = names.text("node"), names.text("token"), names.text("rebalance")
        self._cluster = names.text("cluster")

    def _rows(self, sql: str, **values: object) -> list[Row[*tuple[Any, ...]]]:
        with self._engine.connect() as connection:
            return list(connection.execute(text(sql), values))

    def check_settings(self, config: CoordinationConfig) -> None:
        """Refuse what :class:`~jobsync_orm.coordinator.admission.Admission` refuses, before anything is written."""
        try:
            rows = self._rows(f"SELECT total_tokens, hash_function, protocol_version FROM {self._cluster}")
        except ProgrammingError as error:
            if getattr(error.orig, "sqlstate", None) not in MISSING:
                raise
            raise not_ready(config) from None
        check_settings(config, rows[0] if rows else None)

    def active_nodes(self) -> list[dict[str, Any]]:
        """Nodes with a fresh heartbeat, by name."""
        rows = self._rows(
            f"SELECT name, registered_at AS created_on, last_heartbeat, ordinal, state, weight,"
            f" (SELECT count(*) FROM {self._token} t WHERE t.node = n.name) AS tokens FROM {self._node} n"
            " WHERE state <> 'away' AND last_heartbeat > clock_timestamp() - :timeout * interval '1 second'"
            " ORDER BY name",
            timeout=self._timeout,
        )
        return [dict(row._mapping) for row in rows]

    def dead_nodes(self) -> list[str]:
        """Names of registered nodes with a stale heartbeat, ascending."""
        rows = self._rows(
            f"SELECT name FROM {self._node} WHERE state <> 'away'"
            " AND last_heartbeat <= clock_timestamp() - :timeout * interval '1 second' ORDER BY name",
            timeout=self._timeout,
        )
        return [row[0] for row in rows]

    def counts(self) -> dict[str, int]:
        """``active_nodes``, ``parked_tokens`` (without a registered owner) and ``draining_tokens``."""
        (row,) = self._rows(
            f"SELECT (SELECT count(*) FROM {self._node} WHERE state <> 'away') AS active_nodes,"
            f" count(*) FILTER (WHERE NOT EXISTS (SELECT 1 FROM {self._node} n WHERE n.name = t.node))"
            " AS parked_tokens, count(*) FILTER (WHERE next_node IS NOT NULL) AS draining_tokens"
            f" FROM {self._token} t"
        )
        return dict(row._mapping)

    def rebalances(self, limit: int) -> list[dict[str, Any]]:
        """The latest plans that moved tokens, newest first."""
        rows = self._rows(
            "SELECT triggered_at, trigger_reason, leader_node, nodes_before, nodes_after, tokens_moved, duration_ms,"
            f" epoch FROM {self._rebalance} ORDER BY id DESC LIMIT :limit",
            limit=limit,
        )
        return [dict(row._mapping) for row in rows]
