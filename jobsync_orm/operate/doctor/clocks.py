"""The database's clock and this host's."""

from __future__ import annotations

from collections.abc import Iterator

from sqlalchemy import text

from jobsync_orm.operate.doctor.findings import Finding, Severity, Subject

__all__ = ["check"]


def check(subject: Subject) -> Iterator[Finding]:
    """Two clocks that differ by more than the answer took and the limit allows."""
    ask = text("SELECT CAST(extract(epoch FROM clock_timestamp()) AS float8)")
    with subject.engine.connect() as connection:
        connection.execute(ask)
        before = subject.clock()
        theirs = connection.execute(ask).scalar_one()
        after = subject.clock()
    ahead = theirs - (before + after) / 2
    if abs(ahead) - (after - before) / 2 <= subject.limits.skew_sec:
        return
    yield Finding(
        "clocks",
        Severity.WARNING,
        f"the database's clock is {abs(ahead):.0f} s {'ahead of' if ahead > 0 else 'behind'} this host's",
        "ownership goes by the database's clock alone; but a run_at that an application computes is another moment for "
        "the database, and the times of its log are not those of the tables",
        "timedatectl set-ntp true (or chrony) on the host that is wrong: compare both with `date -u`",
    )
