"""``jobsync-orm status|nodes|tokens|rebalances``: look at a cluster."""

from __future__ import annotations

from typing import Annotated

import typer

from jobsync_orm.cli.connection import Cluster, on_cluster
from jobsync_orm.cli.output import NO, Grid, Part, age
from jobsync_orm.cli.tasks import Since, moment
from jobsync_orm.models.states import JobState
from jobsync_orm.operate import ClusterStatus, NodeStatus, QueueDepth, Rebalance, TokenStatus, as_json, queue_depth
from jobsync_orm.wording import counted

__all__ = ["nodes", "rebalances", "status", "tokens"]

STYLES = {"silent": "red", "cut off": "red", "joining": "yellow", "away": "dim"}


@on_cluster
def status(cluster: Cluster) -> None:
    """The cluster's health in one screen; exit with 1 if anything is not as it should be."""
    found, queue = cluster.operations.status(), queue_depth(cluster.engine, cluster.names)
    cluster.output.show({**as_json(found), "queue": queue}, *_screen(found, queue))
    if not found.healthy:
        raise typer.Exit(NO)


@on_cluster
def nodes(cluster: Cluster) -> None:
    """The registered nodes, oldest first; exit with 1 if none is live."""
    found = cluster.operations.nodes()
    cluster.output.show(found, node_grid(found))
    if not any(node.condition in ("live", "joining") for node in found):
        raise typer.Exit(NO)


@on_cluster
def tokens(cluster: Cluster) -> None:
    """Who has how many tokens, how many are on their way, how many nobody has; exit with 1 if nobody has some."""
    found = cluster.operations.tokens()
    cluster.output.show(found, *_token_parts(found))
    if found.unowned:
        raise typer.Exit(NO)


@on_cluster
def rebalances(
    cluster: Cluster,
    limit: Annotated[int, typer.Option(min=1, help="How many at most.")] = 20,
    since: Since = None,
) -> None:
    """The latest plans that moved tokens, newest first."""
    found = cluster.operations.rebalances(limit, None if since is None else since.astimezone())
    cluster.output.show(found, _rebalance_grid(found))


def _screen(found: ClusterStatus, queue: QueueDepth) -> list[Part]:
    tokens, last = found.tokens, found.last_rebalance
    where = found.appname if found.schema is None else f"{found.schema}.{found.appname}"
    parts: list[Part] = [
        f"cluster {where}: {'healthy' if found.healthy else 'NOT HEALTHY'}",
        *(f"  ! {problem}" for problem in found.problems),
        f"leader {found.leader or '-'}, epoch {found.epoch}, {found.hash_function} over "
        f"{counted(found.total_tokens, 'token', 'tokens')}",
        f"tokens: {tokens.owned} owned, {tokens.draining} draining, {tokens.parked} parked, "
        f"{tokens.unowned - tokens.parked} without owner",
        "last rebalance: none"
        if last is None
        else f"last rebalance: {_ago(found, last)} ago by {last.leader}: {last.reason}, "
        f"{counted(last.tokens_moved, 'token', 'tokens')}, {last.nodes_before} -> "
        f"{counted(last.nodes_after, 'node', 'nodes')}",
        *(
            f"drained: {order.node} by {order.by} since {moment(order.since)}"
            + (f" ({order.reason})" if order.reason else "")
            + ("" if order.registered else ", which is not registered now")
            for order in found.drained
        ),
        _queue_line(queue),
        "",
        node_grid(found.nodes),
    ]
    return parts


def _queue_line(queue: QueueDepth) -> str:
    counts = [
        f"{'about ' if state in queue.estimated else ''}{number} {state.value}"
        for state, number in queue.counts.items()
        if number or state in (JobState.PENDING, JobState.PROCESSING)
    ]
    oldest = queue.oldest_pending_sec
    return "queue: " + ", ".join(counts) + ("" if oldest is None else f", ready for up to {age(oldest)}")


def _ago(found: ClusterStatus, last: Rebalance) -> str:
    return age((found.at - last.triggered_at).total_seconds())


def node_grid(found: tuple[NodeStatus, ...]) -> Grid:
    """The nodes as a table."""
    rows = [
        (
            node.name + (" *" if node.leader else ""),
            node.condition + (", drained" if node.drained else ""),
            age(node.heartbeat_age_sec),
            age(node.lease_left_sec),
            node.tokens.owned,
            node.tokens.leaving,
            node.tokens.coming,
            node.weight,
            f"{node.host}:{node.pid}",
            node.version,
        )
        for node in found
    ]
    titles = ("node (* leads)", "condition", ">heartbeat", ">lease left", ">owned", ">leaving", ">coming", ">weight")
    styles = {row: STYLES[node.condition] for row, node in enumerate(found) if node.condition in STYLES}
    return Grid((*titles, "process", "version"), rows, "no nodes", styles)


def _token_parts(found: TokenStatus) -> list[Part]:
    rows = [(node.node, node.owned, node.leaving, node.coming, node.waiting) for node in found.nodes]
    return [
        Grid(("node", ">owned", ">leaving", ">coming", ">waiting"), rows, "no nodes"),
        f"{found.owned} of {found.total} owned, {found.draining} draining ({found.overdue} overdue), "
        f"{found.unowned} without owner, of which {found.parked} parked by pins that match no live node",
    ]


def _rebalance_grid(found: list[Rebalance]) -> Grid:
    rows = [
        (
            moment(last.triggered_at),
            last.reason,
            last.leader,
            f"{last.nodes_before} -> {last.nodes_after}",
            last.tokens_moved,
            f"{last.duration_sec * 1000:.0f} ms",
            last.epoch,
        )
        for last in found
    ]
    return Grid(("when", "reason", "leader", "nodes", ">moved", ">planned in", ">epoch"), rows, "no rebalances yet")
