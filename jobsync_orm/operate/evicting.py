"""Take a node out of the cluster that does not leave by itself.

Nobody may have a node's tokens while it may say yes to them. So a node is taken out on the same evidence as by a
leader: its heartbeat has stood still for its whole ``heartbeat_timeout_sec``, by the clock of whoever watches, without
a gap, and by the database's. The evicting statement names the heartbeat that was seen; one that has advanced is not
evicted. A leader does all this by itself, sooner; an operator is needed where no live node may lead, and for a node
that is ``away``, whose rest (``rejoin_grace_sec``) can be ended.

A node whose heartbeat goes on has to be stopped first. :func:`expel` does not take it out: it marks its row, so that
the database refuses the next heartbeat of this life. Until the node has heard of that its row and tokens stay. It hears
of it with that heartbeat, or at once by notification: then it says no to everything, and joins anew, as whoever was
taken for dead does, with its tokens at a new epoch and without its claims. If it does not hear of it, its lease ends,
and it is evicted like any other. At no moment has a token two owners.

| statement | locks | if the process stops right there |
|---|---|---|
| look | nothing | nothing |
| expel | the node's row | done or not; the node joins anew, or is evicted by the leader when its lease has ended |
| end_rest | the node's row | done or not; the leader evicts it |
| evict | the cluster's row, the node's, its claims and ephemeral pins (both skip) | done whole or not at all |
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from sqlalchemy import Engine, text

from jobsync_orm.autocommit import Autocommit
from jobsync_orm.coordinator.session import array
from jobsync_orm.coordinator.statements import Statements
from jobsync_orm.exceptions import OperationRefused
from jobsync_orm.naming import Names
from jobsync_orm.operate.missing import check_texts, ready
from jobsync_orm.operate.numbered import numbered

__all__ = ["Member", "Watched", "evict", "expel", "find_member"]

# Seconds between two looks.
LOOK_SEC = 0.25

# Two looks further apart than this are not one observation: this process may have slept.
PATIENCE_SEC = 2.0


@dataclass(frozen=True, slots=True)
class Member:
    """A node's row, as far as taking it out goes.

    Attributes
    ----------
    name : str
    incarnation : str
        This life of it.
    state : str
        ``joining``, ``active`` or ``away``.
    expelled : bool
        Whether its heartbeat is refused.
    beat : str
        Its last heartbeat, as the database writes it.
    age_sec, timeout_sec : float
        Of that heartbeat; and the age from which it counts as dead.
    process : str
        Where it runs.
    drained : bool
    """

    name: str
    incarnation: str
    state: str
    expelled: bool
    beat: str
    age_sec: float
    timeout_sec: float
    process: str
    drained: bool

    @property
    def lease_left_sec(self) -> float:
        """Seconds for which it may still say yes, at most."""
        return 0.0 if self.state == "away" else max(0.0, self.timeout_sec - self.age_sec)


@dataclass(frozen=True, slots=True)
class Watched:
    """How far an eviction is.

    Attributes
    ----------
    outcome : str or None
        None: still watching. ``evicted``: it is out, by this process or another. ``rejoined``: it has joined anew.
        ``alive``: its heartbeat goes on, and nothing was done. (So it does where a worker of a release before migration
        0005 has been expelled.)
    still_sec, needed_sec : float
        For how long its heartbeat has stood still before this process's eyes, and for how long it has to.
    """

    outcome: Literal["evicted", "rejoined", "alive"] | None
    still_sec: float
    needed_sec: float


def find_member(engine: Engine, names: Names, node: str) -> Member | None:
    """The row of a node, or None.

    Raises
    ------
    OperationRefused
        No node can have this name.
    SchemaNotReady
        There are no tables.
    """
    check_texts(node=node)
    look = text(f"""
        SELECT n.name, CAST(n.incarnation AS text), n.state, n.expelled, CAST(n.last_heartbeat AS text),
            CAST(extract(epoch FROM clock_timestamp() - n.last_heartbeat) AS float8), n.heartbeat_timeout_sec,
            n.host || ':' || n.pid, (c.drained -> n.name) IS NOT NULL
        FROM {names.text("cluster")} c JOIN {names.text("node")} n ON n.name = :node""")
    with ready(names):
        rows, _ = Autocommit(engine).repeat(look, {"node": node})
    return Member(*rows[0]) if rows else None


def expel(engine: Engine, names: Names, member: Member) -> None:
    """Have the database refuse the heartbeats of this life of a node.

    Raises
    ------
    OperationRefused
        That life is over already.
    """
    rows = Autocommit(engine).execute(*numbered(Statements(names).expel, member.name, member.incarnation))
    if not rows:
        raise OperationRefused(f"{member.name!r} has gone or joined anew just now")


def evict(engine: Engine, names: Names, member: Member) -> Iterator[Watched]:
    """Watch a node until its heartbeat has stood still for long enough, and take it out.

    Parameters
    ----------
    engine, names : Engine, Names
        The cluster.
    member : Member
        The node, as :func:`find_member` has found it.

    Yields
    ------
    Watched
        What is seen, again and again; only the last one has an ``outcome``.
    """
    sql = Statements(names)
    database = Autocommit(engine)
    if member.state == "away":
        database.execute(*numbered(sql.end_rest, member.name, member.incarnation))
    began: tuple[Member, float] | None = None
    looked = time.monotonic()
    while True:
        asked = time.monotonic()
        now = find_member(engine, names, member.name)
        outcome = _over(member, now)
        if outcome is not None or now is None:
            yield Watched(outcome, 0.0, member.timeout_sec)
            return
        if began is not None and began[0].expelled and now.state != "away" and now.beat != began[0].beat:
            yield Watched("alive", 0.0, now.timeout_sec)  # of a release that does not know of this
            return
        if began is None or began[0].beat != now.beat or asked - looked > PATIENCE_SEC:
            began = now, time.monotonic()
        looked = time.monotonic()
        still = max(0.0, asked - began[1])
        yield Watched(None, still, now.timeout_sec)
        if now.state == "away":
            # It has left or was evicted, and only its name rests.
            database.execute(*numbered(sql.end_rest, now.name, now.incarnation))
            _evict(database, sql, now)
        elif still > now.timeout_sec and now.age_sec > now.timeout_sec:
            _evict(database, sql, now)
        time.sleep(LOOK_SEC)


def _over(before: Member, now: Member | None) -> Literal["evicted", "rejoined", "alive"] | None:
    if now is None:
        return "evicted"
    if now.incarnation != before.incarnation:
        return "rejoined"
    beating = now.state != "away" and now.beat != before.beat and not now.expelled
    return "alive" if beating and not before.expelled else None


def _evict(database: Autocommit, sql: Statements, member: Member) -> list[Any]:
    columns = (array([value]) for value in (member.name, member.incarnation, member.beat, False))
    return database.execute(*numbered(sql.evict, *columns))
