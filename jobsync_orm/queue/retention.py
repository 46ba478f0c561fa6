"""Remove finished jobs, so that the table does not grow for ever.

::

    queue.prune(older_than=timedelta(days=7))
    queue.prune(older_than=timedelta(days=90), states=["failed", "cancelled"])

Finished jobs are in no index of their own: that is what makes a completion cheap. They are found by walking the
primary key from its low end, where the oldest are, up to the first that were enqueued too late. Each batch is one
statement in a transaction of its own, so the walk can be stopped anywhere and begun anew, by several processes too: let
a periodic job do it.

A job that others were enqueued ``after`` is removed if it has completed: for them it counts as that. One that has
failed or was cancelled stays as long as one of those has not completed. Its attempts go with it.

| statement | locks | if the process stops right there |
|---|---|---|
| prune | finished jobs of the batch (skip), by id; then their attempts and dependencies | removed or not; call again |
| cutoff | nothing | nothing |

Two that remove jobs which depend on each other may meet in a deadlock; the batch is sent again then (see
:mod:`~jobsync_orm.autocommit`).

The space is free for new jobs when (auto)vacuum has been at the tables.
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable, Iterable
from functools import cached_property
from typing import Any

from sqlalchemy import text

from jobsync_orm.autocommit import instant, listed, micros
from jobsync_orm.coordinator.session import array
from jobsync_orm.exceptions import InvalidJob
from jobsync_orm.models.states import FINISHED, JobState
from jobsync_orm.naming import Names
from jobsync_orm.queue.core import QueueCore
from jobsync_orm.queue.options import brief, seconds, states_among

__all__ = ["RetentionCalls"]

MOST_AT_ONCE = 100_000


class RetentionStatements:
    """Their SQL."""

    def __init__(self, names: Names) -> None:
        job, attempt, dependency = names.text("job"), names.text("job_attempt"), names.text("job_dependency")
        cutoff = instant("CAST(:cutoff AS bigint)")
        ago = "clock_timestamp() - CAST(:seconds AS float8) * interval '1 second'"
        self.cutoff = text(f"SELECT {micros(ago)}")

        # Looks at :batch jobs after the id :after. Returned: how many those were, the last one, whether all of them
        # were enqueued too late, and how many are gone.
        self.prune = text(f"""
            WITH looked AS MATERIALIZED (
                SELECT id, created_at FROM {job} WHERE id > :after ORDER BY id LIMIT :batch),
            old AS MATERIALIZED (
                SELECT j.id FROM looked l CROSS JOIN LATERAL (
                    SELECT id FROM {job} j
                    WHERE j.id = l.id AND j.state = ANY ({listed("states", "text")}) AND j.finished_at < {cutoff}
                        AND (j.state = 'completed' OR NOT EXISTS (
                            SELECT 1 FROM {dependency} d JOIN {job} b ON b.id = d.job_id
                            WHERE d.after_id = j.id AND b.state <> 'completed'))
                    FOR UPDATE SKIP LOCKED) j),
            gone AS (DELETE FROM {job} WHERE id = ANY (ARRAY(SELECT id FROM old)) RETURNING id),
            attempts AS (DELETE FROM {attempt} WHERE job_id = ANY (ARRAY(SELECT id FROM gone))),
            after AS (DELETE FROM {dependency} WHERE after_id = ANY (ARRAY(SELECT id FROM gone))),
            before AS (
                DELETE FROM {dependency} WHERE job_id = ANY (ARRAY(SELECT id FROM gone))
                    AND after_id <> ALL (ARRAY(SELECT id FROM gone)))
            SELECT count(*), max(id), coalesce(bool_and(created_at >= {cutoff}), true), (SELECT count(*) FROM gone)
            FROM looked""")


class RetentionCalls(QueueCore):
    """See :class:`~jobsync_orm.JobQueue`."""

    @cached_property
    def _retention(self) -> RetentionStatements:
        return RetentionStatements(self.names)

    def prune(
        self,
        older_than: float | datetime.timedelta,
        states: JobState | str | Iterable[JobState | str] = JobState.COMPLETED,
        *,
        batch: int = 1000,
        pause_sec: float = 0.0,
        progress: Callable[[int, int], object] | None = None,
    ) -> int:
        """Remove jobs that finished some time ago, with their attempts.

        Parameters
        ----------
        older_than : float or timedelta
            How long ago they must have finished, in seconds.
        states : JobState or iterable of them
            COMPLETED, FAILED or CANCELLED, or several of these.
        batch : int
            How many jobs one statement looks at, each in a transaction of its own.
        pause_sec : float
            Seconds to wait between two of them, to leave the server to others.
        progress : callable, optional
            Called after each batch with the id of the last job it has looked at, and how many have been removed so far.

        Returns
        -------
        int
            How many jobs were removed. One that somebody else has locked is left for the next call.

        Raises
        ------
        InvalidJob
            A value is out of range, or a state is none of a finished job.
        """
        age = older_than.total_seconds() if isinstance(older_than, datetime.timedelta) else older_than
        age = seconds("older_than", age)
        wanted = states_among(FINISHED, states)
        if not isinstance(batch, int) or isinstance(batch, bool) or not 1 <= batch <= MOST_AT_ONCE:
            raise InvalidJob(f"batch={brief(batch)} must be a whole number from 1 to {MOST_AT_ONCE}")
        rest = seconds("pause_sec", pause_sec)
        database = self._autocommit
        cutoff = database.repeat(self._retention.cutoff, {"seconds": age})[0][0][0]
        values: dict[str, Any] = {"states": array(wanted), "cutoff": cutoff, "batch": batch, "after": -(2**63)}
        removed = 0
        while True:
            number, last, too_late, gone = database.repeat(self._retention.prune, values)[0][0]
            removed += int(gone)
            if progress is not None and last is not None:
                progress(last, removed)
            if number < batch or too_late:
                return removed
            values["after"] = last
            time.sleep(rest)
