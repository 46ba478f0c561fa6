"""``jobsync-orm drain|undrain|evict``: what becomes of a node."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

import typer

from jobsync_orm.cli.connection import Cluster, on_cluster
from jobsync_orm.cli.output import NO, Output, age, whoever
from jobsync_orm.operate import Member, Remaining, Watched, expel, find_member, watch_drain
from jobsync_orm.operate import drain as order
from jobsync_orm.operate import evict as take_out
from jobsync_orm.operate import undrain as lift
from jobsync_orm.wording import counted

__all__ = ["drain", "evict", "undrain"]

Node = Annotated[str, typer.Argument(metavar="NODE", help="The node's name.")]
Yes = Annotated[bool, typer.Option("--yes", help="Do not ask.")]


@on_cluster
def drain(
    cluster: Cluster,
    node: Node,
    reason: Annotated[str | None, typer.Option(help="Stored with the order.")] = None,
    wait: Annotated[bool, typer.Option("--wait", help="Until it has no tokens; exit with 1 after --timeout.")] = False,
    timeout: Annotated[float | None, typer.Option(min=0, help="Seconds to wait; without end if not given.")] = None,
    last: Annotated[bool, typer.Option("--last", help="Also the last node that takes tokens.")] = False,
    yes: Yes = False,
) -> None:
    """Have a node give up its tokens, and give it none until it is undrained, also when it restarts.

    It hands them over as always: on_revoke, open claims, drain_timeout_sec. It stays a member. A worker on it ends the
    jobs that it runs, and takes no new ones.
    """
    output = cluster.output
    output.confirm(f"Move all tokens of {node!r} to other nodes?", yes)
    new = order(cluster.engine, cluster.names, node, by=whoever(), reason=reason, last_too=last)
    if not new:
        output.note(f"{node} is drained already")
    left = _wait(cluster, node, timeout) if wait else next(watch_drain(cluster.engine, cluster.names, node, 0))
    answer = {"node": node, "new": new, "tokens": left.tokens, "claims": left.claims, "done": left.done}
    output.show(
        answer, f"{node} has no tokens" if left.done else f"{node} has {counted(left.tokens, 'token', 'tokens')} left"
    )
    if wait and not left.done:
        raise typer.Exit(NO)


def _wait(cluster: Cluster, node: str, timeout: float | None) -> Remaining:
    watched = watch_drain(cluster.engine, cluster.names, node, timeout)
    left = next(watched)
    total = left.tokens
    with cluster.output.progress(total, f"tokens given up by {node}") as bar:
        for left in watched:
            bar.at(max(0, total - left.tokens))
    return left


@on_cluster
def undrain(cluster: Cluster, node: Node) -> None:
    """Let a node have tokens again; exit with 1 if it was not drained."""
    done = lift(cluster.engine, cluster.names, node)
    cluster.output.show({"node": node, "undrained": done}, f"{node} gets tokens again" if done else "it is not drained")
    if not done:
        raise typer.Exit(NO)


@on_cluster
def evict(
    cluster: Cluster,
    node: Node,
    force: Annotated[bool, typer.Option("--force", help="Also if its lease still runs: end this life of it.")] = False,
    yes: Yes = False,
) -> None:
    """Take a node out of the cluster that does not leave by itself; exit with 1 if it is alive.

    It must have been silent for its whole heartbeat_timeout_sec, before this command's own eyes. The leader does that
    by itself, and sooner.
    """
    output = cluster.output
    member = find_member(cluster.engine, cluster.names, node)
    if member is None:
        output.fail(f"there is no node {node!r}", "NotFound", NO)
    if member.lease_left_sec > 0:
        _stop(cluster, member, force, yes)
    else:
        output.confirm(f"Take {node!r} out? Its claims end, and others get its tokens.", yes)
    outcome = _watch(output, take_out(cluster.engine, cluster.names, member), member)
    told = {
        "evicted": f"{node} is out; others get its tokens",
        "rejoined": f"{node} has joined anew: its claims have ended, "
        + ("and it gets no tokens, since it is drained" if member.drained else "and it has its tokens again"),
        "alive": f"{node} is alive: its heartbeat goes on",
    }
    output.show({"node": node, "outcome": outcome}, told[outcome])
    if outcome == "alive":
        raise typer.Exit(NO)


def _stop(cluster: Cluster, member: Member, force: bool, yes: bool) -> None:
    """End a life whose lease still runs, or say why not."""
    output = cluster.output
    what = (
        f"{member.name!r} (process {member.process}) may say yes to its tasks for another {age(member.lease_left_sec)}"
    )
    if not force:
        output.fail(
            f"{what}. If it is dead, the leader takes it out by itself, or call this again then. If it is to have no "
            f"tokens, drain it. To end this life of it: --force",
            "LeaseRuns",
            NO,
        )
    after = "it stays without tokens" if member.drained else "it gets its tokens back (drain it first to prevent that)"
    output.confirm(
        f"{what}. End this life of it? Its claims end. If the process still runs, it joins anew at once, and {after}; "
        "if not, it is taken out when its lease has ended.",
        yes,
    )
    expel(cluster.engine, cluster.names, member)


def _watch(output: Output, watched: Iterable[Watched], member: Member) -> str:
    with output.progress(round(member.timeout_sec * 10), f"silence of {member.name} (tenths of a second)") as bar:
        for seen in watched:
            bar.at(min(round(seen.still_sec * 10), round(seen.needed_sec * 10)))
            if seen.outcome is not None:
                return seen.outcome
    raise AssertionError("an eviction ends with an outcome")
