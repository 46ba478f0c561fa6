"""Tell the cluster what its watchers see first: that the session of a node has ended.

The leader looks at the sessions of the others once a second, the next in line at the leader's a little less often. Who
watches a cluster may look in between. It wakes both then, as a node that joins does, and they look for themselves:
nobody takes a watcher's word for anything, and how long a session must have been gone to convict is as it was.

| statement | locks | if the process stops right there |
|---|---|---|
| wake | nothing | the leader looks when it would have |
"""

from __future__ import annotations

from contextlib import suppress

from sqlalchemy import Engine, text
from sqlalchemy.exc import DBAPIError

from jobsync_orm.autocommit import Autocommit
from jobsync_orm.naming import Names
from jobsync_orm.operate.picture import ClusterStatus

__all__ = ["Alarm"]


class Alarm:
    """Wakes the leader of one cluster, once for each session that is seen to have ended.

    Parameters
    ----------
    engine : Engine
        A synchronous engine on its database.
    names : Names
        The cluster.
    """

    def __init__(self, engine: Engine, names: Names) -> None:
        self._database = Autocommit(engine)
        self._wake = text(f"SELECT pg_notify('{names.cluster_channel}', '')")
        self._cut_off: set[str] = set()

    def heed(self, status: ClusterStatus) -> None:
        """Take in what a look has shown."""
        before, self._cut_off = self._cut_off, {node.name for node in status.nodes if node.condition == "cut off"}
        if self._cut_off - before:
            with suppress(DBAPIError):  # a standby has no notifications; the leader looks by itself
                self._database.execute(self._wake, {})
