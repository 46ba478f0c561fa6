"""What the leader would do now, worked out here and not published.

Members and pins are read first, then the tokens, as the leader reads them; what changes in between is not noticed.

| statement | locks | if the process stops right there |
|---|---|---|
| snapshot, tokens | nothing | nothing |
| announce | the cluster row, for one statement | the leader has been told, or not |
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any, Literal

from sqlalchemy import Engine, text

from jobsync_orm.autocommit import Autocommit
from jobsync_orm.coordinator.pinning import allowed_nodes
from jobsync_orm.coordinator.statements import PARK, Statements
from jobsync_orm.coordinator.steps import FORCE, GRANT, MARK, Group, Step, steps_of
from jobsync_orm.naming import Names
from jobsync_orm.operate.missing import no_cluster, ready
from jobsync_orm.planner import Member

__all__ = ["PlannedLoad", "PlannedMove", "Preview", "plan_soon", "preview"]

How = Literal["assign", "hand over", "take", "take back"]


@dataclass(frozen=True, slots=True)
class PlannedMove:
    """Tokens that would take the same way.

    Attributes
    ----------
    source : str or None
        Who has them. None: nobody.
    target : str or None
        Who would get them. None: nobody, they would be parked.
    tokens : int
        How many.
    how : str
        ``assign``: at once, since no live node has them; ``hand over``: their owner is asked; ``take``: their owner was
        asked, and its time is over; ``take back``: their owner was asked and is to keep them after all.
    """

    source: str | None
    target: str | None
    tokens: int
    how: How


@dataclass(frozen=True, slots=True)
class PlannedLoad:
    """Tokens of a live node, now and once all has moved. What is on its way to a node counts as its own."""

    node: str
    now: int
    then: int


@dataclass(frozen=True, slots=True)
class Preview:
    """What a plan made now would do.

    Attributes
    ----------
    moves : tuple of PlannedMove
        Empty if nothing is to be done.
    moved : int
        Tokens whose owner would change.
    loads : tuple of PlannedLoad
        For each live node, oldest first.
    resting : bool
        The cluster rests: the leader would wait until it has rested.
    """

    moves: tuple[PlannedMove, ...]
    moved: int
    loads: tuple[PlannedLoad, ...]
    resting: bool


def preview(engine: Engine, names: Names) -> Preview:
    """Work out the plan that the leader would make now.

    Raises
    ------
    SchemaNotReady
        There is no cluster.
    """
    sql = Statements(names)
    database = Autocommit(engine)
    with ready(names):
        snapshot = _read(database, sql.snapshot)
        tokens = _read(database, sql.tokens)
    if not snapshot:
        raise no_cluster(names)
    _, _, _, members, pins, _, _, rest = snapshot[0]
    drained = {name for name, _, state, out in members or [] if out and state != "away"}
    active = [Member(name, weight) for name, weight, state, out in members or [] if state != "away" and not out]
    resting = [name for name, _, state, _ in members or [] if state == "away"]
    groups = [Group(node, aim, overdue, sorted(some)) for node, aim, overdue, some, _ in tokens]
    takers = [member.name for member in active]
    live = [name for name, _, state, _ in members or [] if state != "away"]
    allowed = allowed_nodes([(token, patterns) for token, patterns in pins or []], takers)
    steps = steps_of(groups, active, resting, allowed, drained)
    now: Counter[str | None] = Counter()
    for group in groups:
        now[_holder(group.node, group.next_node, live, takers)] += len(group.tokens)
    then = now.copy()
    moves: Counter[tuple[str | None, str | None, How]] = Counter()
    for step in steps:
        source, target, how = _way(step)
        count = len(step.tokens)
        moves[source, target, how] += count
        then[_holder(step.source, step.marked, live, takers)] -= count
        then[target] += count
    return Preview(
        tuple(PlannedMove(*way[:2], count, way[2]) for way, count in sorted(moves.items(), key=lambda x: str(x[0]))),
        sum(count for (source, target, how), count in moves.items() if how != "take back" and source != target),
        tuple(PlannedLoad(name, now[name], then[name]) for name in live),
        rest is not None and rest > 0,
    )


def plan_soon(engine: Engine, names: Names) -> None:
    """Have the leader plan now, rather than when it would by itself (half a minute later, if nothing happens).

    Raises
    ------
    SchemaNotReady
        There are no tables.
    """
    announce = text(
        f"UPDATE {names.text('cluster')} SET pins_revision = pins_revision + 1"
        f" RETURNING pg_notify('{names.cluster_channel}', '')"
    )
    with ready(names):
        rows = Autocommit(engine).execute(announce, {})
    if not rows:
        raise no_cluster(names)


def _read(database: Autocommit, statement: str) -> list[Any]:
    return database.repeat(text(statement.replace(":", r"\:")), {})[0]


def _holder(node: str | None, aim: str | None, live: list[str], takers: list[str]) -> str | None:
    """Whose a token is, or is about to be."""
    if node not in live:
        return None
    return aim if aim in takers else node


def _way(step: Step) -> tuple[str | None, str | None, How]:
    if step.kind == GRANT:
        return step.source, step.target, "assign"
    if step.kind == MARK:
        return step.source, None if step.target == PARK else step.target, "hand over"
    if step.kind == FORCE:
        return step.source, step.target, "take"
    return step.source, step.source, "take back"
