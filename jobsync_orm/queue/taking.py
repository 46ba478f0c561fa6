"""Taking jobs without being a worker: for somebody's own loop, and for tests.

One statement looks at all lanes, and at so many keys. There may be more keys than that, so a mark goes around: each has
its turn.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from sqlalchemy import TextClause, text

from jobsync_orm.coordinator.session import array
from jobsync_orm.queue.handlers import option_arrays
from jobsync_orm.queue.jobs import ClaimedJob, claimed

if TYPE_CHECKING:
    from jobsync_orm.autocommit import Row
    from jobsync_orm.queue.core import QueueCore

__all__ = ["Taking", "decoded", "named"]


def named(statement: str) -> TextClause:
    """A statement of the workers', with parameters ``:p1`` and so on instead of ``$1``; quoted names stay."""

    def parameter(match: re.Match[str]) -> str:
        return match[0] if match[1] is None else f"(:p{match[1]})"

    return text(re.sub(r'"[^"]*"|\$(\d+)', parameter, statement.replace(":", r"\:")))


def decoded(answer: Any) -> list[Any]:
    """A JSON column, which some drivers decode and others do not."""
    rows: list[Any] = json.loads(answer) if isinstance(answer, str) else answer
    return rows


class Taking:
    """Takes jobs of one queue, from where it left off.

    Parameters
    ----------
    queue : JobQueue
        Whose jobs. What its handlers say holds for jobs that were enqueued without it.
    send : callable
        Executes ``QueueStatements.dequeue`` with parameters ``p1`` and so on, and returns its row.
    """

    def __init__(self, queue: QueueCore, send: Callable[[dict[str, object]], Row]) -> None:
        self._queue = queue
        self._send = send
        self._mark = ""

    def take(self, types: Sequence[str], worker: str, limit: int, keys: bool = True) -> list[ClaimedJob]:
        """Up to ``limit`` jobs of ``types`` that are ready. All lanes are looked at, and keys once around at most."""
        max_retries, timeouts, blocks = option_arrays(self._queue.handlers, types)
        values: dict[str, object] = {
            "p1": array(types),
            "p2": limit,
            "p3": worker,
            "p4": self._queue.ageing_sec,
            "p5": keys,
            "p7": max_retries,
            "p8": timeouts,
            "p9": blocks,
        }
        start = mark = self._mark
        around = False
        while True:
            answer, last = self._send({**values, "p6": mark})
            jobs = claimed(answer)
            self._mark = last or ""
            if jobs or not keys:
                return jobs
            if last is None:
                if around or not start:
                    return []
                around, mark = True, ""
            elif around and last >= start:
                return []
            else:
                mark = last
