"""Looks at clusters that there are not."""

from __future__ import annotations

import dataclasses
import datetime
from typing import Any

from jobsync_orm.models.states import FINISHED, JobState
from jobsync_orm.operate import ClusterStatus, NodeStatus, NodeTokens, QueueDepth, Rebalance, TokenStatus
from jobsync_orm.operate.watching import Ended, Look
from jobsync_orm.queue import Pause

START = datetime.datetime(2026, 11, 30, 12, tzinfo=datetime.UTC)


def node(name: str, owned: int = 0, condition: Any = "live", **changes: Any) -> NodeStatus:
    made = NodeStatus(
        name, condition, False, True, 1, {}, "host", 7, "0.1.0", START, START, 1.0, 15.0, 14.0, 0.5, 0.0, False, True,
        0, NodeTokens(name, owned, 0, 0),
    )  # fmt: skip
    return dataclasses.replace(made, **changes)


def look(
    seconds: float,
    *nodes: NodeStatus,
    leader: str | None = "w1",
    unowned: int = 0,
    parked: int = 0,
    ended: tuple[Ended, ...] = (),
    rebalances: tuple[Rebalance, ...] = (),
    problems: tuple[str, ...] = (),
    paused: tuple[Pause, ...] = (),
    counts: dict[JobState, int] | None = None,
) -> Look:
    owned = sum(one.tokens.owned for one in nodes)
    at = START + datetime.timedelta(seconds=seconds)
    tokens = TokenStatus(owned + unowned, owned, unowned, parked, 0, 0, tuple(one.tokens for one in nodes), at)
    cluster = ClusterStatus(
        "sync_", None, at, tokens.total, "md5", 5, None, leader, nodes, (), tokens, None, problems, not problems
    )
    waiting = {state: 0 for state in JobState if state not in FINISHED} | (counts or {})
    return Look(cluster, rebalances, QueueDepth(waiting, frozenset(), None), paused, ended)
