"""``jobsync-orm reshard``: another number of tokens."""

from __future__ import annotations

from typing import Annotated

import typer

from jobsync_orm.cli.connection import Cluster, on_cluster
from jobsync_orm.cli.output import NO, Grid, Part, age
from jobsync_orm.operate import Survey, survey
from jobsync_orm.operate import reshard as change
from jobsync_orm.wording import counted

__all__ = ["reshard"]


@on_cluster
def reshard(
    cluster: Cluster,
    total_tokens: Annotated[int, typer.Option(min=1, help="The new number of tokens.")],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show; exit with 1 if it cannot be.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """Change the number of tokens, while no worker runs: each row's token is computed anew.

    One transaction: readers go on, writers of these tables wait until it is done, and if it fails nothing has changed.
    Afterwards every worker needs the new total_tokens in its configuration.
    """
    output = cluster.output
    found = survey(cluster.engine, cluster.names, total_tokens)
    if dry_run:
        output.show(found, *_parts(found))
        if found.nodes or found.obstacles:
            raise typer.Exit(NO)
        return
    if found.total_before == total_tokens:
        same = {"total_before": total_tokens, "total_after": total_tokens}
        output.show(same, f"it has {counted(total_tokens, 'token', 'tokens')} already")
        return
    if not output.json:
        output.show(None, *_parts(found))
    if not (found.nodes or found.obstacles):  # else it is refused below, and says why
        output.confirm(
            f"Change {counted(found.total_before, 'token', 'tokens')} to {total_tokens}? Writers of "
            f"{counted(len(found.tables), 'table', 'tables')} and of the "
            "queue wait meanwhile, and the tables grow.",
            yes,
        )
    pages = sum(table.pages for table in found.tables)
    with output.progress(pages, "pages") as bar:
        done = change(
            cluster.engine, cluster.names, total_tokens, lambda at, all, what: bar.at(at, f"pages of {what}", all)
        )
    output.show(
        done,
        f"{counted(done.total_before, 'token is', 'tokens are')} now {done.total_after}; "
        f"{counted(done.rows, 'row', 'rows')} of {counted(done.tables, 'table', 'tables')} and "
        f"{counted(done.jobs, 'job', 'jobs')} have another one; {age(done.took_sec)}",
        f"give every worker total_tokens={done.total_after}; VACUUM (ANALYZE) the tables",
    )


def _parts(found: Survey) -> list[Part]:
    rows = [(table.table, table.column, table.rows, f"{table.size_bytes / 2**20:.1f} MiB") for table in found.tables]
    nodes = [f"in the way: these nodes are registered: {', '.join(found.nodes)}"] if found.nodes else []
    return [
        f"{counted(found.total_before, 'token', 'tokens')} -> {found.total_after}",
        *nodes,
        *(f"in the way: {obstacle}" for obstacle in found.obstacles),
        Grid(("table", "column", ">rows, about", ">size"), rows, "no table has a column of tokens"),
    ]
