"""Jobs and their figures for a person: what ``jobsync-orm queue`` prints."""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterator, Sequence

from jobsync_orm.cli.output import Block, Grid, Part, age
from jobsync_orm.cli.tasks import moment
from jobsync_orm.models.states import LIVE, JobState
from jobsync_orm.operate import FoundJob
from jobsync_orm.queue import JobStatus, Pause, QueueStats

__all__ = ["job_grid", "job_lines", "stats_parts"]

STYLES = {
    JobState.FAILED: "red",
    JobState.RETRYING: "yellow",
    JobState.PROCESSING: "green",
    JobState.CANCELLED: "dim",
    JobState.COMPLETED: "dim",
}
WHEN = {"created_at": "enqueued", "run_at": "ready at", "started_at": "begun", "finished_at": "finished"}

# Their columns are there on a terminal too, where there is little room.
STATES = (JobState.PENDING, JobState.PROCESSING, JobState.COMPLETED, JobState.FAILED)

# Of an error in a list; all of it is in `queue show`.
ERROR_LENGTH = 60


def stats_parts(found: QueueStats, paused: Sequence[Pause], *, every_state: bool) -> list[Part]:
    """The figures of the queue, of all types or of one; without ``every_state`` only of states with jobs."""
    states = [state for state in JobState if every_state or state in STATES or found.counts[state]]
    rows = [_stats_row(stats, states) for stats in found.by_type.values()] if found.type is None else []
    rows.append(_stats_row(found, states))
    styles = {
        place: "yellow"
        for place, stats in enumerate(found.by_type.values())
        if stats.workers == 0 and any(stats.counts[state] for state in LIVE)
    }
    titles = ("type", *(f">{state}" for state in states), ">oldest", ">per s", ">failed/s", ">wait p95", ">run p95")
    return [
        Grid((*titles, ">workers"), rows, styles=styles),
        *(["~ is an estimate: finished jobs are in no index"] if found.estimated else []),
        *(
            f"{'the whole queue' if pause.type is None else pause.type} is paused since {moment(pause.since)}"
            + (f": {pause.reason}" if pause.reason else "")
            for pause in paused
        ),
        *(f"no live worker runs {name}" for name, stats in found.by_type.items() if _forsaken(stats)),
    ]


def _forsaken(stats: QueueStats) -> bool:
    return stats.workers == 0 and any(stats.counts[state] for state in LIVE)


def _stats_row(stats: QueueStats, states: Sequence[JobState]) -> tuple[object, ...]:
    lately = stats.last_minute
    counts = {state: stats.counts[state] for state in states}
    return (
        "(all)" if stats.type is None else stats.type,
        *(f"~{n}" if state in stats.estimated and n else n for state, n in counts.items()),
        age(stats.oldest_pending_sec),
        f"{lately.completed_per_sec:.1f}",
        f"{lately.failed_per_sec:.1f}",
        age(None if stats.wait_sec is None else stats.wait_sec.p95),
        age(None if stats.run_sec is None else stats.run_sec.p95),
        stats.workers,
    )


def job_grid(found: Sequence[FoundJob]) -> Grid:
    """A list of jobs."""
    rows = [
        (
            job.id,
            job.type,
            job.state,
            job.key,
            f"{job.attempt}" + (f" ({job.failures} failed)" if job.failures else ""),
            _short(job.created_at),
            None if job.finished_at is None else _short(job.finished_at),
            job.worker,
            None if job.error is None else _brief(job.error),
        )
        for job in found
    ]
    titles = (">id", "type", "state", "key", "attempt", "enqueued", "finished", "worker", "error")
    styles = {place: STYLES[job.state] for place, job in enumerate(found) if job.state in STYLES}
    return Grid(titles, rows, "no jobs", styles)


def _short(at: datetime.datetime) -> str:
    """A moment of these days, in local time."""
    return f"{at.astimezone():%m-%d %H:%M:%S}"


def _brief(error: str) -> str:
    first = error.strip().split("\n", 1)[0]
    return first if len(first) <= ERROR_LENGTH else first[: ERROR_LENGTH - 1] + "\N{HORIZONTAL ELLIPSIS}"


def job_lines(job: JobStatus, why: Sequence[str]) -> list[Part]:
    """One job with all that is known of it."""
    parts: list[Part] = [
        f"job {job.id} ({job.type}) is {job.state}" + (", told to stop" if job.cancel_requested else ""),
        *(f"  ! {reason}" for reason in why),
        *(f"{title:<16}{value}" for title, value in _details(job) if value is not None),
        *([] if job.error is None else [Block(f"{'error':<16}{job.error}")]),
        "",
    ]
    attempts = [
        (
            attempt.attempt,
            attempt.outcome,
            moment(attempt.started_at),
            age((attempt.ended_at - attempt.started_at).total_seconds()),
            attempt.worker,
            None if attempt.error is None else _brief(attempt.error),
        )
        for attempt in job.attempts
    ]
    parts.append(
        Grid((">attempt", "outcome", "began", ">took", "worker", "error"), attempts, "no attempt has ended yet")
    )
    for attempt in job.attempts:
        if attempt.traceback:
            parts += ["", f"traceback of attempt {attempt.attempt}:", Block(attempt.traceback.rstrip())]
    return parts


def _details(job: JobStatus) -> Iterator[tuple[str, object]]:
    yield "payload", json.dumps(job.payload, ensure_ascii=False)
    yield "result", None if job.result is None else json.dumps(job.result, ensure_ascii=False)
    yield "key", job.key
    yield "idempotency key", job.idempotency_key
    yield "priority", job.priority or None
    yield "attempts", f"{job.attempt}, {job.failures} failed, at most {job.max_retries} retries"
    for title in ("created_at", "run_at", "started_at", "finished_at", "deadline"):
        at = getattr(job, title)
        yield WHEN.get(title, title), None if at is None else moment(at)
    yield "worker", job.worker
