"""Wait until a job has finished: for scripts, tests, and requests that cannot go on without its result.

::

    job = queue.submit("render", {"page": 7})
    print(queue.wait(job, timeout=10).result)

Nobody tells of a job that has finished: that would cost each of them a notification. So its row is looked at, at first
after some milliseconds, then less and less often, up to once a second. One statement each, which locks nothing; no
connection is held in between.
"""

from __future__ import annotations

import asyncio
import time

from jobsync_orm.exceptions import NotFinished
from jobsync_orm.models.states import FINISHED
from jobsync_orm.queue.job_status import JobStatus
from jobsync_orm.queue.new_jobs import Enqueued
from jobsync_orm.queue.options import seconds
from jobsync_orm.queue.reading import ReadingCalls

__all__ = ["WaitCalls"]

# Seconds between two looks: at first, how much longer each is than the one before, and at most.
FIRST_SEC, GROWTH, MOST_SEC = 0.01, 1.5, 1.0


class WaitCalls(ReadingCalls):
    """See :class:`~jobsync_orm.JobQueue`."""

    def wait(self, id: int | Enqueued, timeout: float | None = None) -> JobStatus:
        """Wait until a job has completed, failed for good, or was cancelled.

        Its transaction must have been committed: nobody runs a job before that.

        Parameters
        ----------
        id : int or Enqueued
            The job, or what enqueueing it returned.
        timeout : float, optional
            Seconds to wait at most. None waits for as long as it takes.

        Returns
        -------
        JobStatus
            As :meth:`status` gives it; ``state`` says how it ended.

        Raises
        ------
        NotFinished
            It has not finished by then; a ``TimeoutError``, whose ``status`` is the job's at that moment.
        UnknownJob
            There is no such job.
        InvalidJob
            ``timeout`` is no number of seconds.
        """
        pauses = _Pauses(timeout)
        while (status := self.status(id)).state not in FINISHED:
            time.sleep(pauses.next(status))
        return status

    async def wait_async(self, id: int | Enqueued, timeout: float | None = None) -> JobStatus:
        """:meth:`wait`, without blocking the event loop."""
        pauses = _Pauses(timeout)
        while (status := await self.status_async(id)).state not in FINISHED:
            await asyncio.sleep(pauses.next(status))
        return status


class _Pauses:
    """How long to wait between two looks."""

    def __init__(self, timeout: float | None) -> None:
        self._timeout = timeout
        self._until = float("inf") if timeout is None else time.monotonic() + seconds("timeout", timeout)
        self._next = FIRST_SEC

    def next(self, status: JobStatus) -> float:
        left = self._until - time.monotonic()
        if left <= 0:
            raise NotFinished(f"job {status.id} ({status.type}) is {status.state} after {self._timeout:g} s", status)
        pause, self._next = self._next, min(GROWTH * self._next, MOST_SEC)
        return min(pause, left)
