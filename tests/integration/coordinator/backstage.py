"""For tests of single statements: a coordinator's session without a coordinator, and rows of nodes that never ran."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy import URL, Connection, create_engine, text

from jobsync_orm.coordinator.session import Session


@contextmanager
def open_session(database: URL) -> Iterator[Session]:
    """A session that nobody wakes and whose looks nobody wants."""
    engine = create_engine(database)
    wake_fd, write_fd = os.pipe()
    session = Session(engine.pool, wake_fd, lambda *_: None, 0.1, "SET timezone = 'UTC'")
    session.open()
    try:
        yield session
    finally:
        session.close()
        os.close(wake_fd)
        os.close(write_fd)
        engine.dispose()


def add_node(connection: Connection, name: str, *, silent_sec: float = 0, **columns: object) -> str:
    """Store the row of a node that has last been heard of ``silent_sec`` ago. Returns its incarnation."""
    values: dict[str, object] = {
        "ordinal": 0,
        "state": "active",
        "applied_epoch": 0,
        "connection_grace_sec": 0.3,
        "heartbeat_timeout_sec": 4,
        "rejoin_grace_sec": 0,
        **columns,
    }
    incarnation = str(uuid.uuid4())
    connection.execute(
        text(f"""
            INSERT INTO sync_node (name, incarnation, registered_at, join_epoch, last_heartbeat, weight, can_lead,
                labels, host, pid, backend_pid, version, {", ".join(values)})
            SELECT :name, CAST(:incarnation AS uuid), beat, 1, beat, 1, true, '{{}}', 'h', 1, 1, '0',
                {", ".join(f":{column}" for column in values)}
            FROM (SELECT clock_timestamp() - :silent_sec * interval '1 second' AS beat) AS b"""),
        {"name": name, "incarnation": incarnation, "silent_sec": silent_sec, **values},
    )
    return incarnation
