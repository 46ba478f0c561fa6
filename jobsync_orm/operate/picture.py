"""What one look at a cluster shows: the answers of :class:`~jobsync_orm.operate.Operations`."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

__all__ = [
    "ClusterStatus",
    "Condition",
    "DrainOrder",
    "NodeStatus",
    "NodeTokens",
    "Rebalance",
    "TokenHolder",
    "TokenStatus",
]

Condition = Literal["live", "joining", "cut off", "silent", "away"]


@dataclass(frozen=True, slots=True)
class NodeTokens:
    """The tokens of one node, in numbers.

    Attributes
    ----------
    node : str
        Its name.
    owned : int
        Tokens under its name, those on their way out included.
    leaving : int
        Those of them that it has been asked to give up.
    coming : int
        Tokens of others that it is going to get.
    waiting : int
        Tokens that it should get besides, for which their owner cannot be asked: :class:`TokenHolder` says why.
    """

    node: str
    owned: int
    leaving: int
    coming: int
    waiting: int = 0


@dataclass(frozen=True, slots=True)
class TokenHolder:
    """A transaction of an application in which tokens are used, while plans are to move some.

    Attributes
    ----------
    pid : int or None
        The server's process. None: it is prepared, and in no session.
    application : str or None
        What it calls itself (``application_name``). None if it is prepared.
    open_sec : float or None
        For how long it has been open. None if this role may not see that (``pg_read_all_stats``), or it is prepared.
    """

    pid: int | None
    application: str | None
    open_sec: float | None


@dataclass(frozen=True, slots=True)
class TokenStatus:
    """Where the tokens are.

    Attributes
    ----------
    total : int
        Tokens of the cluster.
    owned : int
        Tokens under the name of a registered node.
    unowned : int
        The others: nobody works on them. ``parked`` and what a leader has not given out yet.
    parked : int
        Those of ``unowned`` that no live node may have: their pins match none that takes tokens, or all are drained.
    draining : int
        Tokens whose owner has been asked to hand them over.
    overdue : int
        Those of them whose time to do so has passed.
    nodes : tuple of NodeTokens
        For each registered node, oldest first.
    at : datetime
        Since when all of this was so, by the database's clock: the moment of the look. Who looks again and again while
        very many tokens move gets some numbers a few seconds late, and this is when the oldest of them were so.
    holders : tuple of TokenHolder
        The transactions that some wait for, the oldest first. Empty if none wait.
    """

    total: int
    owned: int
    unowned: int
    parked: int
    draining: int
    overdue: int
    nodes: tuple[NodeTokens, ...]
    at: datetime.datetime
    holders: tuple[TokenHolder, ...] = ()


@dataclass(frozen=True, slots=True)
class NodeStatus:
    """A registered node.

    Attributes
    ----------
    name : str
    condition : str
        ``live``; ``joining`` (no plan has taken it in yet); ``cut off`` (its session is gone: it has crashed, or
        reconnects at this moment); ``silent`` (its heartbeat is older than ``heartbeat_timeout_sec``); ``away`` (gone,
        and expected back within ``rejoin_grace_sec``).
    leader : bool
        Whether it is the oldest node that may lead.
    can_lead : bool
    weight : int
        Its share relative to the others'.
    labels : mapping of str to str
    host, pid, version : str, int, str
        Where it runs, and the release of this library there.
    registered_at, last_heartbeat : datetime
        By the database's clock.
    heartbeat_age_sec : float
        Seconds since the last heartbeat.
    heartbeat_timeout_sec : float
        Age from which it counts as dead.
    lease_left_sec : float
        Seconds until then, 0 if it is over. The node itself stops saying yes somewhat earlier.
    connection_grace_sec, rejoin_grace_sec : float
        Its settings.
    drained : bool
        Whether an operator has asked for its tokens: it gives them up and gets none, until it is undrained.
    session_open : bool
        Whether the server still has the session in which it coordinates.
    behind_epochs : int
        How many epochs of the cluster it has not said to have applied: it says so with each heartbeat.
    tokens : NodeTokens
    """

    name: str
    condition: Condition
    leader: bool
    can_lead: bool
    weight: int
    labels: Mapping[str, str]
    host: str
    pid: int
    version: str
    registered_at: datetime.datetime
    last_heartbeat: datetime.datetime
    heartbeat_age_sec: float
    heartbeat_timeout_sec: float
    lease_left_sec: float
    connection_grace_sec: float
    rejoin_grace_sec: float
    drained: bool
    session_open: bool
    behind_epochs: int
    tokens: NodeTokens


@dataclass(frozen=True, slots=True)
class DrainOrder:
    """That a node is to have no tokens.

    Attributes
    ----------
    node : str
    since : datetime
    by : str
        Who has said so.
    reason : str or None
    registered : bool
        Whether there is a node of this name now. The order outlives it.
    """

    node: str
    since: datetime.datetime
    by: str
    reason: str | None
    registered: bool


@dataclass(frozen=True, slots=True)
class Rebalance:
    """A plan that moved tokens.

    Attributes
    ----------
    triggered_at : datetime
        When the leader read what it planned for.
    reason : str
        ``initial``, ``new leader``, ``join``, ``leave``, ``join and leave``, ``drain``, ``undrain`` or ``pins or
        repair``.
    leader : str
    nodes_before, nodes_after : int
        Owners before, and live nodes planned for.
    tokens_moved : int
    duration_sec : float
        From reading to publishing. Owners hand over afterwards.
    epoch : int
    """

    triggered_at: datetime.datetime
    reason: str
    leader: str
    nodes_before: int
    nodes_after: int
    tokens_moved: int
    duration_sec: float
    epoch: int


@dataclass(frozen=True, slots=True)
class ClusterStatus:
    """The whole cluster at one moment.

    Attributes
    ----------
    appname : str
    schema : str or None
    at : datetime
        The moment, by the database's clock.
    total_tokens : int
    hash_function : str
    epoch : int
        The cluster's version.
    resting_sec : float or None
        Seconds for which nobody may own anything yet, because the cluster has been formed anew; None mostly.
    leader : str or None
    nodes : tuple of NodeStatus
        Oldest first.
    drained : tuple of DrainOrder
        By name.
    tokens : TokenStatus
    last_rebalance : Rebalance or None
    problems : tuple of str
        What is not as it should be, a sentence each.
    healthy : bool
        Whether there are none.
    """

    appname: str
    schema: str | None
    at: datetime.datetime
    total_tokens: int
    hash_function: str
    epoch: int
    resting_sec: float | None
    leader: str | None
    nodes: tuple[NodeStatus, ...]
    drained: tuple[DrainOrder, ...]
    tokens: TokenStatus
    last_rebalance: Rebalance | None
    problems: tuple[str, ...]
    healthy: bool
