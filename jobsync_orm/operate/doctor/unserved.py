"""Job types that nobody runs."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from jobsync_orm.config import CoordinationConfig
from jobsync_orm.models.states import JobState
from jobsync_orm.operate.doctor.findings import Finding, Severity, Subject
from jobsync_orm.queue import JobQueue
from jobsync_orm.wording import counted

__all__ = ["check"]


def check(subject: Subject) -> Iterator[Finding]:
    """Types with jobs that have been ready for a while, and no live worker."""
    names = subject.names
    queue = JobQueue(CoordinationConfig(engine=subject.engine, appname=names.appname, schema=names.schema), wake=False)
    paused = {pause.type for pause in queue.paused()}
    for type, stats in queue.stats().by_type.items():
        waited, number = stats.oldest_pending_sec, stats.counts[JobState.PENDING]
        if stats.workers or not number or waited is None or waited < subject.limits.unserved_sec:
            continue
        if paused & {None, type}:
            continue
        yield Finding(
            "unserved types",
            Severity.ERROR,
            f"{counted(number, f'job of type {type!r} is', f'jobs of type {type!r} are')} ready, since {waited:.0f} s, "
            "and no live worker runs this type",
            "they wait for ever",
            f"start a worker that imports its handler (jobsync-orm worker MODULE:QUEUE --types {shlex.quote(type)}); "
            f"if the name is wrong, jobsync-orm queue cancel --type {shlex.quote(type)}",
        )
