"""Take jobs and end them yourself, in a loop of your own.

::

    while True:
        for job in queue.dequeue(["resize"], "my-loop-1"):
            try:
                queue.complete(job, resize(**job.payload))
            except Exception as error:
                queue.fail(job, error)

For those who have a process model of their own; :class:`~jobsync_orm.JobWorker` does all this, and runs several jobs at
a time. Both may work on one queue. Here nobody watches over who took a job: if the process dies, the job is free again
when its ``timeout`` and half a minute have passed (:meth:`ManualCalls.extend` moves that moment), once a worker, or
:meth:`ManualCalls.cleanup_stale`, looks.

What ends an attempt names it, by the job and the attempt's number: when the job is somebody else's by then, or
finished, it raises :class:`~jobsync_orm.exceptions.LeaseLost`, and nothing is stored. With ``complete(job, result,
session)`` the completion is part of the session's transaction: it and the work are committed together or not at all::

    with Session.begin() as session:
        session.add(Image(...))
        queue.complete(job, session=session)

| statement | locks | if the process stops right there |
|---|---|---|
| dequeue | the jobs taken (skip), until COMMIT | not taken; or taken, and free again past their deadline |
| end | the job (waits for who writes it) | ended or not; in a session until COMMIT, which is what then decides |
| extend | the job (waits) | extended or not |
| promote, unblock, stale | see ``queue/statements`` | done or not |
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from sqlalchemy.exc import DBAPIError

from jobsync_orm.autocommit import Row
from jobsync_orm.claims import finished
from jobsync_orm.coordinator.session import array
from jobsync_orm.exceptions import InvalidJob, LeaseLost
from jobsync_orm.models.states import AttemptOutcome, JobState
from jobsync_orm.queue.commits import tell_at_commit
from jobsync_orm.queue.enqueue import EnqueueCalls
from jobsync_orm.queue.execution import error_text, traceback_text
from jobsync_orm.queue.handlers import BACKOFF
from jobsync_orm.queue.jobs import ClaimedJob
from jobsync_orm.queue.manual_statements import ManualStatements
from jobsync_orm.queue.options import brief, job_type, seconds, storable
from jobsync_orm.queue.payload import json_text
from jobsync_orm.queue.statements import COLLIDED
from jobsync_orm.queue.taking import Taking, decoded
from jobsync_orm.sqlstates import sqlstate

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

    from jobsync_orm.claims import AnyAsyncSession, AnySession
    from jobsync_orm.queue.waker import Lane

__all__ = ["ManualCalls"]

MOST_AT_ONCE = 1000

# So often a statement is sent again that met another which claimed of the same key at that very moment.
TRIES = 20


class ManualCalls(EnqueueCalls):
    """See :class:`~jobsync_orm.JobQueue`."""

    @cached_property
    def _manual(self) -> ManualStatements:
        return ManualStatements(self.names, self.statements)

    @cached_property
    def _taking(self) -> Taking:
        return Taking(self, self._claim)

    def dequeue(
        self, types: str | Sequence[str], worker_id: str, limit: int = 1, *, keys: bool = True
    ) -> list[ClaimedJob]:
        """Take jobs that are ready, the most urgent first.

        Each has ``id``, ``type``, ``payload``, ``key``, ``attempt`` (its number), ``failures`` and ``timeout``. It is
        the caller's for ``timeout`` seconds, and to be given to :meth:`complete`, :meth:`fail` or :meth:`release`.

        Parameters
        ----------
        types : str or sequence of str
            Job types to take. Those that are paused are left out.
        worker_id : str
            Who takes them; stored with the attempts.
        limit : int
            How many at most, 1 to 1,000.
        keys : bool
            Whether jobs with a key are taken too: one at a time of each key, in order. Whose the key's token is does
            not matter here.

        Returns
        -------
        list of ClaimedJob
            Empty if there are none.

        Raises
        ------
        InvalidJob
            An argument is out of range.
        """
        wanted = [types] if isinstance(types, str) else list(types)
        if not wanted:
            raise InvalidJob("types=[] must name at least one job type")
        if not isinstance(limit, int) or isinstance(limit, bool) or not 1 <= limit <= MOST_AT_ONCE:
            raise InvalidJob(f"limit={brief(limit)} must be a whole number from 1 to {MOST_AT_ONCE}")
        if not storable("worker_id", worker_id):
            raise InvalidJob("worker_id='' must name who takes the jobs")
        wanted = sorted({job_type(type) for type in wanted})
        jobs = self._taking.take(wanted, worker_id, limit, bool(keys))
        if len(jobs) < limit and self._promote():
            jobs += self._taking.take(wanted, worker_id, limit - len(jobs), bool(keys))
        return sorted(jobs, key=lambda job: (job.ready_at - job.priority * self.ageing_sec * 1e6, job.id))

    async def dequeue_async(
        self, types: str | Sequence[str], worker_id: str, limit: int = 1, *, keys: bool = True
    ) -> list[ClaimedJob]:
        """:meth:`dequeue`, without blocking the event loop."""
        jobs: list[ClaimedJob] = await finished(asyncio.to_thread(self.dequeue, types, worker_id, limit, keys=keys))
        return jobs

    def _claim(self, values: dict[str, object]) -> Row:
        for _ in range(TRIES - 1):
            try:
                return self._walk(self._manual.dequeue, values)[0]
            except DBAPIError as error:
                if sqlstate(error.orig) not in COLLIDED:
                    raise
        return self._walk(self._manual.dequeue, values)[0]

    def _promote(self) -> bool:
        """Make ready what is due, as workers do: there may be none. Whether there was something."""
        row = self._autocommit.repeat(self._manual.promote, {"p1": MOST_AT_ONCE, "p2": 0})[0][0]
        self._wake(decoded(row[0]))
        return bool(row[1])

    def complete(self, job: ClaimedJob, result: Any = None, session: AnySession | None = None) -> None:
        """End an attempt that has done its work.

        Parameters
        ----------
        job : ClaimedJob
            As :meth:`dequeue` returned it.
        result : JSON, optional
            Kept with the job.
        session : Session or scoped_session, optional
            Do it in the present transaction of this session, to be committed with the work. Make it the last
            statement: until COMMIT the job's row is locked.

        Raises
        ------
        LeaseLost
            The job is somebody else's by now, or finished. Nothing is stored; roll ``session`` back.
        InvalidPayload
            The result is no JSON, or is too long.
        ConfigurationError
            ``session`` is an AsyncSession: use :meth:`complete_async`.
        """
        values = self._values(job, AttemptOutcome.COMPLETED, JobState.COMPLETED)
        if result is not None:
            values["result"] = json_text(result, "result", self.max_payload_bytes)
        if session is None:
            self._end(job, values)
            return
        from jobsync_orm.transactions import session_of

        self._complete_in(session_of(session, "complete_async(job, result, session)"), job, values)

    async def complete_async(self, job: ClaimedJob, result: Any = None, session: AnyAsyncSession | None = None) -> None:
        """:meth:`complete`, in the transaction of an AsyncSession or in one of its own."""
        if session is None:
            await finished(asyncio.to_thread(self.complete, job, result))
        else:
            from jobsync_orm.transactions import run_in

            await run_in(session, lambda behind: self.complete(job, result, behind))

    def _complete_in(self, session: Session, job: ClaimedJob, values: dict[str, object]) -> None:
        connection = self._connection(session)
        row = connection.execute(self._manual.end, values).first()
        if row is None:
            raise _lost(job)
        if row[1]:
            tell_at_commit(session, connection, self._waker, set(), set(row[1]))

    def fail(
        self, job: ClaimedJob, error: BaseException | str, *, retry: bool = True, delay: float | None = None
    ) -> JobState:
        """End an attempt that has failed.

        Parameters
        ----------
        job : ClaimedJob
            As :meth:`dequeue` returned it.
        error : exception or str
            What went wrong; kept with the attempt, an exception with its traceback.
        retry : bool
            Whether to try again, if there are retries left. False: the job has failed for good.
        delay : float, optional
            Seconds until then. None: as the handler of this type says, if one is registered here, or by the default
            backoff.

        Returns
        -------
        JobState
            RETRYING or FAILED; CANCELLED if somebody has cancelled the job.

        Raises
        ------
        LeaseLost
            The job is somebody else's by now, or finished. Nothing is stored.
        InvalidJob
            ``error`` or ``delay`` is something else.
        """
        if isinstance(error, str):
            exception: BaseException = RuntimeError(error)
            words, trace = storable("error", error), None
        elif isinstance(error, BaseException):
            exception, words, trace = error, error_text(error), traceback_text(error)
        else:
            raise InvalidJob(f"error={brief(error)} must be an exception or text")
        outcome, state = AttemptOutcome.FAILED, JobState.FAILED
        if delay is not None:
            delay = seconds("delay", delay)
        if not retry:
            outcome, delay = AttemptOutcome.DISCARDED, None
        elif job.failures < job.max_retries:
            state = JobState.RETRYING
            if delay is None:
                handler = self.handlers.get(job.type)
                backoff = BACKOFF if handler is None else handler.backoff
                delay = seconds("backoff", backoff(job.failures, exception))
        else:
            delay = None
        values = self._values(job, outcome, state)
        return self._end(job, {**values, "error": words, "traceback": trace, "delay": delay, "counts": 1})

    async def fail_async(
        self, job: ClaimedJob, error: BaseException | str, *, retry: bool = True, delay: float | None = None
    ) -> JobState:
        """:meth:`fail`, without blocking the event loop."""
        state: JobState = await finished(asyncio.to_thread(self.fail, job, error, retry=retry, delay=delay))
        return state

    def release(self, job: ClaimedJob) -> None:
        """Give a job back as it was. The attempt does not count.

        Raises
        ------
        LeaseLost
            The job is somebody else's by now, or finished.
        """
        self._end(job, self._values(job, AttemptOutcome.RELEASED, JobState.PENDING))

    async def release_async(self, job: ClaimedJob) -> None:
        """:meth:`release`, without blocking the event loop."""
        await finished(asyncio.to_thread(self.release, job))

    def extend(self, job: ClaimedJob, seconds: float) -> bool:
        """Keep a job for so many seconds from now.

        Returns
        -------
        bool
            False if somebody has cancelled it: it is still the caller's, who should end it by :meth:`release` or
            :meth:`fail`, which both make it CANCELLED.

        Raises
        ------
        LeaseLost
            The job is somebody else's by now, or finished.
        InvalidJob
            ``seconds`` is no number above 0.
        """
        values = {"id": job.id, "attempt": job.attempt, "seconds": _seconds(seconds)}
        rows, _ = self._autocommit.repeat(self.statements.extend, values)
        if not rows:
            raise _lost(job)
        return not rows[0][0]

    async def extend_async(self, job: ClaimedJob, seconds: float) -> bool:
        """:meth:`extend`, without blocking the event loop."""
        return bool(await finished(asyncio.to_thread(self.extend, job, seconds)))

    def cleanup_stale(self, timeout: float | None = None) -> int:
        """Free jobs that somebody has held for too long, whoever it is. Their attempts count as failures.

        Workers do this by themselves for jobs past their deadline; call it where there are none.

        Parameters
        ----------
        timeout : float, optional
            Jobs whose attempt began more than so many seconds ago are freed too, even if their own ``timeout`` is
            longer. Who still works on one loses it: nothing it writes for the job is stored any more.

        Returns
        -------
        int
            How many: they are ready again, or have failed if they had no retries left.
        """
        limit = None if timeout is None else seconds("timeout", timeout)
        freed = 0
        while True:
            row = self._autocommit.repeat(self._manual.stale, {"p1": MOST_AT_ONCE, "p2": limit})[0][0]
            number = len(decoded(row[0]))
            freed += number
            if number < MOST_AT_ONCE:
                return freed

    async def cleanup_stale_async(self, timeout: float | None = None) -> int:
        """:meth:`cleanup_stale`, without blocking the event loop."""
        return int(await finished(asyncio.to_thread(self.cleanup_stale, timeout)))

    def _values(self, job: ClaimedJob, outcome: AttemptOutcome, state: JobState) -> dict[str, object]:
        if not isinstance(job, ClaimedJob):
            raise InvalidJob(f"job={brief(job)} must be what dequeue() returned")
        return {
            "id": job.id,
            "attempt": job.attempt,
            "outcome": str(outcome),
            "state": str(state),
            "counts": 0,
            **dict.fromkeys(("result", "error", "traceback", "delay")),
        }

    def _end(self, job: ClaimedJob, values: dict[str, object]) -> JobState:
        rows, again = self._autocommit.repeat(self._manual.end, values)
        if not rows and again:  # perhaps the first sending did it, whose answer was lost
            named_by = {name: values[name] for name in ("id", "attempt", "outcome")}
            rows, _ = self._autocommit.repeat(self._manual.ended, named_by)
        if not rows:
            raise _lost(job)
        state, waiting = JobState(rows[0][0]), rows[0][1]
        if state is JobState.COMPLETED and waiting:
            answer = self._autocommit.repeat(self._manual.unblock, {"p1": array(waiting)})[0][0][0]
            self._wake(decoded(answer))
        if state is JobState.PENDING or job.key is not None:  # the next one of its key may be taken
            self._wake([(job.type, job.priority, job.key is not None)])
        return state

    def _wake(self, lanes: Sequence[Sequence[Any]]) -> None:
        if self.wakes and lanes:
            ready: set[Lane] = {(type, priority, keyed) for type, priority, keyed in lanes}
            self._waker.wake(ready)


def _seconds(value: float) -> float:
    return seconds("seconds", value, above=0)


def _lost(job: ClaimedJob) -> LeaseLost:
    return LeaseLost(
        f"attempt {job.attempt} of job {job.id} is over: the job is somebody else's by now, or finished. Nothing is "
        "stored for it; roll back what belongs to it"
    )
