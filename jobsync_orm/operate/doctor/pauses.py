"""Pauses that somebody may have forgotten."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from jobsync_orm.operate.doctor.findings import Finding, Severity, Subject

__all__ = ["check"]


def check(subject: Subject) -> Iterator[Finding]:
    """Old pauses behind which jobs wait."""
    for type, seconds, reason in subject.rows(
        f"""
        SELECT p.type, extract(epoch FROM clock_timestamp() - p.since)::float8, p.reason
        FROM {subject.names.text("job_pause")} p
        WHERE p.since < clock_timestamp() - :seconds * interval '1 second' AND EXISTS (
            SELECT 1 FROM {subject.names.text("job")} j WHERE j.state = 'pending' AND p.type IN ('', j.type))
        ORDER BY 1""",
        seconds=subject.limits.pause_sec,
    ):
        yield Finding(
            "pauses",
            Severity.WARNING,
            f"{f'type {type!r}' if type else 'the whole queue'} has been paused for {seconds / 3600:.1f} h"
            + (f" ({reason})" if reason else ""),
            "jobs wait behind it",
            f"jobsync-orm queue resume {shlex.quote(type) if type else '--all'}",
        )
