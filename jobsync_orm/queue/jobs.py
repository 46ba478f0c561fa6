"""A claimed job, and the end of an attempt: what passes between the queue, its workers and the database."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from jobsync_orm.models.states import AttemptOutcome, JobState

__all__ = ["ClaimedJob", "Ending", "claimed"]


@dataclass(frozen=True, slots=True)
class ClaimedJob:
    """A job that somebody may run now. ``(id, attempt)`` names the attempt, and fences all it writes.

    ``ready_at`` and ``created_at`` are microseconds since 1970 by the database's clock, ``timeout`` is in seconds.
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


def claimed(answer: str | None) -> list[ClaimedJob]:
    """The jobs in the answer of a statement that claims, in its order."""
    return [ClaimedJob(*row) for row in json.loads(answer or "[]")]


@dataclass(frozen=True, slots=True)
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
        Seconds until the job is ready again; given for RETRYING and SCHEDULED.
    counts : bool
        Whether the attempt counts against ``max_retries``.
    began_at, ended_at : float
        ``time.monotonic()``; sent as how long ago it was.
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
