"""``jobsync-orm where|audit``: single tasks."""

from __future__ import annotations

import datetime
from typing import Annotated

import typer

from jobsync_orm.cli.connection import Cluster, on_cluster
from jobsync_orm.cli.output import NO, Grid
from jobsync_orm.operate import TaskPlace, read_audit
from jobsync_orm.operate import where as find

__all__ = ["Since", "audit", "moment", "where"]

Since = Annotated[
    datetime.datetime | None,
    typer.Option(
        formats=["%Y-%m-%d", "%Y-%m-%dT%H:%M:%S", "%Y-%m-%dT%H:%M:%S%z"],
        help="Only those from then on: a day or a moment, in local time unless it has a zone.",
    ),
]


@on_cluster
def where(cluster: Cluster, task: Annotated[str, typer.Argument(metavar="TASK", help="The task's id.")]) -> None:
    """Which token a task has, and which node; exit with 1 if no live node has it."""
    found = find(cluster.engine, cluster.names, task)
    cluster.output.show(found, *_lines(found))
    if not found.live:
        raise typer.Exit(NO)


@on_cluster
def audit(
    cluster: Cluster,
    task: Annotated[str | None, typer.Option(help="Only of this task.")] = None,
    node: Annotated[str | None, typer.Option(help="Only by this node.")] = None,
    since: Since = None,
    limit: Annotated[int, typer.Option(min=1, help="How many at most.")] = 100,
    before: Annotated[int | None, typer.Option(help="Only those with a lower id: for the next page.")] = None,
) -> None:
    """Which tasks were done, by whom, newest first."""
    found = read_audit(
        cluster.engine,
        cluster.names,
        limit=limit,
        task_id=task,
        node=node,
        since=None if since is None else since.astimezone(),
        before=before,
    )
    rows = [
        (entry.id, moment(entry.created_on), entry.date, entry.node, entry.task_id, entry.token_id, entry.epoch)
        for entry in found
    ]
    titles = (">id", "claimed at", "date", "node", "task", ">token", ">epoch")
    cluster.output.show(found, Grid(titles, rows, "nothing is written"))
    if len(found) == limit:
        cluster.output.note(f"there may be more: see --limit, or --before {found[-1].id}")


def moment(at: datetime.datetime) -> str:
    """A moment for a person, in local time."""
    return at.astimezone().isoformat(" ", "seconds")


def _lines(found: TaskPlace) -> list[str]:
    owner = "nobody" if found.node is None else found.node + ("" if found.live else " (not live)")
    going = f", on its way to {found.draining_to}" if found.draining_to else ", being parked" if found.parking else ""
    pinned = ", pinned" if found.pinned else ""
    lines = [f"task {found.task_id} -> token {found.token_id} -> {owner}{going}{pinned}"]
    if found.claim is not None:
        lines.append(f"claimed by {found.claim.node} since {moment(found.claim.claimed_at)}")
    return lines
