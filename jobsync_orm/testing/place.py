"""Where the jobs are that a test runs: in the database, or in a transaction of the test's own."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from sqlalchemy import Connection, TextClause, text
from sqlalchemy.orm import Session, sessionmaker

from jobsync_orm.autocommit import Autocommit, listed
from jobsync_orm.coordinator.session import array
from jobsync_orm.queue import ClaimedJob, Ending, JobQueue
from jobsync_orm.queue.jobs import claimed, settlement
from jobsync_orm.queue.statements import DEADLINE_SLACK_SEC

__all__ = ["Place"]

PARAMETER = re.compile(r"\$(\d+)")


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
        job, pause = queue.names.text("job"), queue.names.text("job_pause")
        now = "clock_timestamp()"

        # No node's, so that no worker takes these jobs for those of one that has died.
        self._claim = text(f"""
            WITH picked AS (
                SELECT j.ctid FROM {job} j
                WHERE j.state = 'pending' AND j.type = ANY ({listed("types", "text")})
                    AND NOT EXISTS (SELECT 1 FROM {pause} p WHERE p.type IN ('', j.type))
                    AND (j.key IS NULL OR NOT EXISTS (SELECT 1 FROM {job} b WHERE b.key = j.key
                        AND (b.state = 'processing' OR b.id < j.id AND (
                            b.state = 'pending' OR b.state = 'retrying' AND b.retry_blocks_key))))
                ORDER BY j.priority DESC, j.ready_at, j.id LIMIT 1 FOR UPDATE SKIP LOCKED),
            taken AS (
                UPDATE {job} j SET state = 'processing', attempt = attempt + 1, started_at = {now}, worker = 'drain',
                    incarnation = NULL,
                    deadline = {now} + (timeout + {DEADLINE_SLACK_SEC}) * interval '1 second'
                WHERE j.ctid = ANY (ARRAY(SELECT ctid FROM picked)) RETURNING j.*)
            SELECT CAST(json_agg(json_build_array(id, type, priority, attempt, failures, max_retries, timeout, key,
                payload, 0, CAST(extract(epoch FROM created_at) * 1000000 AS bigint))) AS text) FROM taken""")

        self._promote = text(f"""
            UPDATE {job} SET state = 'pending', ready_at = {now} WHERE id = (
                SELECT id FROM {job} WHERE state IN ('scheduled', 'retrying')
                    AND type = ANY ({listed("types", "text")}) AND (:early OR run_at <= {now})
                ORDER BY run_at, id LIMIT 1 FOR UPDATE SKIP LOCKED) RETURNING id""")

        self._blocked = text(
            f"SELECT id FROM {job} WHERE state = 'blocked' AND type = ANY ({listed('types', 'text')}) ORDER BY id"
        )
        self._unblock = _bound(queue.statements.unblock)
        self._settle = _bound(queue.statements.settle)

    def claim(self, types: Sequence[str]) -> ClaimedJob | None:
        """Claim the next job."""
        [(row,)] = self._database.execute(self._claim, {"types": array(types)})
        jobs = claimed(row)
        return jobs[0] if jobs else None

    def settle(self, ending: Ending, now: float) -> None:
        """Write how an attempt has ended."""
        self._execute(self._settle, settlement([ending], now))

    def free(self, types: Sequence[str]) -> bool:
        """Make jobs ready whose dependencies have completed. Returned: whether there were any."""
        ids = [id for (id,) in self._database.execute(self._blocked, {"types": array(types)})]
        if not ids:
            return False
        [(freed, *_)] = self._execute(self._unblock, [array(ids)])
        return bool(json.loads(freed) if isinstance(freed, str) else freed)

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


def _bound(sql: str) -> TextClause:
    """A statement with ``$n`` parameters for SQLAlchemy: ``:pn``."""
    return text(PARAMETER.sub(r"(:p\1)", sql.replace(":", r"\:")))
