"""Writing down how attempts ended: in batches, and until the database has acknowledged it.

An ending is kept until an answer says that it is written, or that the attempt was somebody else's by then. There are
never more of them than attempts that were claimed, and nothing is claimed while the database does not answer, so their
number is bounded by what a worker may have in hand at once.

If the answer is lost, the statement is sent again: it names the attempt, so that it changes nothing the second time.
Then, and whenever an ending was not taken, a look at the attempt's row tells three cases apart: somebody's transaction
holds the row (try again), it is written already, or the attempt is not this worker's any more.
"""

from __future__ import annotations

import json
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from jobsync_orm.coordinator.session import Session, SessionLost, StatementFailed, array
from jobsync_orm.logs import fields
from jobsync_orm.models.states import AttemptOutcome, JobState
from jobsync_orm.queue.jobs import settlement

if TYPE_CHECKING:
    from jobsync_orm.queue.jobs import Ending
    from jobsync_orm.queue.statements import QueueStatements
    from jobsync_orm.worker.attempts import Attempt

__all__ = ["Finishing"]

logger = logging.getLogger("jobsync_orm")

# What somebody else's transaction holds is tried again after this time, doubled up to the second one.
HELD_SEC, HELD_MOST_SEC = 0.05, 1.0

# Classes of errors that an ending causes by what it holds, not by when it is written: its data, a constraint or a
# trigger of the application's, a limit.
_ITS_OWN = ("22", "23", "54", "P0")

# A mistake in what was executed, and of these a privilege that is missing.
_MISTAKE, _PRIVILEGE = "42", "42501"

Item = tuple["Attempt", "Ending"]


class Finishing:
    """The endings that are not acknowledged yet.

    Parameters
    ----------
    statements : QueueStatements
        The SQL.
    batch : int
        Most endings of one statement.
    answer_sec : float
        Seconds the server has to answer.
    on_lost : callable
        Told of an attempt that turned out not to be this worker's any more.
    """

    def __init__(
        self, statements: QueueStatements, batch: int, answer_sec: float, on_lost: Callable[[Attempt], None]
    ) -> None:
        self._sql = statements
        self._most = self._batch = batch
        self._answer_sec = answer_sec
        self._on_lost = on_lost
        self._queue: deque[Item] = deque()
        self._held: list[Item] = []
        self._held_sec = HELD_SEC
        self._held_until = 0.0
        self.lost = 0

    def __len__(self) -> int:
        return len(self._queue) + len(self._held)

    def add(self, items: Iterable[Item]) -> None:
        """To be written."""
        self._queue.extend(items)

    def due_at(self) -> float:
        """When there is something to write; ``time.monotonic()``."""
        if self._queue:
            return 0.0
        return self._held_until if self._held else float("inf")

    def write(self, session: Session) -> tuple[list[Item], list[int]]:
        """Write one batch.

        Returns
        -------
        tuple
            What is acknowledged now, and the ids of jobs that wait for one of those completed.

        Raises
        ------
        SessionLost, StatementFailed
            Nothing is lost: what was to be written is still to be written.
        """
        if self._held and time.monotonic() >= self._held_until:
            self._queue.extend(self._held)
            self._held = []
        if not self._queue:
            return [], []
        queue = self._queue
        items = [queue.popleft() for _ in range(min(len(queue), self._most))]
        try:
            done, waiting = self._settle(session, items)
        except BaseException as error:
            queue.extendleft(reversed(items))
            # It may have been too much for the time there was, and next time will be no better.
            if isinstance(error, SessionLost) and self._most > 1:
                self._most = max(1, self._most // 2)
            if isinstance(error, StatementFailed) and _is_its_own(error):
                self._refused(error)
                return [], []
            raise
        self._most = min(self._batch, 2 * self._most)
        return done, waiting

    def _settle(self, session: Session, items: list[Item]) -> tuple[list[Item], list[int]]:
        endings = [ending for _, ending in items if not ending.written]
        waiting_of_written = [id for _, ending in items if ending.written for id in ending.waiting]
        if not endings:
            return items, waiting_of_written
        now = time.monotonic()
        ((written, waiting),) = session.prepared(self._sql.settle, *settlement(endings, now), timeout=self._answer_sec)
        found = json.loads(written or "[]")
        if len(found) == len(endings):
            self._held_sec = HELD_SEC
            return items, waiting_of_written + json.loads(waiting or "[]")
        known = {(id, attempt) for id, attempt, _ in found}
        done: list[Item] = []
        missing: list[Item] = []
        for item in items:
            ending = item[1]
            (done if ending.written or (ending.job_id, ending.attempt) in known else missing).append(item)
        self._look(session, missing, done)
        return done, waiting_of_written + json.loads(waiting or "[]")

    def _look(self, session: Session, missing: list[Item], done: list[Item]) -> None:
        """Why were these not written?"""
        ids, attempts = array(e.job_id for _, e in missing), array(e.attempt for _, e in missing)
        ((answer,),) = session.execute(self._sql.lost, ids, attempts, timeout=self._answer_sec)
        state = {(id, attempt): (held, outcome) for id, attempt, held, outcome in json.loads(answer or "[]")}
        for item in missing:
            attempt, ending = item
            held, outcome = state.get((ending.job_id, ending.attempt), (False, None))
            if held:
                self._held.append(item)
            elif outcome in (ending.outcome, AttemptOutcome.COMPLETED):
                # By the statement whose answer was lost, or in the handler's own transaction, whose COMMIT was not
                # known to have been done.
                done.append(item)
            else:
                self.lost += 1
                logger.warning(
                    "job %d (%s): the end of attempt %d, %s, comes too late: the job had been %s; nothing was changed",
                    ending.job_id,
                    attempt.job.type,
                    ending.attempt,
                    ending.outcome,
                    "taken for stuck and given to others" if outcome else "changed or deleted",
                    extra=fields("job_lost", attempt.context.worker, job=attempt.job),
                )
                self._on_lost(attempt)
        if self._held:
            self._held_until = time.monotonic() + self._held_sec
            self._held_sec = min(2 * self._held_sec, HELD_MOST_SEC)

    def _refused(self, error: StatementFailed) -> None:
        """One of the next batch cannot be stored: find it, and store why instead."""
        if self._most > 1 and len(self._queue) > 1:
            self._most = max(1, min(self._most, len(self._queue)) // 2)
            return
        attempt, ending = self._queue[0]
        if ending.outcome == AttemptOutcome.FAILED and ending.state == JobState.FAILED and ending.result is None:
            # Not even this: it stays the first, and is tried again.
            raise error
        logger.error(
            "job %d (%s): its end cannot be stored: %s",
            ending.job_id,
            attempt.job.type,
            error,
            extra=fields("ending_not_stored", attempt.context.worker, job=attempt.job),
        )
        # Run again it would end in the same way, and its effects are there already.
        self._queue[0] = (
            attempt,
            replace(
                ending,
                outcome=AttemptOutcome.FAILED,
                state=JobState.FAILED,
                result=None,
                error=f"the handler ended ({ending.outcome}), but this could not be stored: {error}",
                traceback=None,
                delay=None,
                counts=True,
            ),
        )


def _is_its_own(error: StatementFailed) -> bool:
    """Whether an ending was refused for what it holds.

    A mistake in a trigger of the application's is taken for that: another ending may not come to it. Where it is in the
    statement itself, or a privilege is missing, no ending can be written until somebody has mended that, and none is to
    be recorded as a failure meanwhile: all are kept.
    """
    if error.sqlstate.startswith(_MISTAKE):
        return error.in_function and error.sqlstate != _PRIVILEGE
    return error.sqlstate.startswith(_ITS_OWN)
