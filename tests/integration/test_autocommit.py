"""What a single statement leaves locked if the process that sends it does not go on."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import Engine, create_engine, event, text
from sqlalchemy.exc import DBAPIError

from jobsync_orm import Job
from jobsync_orm.autocommit import bounded
from jobsync_orm.naming import Names
from jobsync_orm.operate import Operations, drain
from tests.integration.cluster import wait_for


def test_who_is_paused_before_its_commit_does_not_keep_the_cluster_locked(engine: Engine, job: Job) -> None:
    """As the dashboard's process may be. Without the cluster's row no node joins, leaves, or is taken out."""
    pausing = create_engine(engine.url)

    def free() -> bool:
        with engine.begin() as other:
            return bool(other.execute(text("SELECT 1 FROM sync_cluster FOR UPDATE SKIP LOCKED")).all())

    @event.listens_for(pausing, "after_cursor_execute")
    def pause(connection: Any, cursor: Any, statement: str, *_: Any) -> None:
        if "UPDATE" in statement:
            assert not free()
            wait_for(free, "the cluster's row is free")

    with pytest.raises(DBAPIError, match="idle-in-transaction timeout"):
        drain(bounded(pausing, 0.5), Names(), job.node_name, by="ada", last_too=True)
    pausing.dispose()
    assert Operations(engine, Names()).status().drained == ()
