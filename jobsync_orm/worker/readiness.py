"""Whether a database has what a worker needs."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from jobsync_orm.coordinator.admission import MISSING, not_ready
from jobsync_orm.coordinator.session import Session, StatementFailed

if TYPE_CHECKING:
    from jobsync_orm.queue import JobQueue

__all__ = ["check_tables"]

ANSWER_SEC = 10.0

# All that the queue reads and writes. Those of the cluster are looked at by who joins it.
TABLES = ("job", "job_attempt", "job_dependency", "job_schedule", "job_pause", "job_worker")


def check_tables(queue: JobQueue) -> None:
    """See whether the tables of ``queue`` are there.

    Raises
    ------
    SchemaNotReady
        One is not: the database is of an older revision, or has none of this library's tables.
    SessionLost
        The database could not be reached.
    """
    config, names = queue.config, queue.names
    asleep, write = os.pipe()  # which nobody wakes
    session = Session(config.connection_pool(), asleep, lambda at: None, ANSWER_SEC, "")
    try:
        session.open()
        tables = ", ".join(names.sql(table) for table in TABLES)
        session.execute(f"SELECT trace FROM {tables} LIMIT 0", timeout=ANSWER_SEC)  # 0006's
    except StatementFailed as failed:
        if failed.sqlstate not in MISSING:
            raise
        raise not_ready(config) from None
    finally:
        session.close()
        os.close(asleep)
        os.close(write)
