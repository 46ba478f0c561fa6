"""``jobsync-orm locks``: pins, which tie tasks to nodes."""

from __future__ import annotations

from typing import Annotated

import typer

from jobsync_orm.cli.connection import Cluster, on_cluster
from jobsync_orm.cli.output import NO, Grid, whoever
from jobsync_orm.cli.tasks import moment
from jobsync_orm.operate import Explanation, add_pin, explain, list_pins
from jobsync_orm.pins import PinBoard

__all__ = ["app"]

app = typer.Typer(help="Pins: tasks that are tied to nodes.", no_args_is_help=True)

Task = Annotated[str, typer.Argument(metavar="TASK", help="The task's id.")]


@app.command("list")
@on_cluster
def list_(
    cluster: Cluster,
    limit: Annotated[int, typer.Option(min=1, help="How many at most.")] = 100,
    created_by: Annotated[str | None, typer.Option("--by", help="Only those of this creator.")] = None,
    expired: Annotated[bool, typer.Option("--expired", help="Those that have expired as well.")] = False,
) -> None:
    """The pins, newest first."""
    found = list_pins(cluster.engine, cluster.names, limit=limit, created_by=created_by, expired=expired)
    rows = [
        (
            pin.task_id,
            pin.token_id,
            ", ".join(pin.patterns),
            pin.created_by,
            "expired" if pin.expired else "never" if pin.expires_at is None else moment(pin.expires_at),
            pin.reason,
        )
        for pin in found
    ]
    cluster.output.show(found, Grid(("task", ">token", "patterns", "by", "expires", "reason"), rows, "no pins"))
    if len(found) == limit:
        cluster.output.note(f"there may be more than {limit}: see --limit")


@app.command()
@on_cluster
def add(
    cluster: Cluster,
    task: Task,
    patterns: Annotated[
        list[str],
        typer.Argument(metavar="PATTERN...", help="SQL LIKE patterns of node names, the preferred one first."),
    ],
    reason: Annotated[str | None, typer.Option(help="Stored with the pin.")] = None,
    days: Annotated[float | None, typer.Option(help="Days until it expires; never if not given.")] = None,
    created_by: Annotated[str | None, typer.Option("--by", help="Whose pin it is; USER@HOST if not given.")] = None,
) -> None:
    """Pin a task to the nodes that match a pattern, in place of its earlier pin."""
    creator = created_by or whoever()
    add_pin(cluster.engine, cluster.names, task, patterns, created_by=creator, reason=reason, expires_in_days=days)
    _explain(cluster, explain(cluster.engine, cluster.names, task))
    for pattern in patterns:
        if "*" in pattern and "%" not in pattern:
            cluster.output.note(f"{pattern!r} means a node with a * in its name: patterns are SQL LIKE, write % for *")


@app.command()
@on_cluster
def clear(
    cluster: Cluster,
    tasks: Annotated[list[str] | None, typer.Argument(metavar="TASK...", help="Whose pins to delete.")] = None,
    created_by: Annotated[str | None, typer.Option("--by", help="All pins of this creator.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="All pins of the cluster.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """Delete pins; exit with 1 if there was none."""
    output = cluster.output
    if sum((bool(tasks), created_by is not None, everything)) != 1:
        output.fail("say what to clear: TASK..., or --by CREATOR, or --all", "Usage")
    board = PinBoard(cluster.engine, cluster.names, "")
    if tasks:
        what = f"the pins of {len(tasks)} tasks" if len(tasks) > 1 else f"the pin of task {tasks[0]!r}"
    else:
        what = "all pins of the cluster" if everything else f"all pins of {created_by!r}"
    output.confirm(f"Delete {what}?", yes)
    if tasks:
        count = sum(board.clear_task(task) for task in tasks)
    else:
        count = board.clear_all() if created_by is None else board.clear_by_creator(created_by)
    output.show({"cleared": count}, f"{count} cleared")
    if not count:
        raise typer.Exit(NO)


@app.command("explain")
@on_cluster
def explain_(cluster: Cluster, task: Task) -> None:
    """Which token a task has, which pin and pattern count for it, which node has it, and why."""
    _explain(cluster, explain(cluster.engine, cluster.names, task))


def _explain(cluster: Cluster, found: Explanation) -> None:
    cluster.output.show(found, *found.why)
