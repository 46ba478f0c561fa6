"""What has happened from one look at a cluster to the next, and how fast its queue has been worked off.   (pure)"""

from __future__ import annotations

import datetime
from collections import deque
from dataclasses import dataclass

from jobsync_orm.operate.picture import ClusterStatus, NodeStatus
from jobsync_orm.operate.watching import Look
from jobsync_orm.wording import counted

__all__ = ["Gone", "Happening", "Happenings"]

REMEMBERED = 50

# Seconds of which rates are kept, and for which a node that has gone is still shown.
RATES_SEC = 600
GONE_SEC = 30.0

DEAD = ("cut off", "silent")


@dataclass(frozen=True, slots=True)
class Happening:
    """Something that was seen.

    Attributes
    ----------
    at : datetime
        Of the look that showed it, by the database's clock.
    what : str
    grave : bool
        Whether somebody should look at it.
    """

    at: datetime.datetime
    what: str
    grave: bool = False


@dataclass(frozen=True, slots=True)
class Gone:
    """A node that is no member any more.

    Attributes
    ----------
    name : str
    at : datetime
        Of the first look that did not show it.
    dead : bool
        Whether it was taken out; else it has left by itself.
    """

    name: str
    at: datetime.datetime
    dead: bool


class Happenings:
    """Compares looks, one after the other.

    Attributes
    ----------
    events : deque of Happening
        The newest first.
    gone : dict of str to Gone
        Nodes that went lately.
    rates : dict of int to (int, int)
        Second since 1970 -> attempts that completed, and that failed, in it.
    """

    def __init__(self) -> None:
        self.events: deque[Happening] = deque(maxlen=REMEMBERED)
        self.gone: dict[str, Gone] = {}
        self.rates: dict[int, tuple[int, int]] = {}
        self._before: ClusterStatus | None = None
        self._lost: dict[str, datetime.datetime] = {}  # nodes whose tokens have not been seen with owners again

    def see(self, look: Look) -> None:
        """Take in the next look."""
        now, before = look.cluster, self._before
        self._rate(look)
        if before is not None:
            self._compare(before, now)
        else:
            self._lost = {node.name: now.at for node in now.nodes if node.condition in DEAD}
        self._recovered(now)
        self.gone = {name: gone for name, gone in self.gone.items() if (now.at - gone.at).total_seconds() < GONE_SEC}
        self._before = now

    def per_second(self, until: datetime.datetime, seconds: int) -> list[tuple[int, int]]:
        """Completed and failed attempts of each of the last whole seconds before ``until``, oldest first."""
        last = int(until.timestamp())
        return [self.rates.get(second, (0, 0)) for second in range(last - seconds, last)]

    def _rate(self, look: Look) -> None:
        for ended in look.ended:
            self.rates[ended.second] = (ended.completed, ended.failed)
        oldest = int(look.cluster.at.timestamp()) - RATES_SEC
        self.rates = {second: rate for second, rate in self.rates.items() if second >= oldest}

    def _compare(self, before: ClusterStatus, now: ClusterStatus) -> None:
        was, present = {node.name: node for node in before.nodes}, {node.name: node for node in now.nodes}
        for name, node in present.items():
            if name not in was:
                self._tell(now, f"{name} has joined ({node.host}:{node.pid})")
                self.gone.pop(name, None)
            else:
                self._changed(now, was[name], node)
        for name, node in was.items():
            if name not in present:
                self._went(now, node)
        if now.leader != before.leader:
            self._tell(now, f"{now.leader} leads" if now.leader else "nobody leads", now.leader is None)
        if now.resting_sec is not None and before.resting_sec is None:
            self._tell(now, "the cluster has been formed anew, and rests", True)

    def _changed(self, now: ClusterStatus, was: NodeStatus, node: NodeStatus) -> None:
        if node.registered_at != was.registered_at:
            self._tell(now, f"{node.name} has joined anew ({node.host}:{node.pid})")
        if node.condition in DEAD and was.condition not in DEAD:
            how = "its session has ended" if node.condition == "cut off" else "its heartbeat has stopped"
            self._tell(
                now, f"{node.name} is {node.condition}: {how}; {counted(node.tokens.owned, 'token', 'tokens')}", True
            )
            self._lost[node.name] = now.at
        elif node.condition == "live" and was.condition in DEAD:
            self._tell(now, f"{node.name} is live again")
            self._lost.pop(node.name, None)
        elif node.condition == "away" and was.condition != "away":
            self._tell(now, f"{node.name} is away for now")
        if node.drained != was.drained:
            self._tell(now, f"{node.name} is drained" if node.drained else f"{node.name} is undrained")

    def _went(self, now: ClusterStatus, node: NodeStatus) -> None:
        dead = node.condition in DEAD
        self.gone[node.name] = Gone(node.name, now.at, dead)
        self._tell(now, f"{node.name} has been taken out" if dead else f"{node.name} has left", dead)

    def _recovered(self, now: ClusterStatus) -> None:
        """Say so when all tokens of those that were lost are owned, by nodes that live."""
        if not self._lost or now.tokens.unowned > now.tokens.parked:
            return
        if any(node.condition in DEAD and node.tokens.owned for node in now.nodes):
            return
        for name, since in self._lost.items():
            took = (now.at - since).total_seconds()
            self._tell(now, f"{name}'s tokens have live owners again, after {took:.1f} s")
        self._lost.clear()

    def _tell(self, now: ClusterStatus, what: str, grave: bool = False) -> None:
        self.events.appendleft(Happening(now.at, what, grave))
