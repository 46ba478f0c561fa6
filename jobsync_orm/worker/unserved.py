"""Says of which types there are jobs that nobody runs: a name spelled wrong, or a worker that is not started."""

from __future__ import annotations

import json
import logging
import time
from typing import TYPE_CHECKING

from jobsync_orm.coordinator.session import Session
from jobsync_orm.logs import fields

if TYPE_CHECKING:
    from jobsync_orm.queue.statements import QueueStatements

__all__ = ["Unserved"]

logger = logging.getLogger("jobsync_orm")

# Seconds between two looks, and for how long jobs have been ready of which it is said.
LOOK_SEC = 20.0
AFTER_SEC = 60.0

ANSWER_SEC = 10.0


class Unserved:
    """Looks now and then, and logs a warning once for each type, by one worker of all.

    Parameters
    ----------
    statements : QueueStatements
        The SQL.
    node : str
        This worker.
    """

    def __init__(self, statements: QueueStatements, node: str) -> None:
        self._sql = statements.unserved
        self._node = node
        self._due_at = time.monotonic() + LOOK_SEC
        self._told: set[str] = set()

    def due_at(self) -> float:
        """Every twenty seconds."""
        return self._due_at

    def woken(self, payloads: set[str]) -> None:
        """Nothing to hear."""

    def run(self, session: Session) -> None:
        """One look."""
        self._due_at = time.monotonic() + LOOK_SEC
        ((answer,),) = session.prepared(self._sql, AFTER_SEC, self._node, timeout=ANSWER_SEC)
        found: dict[str, float] = dict(json.loads(answer or "[]"))
        for type in sorted(found.keys() - self._told):
            logger.warning(
                "%s: jobs of type %r have been ready for %.0f s, and no live worker runs this type: is it spelled "
                "right, and does a worker import its handler?",
                self._node,
                type,
                found[type],
                extra=fields("type_unserved", self._node),
            )
        self._told = set(found)
