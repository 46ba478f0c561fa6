"""Jobs that wait for others which will not complete."""

from __future__ import annotations

from collections.abc import Iterator

from jobsync_orm.operate.doctor.findings import Finding, Severity, Subject
from jobsync_orm.wording import counted

__all__ = ["check"]


def check(subject: Subject) -> Iterator[Finding]:
    """Blocked jobs after one that has failed or was cancelled."""
    job, dependency = subject.names.text("job"), subject.names.text("job_dependency")
    ((blocked, before, some),) = subject.rows(
        f"""
        SELECT count(DISTINCT b.id), count(DISTINCT a.id), min(a.id)
        FROM {job} b JOIN {dependency} d ON d.job_id = b.id JOIN {job} a ON a.id = d.after_id
        WHERE b.state = 'blocked' AND a.state IN ('failed', 'cancelled')"""
    )
    if blocked:
        yield Finding(
            "chains",
            Severity.WARNING,
            f"{counted(blocked, 'job is', 'jobs are')} blocked behind {before} that failed or were "
            f"cancelled, such as job {some}",
            "they stay blocked until those have completed",
            f"jobsync-orm queue retry {some}, or cancel those that wait: jobsync-orm queue cancel --state blocked",
        )
