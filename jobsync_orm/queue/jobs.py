"""A claimed job, and the end of an attempt: what passes between the queue, its workers and the database."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from jobsync_orm.coordinator.session import array
from jobsync_orm.models.states import AttemptOutcome, JobState

__all__ = ["ClaimedJob", "Ending", "claimed", "settlement"]

# A member of an enumeration takes longer to look up than a name.
_COMPLETED = AttemptOutcome.COMPLETED


# Neither of the two is frozen: that would make each take three times as long to create, and a worker creates thousands
# of them a second. Nobody changes one.
@dataclass(slots=True)
class ClaimedJob:
    """A job that somebody may run now. ``(id, attempt)`` names the attempt, and fences all it writes.

    ``ready_at`` and ``created_at`` are microseconds since 1970 by the database's clock, ``timeout`` is in seconds.
    ``trace`` is what :mod:`jobsync_orm.tracing` had stored with the job where it was enqueued, or whatever somebody has
    written there.
    """

    id: int
    type: str
    priority: int
    attempt: int
    failures: int
    max_retries: int
    timeout: float
    key: str | None
    payload: Any
    ready_at: int
    created_at: int
    trace: str | None = None


def claimed(answer: str | None) -> list[ClaimedJob]:
    """The jobs in the answer of a statement that claims, in its order."""
    try:
        rows = json.loads(answer or "[]")
    except ValueError:
        # Enqueueing refuses it, SQL does not; the jobs that were claimed with it are not to be lost.
        rows = json.loads(answer or "[]", parse_int=_integer)
    return [ClaimedJob(*row) for row in rows]


def _integer(digits: str) -> int | Decimal:
    """A number that may have more digits than Python reads as an int."""
    try:
        return int(digits)
    except ValueError:
        return Decimal(digits)


@dataclass(slots=True)
class Ending:
    """How an attempt ended, and where its job goes.

    Attributes
    ----------
    job_id, attempt : int
        The attempt.
    outcome : AttemptOutcome
        How it ended.
    state : JobState
        Where the job goes: COMPLETED, FAILED, CANCELLED, RETRYING, SCHEDULED, or PENDING at once.
    result : str or None
        JSON text.
    error, traceback : str or None
        Of an attempt that failed.
    delay : float or None
        Seconds until the job is ready again; RETRYING and SCHEDULED need this or ``until``.
    until : float or None
        The moment at which it is ready again, in seconds since 1970 by the database's clock.
    counts : bool
        Whether the attempt counts against ``max_retries``.
    began_at, ended_at : float
        ``time.monotonic()``; sent as how long ago it was.
    written : bool
        Nothing is to be written: its transaction has written it, or the job is no longer this attempt's.
    waiting : tuple[int, ...]
        Of one that is written: jobs that wait for this one, as the statement that settles would have returned them.
    """

    job_id: int
    attempt: int
    outcome: AttemptOutcome
    state: JobState
    began_at: float
    ended_at: float
    result: str | None = None
    error: str | None = None
    traceback: str | None = None
    delay: float | None = None
    counts: bool = False
    until: float | None = None
    written: bool = False
    waiting: tuple[int, ...] = ()


def settlement(endings: Sequence[Ending], now: float) -> list[str]:
    """The parameters of ``QueueStatements.settle``, as text; ``now`` is ``time.monotonic()``."""
    ids = "{" + ",".join([str(e.job_id) for e in endings]) + "}"
    attempts = "{" + ",".join([str(e.attempt) for e in endings]) + "}"
    began = "{" + ",".join([f"{now - e.began_at:.6f}" for e in endings]) + "}"
    ended = "{" + ",".join([f"{now - e.ended_at:.6f}" for e in endings]) + "}"
    many = len(endings)
    nothing = _same("NULL", many)
    results = array([e.result for e in endings]) if any(e.result is not None for e in endings) else nothing
    # Nearly always all of them have completed, and then most columns are known.
    if all(e.outcome is _COMPLETED and e.error is None for e in endings):
        completed = _same("completed", many)
        no = _same("f", many)
        return [ids, attempts, completed, completed, results, nothing, nothing, nothing, no, began, ended, nothing]
    return [
        ids,
        attempts,
        array([e.outcome for e in endings]),
        array([e.state for e in endings]),
        results,
        array([e.error for e in endings]),
        array([e.traceback for e in endings]),
        array([e.delay for e in endings]),
        array([e.counts for e in endings]),
        began,
        ended,
        array([e.until for e in endings]),
    ]


def _same(element: str, many: int) -> str:
    return "{" + ",".join([element] * many) + "}"
