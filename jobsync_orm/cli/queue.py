"""``jobsync-orm queue``: look at the jobs of a queue, and intervene. No handler is imported for that."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Annotated, NoReturn

import typer

from jobsync_orm.cli.connection import Cluster, lasting, on_cluster
from jobsync_orm.cli.durations import duration
from jobsync_orm.cli.jobs import job_grid, job_lines, stats_parts
from jobsync_orm.cli.output import NO, age
from jobsync_orm.config import CoordinationConfig
from jobsync_orm.exceptions import JobConflict, UnknownJob
from jobsync_orm.models.states import FINISHED, LIVE, JobState
from jobsync_orm.operate import JobFilter, JobFinder, as_json, why_it_waits
from jobsync_orm.queue import JobQueue
from jobsync_orm.queue.control_statements import RETRIABLE

__all__ = ["app"]

app = typer.Typer(help="The jobs of the queue.", no_args_is_help=True)

Types = Annotated[list[str] | None, typer.Option("--type", help="Only of this type; may be given several times.")]
States = Annotated[
    list[JobState] | None, typer.Option("--state", help="Only in this state; may be given several times.")
]
Key = Annotated[str | None, typer.Option(help="Only with this key.")]
Error = Annotated[str | None, typer.Option(help="Only those whose error contains this text.")]
Ids = Annotated[list[int] | None, typer.Argument(metavar="ID...", help="Jobs.")]
Everything = Annotated[bool, typer.Option("--all", help="All that can be, of every type.")]
Yes = Annotated[bool, typer.Option("--yes", help="Do not ask.")]


@contextmanager
def _queue(cluster: Cluster) -> Iterator[JobQueue]:
    """The queue of a cluster, on a connection that is kept."""
    names = cluster.names
    with lasting(cluster.engine) as engine:
        yield JobQueue(CoordinationConfig(engine=engine, appname=names.appname, schema=names.schema), wake=False)


@app.command()
@on_cluster
def stats(
    cluster: Cluster, type: Annotated[str | None, typer.Option("--type", help="Only of this type.")] = None
) -> None:
    """How many jobs of each type are in which state, how fast they are worked off, how long they wait."""
    with _queue(cluster) as queue:
        found, paused = queue.stats(type), queue.paused()
    answer = {**as_json(found), "paused": as_json(paused)}
    cluster.output.show(answer, *stats_parts(found, paused, every_state=not sys.stdout.isatty()))


@app.command()
@on_cluster
def jobs(
    cluster: Cluster,
    types: Types = None,
    states: States = None,
    key: Key = None,
    error: Error = None,
    limit: Annotated[int, typer.Option(min=1, help="How many at most.")] = 50,
    before: Annotated[int | None, typer.Option(help="Only those with a lower id: for the next page.")] = None,
    after: Annotated[int | None, typer.Option(help="Only those with a higher id, the oldest first.")] = None,
) -> None:
    """Jobs, newest first."""
    wanted = JobFilter(tuple(types or ()), tuple(states or ()), key, error)
    found = JobFinder(cluster.engine, cluster.names).page(wanted, limit, before=before, after=after)
    cluster.output.show(found, job_grid(found))
    if len(found) == limit:
        way = "--before" if after is None else "--after"
        cluster.output.note(f"there may be more: see --limit, or {way} {found[-1].id}")


@app.command()
@on_cluster
def show(cluster: Cluster, id: Annotated[int, typer.Argument(metavar="ID", help="The job.")]) -> None:
    """One job with its payload, its attempts, and why it waits; exit with 1 if there is none."""
    with _queue(cluster) as queue:
        try:
            found = queue.status(id)
        except UnknownJob as error:
            cluster.output.fail(str(error), "UnknownJob", NO)
        why = why_it_waits(queue, found)
    cluster.output.show({**_fields(found), "why": list(why)}, *job_lines(found, why))


def _fields(found: object) -> dict[str, object]:
    """Payload and result are JSON as they are."""
    answer: dict[str, object] = asdict(found)  # type: ignore[call-overload]
    free = {name: answer.pop(name) for name in ("payload", "result")}
    return {**as_json(answer), **free}


@app.command()
@on_cluster
def retry(
    cluster: Cluster,
    ids: Ids = None,
    types: Types = None,
    states: States = None,
    key: Key = None,
    error: Error = None,
    everything: Everything = False,
    yes: Yes = False,
) -> None:
    """Have jobs that failed (or, by --state, were cancelled or back off) run again, with all their retries.

    Exit with 1 if a job that was named cannot be, or none fits.
    """
    chosen = tuple(states or (JobState.FAILED,))
    if not set(chosen) <= set(RETRIABLE):
        _usage(cluster, f"--state must be among {', '.join(RETRIABLE)}")
    wanted = JobFilter(tuple(types or ()), chosen, key, error)
    given = bool(types or states or key or error)
    with _queue(cluster) as queue:
        _steer(cluster, "retry", "retried", ids, wanted, given or everything, yes, queue.retry_each)


@app.command()
@on_cluster
def cancel(
    cluster: Cluster,
    ids: Ids = None,
    types: Types = None,
    states: States = None,
    key: Key = None,
    error: Error = None,
    everything: Everything = False,
    yes: Yes = False,
) -> None:
    """Have jobs not run, or no longer: what waits is cancelled, what runs is told to stop.

    Exit with 1 if a job that was named cannot be, or none fits.
    """
    chosen = tuple(states or LIVE)
    if not set(chosen) <= set(LIVE):
        _usage(cluster, f"--state must be among {', '.join(LIVE)}")
    wanted = JobFilter(tuple(types or ()), chosen, key, error)
    given = bool(types or states or key or error)
    with _queue(cluster) as queue:
        _steer(cluster, "cancel", "cancelled", ids, wanted, given or everything, yes, queue.cancel_each)


def _steer(
    cluster: Cluster,
    verb: str,
    done: str,
    ids: list[int] | None,
    wanted: JobFilter,
    by_filter: bool,
    yes: bool,
    steer: Callable[[Sequence[int]], Iterator[tuple[int, JobState | UnknownJob | JobConflict]]],
) -> None:
    """Do something to each of the jobs that were named, or counted; a thousand are a transaction."""
    output = cluster.output
    if bool(ids) == by_filter:
        _usage(cluster, f"say what to {verb}: ID..., or --type, --state, --key, --error, or --all")
    chosen = list(dict.fromkeys(ids)) if ids else JobFinder(cluster.engine, cluster.names).ids(wanted)
    if chosen:
        what = f"job {chosen[0]}" if len(chosen) == 1 else f"{len(chosen)} jobs"
        output.confirm(f"{verb.capitalize()} {what}?", yes)
    changed: list[dict[str, object]] = []
    refused: list[dict[str, object]] = []
    with output.progress(len(chosen), done) as bar:
        for place, (id, outcome) in enumerate(steer(chosen), 1):
            if isinstance(outcome, JobState):
                changed.append({"id": id, "state": outcome})
            else:
                refused.append({"id": id, "why": str(outcome)})
            bar.at(place)
    running = sum(entry["state"] is JobState.PROCESSING for entry in changed)
    told = f"{len(changed)} {done}" + (f", {running} of them told to stop where they run" if running else "")
    left = f"{len(refused)} left as they are"
    output.show(
        {"matched": len(chosen), "changed": changed, "refused": refused},
        told if chosen else "no job fits",
        *([left, *(f"  {entry['why']}" for entry in refused[:20])] if refused else []),
    )
    if not changed or (ids and refused):
        raise typer.Exit(NO)


Type = Annotated[str | None, typer.Argument(metavar="TYPE", help="A job type.")]
Whole = Annotated[bool, typer.Option("--all", help="The whole queue.")]


@app.command()
@on_cluster
def pause(
    cluster: Cluster,
    type: Type = None,
    whole: Whole = False,
    reason: Annotated[str | None, typer.Option(help="Stored with the pause.")] = None,
    yes: Yes = False,
) -> None:
    """Have no more jobs of a type taken, or none at all. What runs goes on, and jobs may be enqueued."""
    name = _scope(cluster, type, whole)
    with _queue(cluster) as queue:
        if type is not None and type not in queue.depths() | dict.fromkeys(_run(queue)):
            cluster.output.note(f"there is no job of type {type!r}, and no worker runs it: is it spelled right?")
        cluster.output.confirm(f"Have no more jobs of {name} taken, until it is resumed?", yes)
        queue.pause(type, reason)
    cluster.output.show({"type": type, "paused": True}, f"{name} is paused; what runs goes on")


def _run(queue: JobQueue) -> list[str]:
    """The types that workers run."""
    return [type for worker in queue.worker_stats() for type in worker["types"]]


@app.command()
@on_cluster
def resume(cluster: Cluster, type: Type = None, whole: Whole = False) -> None:
    """End a pause; exit with 1 if there was none.

    --all ends that of the whole queue; types that are paused themselves stay so.
    """
    name = _scope(cluster, type, whole)
    with _queue(cluster) as queue:
        done = queue.resume(type)
        others = [pause.type for pause in queue.paused() if pause.type is not None]
    cluster.output.show({"type": type, "resumed": done}, f"{name} goes on" if done else f"{name} is not paused")
    if whole and others:
        cluster.output.note(f"still paused by themselves: {', '.join(others)}")
    if not done:
        raise typer.Exit(NO)


def _scope(cluster: Cluster, type: str | None, whole: bool) -> str:
    if (type is None) != whole:
        _usage(cluster, "say what: TYPE, or --all for the whole queue")
    return "the whole queue" if type is None else f"type {type!r}"


@app.command()
@on_cluster
def prune(
    cluster: Cluster,
    older_than: Annotated[float, typer.Option(parser=duration, metavar="AGE", help="Finished so long ago: 7d, 12h.")],
    states: Annotated[
        list[JobState] | None,
        typer.Option("--state", help="completed if not given; may be given several times."),
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="How many jobs one transaction looks at.")] = 1000,
    pause_sec: Annotated[float, typer.Option("--pause", min=0, help="Seconds to wait between two of them.")] = 0.0,
    yes: Yes = False,
) -> None:
    """Remove finished jobs, with their attempts. Failed ones that others wait for stay."""
    output, chosen = cluster.output, tuple(states or (JobState.COMPLETED,))
    if not set(chosen) <= set(FINISHED):
        _usage(cluster, f"--state must be among {', '.join(FINISHED)}")
    output.confirm(f"Remove all {' and '.join(chosen)} jobs that finished more than {age(older_than)} ago?", yes)
    lowest, highest = JobFinder(cluster.engine, cluster.names).span()
    with _queue(cluster) as queue, output.progress(highest - lowest + 1, "jobs looked at") as bar:
        removed = queue.prune(
            older_than,
            chosen,
            batch=batch,
            pause_sec=pause_sec,
            progress=lambda last, gone: bar.at(last - lowest + 1, f"{gone} removed, jobs looked at"),
        )
    output.show({"removed": removed}, f"{removed} removed")


def _usage(cluster: Cluster, message: str) -> NoReturn:
    cluster.output.fail(message, "Usage")
