"""The audit: who has done which task.

| statement | locks | if the process stops right there |
|---|---|---|
| read | nothing | nothing |
"""

from __future__ import annotations

import datetime
from dataclasses import dataclass

from sqlalchemy import Engine, text

from jobsync_orm.autocommit import Autocommit
from jobsync_orm.exceptions import ConfigurationError
from jobsync_orm.hashing import task_key
from jobsync_orm.naming import Names
from jobsync_orm.operate.missing import ready

__all__ = ["AuditEntry", "read_audit"]


@dataclass(frozen=True, slots=True)
class AuditEntry:
    """A task that was done.

    Attributes
    ----------
    id : int
        Grows with each entry.
    date : date
        The processing date.
    node : str
    task_id : str or None
    token_id : int or None
    epoch : int or None
        At which the node had the token; 0 or None if it had not.
    created_on : datetime
        When the task was claimed.
    """

    id: int
    date: datetime.date
    node: str
    task_id: str | None
    token_id: int | None
    epoch: int | None
    created_on: datetime.datetime


def read_audit(
    engine: Engine,
    names: Names,
    *,
    limit: int = 100,
    task_id: object = None,
    node: str | None = None,
    since: datetime.datetime | None = None,
    before: int | None = None,
) -> list[AuditEntry]:
    """Entries, newest first. The newest are found quickly; rare ones take a walk through the table.

    Parameters
    ----------
    engine, names : Engine, Names
        The cluster.
    limit : int
        At most so many.
    task_id : object, optional
        Only of this task.
    node : str, optional
        Only by this node.
    since : datetime, optional
        Only those created then or later. It must have a time zone.
    before : int, optional
        Only those with a lower ``id``: the last one of the page before.

    Raises
    ------
    ConfigurationError, UnstableTaskId, InvalidTaskId, SchemaNotReady
        What was asked cannot be.
    """
    if limit < 1:
        raise ConfigurationError(f"limit={limit!r} must be at least 1")
    if since is not None and since.tzinfo is None:
        raise ConfigurationError(f"since={since!r} must have a time zone")
    wanted = {
        "task": ("task_id = :task", None if task_id is None else task_key(task_id)),
        "node": ("node = :node", node),
        "since": ("created_on >= :since", since),
        "before": ("id < :before", before),
    }
    given = {name: value for name, (_, value) in wanted.items() if value is not None}
    where = " AND ".join(wanted[name][0] for name in given) or "true"
    found = text(f"""
        SELECT id, date, node, task_id, token_id, epoch, created_on FROM {names.text("audit")}
        WHERE {where} ORDER BY id DESC LIMIT :most""")
    with ready(names):
        rows, _ = Autocommit(engine).repeat(found, {**given, "most": limit})
    return [AuditEntry(*row) for row in rows]
