"""Where a task is, and why: its token, the pins on it, the node that has it.

| statement | locks | if the process stops right there |
|---|---|---|
| find | nothing | nothing |
"""

from __future__ import annotations

import datetime
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Engine, text

from jobsync_orm.autocommit import Autocommit
from jobsync_orm.coordinator.pinning import allowed_nodes
from jobsync_orm.coordinator.statements import PARK
from jobsync_orm.exceptions import InvalidPattern
from jobsync_orm.hashing import task_key
from jobsync_orm.like import matches
from jobsync_orm.naming import Names
from jobsync_orm.operate.missing import no_cluster, ready

__all__ = ["Explanation", "PatternMatch", "PinOnToken", "TaskClaim", "TaskPlace", "explain", "where"]


@dataclass(frozen=True, slots=True)
class TaskClaim:
    """Who is processing a task now.

    Attributes
    ----------
    node : str
    claimed_at : datetime
    fence : int
        The number that fences off earlier claims.
    """

    node: str
    claimed_at: datetime.datetime
    fence: int


@dataclass(frozen=True, slots=True)
class TaskPlace:
    """Where a task is at one moment.

    Attributes
    ----------
    task_id : str
    token_id : int
        What it hashes to.
    node : str or None
        Under whose name the token is.
    live : bool
        Whether that node is a live member of the cluster. If not, nobody works on the task.
    epoch : int
        At which the node got it.
    assigned_at : datetime
    draining_to : str or None
        The node that is to get it next, if it is on its way.
    parking : bool
        Whether its owner has been asked to give it up to nobody, because of a pin.
    drain_deadline : datetime or None
        When the owner may be passed over.
    pinned : bool
        Whether a pin that has not expired is on the token: this task's or another's.
    claim : TaskClaim or None
    """

    task_id: str
    token_id: int
    node: str | None
    live: bool
    epoch: int
    assigned_at: datetime.datetime
    draining_to: str | None
    parking: bool
    drain_deadline: datetime.datetime | None
    pinned: bool
    claim: TaskClaim | None


@dataclass(frozen=True, slots=True)
class PatternMatch:
    """One pattern of a pin.

    Attributes
    ----------
    pattern : str
    nodes : tuple of str
        Live nodes whose names it matches.
    chosen : bool
        Whether it is the first of the pin's patterns that any node matches: the later ones are not tried.
    """

    pattern: str
    nodes: tuple[str, ...]
    chosen: bool


@dataclass(frozen=True, slots=True)
class PinOnToken:
    """A pin on a task's token.

    Attributes
    ----------
    task_id : str
        Whose pin it is: the task's own, or another task's that hashes to the same token.
    own : bool
    patterns : tuple of PatternMatch
        In order of preference.
    expired : bool
        It counts no more.
    reason, created_by : str
    created_at, expires_at : datetime
    ephemeral : bool
        Whether it ends with the node that made it.
    """

    task_id: str
    own: bool
    patterns: tuple[PatternMatch, ...]
    expired: bool
    reason: str | None
    created_by: str
    created_at: datetime.datetime
    expires_at: datetime.datetime | None
    ephemeral: bool


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why a task is where it is.

    Attributes
    ----------
    place : TaskPlace
    pins : tuple of PinOnToken
        All on its token, expired ones too; its own first.
    allowed : tuple of str or None
        The nodes that may have it by its pins. None: any node.
    why : tuple of str
        The same in sentences.
    """

    place: TaskPlace
    pins: tuple[PinOnToken, ...]
    allowed: tuple[str, ...] | None
    why: tuple[str, ...]


def where(engine: Engine, names: Names, task_id: object) -> TaskPlace:
    """Where a task is.

    Parameters
    ----------
    engine, names : Engine, Names
        The cluster.
    task_id : object
        As for :meth:`~jobsync_orm.Job.can_claim_task`: a number and its text are the same task.

    Raises
    ------
    UnstableTaskId, InvalidTaskId
        That is no task id.
    SchemaNotReady
        There is no cluster.
    """
    return explain(engine, names, task_id).place


def explain(engine: Engine, names: Names, task_id: object) -> Explanation:
    """Where a task is, and why. Parameters and errors as for :func:`where`."""
    key = task_key(task_id)
    cluster, node, token, lock, claim = (names.text(kind) for kind in ("cluster", "node", "token", "lock", "claim"))
    find = text(f"""
        SELECT t.token_id, t.node, t.epoch, t.assigned_at, t.next_node, t.drain_deadline, n.name IS NOT NULL,
            k.node, k.claimed_at, k.fence,
            (SELECT json_agg(name ORDER BY name) FROM {node} WHERE state <> 'away'),
            (SELECT json_agg(json_build_object('task_id', l.task_id, 'patterns', l.node_patterns,
                'expired', coalesce(l.expires_at <= clock_timestamp(), false), 'reason', l.reason,
                'created_by', l.created_by, 'created_at', l.created_at, 'expires_at', l.expires_at,
                'ephemeral', l.ephemeral) ORDER BY l.task_id <> CAST(:task AS text), l.created_at, l.task_id)
                FROM {lock} l WHERE l.token_id = t.token_id)
        FROM {cluster} c
        JOIN {token} t ON t.token_id = {names.text("token_of")}(CAST(:task AS text))
        LEFT JOIN {node} n ON n.name = t.node AND n.state <> 'away'
        LEFT JOIN {claim} k ON k.task_id = CAST(:task AS text)""")
    with ready(names):
        rows, _ = Autocommit(engine).repeat(find, {"task": key})
    if not rows:
        raise no_cluster(names)
    (token_id, owner, epoch, assigned_at, aim, deadline, live, holder, claimed_at, fence, nodes, stored) = rows[0]
    pins = tuple(_pin(pin, key, nodes or []) for pin in stored or [])
    counting = [(token_id, pin["patterns"]) for pin in stored or [] if not pin["expired"]]
    allowed = tuple(sorted(allowed_nodes(counting, nodes or [])[token_id])) if counting else None
    place = TaskPlace(
        key,
        token_id,
        owner,
        live,
        epoch,
        assigned_at,
        aim or None,
        aim == PARK,
        deadline,
        bool(counting),
        None if holder is None else TaskClaim(holder, claimed_at, fence),
    )
    return Explanation(place, pins, allowed, tuple(_why(place, pins, allowed)))


def _pin(pin: dict[str, Any], key: str, nodes: list[str]) -> PinOnToken:
    found: list[PatternMatch] = []
    patterns = pin["patterns"] if isinstance(pin["patterns"], list) else []
    for pattern in patterns:
        matching = tuple(name for name in nodes if _fits(name, pattern))
        found.append(PatternMatch(str(pattern), matching, bool(matching) and not any(one.chosen for one in found)))
    moment = datetime.datetime.fromisoformat
    return PinOnToken(
        pin["task_id"],
        pin["task_id"] == key,
        tuple(found),
        pin["expired"],
        pin["reason"],
        pin["created_by"],
        moment(pin["created_at"]),
        None if pin["expires_at"] is None else moment(pin["expires_at"]),
        pin["ephemeral"],
    )


def _fits(name: str, pattern: Any) -> bool:
    try:
        return matches(name, pattern)
    except InvalidPattern:  # written past register_lock; the leader takes it for one that matches nobody
        return False


def _why(place: TaskPlace, pins: tuple[PinOnToken, ...], allowed: tuple[str, ...] | None) -> list[str]:
    found = [f"task {place.task_id!r} hashes to token {place.token_id}"]
    for pin in pins:
        whose = "its pin" if pin.own else f"the pin of task {pin.task_id!r}, which shares the token,"
        if pin.expired:
            found.append(f"{whose} has expired and does not count")
            continue
        tried = [repr(match.pattern) for match in pin.patterns if not match.chosen and not match.nodes]
        chosen = next((match for match in pin.patterns if match.chosen), None)
        if chosen is None:
            found.append(f"{whose} matches no live node: {', '.join(tried) or 'it has no pattern'}")
            continue
        before = tried[: pin.patterns.index(chosen)]
        skipped = f", since no live node matches {', '.join(before)}" if before else ""
        found.append(f"{whose} allows {', '.join(chosen.nodes)}, by pattern {chosen.pattern!r}{skipped}")
    if allowed is None:
        found.append("no pin is on the token: balance alone decides")
    elif not allowed:
        found.append("no live node is allowed: the token is parked, and nobody works on the task")
    elif len(pins) > 1:
        found.append(f"together the pins allow {', '.join(allowed)}")
    if place.node is None:
        found.append("nobody has the token now")
    elif not place.live:
        found.append(f"the token is under the name of {place.node}, which is not live: nobody works on the task")
    else:
        found.append(f"{place.node} has the token since epoch {place.epoch}")
    if place.draining_to is not None:
        found.append(f"it is on its way to {place.draining_to}")
    if place.parking:
        found.append("its owner has been asked to give it up to nobody")
    return found
