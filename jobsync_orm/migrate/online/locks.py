"""DDL that needs a table for itself, without making its writers wait: a short wait for the lock, and another try.

A statement that waits for ACCESS EXCLUSIVE makes everybody wait who comes after it, for as long as the oldest
transaction on the table runs. So it waits ``lock_timeout`` seconds at most, gives up, lets the writers through, and
tries again.

Such a wait is too short to make an autovacuum go: PostgreSQL cancels one only for who has waited ``deadlock_timeout``
(1 s). So first SHARE UPDATE EXCLUSIVE is taken, for which one may wait long, because no reader or writer queues
behind it; it sends the autovacuum away and keeps the next one, and other DDL, from beginning.

All of it is one statement, a DO block: one message, one transaction. A process that is paused or killed at any
moment has either not sent it, or the server finishes it alone; no lock is ever held while the client is silent.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from sqlalchemy import Connection, text
from sqlalchemy.exc import DBAPIError

from jobsync_orm.exceptions import ConfigurationError, LockNotAcquired
from jobsync_orm.migrate.binding import raw
from jobsync_orm.naming import literal
from jobsync_orm.sqlstates import sqlstate

__all__ = ["Patience", "exclusively", "unlimited"]

log = logging.getLogger("jobsync_orm.migrate")

# lock_not_available; deadlock_detected, if somebody who has the table read-locked asks for what the first lock keeps.
_IN_USE = ("55P03", "40P01")

_FIRST_PAUSE, _LAST_PAUSE = 0.2, 5.0


class Patience:
    """How long to wait for locks.

    Parameters
    ----------
    lock_timeout : float
        Seconds for which others may have to wait behind one try.
    total : float
        Seconds after which the tries end.

    Raises
    ------
    ConfigurationError
        A number out of range.
    """

    def __init__(self, lock_timeout: float, total: float) -> None:
        if not 0.001 <= lock_timeout <= 3600:
            raise ConfigurationError(f"lock_timeout={lock_timeout!r} must be a number of seconds from 0.001 to 3600")
        if not 0 <= total <= 1_000_000:
            raise ConfigurationError(f"patience={total!r} must be a number of seconds from 0 to 1,000,000")
        self.lock_timeout, self.total = lock_timeout, total


def exclusively(
    connection: Connection, table: str, oid: int, statements: Sequence[str], patience: Patience, unless: str = "false"
) -> None:
    """Run statements in one transaction that has the table for itself.

    Parameters
    ----------
    connection : Connection
        In AUTOCOMMIT.
    table, oid : str, int
        The table, in SQL, and its number.
    statements : sequence of str
        Statements of PL/pgSQL.
    patience : Patience
        How long to wait.
    unless : str
        Condition under which there is nothing to do, asked when no other DDL can come between.

    Raises
    ------
    LockNotAcquired
        Others held the table all the time; the message says which sessions.
    """
    deadline = time.monotonic() + patience.total
    pause = _FIRST_PAUSE
    while True:
        left = max(deadline - time.monotonic(), patience.lock_timeout)
        block = (
            f"BEGIN {_timeout(left)} LOCK TABLE {table} IN SHARE UPDATE EXCLUSIVE MODE;"
            f" IF {unless} THEN RETURN; END IF; {_timeout(patience.lock_timeout)} {' '.join(statements)} END"
        )
        try:
            connection.execute(raw(f"DO {literal(block)}"))
            return
        except DBAPIError as error:
            if sqlstate(error.orig) not in _IN_USE:
                raise
            if time.monotonic() + pause >= deadline:
                raise LockNotAcquired(
                    f"{table} was in use for all of {patience.total:g} s: {_holders(connection, oid)}. Nothing of this "
                    "step was done. End those transactions (pg_terminate_backend) or wait, and run it again; or raise "
                    "lock_timeout above their duration"
                ) from error
            log.info("%s is in use by %s; trying again in %.1f s", table, _holders(connection, oid), pause)
        # Others wait behind a try for lock_timeout: leave them ten times as long in between, in the end.
        time.sleep(pause * random.uniform(0.8, 1.2))
        pause = min(pause * 1.5, max(_LAST_PAUSE, 10 * patience.lock_timeout))


def _timeout(seconds: float) -> str:
    return f"PERFORM pg_catalog.set_config('lock_timeout', '{round(seconds * 1000)}', true);"


def _holders(connection: Connection, oid: int) -> str:
    ask = text(
        "SELECT l.pid, a.state, a.application_name,"
        " CAST(extract(epoch FROM clock_timestamp() - a.xact_start) AS float8) AS age"
        " FROM pg_catalog.pg_locks l LEFT JOIN pg_catalog.pg_stat_activity a USING (pid)"
        " WHERE l.locktype = 'relation' AND l.relation = :oid AND l.granted AND l.pid <> pg_catalog.pg_backend_pid()"
        " AND l.database = (SELECT oid FROM pg_catalog.pg_database WHERE datname = pg_catalog.current_database())"
        " ORDER BY a.xact_start NULLS LAST, l.pid"
    )
    sessions = {}
    for pid, state, application, age in connection.execute(ask, {"oid": oid}):
        known = [
            state or "",
            f"for {age:.0f} s" if age is not None else "",
            application and f"application {application}",
        ]
        about = ", ".join(part for part in known if part)
        sessions[pid] = f"pid {pid}" + (f" ({about})" if about else "")
    return "; ".join([*sessions.values()][:5]) or "sessions that are gone by now"


@contextmanager
def unlimited(connection: Connection) -> Iterator[None]:
    """None of the role's or database's time limits for statements that take long and make nobody wait.

    And READ COMMITTED: under any other default a batch would fail wherever somebody has just written one of its rows.
    """
    ours = {"statement_timeout": "0", "lock_timeout": "0", "default_transaction_isolation": "read committed"}
    before = {
        name: connection.scalar(text("SELECT pg_catalog.current_setting(:name)"), {"name": name}) for name in ours
    }
    setting = text("SELECT pg_catalog.set_config(:name, :value, false)")
    for name, value in ours.items():
        connection.execute(setting, {"name": name, "value": value})
    try:
        yield
    finally:
        if not connection.invalidated:
            for name, value in before.items():
                connection.execute(setting, {"name": name, "value": value})
