"""Who leads, and what a leader does: evict the dead, plan, publish.

The oldest node that may lead is the leader. It holds no lease and no lock for that: every statement it publishes
checks, in the database, that it is still the oldest and that the inputs of its plan are still what it read. A stale
leader's statement changes nothing, and two nodes that both think they lead do no harm.

The inputs are read without a transaction: first the members and pins with the cluster's ``revision`` (raised by every
change of members or pins), then the tokens. ``publish`` names the revision, and for each token the owner and mark that
were read; tokens released by their owners meanwhile are left for the next round.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from jobsync_orm.coordinator.observation import Evidence
from jobsync_orm.coordinator.pinning import allowed_nodes
from jobsync_orm.coordinator.session import Session, array, now, parse_array
from jobsync_orm.coordinator.statements import PARK, Statements
from jobsync_orm.naming import Names
from jobsync_orm.planner import Member, Plan, plan

__all__ = ["Group", "Leadership", "Outcome", "Step", "steps_of"]

# Seconds for statements that may touch every token.
HEAVY_SEC = 60.0

# Publishing each of thirty simultaneous joins by itself would move tokens thirty times: the first plan is made at
# once, the next after this many seconds.
PLAN_GAP_SEC = 0.1

# A token that was skipped because an application's transaction held its row is tried again after this time.
RETRY_SEC = 0.25

# A leader whose plan is in force makes it again after this time, for what no change of the revision has announced.
RECONCILE_SEC = 30.0

# A plan that failed is made again after this time.
FAILED_SEC = 1.0

GRANT, MARK, UNMARK = 0, 1, 2


@dataclass(frozen=True, slots=True)
class Group:
    """Tokens that have the same owner and the same mark, ascending."""

    node: str | None
    next_node: str | None
    overdue: bool
    tokens: list[int]


@dataclass(frozen=True, slots=True)
class Step:
    """What is to happen to tokens of one group."""

    tokens: Sequence[int]
    source: str | None
    marked: str | None
    kind: int
    target: str | None


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a published plan did."""

    epoch: int
    steps: int
    moved: int
    skipped: int


class Leadership:
    """The leading part of one node; idle while others lead."""

    def __init__(
        self,
        names: Names,
        statements: Statements,
        me: str,
        drain_timeout_sec: float,
    ) -> None:
        self._names = names
        self._sql = statements
        self._me = me
        self._drain = drain_timeout_sec
        self._planned_revision: int | None = None
        self._planned_members: set[str] | None = None
        self._plan_at = float("inf")
        self._planned_at = 0.0
        self.oldest: list[str] = []

    @property
    def leads(self) -> bool:
        """Whether this node is the oldest that may lead, as far as it knows."""
        return self.oldest[:1] == [self._me]

    @property
    def is_next(self) -> bool:
        """Whether this node leads when the leader dies."""
        return self.oldest[1:2] == [self._me]

    @property
    def plan_at(self) -> float:
        """When the next plan is due, on this process's clock."""
        return self._plan_at if self.leads else float("inf")

    def forget(self) -> None:
        """The session is new: what was planned may have changed."""
        self._planned_revision = None
        self.oldest = []

    def heard(self, oldest: list[str], revision: int) -> None:
        """Take in who is oldest, and the revision of the plan's inputs."""
        self.oldest = oldest
        if self.leads and revision != self._planned_revision:
            self._due(max(now(), self._planned_at + PLAN_GAP_SEC))

    def _due(self, at: float) -> None:
        self._plan_at = min(self._plan_at, at)

    def wards(self, everyone: Iterable[str]) -> list[str]:
        """Whom this node may evict: all others for the leader; for others those ahead of them in the succession."""
        if self.leads:
            return [name for name in everyone if name != self._me]
        if self._me in self.oldest:
            return self.oldest[: self.oldest.index(self._me)]
        return list(self.oldest)

    def evict(self, session: Session, dead: Sequence[Evidence]) -> list[str]:
        """Take dead nodes out of the cluster. Returns the names that are gone."""
        rows = session.execute(
            self._sql.evict,
            array(e.name for e in dead),
            array(e.incarnation for e in dead),
            array(e.beat for e in dead),
            array(e.freed for e in dead),
            timeout=HEAVY_SEC,
        )
        return [row[0] or "" for row in rows]

    def plan(self, session: Session, incarnation: str) -> Outcome | None:
        """Read, plan, publish. None where there was nothing to do or the world had changed meanwhile."""
        # Whatever fails below is tried again.
        self._plan_at = now() + FAILED_SEC
        self._planned_at = now()
        (snapshot,) = session.execute(self._sql.snapshot, timeout=HEAVY_SEC)
        revision, started, members_text, pins_text, expiry, _total = snapshot
        members: list[tuple[str, int, str]] = json.loads(members_text or "[]") or []
        pins: list[tuple[int, list[str]]] = json.loads(pins_text or "[]") or []
        later = now() + RECONCILE_SEC
        if expiry is not None:
            later = now() + float(expiry) + 0.01
        active = [Member(name, weight) for name, weight, state in members if state != "away"]
        resting = {name for name, _, state in members if state == "away"}
        joining = [name for name, _, state in members if state == "joining"]
        groups = []
        for node, next_node, overdue, tokens, left in session.execute(self._sql.tokens, timeout=HEAVY_SEC):
            groups.append(Group(node, next_node, overdue == "t", sorted(parse_array(tokens))))
            if left is not None:
                later = min(later, now() + max(float(left), RETRY_SEC) + 0.01)
        names = {member.name for member in active}
        steps = steps_of(groups, active, resting, allowed_nodes(pins, names))
        reason = self._reason(names, joining)
        outcome = None
        if steps or joining:
            outcome = self._publish(
                session, incarnation, revision, started, steps, joining, reason, len(active), _owners(groups)
            )
            if outcome is None:
                self._plan_at = now() + PLAN_GAP_SEC
                return None
            if outcome.skipped:
                later = min(later, now() + RETRY_SEC)
            if any(step.kind == MARK for step in steps):
                later = min(later, now() + self._drain + 0.05)
        self._planned_revision = int(revision or 0)
        self._planned_members = names
        self._plan_at = later
        return outcome

    def _publish(
        self,
        session: Session,
        incarnation: str,
        revision: str | None,
        started: str | None,
        steps: Sequence[Step],
        joining: Sequence[str],
        reason: str,
        nodes_after: int,
        nodes_before: int,
    ) -> Outcome | None:
        index: dict[str | None, int | None] = {None: None}
        table: list[str] = []

        def number(name: str | None) -> int | None:
            if name not in index:
                table.append(name or "")
                index[name] = len(table)
            return index[name]

        runs = [(low, high, step) for step in steps for low, high in _runs(step.tokens)]
        told = set(joining)
        for step in steps:
            told.update(name for name in (step.source, step.target, step.marked) if name)
        told.discard(self._me)
        columns = [
            array(low for low, _, _ in runs),
            array(high for _, high, _ in runs),
            array(number(step.source) for _, _, step in runs),
            array(number(step.marked) for _, _, step in runs),
        ]
        kinds = array(step.kind for _, _, step in runs)
        targets = array(number(step.target) for _, _, step in runs)
        rows = session.execute(
            self._sql.publish,
            self._me,
            incarnation,
            revision,
            array(joining),
            *columns,
            array(table),
            kinds,
            targets,
            self._drain,
            started,
            reason,
            nodes_before,
            nodes_after,
            array(self._names.node_channel(name) for name in sorted(told)),
            timeout=HEAVY_SEC,
        )
        if not rows:
            return None
        epoch, done, moved, _ = rows[0]
        wanted = sum(len(step.tokens) for step in steps)
        return Outcome(int(epoch or 0), int(done or 0), int(moved or 0), wanted - int(done or 0))

    def _reason(self, names: set[str], joining: Sequence[str]) -> str:
        """Why this plan is made, in a word or two, for the audit."""
        before = self._planned_members
        if before is None:
            return "new leader" if len(names) > len(joining) else "initial"
        joined, left = names - before or set(joining), before - names
        return "join and leave" if joined and left else "join" if joined else "leave" if left else "pins or repair"


def _owners(groups: Iterable[Group]) -> int:
    return len({group.node for group in groups if group.node is not None})


def steps_of(
    groups: Sequence[Group],
    active: Sequence[Member],
    resting: Iterable[str],
    pins: Mapping[int, Collection[str]],
) -> list[Step]:
    """The steps from what is stored to what the planner wants.

    A token on its way from one live node to another counts as the latter's, so that a plan made in the middle of a
    hand-off does not start it anew. Tokens of resting nodes stay where they are.
    """
    names = {member.name for member in active}
    resting = set(resting)
    holders: dict[str | None, list[Group]] = {}
    for group in groups:
        if group.node in resting:
            continue
        holder = group.node if group.node in names else None
        if holder is not None and group.next_node in names:
            holder = group.next_node
        holders.setdefault(holder, []).append(group)
    owned = {
        holder: parts[0].tokens if len(parts) == 1 else sorted(t for part in parts for t in part.tokens)
        for holder, parts in holders.items()
    }
    wanted: Plan = plan(owned, active, pins)

    leaving: dict[str | None, list[tuple[str | None, list[int]]]] = {}
    for target, tokens in wanted.assign.items():
        leaving.setdefault(None, []).append((target, tokens))
    for (giver, target), tokens in wanted.move.items():
        leaving.setdefault(giver, []).append((target, tokens))
    for giver, tokens in wanted.park.items():
        leaving.setdefault(giver, []).append((None, tokens))

    steps: list[Step] = []
    for holder, parts in holders.items():
        going = leaving.get(holder, [])
        for part in parts:
            stay: Sequence[int] = part.tokens
            for aim, moving in going:
                chosen = moving if len(parts) == 1 else sorted(set(moving).intersection(part.tokens))
                if chosen:
                    steps.extend(_moving(part, holder, aim, chosen))
            if going and _staying_matters(part, holder, names):
                gone = {token for _, tokens in going for token in tokens}
                stay = [token for token in part.tokens if token not in gone]
            if stay and _staying_matters(part, holder, names):
                steps.append(_staying(part, holder, stay))
    return steps


def _moving(part: Group, holder: str | None, target: str | None, tokens: Sequence[int]) -> list[Step]:
    """Tokens of ``part`` that ``holder`` is to lose to ``target`` (None: to nobody)."""
    if holder is None:  # no live owner: at once
        return [Step(tokens, part.node, part.next_node, GRANT, target)]
    if part.node == target:
        return [Step(tokens, part.node, part.next_node, UNMARK, None)]
    aim = PARK if target is None else target
    if part.next_node == aim:
        # Being parked and still to be parked: only the deadline matters.
        return [Step(tokens, part.node, aim, GRANT, target)] if part.overdue else []
    return [Step(tokens, part.node, part.next_node, MARK, aim)]


def _staying_matters(part: Group, holder: str | None, names: set[str]) -> bool:
    if holder is None:
        return part.node is not None  # parked, but still under the name of a dead node
    return part.next_node is not None and (part.overdue or part.next_node not in names)


def _staying(part: Group, holder: str | None, tokens: Sequence[int]) -> Step:
    if holder is None:
        return Step(tokens, part.node, part.next_node, GRANT, None)
    if part.next_node == holder:  # on its way, and overdue
        return Step(tokens, part.node, part.next_node, GRANT, holder)
    return Step(tokens, part.node, part.next_node, UNMARK, None)  # the target is gone, or the pin was lifted


def _runs(tokens: Sequence[int]) -> list[tuple[int, int]]:
    """Ascending integers as closed ranges."""
    if not tokens:
        return []
    if tokens[-1] - tokens[0] == len(tokens) - 1:
        return [(tokens[0], tokens[-1])]
    runs = []
    low = high = tokens[0]
    for token in tokens[1:]:
        if token == high + 1:
            high = token
        else:
            runs.append((low, high))
            low = high = token
    runs.append((low, high))
    return runs
