"""Jobs with a key in a worker: what the pump asks and tells."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING

from jobsync_orm.coordinator.session import Session, StatementFailed, array
from jobsync_orm.queue.handlers import option_arrays
from jobsync_orm.queue.jobs import claimed
from jobsync_orm.queue.statements import COLLIDED
from jobsync_orm.worker.key_search import ANSWER_SEC, KeySearch
from jobsync_orm.worker.keys import Keys

if TYPE_CHECKING:
    from jobsync_orm.models.states import JobState
    from jobsync_orm.queue.handlers import Handler
    from jobsync_orm.queue.jobs import ClaimedJob
    from jobsync_orm.queue.statements import QueueStatements

__all__ = ["Keyed"]

# A claim that met another one is sent again so many times at once.
TRIES = 3


class Keyed:
    """See above.

    Parameters
    ----------
    statements : QueueStatements
        The SQL.
    node_name : str
        This worker.
    incarnation, types, tokens, poll_sec
        See :class:`~jobsync_orm.worker.key_search.KeySearch`.
    ageing_sec : float
        Seconds of waiting that weigh as much as one point of priority.
    handlers : mapping
        Type -> handler, of the types this worker runs.
    """

    def __init__(
        self,
        statements: QueueStatements,
        node_name: str,
        incarnation: Callable[[], str],
        types: Callable[[], Collection[str]],
        tokens: Callable[[], object],
        poll_sec: float,
        ageing_sec: float,
        handlers: Mapping[str, Handler],
    ) -> None:
        self._sql = statements.heads
        self._node_name = node_name
        self._types = types
        self._handlers = handlers
        self.keys = Keys(ageing_sec)
        self.search = KeySearch(statements, self.keys, node_name, incarnation, types, tokens, poll_sec)

    def claim(self, session: Session, rooms: Mapping[str, int], before: float, incarnation: str) -> list[ClaimedJob]:
        """Claim the first jobs of the keys whose turn it is.

        Parameters
        ----------
        session : Session
            The pump's.
        rooms : mapping
            Type -> how many jobs of it there is room for.
        before : float
            See :meth:`Keys.plan <jobsync_orm.worker.keys.Keys.plan>`.
        incarnation : str
            For which life of the node.
        """
        asked = self.keys.plan(rooms, time.monotonic(), before)
        if not asked:
            return []
        try:
            answer, left, follows = self._ask(session, rooms, incarnation, asked)
        except BaseException:
            self.keys.put_back(asked)
            raise
        jobs = claimed(answer)
        self.keys.claimed(jobs, json.loads(left or "[]"), json.loads(follows or "[]"), self._types(), time.monotonic())
        return jobs

    def _ask(
        self, session: Session, rooms: Mapping[str, int], incarnation: str, asked: list[str]
    ) -> tuple[str | None, ...]:
        types = sorted(rooms)
        options = option_arrays(self._handlers, types)
        parameters = (self._node_name, incarnation, array(types), True, array(asked), *options)
        for _ in range(TRIES - 1):
            try:
                return session.prepared(self._sql, *parameters, timeout=ANSWER_SEC)[0]
            except StatementFailed as failed:
                if failed.sqlstate not in COLLIDED:
                    raise
        return session.prepared(self._sql, *parameters, timeout=ANSWER_SEC)[0]

    def settled(self, job: ClaimedJob, state: JobState) -> None:
        """It is written down that ``job`` has ended, and in which state it is now: its key is free."""
        if job.key is not None:
            self.keys.settled(job, state, self._types())
