"""What a job owns, from memory."""

from __future__ import annotations

import asyncio
import logging
from time import clock_gettime
from typing import Any

from jobsync_orm.coordinator.clock import CLOCK
from jobsync_orm.coordinator.view import View
from jobsync_orm.job.life import Life
from jobsync_orm.logs import fields
from jobsync_orm.tasks import Task

__all__ = ["OwnershipCalls"]

logger = logging.getLogger("jobsync_orm")


class OwnershipCalls(Life):
    """See :class:`~jobsync_orm.Job`."""

    _said_no = False

    def can_claim_task(self, task: Task | Any) -> bool:
        """Whether this node may work on ``task`` now.

        Normally answers from memory. Where this node cannot know for a moment (its connection has just broken, the
        process has been asleep) it waits for certainty, at most ``certainty_wait_sec`` once per interruption, and
        answers False if there is none.

        Parameters
        ----------
        task : Task, int, str, UUID
            Task or task id.

        Returns
        -------
        bool
            True in standalone mode. False before ``start`` (which the log says once) and after ``stop``.

        Raises
        ------
        UnstableTaskId, InvalidTaskId
            The id cannot be hashed to the same token by every worker.
        ForkedJob
            The job was started before this process was forked.
        """
        token = self._token_of(task.id if type(task) is Task else task)
        coordinator = self._coordinator
        if coordinator is None:
            return self.coordination_config is None or self._says_no()
        view = coordinator.ownership.view
        if clock_gettime(CLOCK) < view.valid_until:
            return view.owned[token] == 1
        self.check_process()
        return coordinator.ownership.decide(token)

    async def can_claim_task_async(self, task: Task | Any) -> bool:
        """:meth:`can_claim_task`, without blocking the event loop where there is no certainty for a moment."""
        coordinator = self._coordinator
        if coordinator is not None:
            token = self._token_of(task.id if type(task) is Task else task)
            view = coordinator.ownership.view
            if clock_gettime(CLOCK) < view.valid_until:
                return view.owned[token] == 1
            return await asyncio.to_thread(self.can_claim_task, task)
        return self.can_claim_task(task)

    def _says_no(self) -> bool:
        """False, and once for each job a word about it: no error, since programs ask while they start and stop."""
        if not self._said_no:
            self._said_no = True
            logger.warning(
                "%s was never started; it says no to everything: use `with Job(...) as job:` or job.start()",
                self.node_name,
                extra=fields("not_started", self.node_name),
            )
        return False

    def task_to_token(self, task_id: Any) -> int:
        """The token ``task_id`` hashes to, in ``[0, total_tokens)``."""
        return self._token_of(task_id.id if isinstance(task_id, Task) else task_id)

    @property
    def my_tokens(self) -> set[int]:
        """The tokens this node owns, as a new set; all of them in standalone mode."""
        self.check_process()
        if self.coordination_config is None:
            return set(range(self.total_tokens))
        return self._coordinator.ownership.view.tokens() if self._coordinator else set()

    @property
    def token_version(self) -> int:
        """The cluster's epoch as of this node's present tokens; only grows. 0 in standalone mode."""
        return self._coordinator.ownership.held.epoch if self._coordinator else 0

    def held_view(self) -> View | None:
        """What this node owned at its last refresh, whether or not that is certain now; None before ``start``.

        For the commit fence, which compares it with what the database says when a transaction commits. To ask what this
        node may work on use :meth:`can_claim_task`.
        """
        return self._coordinator.ownership.held if self._coordinator else None
