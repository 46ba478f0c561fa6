"""Drain a node: it gives up its tokens, and gets none until it is undrained.

The order is an entry in the cluster's row, by the node's *name*: it outlives the process, so that a node that restarts
gets nothing either. It raises the cluster's revision, as though the node had left: no plan that was made before it can
be published after it. The leader's next plan then asks the node for its tokens like for any hand-off, with
``on_revoke``, open claims and ``drain_timeout_sec``, and gives them to the others. The node stays a member: it beats,
and may lead. A worker on it ends the jobs that it runs, gives back those that wait for a slot, and takes no new one.

Where no other live node takes tokens, the node's tokens are parked: asked back, and given to nobody. :func:`drain`
refuses that unless it is told to. Two operators who each drain the other's last node cannot both succeed: the order is
a compare-and-set on the revision that the check has seen.

| statement | locks | if the process stops right there |
|---|---|---|
| drain, undrain | the cluster's row, for one statement | ordered or not; the leader does the rest by itself |
| look, left | nothing | nothing |
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

from sqlalchemy import Engine, text

from jobsync_orm.autocommit import Autocommit
from jobsync_orm.coordinator.statements import Statements
from jobsync_orm.exceptions import OperationRefused
from jobsync_orm.naming import Names
from jobsync_orm.operate.missing import check_given, check_texts, no_cluster, ready
from jobsync_orm.operate.numbered import numbered

__all__ = ["Remaining", "drain", "undrain", "watch_drain"]

# Seconds between two looks at what is left.
LOOK_SEC = 0.2

# The order is tried again if members came or went in between.
TRIES = 20


@dataclass(frozen=True, slots=True)
class Remaining:
    """What a drained node still has.

    Attributes
    ----------
    tokens : int
        Tokens under its name.
    claims : int
        Tasks it has claimed and not completed: their tokens wait for them, at most ``drain_timeout_sec``.
    registered : bool
        Whether there is such a node.
    """

    tokens: int
    claims: int
    registered: bool

    @property
    def done(self) -> bool:
        """Whether it has nothing."""
        return self.tokens == 0


def drain(
    engine: Engine, names: Names, node: str, *, by: str, reason: str | None = None, last_too: bool = False
) -> bool:
    """Order a node to be drained. Returns at once; False if it was drained already.

    Parameters
    ----------
    engine, names : Engine, Names
        The cluster.
    node : str
        A registered node's name.
    by : str
        Who says so.
    reason : str, optional
        Stored with the order.
    last_too : bool
        Also if no other live node takes tokens: then nobody works on any.

    Raises
    ------
    OperationRefused
        There is no such node, it is the last one that takes tokens, or ``reason`` cannot be stored. Nothing is changed.
    SchemaNotReady
        There is no cluster.
    """
    check_given(engine, names)
    check_texts(node=node, by=by, reason=reason)
    database = Autocommit(engine)
    sql = Statements(names)
    look = text(f"""
        SELECT c.revision, (c.drained -> CAST(:node AS text)) IS NOT NULL,
            (SELECT json_agg(n.name ORDER BY n.ordinal) FROM {names.text("node")} n),
            (SELECT count(*) FROM {names.text("node")} n
                WHERE n.state <> 'away' AND n.name <> CAST(:node AS text) AND (c.drained -> n.name) IS NULL
                    AND n.last_heartbeat > clock_timestamp() - n.heartbeat_timeout_sec * interval '1 second')
        FROM {names.text("cluster")} c""")
    for _ in range(TRIES):
        with ready(names):
            rows, _ = database.repeat(look, {"node": node})
        if not rows:
            raise no_cluster(names)
        revision, already, members, others = rows[0]
        if already:
            return False
        if node not in (members or []):
            raise OperationRefused(f"there is no node {node!r}; registered are {', '.join(members or []) or 'none'}")
        if not others and not last_too:
            raise OperationRefused(
                f"{node!r} is the last node that takes tokens: nobody would work on any of them. Start another one or "
                "undrain one first, or say that this is wanted (--last)"
            )
        if database.execute(*numbered(sql.drain, node, by, reason, revision)):
            return True
    raise OperationRefused(f"nodes come and go all the time: {node!r} was not drained, try again")


def undrain(engine: Engine, names: Names, node: str) -> bool:
    """Let a node have tokens again. False if it was not drained.

    Raises
    ------
    OperationRefused
        No node can have this name.
    SchemaNotReady
        There are no tables.
    """
    check_texts(node=node)
    with ready(names):
        return bool(Autocommit(engine).execute(*numbered(Statements(names).undrain, node)))


def watch_drain(engine: Engine, names: Names, node: str, timeout_sec: float | None = None) -> Iterator[Remaining]:
    """What a drained node still has, again and again, until it has nothing or the time is over.

    Parameters
    ----------
    engine, names : Engine, Names
        The cluster.
    node : str
        The node.
    timeout_sec : float, optional
        Seconds to watch. None: without end.

    Yields
    ------
    Remaining
        The last one is ``done`` unless the time is over.
    """
    database = Autocommit(engine)
    left = text(f"""
        SELECT (SELECT count(*) FROM {names.text("token")} WHERE node = :node),
            (SELECT count(*) FROM {names.text("claim")} WHERE node = :node),
            EXISTS (SELECT 1 FROM {names.text("node")} WHERE name = :node)""")
    until = None if timeout_sec is None else time.monotonic() + timeout_sec
    while True:
        with ready(names):
            rows, _ = database.repeat(left, {"node": node})
        found = Remaining(*rows[0])
        yield found
        if found.done or (until is not None and time.monotonic() >= until):
            return
        time.sleep(LOOK_SEC)
