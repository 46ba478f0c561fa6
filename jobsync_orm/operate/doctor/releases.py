"""Whether the nodes agree with each other."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from jobsync_orm.operate.doctor.findings import Finding, Severity, Subject

__all__ = ["check"]


def check(subject: Subject) -> Iterator[Finding]:
    """Nodes of several releases, or with different timeouts."""
    rows = subject.rows(
        f"SELECT name, version, heartbeat_timeout_sec FROM {subject.names.text('node')} WHERE state <> 'away'"
        " ORDER BY ordinal"
    )
    releases, timeouts = defaultdict(list), defaultdict(list)
    for name, version, timeout in rows:
        releases[version].append(name)
        timeouts[timeout].append(name)
    if len(releases) > 1:
        oldest = min(releases, key=lambda version: len(releases[version]))
        yield Finding(
            "releases",
            Severity.WARNING,
            "the nodes run several releases of jobsync_orm: "
            + "; ".join(f"{version or 'unknown'} ({', '.join(nodes)})" for version, nodes in sorted(releases.items())),
            "that is meant for the time of a rolling update only: the older ones do not know what is new, such as the "
            "order to drain a node",
            f"finish the update: install the same release and start again {', '.join(releases[oldest])}",
        )
    if len(timeouts) > 1:
        yield Finding(
            "releases",
            Severity.WARNING,
            "the nodes have different heartbeat_timeout_sec: "
            + "; ".join(f"{timeout:g} s ({', '.join(nodes)})" for timeout, nodes in sorted(timeouts.items())),
            "after a failover the cluster rests for the longest that is known: one that was lost with its row, and has "
            "a longer one, may go on after that",
            f"give all nodes heartbeat_timeout_sec={max(timeouts):g}",
        )
