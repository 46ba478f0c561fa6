"""The nodes: somebody lives, somebody leads, the dead are out."""

from __future__ import annotations

from collections.abc import Iterator

from jobsync_orm.operate.cluster import Operations
from jobsync_orm.operate.doctor.findings import Finding, Severity, Subject
from jobsync_orm.operate.picture import ClusterStatus
from jobsync_orm.wording import counted

__all__ = ["check"]

# Seconds that the leader is given to take a node out whose session has ended. It needs about two.
EVICTED_SEC = 10.0


def check(subject: Subject) -> Iterator[Finding]:
    """Nobody is there, nobody leads, somebody is dead and still a member."""
    status = Operations(subject.engine, subject.names).status()
    live = [node for node in status.nodes if node.condition in ("live", "joining")]
    if not status.nodes:
        yield Finding(
            "members",
            Severity.NOTE,
            "no node is registered",
            "nobody works on any token, and no job runs",
            "start a worker: jobsync-orm worker MODULE:QUEUE, or a program with a Job",
        )
    elif not live:
        yield Finding(
            "members",
            Severity.ERROR,
            f"none of the {len(status.nodes)} registered nodes is live",
            "nobody works on any token, and no job runs",
            "start the workers, and look at their logs: jobsync-orm nodes shows where they ran",
        )
    elif not any(node.can_lead for node in live):
        yield Finding(
            "members",
            Severity.ERROR,
            "no live node may lead (can_lead=False everywhere)",
            "tokens of nodes that die stay where they are, and new nodes get none",
            "start one worker with can_lead=True, which is the default",
        )
    yield from _dead(status)
    for order in status.drained:
        if not order.registered:
            yield Finding(
                "members",
                Severity.NOTE,
                f"{order.node} is drained (by {order.by}), and is not registered",
                "the order stands: a process that starts under this name gets no tokens",
                f"jobsync-orm undrain {order.node}",
            )


def _dead(status: ClusterStatus) -> Iterator[Finding]:
    for node in status.nodes:
        if node.condition == "silent" or (node.condition == "cut off" and node.heartbeat_age_sec > EVICTED_SEC):
            yield Finding(
                "members",
                Severity.ERROR,
                f"{node.name} (process {node.pid} on {node.host}) is dead or hangs: no heartbeat for "
                f"{node.heartbeat_age_sec:.0f} s, and it has not been taken out",
                f"its {counted(node.tokens.owned, 'token', 'tokens')} and the jobs it had wait",
                f"jobsync-orm evict {node.name}; if the process still runs, end it",
            )
