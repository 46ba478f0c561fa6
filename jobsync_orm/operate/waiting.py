"""Why a job is where it is: what it waits for, in sentences.

| statement | locks | if the process stops right there |
|---|---|---|
| before, line, worker | nothing | nothing |

They are asked one after the other; what changes in between is not noticed.
"""

from __future__ import annotations

from collections.abc import Iterator

from sqlalchemy import text

from jobsync_orm.autocommit import Autocommit, listed
from jobsync_orm.coordinator.session import array
from jobsync_orm.models.queue import IN_LINE
from jobsync_orm.models.states import JobState
from jobsync_orm.operate.tasks import where
from jobsync_orm.queue import JobQueue, JobStatus
from jobsync_orm.wording import counted

__all__ = ["why_it_waits"]


def why_it_waits(queue: JobQueue, status: JobStatus) -> tuple[str, ...]:
    """What keeps a job from running, or from having finished.

    Parameters
    ----------
    queue : JobQueue
        Its queue.
    status : JobStatus
        The job, as :meth:`~jobsync_orm.JobQueue.status` shows it.

    Returns
    -------
    tuple of str
        A sentence each, the weightiest first. Empty for a job that has finished.
    """
    if status.finished_at is not None:
        return ()
    database = Autocommit(queue.engine)
    if status.state is JobState.PROCESSING:
        return tuple(_running(queue, database, status))
    return (*_held_up(queue, database, status), *_in_its_turn(queue, database, status))


def _held_up(queue: JobQueue, database: Autocommit, status: JobStatus) -> Iterator[str]:
    """What holds it up whatever its turn is."""
    for pause in queue.paused():
        if pause.type in (None, status.type):
            what = "the whole queue" if pause.type is None else f"type {pause.type!r}"
            yield f"{what} is paused since {_moment(pause.since)}" + (f": {pause.reason}" if pause.reason else "")
    if status.workers == 0:
        yield f"no live worker runs jobs of type {status.type!r}: is it spelled right, is its worker started?"
    if status.waits_for:
        yield from _before(queue, database, status)


def _before(queue: JobQueue, database: Autocommit, status: JobStatus) -> Iterator[str]:
    ask = text(
        f"SELECT id, type, state FROM {queue.names.text('job')} WHERE id = ANY ({listed('ids', 'bigint')}) ORDER BY id"
    )
    for id, type, state in database.repeat(ask, {"ids": array(status.waits_for)})[0]:
        lost = state in (JobState.FAILED, JobState.CANCELLED)
        yield f"it is to run after job {id} ({type}), which is {state}" + (
            f": retry that one, or cancel job {status.id}" if lost else ""
        )


def _in_its_turn(queue: JobQueue, database: Autocommit, status: JobStatus) -> Iterator[str]:
    if status.state in (JobState.SCHEDULED, JobState.RETRYING) and status.run_at is not None:
        why = "an attempt has failed" if status.state is JobState.RETRYING else "it is for later"
        yield f"{why}: it is ready at {_moment(status.run_at)}"
    if status.state is not JobState.PENDING:
        return
    if status.key is not None:
        yield from _in_line(queue, database, status)
    elif status.ahead:
        many = counted(status.ahead, "job goes", "jobs go")
        yield f"{many} before it, of its type and priority"


def _in_line(queue: JobQueue, database: Autocommit, status: JobStatus) -> Iterator[str]:
    """What a job with a key waits for."""
    ask = text(f"""
        SELECT id, state, worker FROM {queue.names.text("job")}
        WHERE {IN_LINE} AND key = :key AND id <> :id AND (id < :id OR state = 'processing')
        ORDER BY state = 'processing' DESC, id LIMIT 1""")
    for id, state, worker in database.repeat(ask, {"key": status.key, "id": status.id})[0]:
        how = f"is being processed by {worker}" if state == JobState.PROCESSING else f"is {state}"
        yield f"jobs of key {status.key!r} run one at a time: job {id} goes first, which {how}"
    place = where(queue.engine, queue.names, status.key)
    if place.draining_to is not None or place.parking:
        yield f"its key's token {place.token_id} is being handed over"
    elif not place.live:
        owner = "nobody" if place.node is None else f"{place.node}, which is not live"
        yield f"its key's token {place.token_id} belongs to {owner}" + (
            f": a pin names nodes that are not there, see `jobsync-orm locks explain {status.key}`"
            if place.pinned
            else ""
        )


def _running(queue: JobQueue, database: Autocommit, status: JobStatus) -> Iterator[str]:
    if status.started_at is not None and status.deadline is not None:
        yield (
            f"{status.worker} has it since {_moment(status.started_at)}, and may keep it until "
            f"{_moment(status.deadline)}"
        )
    if status.cancel_requested:
        yield "it has been told to stop"
    ask = text(f"""
        SELECT j.deadline < clock_timestamp(), j.incarnation IS NOT NULL AND NOT EXISTS (
            SELECT 1 FROM {queue.names.text("node")} n WHERE n.incarnation = j.incarnation)
        FROM {queue.names.text("job")} j WHERE j.id = :id AND j.state = 'processing'""")
    for late, alone in database.repeat(ask, {"id": status.id})[0]:
        if alone:
            yield f"that life of {status.worker} has ended: a live worker gives the job to others"
        elif late:
            yield "its time is over: the next worker that looks gives it to others"


def _moment(at: object) -> str:
    return f"{at:%Y-%m-%d %H:%M:%S%z}"
