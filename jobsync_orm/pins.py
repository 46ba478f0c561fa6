"""Pins: locks that tie tasks to workers by SQL LIKE patterns, with ordered fallback.

A pin belongs to a task, and takes the task's token with it. Every change raises the cluster's revision and notifies,
so the leader replans at once; a pin that expires is acted on when it expires.

Registration is one transaction of a constant number of statements. It takes an advisory transaction lock, so that two
registrations cannot each miss the other's conflict, then the lock table as any writer does, so that the number of
tokens does not change until its rows are stored, and reads and writes lock rows; nothing the coordinator does waits
for it. The server ends it after 10 idle seconds, so a process that is paused in it blocks other registrations for no
longer than that. The cluster row is raised by a statement of its own afterwards: locked until a COMMIT that this
process still has to send, it would stop the whole cluster if the process were paused. If the process is killed in
between, the leader's periodic plan finds the pins.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Engine, TextClause, text

from jobsync_orm.coordinator.session import array
from jobsync_orm.exceptions import ClusterMismatch, ConfigurationError, InvalidPattern, LockConflict
from jobsync_orm.like import can_meet, compile_pattern
from jobsync_orm.naming import Names, is_storable
from jobsync_orm.sqlstates import repeated

__all__ = ["Pin", "PinBoard", "check_conflicts", "patterns_of", "reason_of"]

# A hundred years. Past the year 9999 no driver could read the moment at which it expires.
MOST_DAYS = 36_600


@dataclass(frozen=True, slots=True)
class Pin:
    """One pin to be registered."""

    task_id: str
    token_id: int
    patterns: tuple[str, ...]
    reason: str | None


def patterns_of(task_id: str, node_patterns: str | Sequence[str]) -> tuple[str, ...]:
    """One pattern or an ordered list of them, checked.

    Raises
    ------
    InvalidPattern
        No pattern, one that is no text, or one that PostgreSQL would refuse.
    """
    patterns = (node_patterns,) if isinstance(node_patterns, str) else tuple(node_patterns)
    if not patterns:
        raise InvalidPattern(f"task {task_id!r}: give at least one node pattern; '%' matches every node")
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise InvalidPattern(f"task {task_id!r}: node pattern {pattern!r} is no text")
        if not pattern:
            raise InvalidPattern(f"task {task_id!r}: an empty node pattern matches no node; '%' matches every node")
        compile_pattern(pattern)  # cached, so that ten thousand pins to one pattern check it once
    return patterns


def reason_of(task_id: str, reason: str | None) -> str | None:
    """The reason given for a pin, checked.

    Raises
    ------
    ConfigurationError
        It has a character that PostgreSQL cannot store.
    """
    if reason is not None and not is_storable(reason):
        raise ConfigurationError(
            f"task {task_id!r}: reason={reason[:80]!r} has a NUL character or a lone surrogate, which PostgreSQL "
            "cannot store: leave it out"
        )
    return reason


class PinBoard:
    """The pins of one cluster.

    Parameters
    ----------
    engine : Engine
        The application's engine.
    names : Names
        The cluster.
    node : str
        Creator of the pins registered here.
    """

    def __init__(self, engine: Engine, names: Names, node: str) -> None:
        self._autocommit = engine.execution_options(isolation_level="AUTOCOMMIT")
        # Who waits for another's pins is to see them, whatever the default of the database is.
        self._engine = engine.execution_options(isolation_level="READ COMMITTED")
        self._node = node
        lock, cluster = names.text("lock"), names.text("cluster")
        self._limits = text("SET LOCAL idle_in_transaction_session_timeout = '10s'")
        self._serialise = text(f"SELECT pg_advisory_xact_lock({names.advisory_key('pins')})")
        self._hold = text(f"LOCK TABLE {lock} IN ROW EXCLUSIVE MODE")
        self._total = text(f"SELECT total_tokens FROM {cluster}")
        self._present = text(f"""
            SELECT token_id, task_id, node_patterns FROM {lock}
            WHERE token_id = ANY (CAST(:tokens AS int[])) AND (expires_at IS NULL OR expires_at > clock_timestamp())""")
        self._announce = text(
            f"UPDATE {cluster} SET pins_revision = pins_revision + 1 RETURNING pg_notify('{names.cluster_channel}', '')"
        )
        self._store = text(f"""
            INSERT INTO {lock} AS l (task_id, token_id, node_patterns, reason, created_at, created_by, expires_at,
                ephemeral)
            SELECT x.task_id, x.token_id, x.patterns, x.reason, clock_timestamp(), :node,
                clock_timestamp() + CAST(:days AS float8) * interval '1 day', :ephemeral
            FROM json_to_recordset(CAST(:pins AS json))
                AS x (task_id text, token_id int, patterns jsonb, reason text)
            ON CONFLICT (task_id) DO UPDATE SET token_id = excluded.token_id,
                node_patterns = excluded.node_patterns, reason = excluded.reason,
                created_at = excluded.created_at, created_by = excluded.created_by,
                expires_at = excluded.expires_at, ephemeral = excluded.ephemeral""")
        self._clear_by = text(f"DELETE FROM {lock} WHERE created_by = :creator")
        self._clear_task = text(f"DELETE FROM {lock} WHERE task_id = :task_id")
        self._clear_all = text(f"DELETE FROM {lock}")
        self._list = text(f"""
            SELECT task_id, node_patterns, reason, created_at, created_by, expires_at FROM {lock}
            WHERE expires_at IS NULL OR expires_at > clock_timestamp() ORDER BY created_at DESC, task_id""")

    def register(
        self, pins: Sequence[Pin], total_tokens: int, *, expires_in_days: float | None, ephemeral: bool
    ) -> None:
        """Store pins, whose tokens are of so many, replacing the tasks' old ones; all of them or none.

        Raises
        ------
        ClusterMismatch
            The cluster has another number of tokens by now; nothing is stored.
        LockConflict
            Two pins share a token and no node name can match both; nothing is stored.
        """
        if expires_in_days is not None and not 0 <= expires_in_days <= MOST_DAYS:
            raise ConfigurationError(
                f"expires_in_days={expires_in_days!r} must be a number of days, at most {MOST_DAYS}, or 0 or None for "
                "never"
            )
        latest = {pin.task_id: pin for pin in pins}
        if not latest:
            return
        pins_json = json.dumps(
            [
                {"task_id": pin.task_id, "token_id": pin.token_id, "patterns": pin.patterns, "reason": pin.reason}
                for pin in latest.values()
            ]
        )
        tokens = array({pin.token_id for pin in latest.values()})
        with self._engine.begin() as connection:
            connection.execute(self._limits)
            connection.execute(self._serialise)
            connection.execute(self._hold)
            self._check_total(connection.execute(self._total).scalar_one(), total_tokens)
            stored = connection.execute(self._present, {"tokens": tokens})
            others = [Pin(row[1], row[0], tuple(row[2]), None) for row in stored if row[1] not in latest]
            check_conflicts(others, latest.values())
            values = {"pins": pins_json, "node": self._node, "days": expires_in_days or None, "ephemeral": ephemeral}
            connection.execute(self._store, values)
        self._tell()

    @staticmethod
    def _check_total(theirs: int, mine: int) -> None:
        if mine != theirs:
            raise ClusterMismatch(
                f"the cluster has {theirs} tokens now, and these pins were computed with total_tokens={mine}: restart "
                f"this process with total_tokens={theirs}, and register them again"
            )

    def _tell(self) -> None:
        self._send(self._announce, {})

    def _send(self, statement: TextClause, values: dict[str, str]) -> int:
        def send() -> int:
            with self._autocommit.connect() as connection:
                return connection.execute(statement, values).rowcount

        return repeated(send)

    def clear_by_creator(self, creator: str) -> int:
        """Delete the pins one node created. Returns how many."""
        return self._clear(self._clear_by, {"creator": creator})

    def clear_task(self, task_id: str) -> int:
        """Delete the pin of one task. Returns how many, 0 or 1."""
        return self._clear(self._clear_task, {"task_id": task_id})

    def clear_all(self) -> int:
        """Delete every pin. Returns how many."""
        return self._clear(self._clear_all, {})

    def _clear(self, statement: TextClause, values: dict[str, str]) -> int:
        count = self._send(statement, values)
        if count:
            self._tell()
        return count

    def list(self) -> list[dict[str, Any]]:
        """Unexpired pins, newest first."""
        with self._autocommit.connect() as connection:
            return [dict(row._mapping) for row in connection.execute(self._list)]


def check_conflicts(present: Iterable[Pin], new: Iterable[Pin]) -> None:
    """Refuse pins of which no node name could satisfy both.

    Parameters
    ----------
    present : iterable of Pin
        Those that are there.
    new : iterable of Pin
        Those that are to be; they are compared with those and with each other.

    Raises
    ------
    LockConflict
        It names the token and both tasks.
    """
    by_token: dict[int, dict[tuple[str, ...], str]] = {}
    for pin in present:
        by_token.setdefault(pin.token_id, {}).setdefault(pin.patterns, pin.task_id)
    known: dict[tuple[tuple[str, ...], tuple[str, ...]], bool] = {}
    for pin in new:
        others = by_token.setdefault(pin.token_id, {})
        for patterns, task_id in others.items():
            if patterns == pin.patterns:
                continue
            pair = (patterns, pin.patterns)
            if pair not in known:
                known[pair] = any(can_meet(p, q) for p in patterns for q in pin.patterns)
            if not known[pair]:
                raise LockConflict(
                    f"task {pin.task_id!r} {list(pin.patterns)} and task {task_id!r} {list(patterns)} share token "
                    f"{pin.token_id}, and no node name matches both: give them a common fallback pattern",
                    pin.token_id,
                    (pin.task_id, task_id),
                )
        others.setdefault(pin.patterns, pin.task_id)
