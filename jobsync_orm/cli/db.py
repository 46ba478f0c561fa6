"""``jobsync-orm db``: create, upgrade, inspect and remove the library's tables."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from jobsync_orm import migrate
from jobsync_orm.cli.connection import Cluster, on_cluster
from jobsync_orm.cli.output import NO
from jobsync_orm.cli.roles import grants, roles
from jobsync_orm.config import CoordinationConfig
from jobsync_orm.coordinator.history import Operator
from jobsync_orm.wording import counted

__all__ = ["app"]

app = typer.Typer(help="The library's tables.", no_args_is_help=True)
app.command()(roles)
app.command()(grants)

TotalTokens = Annotated[int | None, typer.Option(help="Number of tokens; 10000 for a new cluster.")]
HashFunction = Annotated[str | None, typer.Option(help="md5, sha256 or double_sha256, which is that of a new cluster.")]
Yes = Annotated[bool, typer.Option("--yes", help="Do not ask.")]


@app.command()
@on_cluster
def upgrade(
    cluster: Cluster,
    total_tokens: TotalTokens = None,
    hash_function: HashFunction = None,
    revision: Annotated[str, typer.Option(help="Where to go.")] = "head",
) -> None:
    """Create the tables, or bring them to the newest revision."""
    migrate.upgrade(
        cluster.engine,
        **_named(cluster),
        total_tokens=total_tokens,
        hash_function=hash_function,
        revision=revision,
    )
    _show_current(cluster)


@app.command()
@on_cluster
def downgrade(
    cluster: Cluster,
    revision: Annotated[str, typer.Option(help="Where to go; base removes everything.")] = "base",
    yes: Yes = False,
) -> None:
    """Go back to an older revision, or remove the tables. Stop every worker first."""
    found = migrate.current(cluster.engine, **_named(cluster))
    if found is not None:
        what = "all tables of the cluster" if revision == "base" else f"what came after revision {revision}"
        cluster.output.confirm(f"Remove {what}, with all that is in them?", yes)
    migrate.downgrade(cluster.engine, **_named(cluster), revision=revision)
    _show_current(cluster)


@app.command()
@on_cluster
def current(cluster: Cluster) -> None:
    """Print the revision the tables are at."""
    _show_current(cluster)


@app.command()
@on_cluster
def check(cluster: Cluster, total_tokens: TotalTokens = None, hash_function: HashFunction = None) -> None:
    """Print what keeps a worker from running here as this user; exit with 1 if anything does."""
    problems = migrate.check(cluster.engine, **_named(cluster), total_tokens=total_tokens, hash_function=hash_function)
    cluster.output.show({"problems": problems}, *(problems or ["ok"]))
    if problems:
        raise typer.Exit(NO)


@app.command()
@on_cluster
def reform(
    cluster: Cluster,
    rest: Annotated[
        float,
        typer.Option(
            min=0,
            help="Least number of seconds for which nobody owns anything: the longest heartbeat_timeout_sec of the "
            "workers that may still run.",
        ),
    ] = CoordinationConfig.heartbeat_timeout_sec,
    yes: Yes = False,
) -> None:
    """Form the cluster anew after a restore: no epoch or fencing number from before it is ever given out again.

    Claims and hand-overs under way end, every worker registers anew by itself, and nobody owns anything for a while.
    Rows of your tables, pins, checkpoints and the audit stay. A failover needs no command: workers notice it.
    """
    output = cluster.output
    operator = Operator(cluster.engine, cluster.names)
    found, members = operator.look()
    output.note(f"epoch {found.epoch}, {counted(len(members), 'node', 'nodes')}: {', '.join(members) or 'none'}")
    output.confirm("End all claims and let nobody own anything until the cluster has rested?", yes)
    done = operator.reform(found, rest)
    if done is None:
        output.fail("somebody else has formed it anew just now; nothing was changed", "Conflict", NO)
    output.show(done, f"formed anew at epoch {done.epoch}; nobody owns anything for {done.rest_sec:.0f} s")
    if not done.fences_raised:
        output.fail("this role may not raise the fencing numbers of claims; see `db check`", "Permission", NO)


def _named(cluster: Cluster) -> dict[str, Any]:
    return {"appname": cluster.names.appname, "schema": cluster.names.schema}


def _show_current(cluster: Cluster) -> None:
    revision, newest = migrate.current(cluster.engine, **_named(cluster)), migrate.head()
    found = {"revision": revision, "newest": newest}
    cluster.output.show(found, f"{revision or 'no tables'} (newest: {newest})")
