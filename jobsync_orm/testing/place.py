"""Where the jobs are that a test runs: in the database, or in a transaction of the test's own."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, Protocol

from sqlalchemy import Connection, TextClause, text
from sqlalchemy.orm import Session, sessionmaker

from jobsync_orm.autocommit import Autocommit, listed
from jobsync_orm.coordinator.session import array
from jobsync_orm.queue import ClaimedJob, Ending, JobQueue
from jobsync_orm.queue.jobs import settlement
from jobsync_orm.queue.taking import Taking, named

__all__ = ["Place"]

# The thread that tells workers of new jobs frees those that wait for nothing any more, too: so long is waited for it.
FREED_SEC: Final = 1.0


class Executes(Protocol):
    def execute(self, statement: TextClause, values: Mapping[str, object], /) -> Any: ...


class Place:
    """What a drain does to the tables.

    Parameters
    ----------
    queue : JobQueue
        Whose jobs.
    connection : Connection, optional
        One with an open transaction, in which everything is done then.
    """

    def __init__(self, queue: JobQueue, connection: Connection | None = None) -> None:
        self._queue = queue
        self._connection = connection
        self._database: Executes = connection if connection is not None else Autocommit(queue.engine)
        job, now = queue.names.text("job"), "clock_timestamp()"
        dequeue = named(queue.statements.dequeue)
        self._taking = Taking(queue, lambda values: next(iter(self._database.execute(dequeue, values))))

        self._promote = text(f"""
            UPDATE {job} SET state = 'pending', ready_at = {now} WHERE id = (
                SELECT id FROM {job} WHERE state IN ('scheduled', 'retrying')
                    AND type = ANY ({listed("types", "text")}) AND (:early OR run_at <= {now})
                ORDER BY run_at, id LIMIT 1 FOR UPDATE SKIP LOCKED) RETURNING id""")

        self._blocked = text(
            f"SELECT id FROM {job} j WHERE state = 'blocked' AND type = ANY ({listed('types', 'text')})"
            f" AND NOT {queue.statements.waits} ORDER BY id"
        )
        self._unblock = named(queue.statements.unblock)
        self._settle = named(queue.statements.settle)

    def claim(self, types: Sequence[str]) -> ClaimedJob | None:
        """Claim the next job."""
        jobs = self._taking.take(types, "drain", 1)
        return jobs[0] if jobs else None

    def settle(self, ending: Ending, now: float) -> None:
        """Write how an attempt has ended."""
        self._execute(self._settle, settlement([ending], now))

    def free(self, types: Sequence[str]) -> bool:
        """Make jobs ready whose dependencies have completed. Returned: whether there were any."""
        found, until = False, time.monotonic() + FREED_SEC
        while ids := [id for (id,) in self._database.execute(self._blocked, {"types": array(types)})]:
            found = True
            [(freed, *_)] = self._execute(self._unblock, [array(ids)])
            if json.loads(freed) if isinstance(freed, str) else freed:
                break
            if time.monotonic() > until:
                return False
            time.sleep(FREED_SEC / 200)
        return found

    def promote(self, types: Sequence[str], early: bool) -> bool:
        """Make the scheduled or retrying job ready that is due first, if it is due, or else ``early``."""
        return bool(list(self._database.execute(self._promote, {"types": array(types), "early": early})))

    @contextmanager
    def sessions(self) -> Iterator[None]:
        """Give handlers sessions in the test's transaction, if it has one."""
        connection = self._connection
        if connection is None:
            yield
            return
        before = self._queue.session_factory
        make: Callable[..., Any] = before if isinstance(before, sessionmaker) else Session
        self._queue.session_factory = lambda: make(bind=connection, join_transaction_mode="create_savepoint")
        try:
            yield
        finally:
            self._queue.session_factory = before

    def _execute(self, statement: TextClause, values: Sequence[object]) -> list[Any]:
        named = {f"p{number}": value for number, value in enumerate(values, 1)}
        return list(self._database.execute(statement, named))
