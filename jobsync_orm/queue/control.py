"""Steer jobs from outside: cancel, retry, reprioritise, pause.

::

    queue.cancel(4711)
    queue.retry(4711)
    queue.reprioritise(4711, JobPriority.HIGH)
    queue.pause("send_mail", reason="the provider is down")
    queue.resume("send_mail")

Each call is one statement in a transaction of its own, which tells the workers too: what it says is true when it
returns, wherever the job runs. The ``*_many`` forms do the same for all jobs of a type, the ``*_each`` forms for jobs
whose ids are known, in batches of up to 1,000 that each are a transaction.

Cancelling
----------
A job that waits is cancelled at once. One that is being processed goes on until its worker has heard of it: ``cancel``
then answers PROCESSING. Its handler sees ``ctx.cancelled`` and ends as CANCELLED by ``ctx.check()``; one in a process
of its own is killed. If the handler returns first, the job has completed.

Jobs that were enqueued ``after`` a cancelled job stay BLOCKED: cancel them too, or :meth:`ControlCalls.retry` the job.

Retrying
--------
A job that has failed or was cancelled begins again, with all its retries; one that backs off does so without waiting
any longer. What went wrong before stays in its attempts. In the line of its key it has the place of its id, before
younger jobs.

| statement | locks | if the process stops right there |
|---|---|---|
| cancel, reprioritise | the job | done or not |
| retry | the job, then its idempotency key (waits for who writes a live job of the same) | done or not |
| cancel_many, cancel_each | up to 1,000 jobs (skip), in order of their ids | the batches so far are done; call again |
| retry_many, retry_each | the same, then their idempotency keys: see :mod:`jobsync_orm.queue.batches` | the same |
| pause, resume | the row of the pause | done or not |
| paused, holder | nothing | nothing |

A job is waited for only while somebody writes it, or a live job with its idempotency key. ``*_many`` leave such a job
out, ``*_each`` wait for it last of all, by itself, and not for long: of one that stays in somebody's hands they say so.
"""

from __future__ import annotations

import asyncio
import datetime
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from sqlalchemy import TextClause
from sqlalchemy.exc import IntegrityError

from jobsync_orm.autocommit import Row
from jobsync_orm.claims import finished
from jobsync_orm.coordinator.session import array
from jobsync_orm.exceptions import InvalidJob, JobConflict, UnknownJob
from jobsync_orm.models.states import LIVE, JobState
from jobsync_orm.queue.batches import alone, in_batches
from jobsync_orm.queue.control_statements import BATCH, RETRIABLE, ControlStatements
from jobsync_orm.queue.core import QueueCore
from jobsync_orm.queue.new_jobs import Enqueued, id_of
from jobsync_orm.queue.options import brief, job_type, priority_number, states_among, storable

__all__ = ["ControlCalls", "Pause"]

# So often a statement is sent again that met a job enqueued at that very moment.
TRIES = 20


@dataclass(frozen=True, slots=True)
class Pause:
    """What is not taken at the moment.

    Attributes
    ----------
    type : str or None
        The job type; None is the whole queue.
    since : datetime
        When it was paused.
    reason : str or None
        As given to :meth:`ControlCalls.pause`.
    """

    type: str | None
    since: datetime.datetime
    reason: str | None


class ControlCalls(QueueCore):
    """See :class:`~jobsync_orm.JobQueue`."""

    @cached_property
    def _control(self) -> ControlStatements:
        return ControlStatements(self.names)

    def cancel(self, id: int | Enqueued) -> JobState:
        """Have a job not run, or no longer.

        Parameters
        ----------
        id : int or Enqueued
            The job, or what enqueueing it returned.

        Returns
        -------
        JobState
            CANCELLED; or PROCESSING if a worker has it, which has been told.

        Raises
        ------
        UnknownJob
            There is no such job.
        JobConflict
            It has completed or failed.
        """
        before, after, _ = self._one(self._control.cancel, id)
        if after is None and before in (JobState.COMPLETED, JobState.FAILED):
            raise _nothing_to_cancel(id_of(id), before)
        return before if after is None else after

    async def cancel_async(self, id: int | Enqueued) -> JobState:
        """:meth:`cancel`, without blocking the event loop."""
        state: JobState = await finished(asyncio.to_thread(self.cancel, id))
        return state

    def retry(self, id: int | Enqueued) -> JobState:
        """Have a job that has failed, was cancelled or backs off run now, with all its retries.

        Parameters
        ----------
        id : int or Enqueued
            The job, or what enqueueing it returned.

        Returns
        -------
        JobState
            PENDING; or BLOCKED if it was cancelled while it waited for jobs that have not completed yet.

        Raises
        ------
        UnknownJob
            There is no such job.
        JobConflict
            It has completed, or is to run anyway; or another live job has its idempotency key.
        """
        for _ in range(TRIES):
            try:
                before, after, again = self._one(self._control.retry, id)
            except IntegrityError:
                holders = self._read(self._control.holder, {"id": id_of(id)})
                if holders:
                    other, state, type, key = holders[0]
                    raise _key_taken(id_of(id), f"job {other} ({state})", type, key) from None
                continue  # it has finished in between
            if after is None and again and before in (JobState.PENDING, JobState.BLOCKED):
                return before  # by the first sending, whose answer was lost
            if after is None:
                raise _not_retriable(id_of(id), before)
            return after
        raise JobConflict(
            f"job {id_of(id)} cannot be retried: again and again there is a live job with its idempotency key"
        )

    async def retry_async(self, id: int | Enqueued) -> JobState:
        """:meth:`retry`, without blocking the event loop."""
        state: JobState = await finished(asyncio.to_thread(self.retry, id))
        return state

    def reprioritise(self, id: int | Enqueued, priority: int) -> JobState:
        """Give a job that waits another priority.

        Parameters
        ----------
        id : int or Enqueued
            The job, or what enqueueing it returned.
        priority : int
            A :class:`~jobsync_orm.models.JobPriority` or any whole number; the larger goes first. Jobs of one key keep
            their order whatever their priorities.

        Returns
        -------
        JobState
            The state it is in.

        Raises
        ------
        UnknownJob
            There is no such job.
        JobConflict
            It is being processed, or has finished.
        InvalidJob
            ``priority`` is no 32-bit integer.
        """
        before, after, _ = self._one(self._control.reprioritise, id, priority=priority_number(priority))
        if after is None:
            raise JobConflict(f"job {id_of(id)} is {before}: only a job that waits can get another priority")
        return after

    async def reprioritise_async(self, id: int | Enqueued, priority: int) -> JobState:
        """:meth:`reprioritise`, without blocking the event loop."""
        state: JobState = await finished(asyncio.to_thread(self.reprioritise, id, priority))
        return state

    def cancel_many(
        self, *, type: str | None = None, state: JobState | str | Iterable[JobState | str] | None = None
    ) -> int:
        """Cancel all jobs of a type, or in a state, or both, that were there when the call began.

        Parameters
        ----------
        type : str, optional
            Their type. None: any.
        state : JobState or iterable of them, optional
            Their state or states. None: all that have not finished.

        Returns
        -------
        int
            How many were cancelled, or, where they are being processed, are to be. Jobs that somebody was writing at
            that moment are not among them.

        Raises
        ------
        InvalidJob
            Neither is given, or a state is unknown or final.
        """
        if type is None and state is None:
            raise InvalidJob("cancel_many needs type=... or state=..., so that it does not empty the queue by mistake")
        chosen = self._chosen(type, states_among(LIVE, state))
        after = changed = 0
        while True:
            number, last, count, _ = self._read(self._control.cancel_many, {**chosen, "after": after})[0]
            changed += int(count)
            if number < BATCH:
                return changed
            after = last

    async def cancel_many_async(
        self, *, type: str | None = None, state: JobState | str | Iterable[JobState | str] | None = None
    ) -> int:
        """:meth:`cancel_many`, without blocking the event loop."""
        return int(await finished(asyncio.to_thread(self.cancel_many, type=type, state=state)))

    def retry_many(
        self, type: str | None = None, *, state: JobState | str | Iterable[JobState | str] = JobState.FAILED
    ) -> int:
        """Retry all failed jobs, of one type or of all, that were there when the call began.

        Parameters
        ----------
        type : str, optional
            Their type. None: any.
        state : JobState or iterable of them
            FAILED, CANCELLED or RETRYING, or several of these.

        Returns
        -------
        int
            How many. A job is left out if a live one has its idempotency key, or somebody was writing it.

        Raises
        ------
        InvalidJob
            ``state`` is another one.
        """
        chosen = self._chosen(type, states_among(RETRIABLE, state))
        last = changed = 0
        while ids := [id for (id,) in self._read(self._control.page, {**chosen, "after": last})]:
            for done in in_batches(self._autocommit, self._control.retry_many, ids, {"states": chosen["states"]}):
                changed += sum(row[1] is not None for row in done.rows.values())
            last = ids[-1]
        return changed

    async def retry_many_async(
        self, type: str | None = None, *, state: JobState | str | Iterable[JobState | str] = JobState.FAILED
    ) -> int:
        """:meth:`retry_many`, without blocking the event loop."""
        return int(await finished(asyncio.to_thread(self.retry_many, type, state=state)))

    def cancel_each(self, ids: Iterable[int | Enqueued]) -> Iterator[tuple[int, JobState | UnknownJob | JobConflict]]:
        """:meth:`cancel` many jobs, a thousand at a time.

        Parameters
        ----------
        ids : iterable of int or Enqueued
            The jobs. One that is named twice is done once.

        Yields
        ------
        tuple of int and JobState or error
            Of each job, its id, and what :meth:`cancel` would have returned or raised. Batch after batch: what has not
            been taken from here yet may not have been done. Last come those that another transaction was writing; if it
            goes on for more than ten seconds, a JobConflict says so.
        """
        statements = self._control.cancel_each, self._control.cancel_waiting
        return self._each(statements, ids, _of_cancelling)

    def retry_each(self, ids: Iterable[int | Enqueued]) -> Iterator[tuple[int, JobState | UnknownJob | JobConflict]]:
        """:meth:`retry` many jobs, a thousand at a time; as :meth:`cancel_each`.

        Of several with one idempotency key the oldest is retried.
        """
        statements = self._control.retry_each, self._control.retry_waiting
        return self._each(statements, ids, _of_retrying)

    def _each(
        self,
        statements: tuple[TextClause, TextClause],
        ids: Iterable[int | Enqueued],
        outcome: Callable[[int, Row, bool], JobState | JobConflict],
    ) -> Iterator[tuple[int, JobState | UnknownJob | JobConflict]]:
        """Execute the first of ``statements`` for all, then the second for those that somebody else has."""
        in_hands: list[int] = []
        for done in in_batches(self._autocommit, statements[0], sorted({id_of(id) for id in ids}), {}):
            in_hands += [id for id in done.ids if id not in done.rows]
            for id in (id for id in done.ids if id in done.rows):
                yield id, outcome(id, done.rows[id], done.again)
        for last in alone(self._autocommit, statements[1], in_hands):
            if isinstance(last, int):
                yield last, _in_hands(last)
                continue
            (id,) = last.ids
            yield id, outcome(id, last.rows[id], last.again) if last.rows else UnknownJob(f"there is no job {id}")

    def pause(self, type: str | None = None, reason: str | None = None) -> None:
        """Have no more jobs taken, of one type or of all. What runs goes on, and jobs may be enqueued.

        Parameters
        ----------
        type : str, optional
            The job type, which need not be known here. None: the whole queue.
        reason : str, optional
            For whoever reads :meth:`paused`. A second pause replaces it.

        Raises
        ------
        InvalidJob
            ``type`` cannot name a job type, or ``reason`` cannot be stored.
        """
        if reason is not None:
            storable("reason", reason)
        self._autocommit.repeat(self._control.pause, {"type": _scope(type), "reason": reason})

    async def pause_async(self, type: str | None = None, reason: str | None = None) -> None:
        """:meth:`pause`, without blocking the event loop."""
        await finished(asyncio.to_thread(self.pause, type, reason))

    def resume(self, type: str | None = None) -> bool:
        """End a pause. Returns whether there was one; True also if the connection broke, so that this is not known.

        Parameters
        ----------
        type : str, optional
            As it was paused. None ends the pause of the whole queue, and leaves types alone that are paused themselves.
        """
        rows, again = self._autocommit.repeat(self._control.resume, {"type": _scope(type)})
        return bool(rows) or again

    async def resume_async(self, type: str | None = None) -> bool:
        """:meth:`resume`, without blocking the event loop."""
        return bool(await finished(asyncio.to_thread(self.resume, type)))

    def paused(self) -> list[Pause]:
        """What is paused: the whole queue first, then types by name."""
        return [Pause(type or None, since, reason) for type, since, reason in self._read(self._control.paused, {})]

    async def paused_async(self) -> list[Pause]:
        """:meth:`paused`, without blocking the event loop."""
        return await asyncio.to_thread(self.paused)

    def _read(self, statement: TextClause, values: Mapping[str, object]) -> list[Row]:
        return self._autocommit.repeat(statement, values)[0]

    def _one(self, statement: TextClause, id: Any, **values: object) -> tuple[JobState, JobState | None, bool]:
        """The state of a job before and after ``statement``, and whether that may have been executed twice.

        The state after is None if the statement did nothing.
        """
        rows, again = self._autocommit.repeat(statement, {"id": id_of(id), **values})
        if not rows:
            raise UnknownJob(f"there is no job {id_of(id)}")
        before, after = rows[0][0], rows[0][1]
        return JobState(before), None if after is None else JobState(after), again

    def _chosen(self, type: str | None, states: Iterable[JobState]) -> dict[str, object]:
        """Which jobs the ``*_many`` forms mean."""
        newest = self._read(self._control.newest, {})[0][0]
        return {"type": None if type is None else job_type(type), "states": array(states), "last": newest or 0}


def _of_cancelling(id: int, row: Row, again: bool) -> JobState | JobConflict:
    before, after, *_ = row
    if after is None and before in (JobState.COMPLETED, JobState.FAILED):
        return _nothing_to_cancel(id, JobState(before))
    return JobState(after or before)


def _of_retrying(id: int, row: Row, again: bool) -> JobState | JobConflict:
    before, after, type, key, *_ = row
    if after is not None:
        return JobState(after)
    if again and before in (JobState.PENDING, JobState.BLOCKED):
        return JobState(before)  # by the first sending, whose answer was lost
    return _key_taken(id, "a live job", type, key) if before in RETRIABLE else _not_retriable(id, JobState(before))


def _in_hands(id: int) -> JobConflict:
    return JobConflict(
        f"job {id} is left as it is: a transaction that has not ended has written it, or a job with its idempotency "
        "key; try again when that one has ended (jobsync-orm doctor names those that are open for long)"
    )


def _nothing_to_cancel(id: int, state: JobState) -> JobConflict:
    return JobConflict(f"job {id} is {state}, so there is nothing to cancel")


def _key_taken(id: int, who: str, type: str, key: str) -> JobConflict:
    return JobConflict(
        f"job {id} cannot be retried: {who} of the same type {type!r} has its idempotency key {brief(key)}; wait for "
        "that one, or cancel it"
    )


def _not_retriable(id: int, state: JobState) -> JobConflict:
    why = "has completed" if state is JobState.COMPLETED else f"is {state}, so it is to run anyway"
    return JobConflict(f"job {id} {why}: failed, cancelled and retrying jobs can be retried")


def _scope(type: str | None) -> str:
    """The row of a pause."""
    return "" if type is None else job_type(type)
