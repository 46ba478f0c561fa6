"""Claims on tasks, and the audit of what was done."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable
from typing import Any

from jobsync_orm.hashing import task_key
from jobsync_orm.job.ownership import OwnershipCalls
from jobsync_orm.tasks import Task, TaskBook, task_ids

__all__ = ["TaskCalls"]

logger = logging.getLogger("jobsync_orm")


class TaskCalls(OwnershipCalls):
    """See :class:`~jobsync_orm.Job`."""

    _book: TaskBook | None

    def _reset(self) -> None:
        super()._reset()
        self._book = None

    def _before_leaving(self) -> None:
        """Write the audit, but do not wait without end for a database that does not answer: leaving matters more."""
        if self._book is None or self.coordination_config is None:
            return

        def write() -> None:
            try:
                self.write_audit()
            except Exception:
                logger.exception("%s: the audit could not be written while stopping", self.node_name)

        writer = threading.Thread(target=write, name="jobsync-audit", daemon=True)
        writer.start()
        writer.join(self.coordination_config.callback_timeout_sec)
        if writer.is_alive():
            logger.error("%s: the audit has not been written in time while stopping", self.node_name)

    def _task_book(self) -> TaskBook:
        if self._book is None:
            assert self.names is not None
            self._book = TaskBook(self._application_engine(), self.names, self.node_name, self._date)
        return self._book

    def set_claim(self, task: Task | Any | Iterable[Task | Any]) -> list[str]:
        """Record an exclusive claim on each task, whether or not its token is this node's.

        Parameters
        ----------
        task : Task, task id, or an iterable of them
            Text, bytes and mappings are one id and never taken apart.

        Returns
        -------
        list of str
            Text of the ids now claimed by this node (claims it already had included), ascending. A task missing from
            it is claimed by another node. Empty in standalone mode.
        """
        tokens = {task_key(id): self._token_of(id) for id in task_ids(task)}
        if self.coordination_config is None:
            return []
        incarnation = self._running().incarnation
        if not tokens or not incarnation:
            return []
        return sorted(self._task_book().claim(tokens, incarnation, owned=False))

    def release_claim(self, task: Task | Any | Iterable[Task | Any]) -> list[str]:
        """End this node's claims on these tasks; returns the text of the ids whose claim ended."""
        keys = [task_key(id) for id in task_ids(task)]
        if self.coordination_config is None:
            return []
        incarnation = self._running().incarnation
        return sorted(self._task_book().release(keys, incarnation)) if keys and incarnation else []

    def add_task(self, task: Task | Any) -> bool:
        """Claim ``task`` and put it down for the audit, if it is this node's to do.

        Returns
        -------
        bool
            False where the task is not this node's, or is claimed by another. Always False in standalone mode, which
            has no audit.
        """
        id = task.id if isinstance(task, Task) else task
        key, token = task_key(id), self._token_of(id)
        if self.coordination_config is None or not self.can_claim_task(id):
            return False
        claimed = self._task_book().claim({key: token}, self._running().incarnation, owned=True)
        if key not in claimed:
            return False
        self._task_book().add(key, token, claimed[key])
        return True

    def write_audit(self) -> None:
        """Write the added tasks to the audit and end their claims, in one transaction.

        A database error raises, and the tasks stay down for the next call. (If the connection breaks after the database
        has committed and before it could say so, the next call writes them again.)
        """
        if self.coordination_config is not None and self._book is not None:
            self._book.write(self._running().incarnation or "00000000-0000-0000-0000-000000000000")

    def get_audit(self) -> list[dict[str, str]]:
        """Audit rows of the processing date, of all nodes, oldest first.

        Returns
        -------
        list of dict
            With keys ``node`` and ``task_id``. Empty in standalone mode.
        """
        return [] if self.coordination_config is None else self._task_book().read()
