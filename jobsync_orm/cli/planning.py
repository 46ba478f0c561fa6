"""``jobsync-orm rebalance``: what the leader would do now, or have it do so."""

from __future__ import annotations

from typing import Annotated

import typer

from jobsync_orm.cli.connection import Cluster, on_cluster
from jobsync_orm.cli.output import Grid, Part
from jobsync_orm.operate import Preview, plan_soon, preview
from jobsync_orm.wording import counted

__all__ = ["rebalance"]


@on_cluster
def rebalance(
    cluster: Cluster,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what a plan made now would move.")] = False,
) -> None:
    """Have the leader plan now. It plans by itself whenever a node or a pin comes or goes, and every 30 s."""
    found = preview(cluster.engine, cluster.names)
    if not dry_run:
        plan_soon(cluster.engine, cluster.names)
    cluster.output.show(found, *_parts(found))
    if not dry_run:
        cluster.output.note("the leader has been told to plan now")


def _parts(found: Preview) -> list[Part]:
    moves = [(move.source or "(nobody)", move.target or "(nobody)", move.tokens, move.how) for move in found.moves]
    loads = [(load.node, load.now, load.then) for load in found.loads]
    rest: list[Part] = ["the cluster rests: nothing is moved before it has rested"] if found.resting else []
    return [
        *rest,
        f"{counted(found.moved, 'token', 'tokens')} would move" if found.moves else "nothing would move",
        *([Grid(("from", "to", ">tokens", "how"), moves)] if moves else []),
        "",
        Grid(("node", ">now", ">then"), loads, "no live node"),
    ]
