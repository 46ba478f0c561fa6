"""Whether notifications arrive, and whether this connection is one of its own."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any

from sqlalchemy import NullPool, create_engine

from jobsync_orm.config import CoordinationConfig
from jobsync_orm.operate.doctor.findings import Finding, Severity, Subject

__all__ = ["check"]

ANSWER_SEC = 5.0

# Share of the server's queue of notifications from which somebody should look.
FULL = 0.5


def check(subject: Subject) -> Iterator[Finding]:
    """A pooler; a notification that does not come back; a queue of them that nobody empties."""
    engine = create_engine(
        CoordinationConfig(engine=subject.engine).sqlalchemy_url(),
        poolclass=NullPool,
        connect_args={"prepare_threshold": None},
    ).execution_options(isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        driver: Any = connection.connection.driver_connection
        pid, used = connection.exec_driver_sql("SELECT pg_backend_pid(), pg_notification_queue_usage()").one()
        if driver.info.backend_pid != pid:
            yield Finding(
                "listening",
                Severity.WARNING,
                "this connection goes through a connection pooler",
                "it can keep neither the advisory lock nor the notifications of a node: a worker with this URL is "
                "refused with PooledConnection",
                "give workers (CoordinationConfig, JobWorker) a URL that reaches PostgreSQL directly; sessions of the "
                "application may keep the pooler",
            )
        elif not _comes_back(connection, driver):
            yield Finding(
                "listening",
                Severity.ERROR,
                f"a notification did not come back within {ANSWER_SEC:.0f} s",
                "workers hear of new jobs and of their tokens only when they look by themselves",
                "look for what is between this host and the server (a proxy), and connect without it",
            )
        if used > FULL:
            yield Finding(
                "listening",
                Severity.ERROR,
                f"the server's queue of notifications is {used:.0%} full",
                "when it is full, each transaction that notifies fails: enqueueing too",
                "end the session that listens and does not go on: SELECT pid, application_name, xact_start FROM "
                "pg_stat_activity ORDER BY xact_start LIMIT 5, then SELECT pg_terminate_backend(PID)",
            )


def _comes_back(connection: Any, driver: Any) -> bool:
    channel = f"jobsync_doctor_{uuid.uuid4().hex}"
    connection.exec_driver_sql(f"LISTEN {channel}")
    connection.exec_driver_sql(f"NOTIFY {channel}")
    return any(notify.channel == channel for notify in driver.notifies(timeout=ANSWER_SEC, stop_after=1))
