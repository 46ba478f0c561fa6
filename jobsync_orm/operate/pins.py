"""The pins of a cluster, for operators. What changes them is :class:`~jobsync_orm.pins.PinBoard`, as for a job.

| statement | locks | if the process stops right there |
|---|---|---|
| list, parked | nothing | nothing |
| add, clear | see ``jobsync_orm/pins.py`` | see there |
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import Engine, text

from jobsync_orm.autocommit import Autocommit, Row
from jobsync_orm.exceptions import ConfigurationError
from jobsync_orm.hashing import task_key, task_to_token
from jobsync_orm.naming import Names
from jobsync_orm.operate.missing import no_cluster, ready
from jobsync_orm.pins import Pin, PinBoard, patterns_of, reason_of

__all__ = ["StoredPin", "add_pin", "list_pins", "parked_pins"]

# A StoredPin, of lock l.
PIN = (
    "l.task_id, l.token_id, l.node_patterns, l.reason, l.created_by, l.created_at, l.expires_at,"
    " coalesce(l.expires_at <= clock_timestamp(), false), l.ephemeral"
)


@dataclass(frozen=True, slots=True)
class StoredPin:
    """A pin as it is stored.

    Attributes
    ----------
    task_id : str
    token_id : int
    patterns : tuple of str
        In order of preference.
    reason : str or None
    created_by : str
        A node, or whoever was named when it was added.
    created_at : datetime
    expires_at : datetime or None
        None: never.
    expired : bool
    ephemeral : bool
        Whether it ends with the node that made it.
    """

    task_id: str
    token_id: int
    patterns: tuple[str, ...]
    reason: str | None
    created_by: str
    created_at: datetime.datetime
    expires_at: datetime.datetime | None
    expired: bool
    ephemeral: bool


def list_pins(
    engine: Engine, names: Names, *, limit: int = 100, created_by: str | None = None, expired: bool = False
) -> list[StoredPin]:
    """Pins, newest first.

    Parameters
    ----------
    engine, names : Engine, Names
        The cluster.
    limit : int
        At most so many.
    created_by : str, optional
        Only those of this creator.
    expired : bool
        Those that have expired as well.

    Raises
    ------
    ConfigurationError
        ``limit`` is below 1.
    SchemaNotReady
        There are no tables.
    """
    if limit < 1:
        raise ConfigurationError(f"limit={limit!r} must be at least 1")
    found = text(f"""
        SELECT {PIN} FROM {names.text("lock")} l
        WHERE (CAST(:creator AS text) IS NULL OR created_by = CAST(:creator AS text))
            AND (:expired OR expires_at IS NULL OR expires_at > clock_timestamp())
        ORDER BY created_at DESC, task_id LIMIT :most""")
    with ready(names):
        rows, _ = Autocommit(engine).repeat(found, {"creator": created_by, "expired": expired, "most": limit})
    return [_stored(row) for row in rows]


def parked_pins(engine: Engine, names: Names, *, limit: int = 100) -> list[StoredPin]:
    """Pins that count, on tokens nobody has: what parks them. By token, the older pin of a token first.

    Parameters
    ----------
    engine, names : Engine, Names
        The cluster.
    limit : int
        At most so many.

    Raises
    ------
    ConfigurationError, SchemaNotReady
        As :func:`list_pins`.
    """
    if limit < 1:
        raise ConfigurationError(f"limit={limit!r} must be at least 1")
    found = text(f"""
        SELECT {PIN} FROM {names.text("lock")} l JOIN {names.text("token")} t ON t.token_id = l.token_id
        WHERE (l.expires_at IS NULL OR l.expires_at > clock_timestamp())
            AND NOT EXISTS (SELECT 1 FROM {names.text("node")} n WHERE n.name = t.node)
        ORDER BY l.token_id, l.created_at, l.task_id LIMIT :most""")
    with ready(names):
        rows, _ = Autocommit(engine).repeat(found, {"most": limit})
    return [_stored(row) for row in rows]


def _stored(row: Row) -> StoredPin:
    task, token, patterns, *more = row
    return StoredPin(task, token, tuple(patterns) if isinstance(patterns, list) else (), *more)


def add_pin(
    engine: Engine,
    names: Names,
    task_id: object,
    node_patterns: str | Sequence[str],
    *,
    created_by: str,
    reason: str | None = None,
    expires_in_days: float | None = None,
) -> None:
    """Pin a task, as :meth:`~jobsync_orm.Job.register_lock` does; it replaces the task's earlier pin.

    Parameters
    ----------
    engine, names : Engine, Names
        The cluster.
    task_id, node_patterns, reason, expires_in_days
        As there.
    created_by : str
        Whose pin it is.

    Raises
    ------
    LockConflict, ClusterMismatch, InvalidPattern, UnstableTaskId, InvalidTaskId, ConfigurationError, SchemaNotReady
        Nothing is stored.
    """
    key = task_key(task_id)
    patterns, reason = patterns_of(key, node_patterns), reason_of(key, reason)
    settings = text(f"SELECT total_tokens, hash_function FROM {names.text('cluster')}")
    with ready(names):
        rows, _ = Autocommit(engine).repeat(settings, {})
    if not rows:
        raise no_cluster(names)
    pin = Pin(key, task_to_token(key, *rows[0]), patterns, reason)
    PinBoard(engine, names, created_by).register([pin], rows[0][0], expires_in_days=expires_in_days, ephemeral=False)
