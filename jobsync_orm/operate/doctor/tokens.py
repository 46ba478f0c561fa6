"""Tokens that nobody works on."""

from __future__ import annotations

from collections.abc import Iterator

from jobsync_orm.operate.cluster import Operations
from jobsync_orm.operate.doctor.findings import Finding, Severity, Subject
from jobsync_orm.operate.waiting_tokens import token_wait
from jobsync_orm.wording import counted

__all__ = ["check"]


def check(subject: Subject) -> Iterator[Finding]:
    """Parked ones, hand-overs that do not end, a cluster that rests."""
    status = Operations(subject.engine, subject.names).status()
    tokens = status.tokens
    if status.nodes and tokens.parked:
        drained = all(node.drained for node in status.nodes)
        yield Finding(
            "tokens",
            Severity.WARNING,
            f"{counted(tokens.parked, 'token is', 'tokens are')} parked: "
            + ("all nodes are drained" if drained else "their pins match no live node"),
            "nobody works on their rows, tasks and keys",
            f"jobsync-orm undrain {status.nodes[0].name}"
            if drained
            else "jobsync-orm locks list, then start a node whose name a pattern matches, or jobsync-orm locks clear",
        )
    if tokens.overdue:
        yield Finding(
            "tokens",
            Severity.WARNING,
            f"{counted(tokens.overdue, 'token', 'tokens')} should have been handed over by now",
            "a transaction of their owner holds them: the next owner waits",
            "SELECT pid, state, xact_start FROM pg_stat_activity WHERE state = 'idle in transaction' ORDER BY "
            "xact_start, then SELECT pg_terminate_backend(PID)",
        )
    if tokens.holders:
        waiting = {node.node: node.waiting for node in tokens.nodes if node.waiting}
        pids = [str(holder.pid) for holder in tokens.holders if holder.pid is not None]
        yield Finding(
            "tokens",
            Severity.WARNING,
            token_wait(waiting, tokens.holders),
            "a plan passes over tokens that are in use, so these nodes have less work than they should",
            f"end it, or SELECT pg_terminate_backend({pids[0]})"
            if pids
            else "SELECT gid FROM pg_prepared_xacts, then ROLLBACK PREPARED 'GID'",
        )
    if status.resting_sec is not None:
        yield Finding(
            "tokens",
            Severity.NOTE,
            f"the cluster has been formed anew and rests for {status.resting_sec:.0f} s",
            "nobody owns anything until then, as after any failover",
            "wait",
        )
