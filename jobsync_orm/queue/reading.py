"""See how the queue does: figures, workers, and single jobs."""

from __future__ import annotations

import asyncio
from functools import cached_property
from typing import Any

from sqlalchemy import TextClause, text

from jobsync_orm.exceptions import UnknownJob
from jobsync_orm.queue.core import QueueCore
from jobsync_orm.queue.figures import Figures, QueueStats
from jobsync_orm.queue.job_status import JobStatus, StatusReader
from jobsync_orm.queue.new_jobs import Enqueued, id_of
from jobsync_orm.queue.options import job_type

__all__ = ["ReadingCalls"]

# What is told of a worker.
WORKER = (
    *("node", "types", "concurrency", "running", "completed", "failed", "started_at", "seen_at", "claimed_at"),
    *("alive", "last_heartbeat"),
)


class ReadingCalls(QueueCore):
    """See :class:`~jobsync_orm.JobQueue`."""

    @cached_property
    def _figures(self) -> Figures:
        return Figures(self.names)

    @cached_property
    def _status_reader(self) -> StatusReader:
        return StatusReader(self.names)

    @cached_property
    def _worker_rows(self) -> TextClause:
        return text(f"""
            SELECT {", ".join(f"w.{name}" for name in WORKER[:-2])}, n.name IS NOT NULL, n.last_heartbeat
            FROM {self.names.text("job_worker")} w
            LEFT JOIN {self.names.text("node")} n
                ON n.name = w.node AND n.incarnation = w.incarnation AND n.state <> 'away'
            ORDER BY w.node""")

    def stats(self, type: str | None = None) -> QueueStats:
        """Figures of the queue: how many jobs in which state, how fast they are worked off, how long they wait.

        Parameters
        ----------
        type : str, optional
            Of this job type only. None: of all, with those of each type in ``by_type``.

        Raises
        ------
        InvalidJob
            ``type`` cannot name a job type. One that there are no jobs of has all counts 0.
        """
        if type is not None:
            job_type(type)
        figures = self._figures.read(self._autocommit, self._walk)
        return figures if type is None else figures.by_type.get(type, QueueStats(type))

    async def stats_async(self, type: str | None = None) -> QueueStats:
        """:meth:`stats`, without blocking the event loop."""
        return await asyncio.to_thread(self.stats, type)

    def depths(self, within_sec: float | None = None) -> dict[str, QueueStats]:
        """How many jobs of each type are in which state, and how old the oldest is: :meth:`stats` without its rates.

        It costs less than :meth:`stats` where many attempts end; metrics are made of it.

        Parameters
        ----------
        within_sec : float, optional
            The server gives up a statement after so many seconds, and this raises ``sqlalchemy.exc.DBAPIError``.
        """
        return self._figures.depths(lambda statement, values: self._walk(statement, values, within_sec))

    def worker_stats(self) -> list[dict[str, Any]]:
        """The workers, by name.

        Returns
        -------
        list of dict
            ``node``, its name; ``types`` it handles; ``concurrency``, and how many attempts are ``running``;
            ``completed`` and ``failed`` since ``started_at``; ``claimed_at``, when it last got a job; ``seen_at``, when
            it wrote all this; ``alive``, whether it is a member of the cluster at this moment, and its
            ``last_heartbeat`` if so.
        """
        rows, _ = self._autocommit.repeat(self._worker_rows, {})
        return [dict(zip(WORKER, row, strict=True)) for row in rows]

    async def worker_stats_async(self) -> list[dict[str, Any]]:
        """:meth:`worker_stats`, without blocking the event loop."""
        return await asyncio.to_thread(self.worker_stats)

    def status(self, id: int | Enqueued) -> JobStatus:
        """One job with its attempts.

        Parameters
        ----------
        id : int or Enqueued
            The job, or what enqueueing it returned.

        Raises
        ------
        UnknownJob
            There is no such job: it never was, or it has been pruned.
        """
        number = id_of(id)
        found = self._status_reader.read(self._autocommit, number)
        if found is None:
            raise UnknownJob(f"there is no job {number}")
        return found

    async def status_async(self, id: int | Enqueued) -> JobStatus:
        """:meth:`status`, without blocking the event loop."""
        return await asyncio.to_thread(self.status, id)
