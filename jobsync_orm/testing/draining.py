"""Runs what is enqueued in the calling thread until nothing is left. See :func:`drain`, and
:func:`drain_async`."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Coroutine, Generator, Iterable
from dataclasses import dataclass
from time import monotonic
from typing import Any, TypeVar

from sqlalchemy import Connection

from jobsync_orm.exceptions import InvalidJob, JobsyncError
from jobsync_orm.models.states import AttemptOutcome, JobState
from jobsync_orm.queue import CancelFlag, ClaimedJob, Ending, Handler, JobContext, JobQueue
from jobsync_orm.queue.execution import execute, execute_async
from jobsync_orm.testing.place import Place

__all__ = ["HandlerFailed", "Ran", "drain", "drain_async", "finish", "work_off"]

# A drain without a limit of its own that has run so many is taken for one that does not end.
ENDLESS = 10_000

T = TypeVar("T")

Steps = Generator[tuple[Handler, ClaimedJob, JobContext], "Ending | None", None]


@dataclass(frozen=True, slots=True)
class Ran:
    """An attempt that has been run.

    Attributes
    ----------
    id, type, attempt
        Of the job.
    outcome : AttemptOutcome
        How the attempt ended.
    state : JobState
        Where the job went.
    result
        What the handler returned, as it is stored.
    error, traceback : str or None
        Of what it raised.
    """

    id: int
    type: str
    attempt: int
    outcome: AttemptOutcome
    state: JobState
    result: Any
    error: str | None
    traceback: str | None


class HandlerFailed(JobsyncError, AssertionError):
    """Jobs that a test has run are left failed, or are to be tried again.

    Attributes
    ----------
    runs : list of Ran
        All attempts that were run.
    """

    def __init__(self, runs: list[Ran], failed: list[Ran]) -> None:
        first = failed[0]
        more = f" (and {len(failed) - 1} more)" if len(failed) > 1 else ""
        super().__init__(
            f"job {first.id} ({first.type}) is {first.state} after attempt {first.attempt}{more}: {first.error}\n\n"
            f"{first.traceback or ''}\n"
            "If that is what the test is about: check=False; run_due=True runs the further attempts at once"
        )
        self.runs = runs


def drain(
    queue: JobQueue,
    *,
    types: Iterable[str] | None = None,
    limit: int | None = None,
    run_due: bool = False,
    check: bool = True,
    connection: Connection | None = None,
) -> list[Ran]:
    """Run the jobs that are ready, one after the other in this thread, and those they enqueue, until none is left.

    The most urgent goes first, those of a key in their order, those enqueued ``after=`` others when these have
    completed. Attempts, results and errors are written as a worker would. Jobs without a handler here, and those of
    paused types, stay where they are. A handler of kind ``"process"`` runs in this thread too, a coroutine function in
    an event loop of its own; timeouts are not watched.

    Parameters
    ----------
    queue : JobQueue
        Whose jobs.
    types : iterable of str, optional
        The types to run. None runs all that have a handler.
    limit : int, optional
        Run so many attempts at most. None runs all, and raises after 10,000.
    run_due : bool
        Also run, as soon as nothing else is ready, what is due later: scheduled, snoozed or backing off, the earliest
        first.
    check : bool
        Raise if a job that was run is left FAILED, but not by :class:`~jobsync_orm.Discard`, or RETRYING.
    connection : Connection, optional
        Do everything in the transaction that is open there, which the test rolls back later; ``ctx.session`` is on it
        too. Only for handlers that are plain functions.

    Returns
    -------
    list of Ran
        The attempts, in the order in which they were run.

    Raises
    ------
    HandlerFailed
        See ``check``. All other jobs have been run by then.
    UnknownJobType
        One of ``types`` has no handler.
    InvalidJob
        ``limit`` is no whole number above 0, or a drain without one has run 10,000 attempts.
    """
    _check(types, limit)
    runs: list[Ran] = []
    work_off(queue, Place(queue, connection), runs, types=types, limit=limit, run_due=run_due)
    if check:
        finish(runs)
    return runs


async def drain_async(
    queue: JobQueue,
    *,
    types: Iterable[str] | None = None,
    limit: int | None = None,
    run_due: bool = False,
    check: bool = True,
) -> list[Ran]:
    """:func:`drain` for a coroutine: handlers that are coroutine functions run in its event loop, others in a thread.

    Parameters, returns and errors are those of :func:`drain`. What the queue has opened in this event loop for
    ``ctx.async_session()`` is closed at the end.
    """
    _check(types, limit)
    runs: list[Ran] = []
    steps = _steps(queue, Place(queue), runs, types, limit, run_due)
    ending: Ending | None = None
    try:
        while (attempt := await asyncio.to_thread(_following, steps, ending)) is not None:
            handler, job, context = attempt
            if handler.kind == "async":
                ending = await execute_async(queue, handler, job, context)
            else:
                ending = await asyncio.to_thread(execute, queue, handler, job, context)
    finally:
        await queue.dispose_async()
    if check:
        finish(runs)
    return runs


def _check(types: Any, limit: Any) -> None:
    if limit is not None and (not isinstance(limit, int) or isinstance(limit, bool) or limit < 1):
        raise InvalidJob(f"limit={limit!r} must be a whole number above 0, or None")
    if isinstance(types, str):
        raise InvalidJob(f"types={types!r} must be a list of types, not one text")


def work_off(
    queue: JobQueue,
    place: Place,
    runs: list[Ran],
    *,
    types: Iterable[str] | None = None,
    limit: int | None = None,
    run_due: bool = False,
) -> None:
    """Run what there is, and add it to ``runs``."""
    steps = _steps(queue, place, runs, types, limit, run_due)
    with place.sessions():
        ending = None
        while (attempt := _following(steps, ending)) is not None:
            handler, job, context = attempt
            if handler.kind == "async":
                ending = in_event_loop(queue, execute_async(queue, handler, job, context))
            else:
                ending = execute(queue, handler, job, context)


def _following(steps: Steps, ending: Ending | None) -> tuple[Handler, ClaimedJob, JobContext] | None:
    """Tell how an attempt has ended (None: there was none), and get the next one. None: there are no more."""
    try:
        return steps.send(ending)
    except StopIteration:
        return None


def _steps(
    queue: JobQueue, place: Place, runs: list[Ran], types: Iterable[str] | None, limit: int | None, run_due: bool
) -> Steps:
    """Yields what is to be run next, and is sent how that has ended."""
    chosen = None if types is None else [queue.handler_of(type).type for type in types]
    many = 0
    while limit is None or many < limit:
        wanted = list(queue.handlers) if chosen is None else chosen
        job = place.claim(wanted)
        if job is None:
            if place.free(wanted) or place.promote(wanted, run_due):
                continue
            # Meanwhile this process may have freed what waited for the last one.
            job = place.claim(wanted)
            if job is None:
                return
        if limit is None and many == ENDLESS:
            raise InvalidJob(
                f"{ENDLESS} attempts have been run and there is still work: does a handler snooze, or enqueue "
                "jobs, for ever? Give limit=..."
            )
        many += 1
        ending = yield queue.handlers[job.type], job, JobContext(queue, job, "drain", CancelFlag())
        assert ending is not None
        if not ending.written:
            place.settle(ending, monotonic())
        result = None if ending.result is None else json.loads(ending.result)
        runs.append(
            Ran(job.id, job.type, job.attempt, ending.outcome, ending.state, result, ending.error, ending.traceback)
        )


def finish(runs: list[Ran]) -> None:
    """Raise if a job is left failed or retrying."""
    last = {run.id: run for run in runs}
    failed = [
        run
        for run in last.values()
        if run.state in (JobState.FAILED, JobState.RETRYING) and run.outcome != AttemptOutcome.DISCARDED
    ]
    if failed:
        raise HandlerFailed(runs, failed)


def in_event_loop(queue: JobQueue, coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end in an event loop of its own, even from a thread in which one is running."""

    async def leave_nothing_behind() -> T:
        try:
            return await coroutine
        finally:
            await queue.dispose_async()

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(leave_nothing_behind())
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(asyncio.run(leave_nothing_behind()))
        except BaseException as error:  # noqa: BLE001  # it is raised again, in the thread that waits
            errors.append(error)

    thread = threading.Thread(target=run, name="jobsync-testing")
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]
