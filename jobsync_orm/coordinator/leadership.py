"""Who leads, and what a leader does: evict the dead, plan, publish.

The oldest node that may lead is the leader. It holds no lease and no lock for that: every statement it publishes
checks, in the database, that it is still the oldest and that the inputs of its plan are still what it read. A stale
leader's statement changes nothing, and two nodes that both think they lead do no harm.

The inputs are read without a transaction: first the members and pins with the cluster's ``revision`` (raised by every
change of members), then the tokens. ``publish`` names the revision, and for each token the owner and mark that
were read; tokens released by their owners meanwhile are left for the next round.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from jobsync_orm.coordinator.clock import SYSTEM, Clock
from jobsync_orm.coordinator.observation import Evidence
from jobsync_orm.coordinator.pinning import allowed_nodes
from jobsync_orm.coordinator.session import Session, array, parse_array
from jobsync_orm.coordinator.statements import HEAVY_SEC, Statements
from jobsync_orm.coordinator.steps import MARK, Group, Step, batches_of, runs_of, steps_of
from jobsync_orm.logs import fields
from jobsync_orm.naming import Names
from jobsync_orm.planner import Member

__all__ = ["Leadership", "Outcome"]

logger = logging.getLogger("jobsync_orm")

# Publishing each of thirty simultaneous joins by itself would move tokens thirty times: the first plan is made at
# once, the next after this many seconds.
PLAN_GAP_SEC = 0.1

# Tokens that were skipped because an application's transaction held their rows are tried again after these times.
RETRY_FIRST_SEC, RETRY_MOST_SEC = 0.25, 2.0

# A leader whose plan is in force makes it again after this time, for what no change of the revision has announced.
RECONCILE_SEC = 30.0

# A plan that failed is made again after this time.
FAILED_SEC = 1.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a published plan did."""

    epoch: int
    steps: int
    moved: int
    skipped: int
    reason: str = ""


@dataclass(slots=True)
class _Planned:
    """A plan on its way into the database."""

    revision: str | None
    started: str | None
    reason: str
    nodes_before: int
    nodes_after: int
    joining: Sequence[str]
    batches: list[list[Step]]
    done_at: float  # when to plan again once all is published


class Leadership:
    """The leading part of one node; idle while others lead."""

    def __init__(
        self, names: Names, statements: Statements, me: str, drain_timeout_sec: float, clock: Clock = SYSTEM
    ) -> None:
        self._clock = clock
        self._names = names
        self._sql = statements
        self._me = me
        self._drain = drain_timeout_sec
        self._seen_revisions: tuple[int, int] | None = None
        self._planned_revisions: tuple[int, int] | None = None
        self._planned_members: set[str] | None = None
        self._planned_drained: set[str] = set()
        self._plan_at = float("inf")
        self._planned_at = 0.0
        self._retry = RETRY_FIRST_SEC
        self._rest_until = 0.0
        self._under_way: _Planned | None = None
        self._parked: set[int] = set()
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
    def is_in_line(self) -> bool:
        """Whether this node leads or may soon."""
        return self._me in self.oldest

    @property
    def plan_at(self) -> float:
        """When the next plan is due, on this process's clock."""
        return self._plan_at if self.leads else float("inf")

    def forget(self) -> None:
        """The session or this life of the node is new: what was planned may have changed.

        Revisions that were seen say nothing any more: another history of the database may come to the same numbers.
        """
        self._planned_revisions = self._seen_revisions = self._under_way = None
        self.oldest = []

    def heard(self, oldest: list[str], revisions: tuple[int, int]) -> None:
        """Take in who is oldest, and the revisions of the members and of the pins."""
        self.oldest = oldest
        if self.leads and revisions not in (self._planned_revisions, self._seen_revisions):
            self._plan_soon()
        self._seen_revisions = revisions

    def _plan_soon(self) -> None:
        self._plan_at = min(self._plan_at, max(self._clock.now(), self._planned_at + PLAN_GAP_SEC))

    def wards(self, everyone: Iterable[str]) -> list[str]:
        """Whom this node may evict: all others for the leader; for others those ahead of them in the succession."""
        if self.leads:
            return [name for name in everyone if name != self._me]
        if self._me in self.oldest:
            return self.oldest[: self.oldest.index(self._me)]
        return list(self.oldest)

    def evict(self, session: Session, dead: Sequence[Evidence]) -> list[str]:
        """Take dead nodes out of the cluster, and plan at once if this node leads. Returns the names that are gone."""
        rows = session.execute(
            self._sql.evict,
            array(e.name for e in dead),
            array(e.incarnation for e in dead),
            array(e.beat for e in dead),
            array(e.freed for e in dead),
            timeout=HEAVY_SEC,
        )
        if rows:
            self._plan_soon()
        return [row[0] or "" for row in rows]

    def plan(self, session: Session, incarnation: str, known_epoch: int = 0) -> Outcome | None:
        """Read, plan, and publish; a large plan batch by batch, one in each call, so that heartbeats go on.

        None where there was nothing to do, the cluster rests, or the world had changed meanwhile, so much so perhaps
        that the database is from before ``known_epoch``.
        """
        self._plan_at = self._clock.now() + FAILED_SEC  # whatever fails below is tried again
        planned, self._under_way = self._under_way, None
        if planned is None:
            planned = self._make(session)
        if not planned.batches and not planned.joining:
            self._settle(planned)
            return None
        steps = planned.batches.pop(0) if planned.batches else []
        outcome = self._publish(session, incarnation, planned, steps, known_epoch)
        if outcome is None:
            self._plan_at = self._clock.now() + PLAN_GAP_SEC
            return None
        if outcome.skipped:
            # In use, or just released by its owner. Ever more patiently: the plan would raise the epoch each time.
            planned.done_at = min(planned.done_at, self._clock.now() + self._retry)
            self._retry = min(2 * self._retry, RETRY_MOST_SEC)
        elif outcome.steps:
            self._retry = RETRY_FIRST_SEC
        if any(step.kind == MARK for step in steps):
            planned.done_at = min(planned.done_at, self._clock.now() + self._drain + 0.05)
        if planned.batches:
            self._under_way, self._plan_at = planned, self._clock.now()
        else:
            self._settle(planned)
        return outcome

    def _settle(self, planned: _Planned) -> None:
        self._plan_at = planned.done_at
        if self._seen_revisions != self._planned_revisions:
            self._plan_at = min(self._plan_at, self._clock.now() + PLAN_GAP_SEC)

    def _make(self, session: Session) -> _Planned:
        """Read what is, and work out what is to be."""
        self._planned_at = self._clock.now()
        (snapshot,) = session.execute(self._sql.snapshot, timeout=HEAVY_SEC)
        revision, pins_revision, started, members_text, pins_text, expiry, orphaned, rest = snapshot
        # As long as by either clock: the server's may be set forward meanwhile.
        self._rest_until = max(self._rest_until, self._clock.now() + float(rest or 0))
        if self._clock.now() < self._rest_until:
            # Nothing may be given out yet, and pins of nodes that still have to come back are no orphans.
            self._planned_revisions = self._seen_revisions = (int(revision or 0), int(pins_revision or 0))
            return _Planned(revision, started, "", 0, 0, (), [], self._rest_until + 0.01)
        later = self._clock.now() + RECONCILE_SEC
        if orphaned == "t":
            session.execute(self._sql.drop_orphaned_pins, timeout=HEAVY_SEC)
            later = self._clock.now() + PLAN_GAP_SEC  # this snapshot still has them
        self._planned_revisions = self._seen_revisions = (int(revision or 0), int(pins_revision or 0))
        members: list[tuple[str, int, str, bool]] = json.loads(members_text or "[]") or []
        pins: list[tuple[int, list[str]]] = json.loads(pins_text or "[]") or []
        if expiry is not None:
            later = min(later, self._clock.now() + float(expiry) + 0.01)
        names = {name for name, _, state, _ in members if state != "away"}
        drained = {name for name, _, _, out in members if out} & names
        active = [Member(name, weight) for name, weight, *_ in members if name in names - drained]
        resting = {name for name, _, state, _ in members if state == "away"}
        joining = [name for name, _, state, _ in members if state == "joining"]
        groups = []
        for node, next_node, overdue, tokens, left in session.execute(self._sql.tokens, timeout=HEAVY_SEC):
            groups.append(Group(node, next_node, overdue == "t", sorted(parse_array(tokens))))
            if left is not None:
                later = min(later, self._clock.now() + max(float(left), RETRY_FIRST_SEC) + 0.01)
        allowed = allowed_nodes(pins, names - drained)
        self._report_parked({token for token, nodes in allowed.items() if not nodes}, pins)
        steps = steps_of(groups, active, resting, allowed, drained)
        planned = _Planned(
            revision,
            started,
            self._reason(names, joining, drained),
            len({group.node for group in groups if group.node is not None}),
            len(active),
            joining,
            batches_of(steps),
            later,
        )
        self._planned_members, self._planned_drained = names, drained
        return planned

    def _report_parked(self, parked: set[int], pins: Sequence[tuple[int, list[str]]]) -> None:
        """Say once which pins keep tokens from everybody."""
        if new := parked - self._parked:
            patterns = sorted({str(patterns) for token, patterns in pins if token in new})
            logger.warning(
                "%d token%s rest%s because of pins that match no live node that takes tokens: %s%s",
                len(parked),
                *(("", "s") if len(parked) == 1 else ("s", "")),
                ", ".join(patterns[:3]),
                ", ..." if len(patterns) > 3 else "",
                extra=fields("tokens_parked", self._me),
            )
        self._parked = parked

    def _publish(
        self, session: Session, incarnation: str, planned: _Planned, steps: Sequence[Step], known_epoch: int
    ) -> Outcome | None:
        index: dict[str | None, int | None] = {None: None}
        table: list[str] = []

        def number(name: str | None) -> int | None:
            if name not in index:
                table.append(name or "")
                index[name] = len(table)
            return index[name]

        runs = [(low, high, step) for step in steps for low, high in runs_of(step.tokens)]
        # A node counts as planned for once the last of its plan's batches is in.
        joining = [] if planned.batches else planned.joining
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
            planned.revision,
            array(joining),
            *columns,
            array(table),
            kinds,
            targets,
            self._drain,
            planned.started,
            planned.reason,
            planned.nodes_before,
            planned.nodes_after,
            array(self._names.node_channel(name) for name in sorted(told)),
            known_epoch,
            timeout=HEAVY_SEC,
        )
        wanted = sum(len(step.tokens) for step in steps)
        if rows:
            epoch, done, moved, _ = rows[0]
            return Outcome(int(epoch or 0), int(done or 0), int(moved or 0), wanted - int(done or 0), planned.reason)
        # Nothing written: all of it is in use, or this node no longer leads, or the members have changed.
        ((revision,),) = session.execute(self._sql.revision, timeout=HEAVY_SEC)
        return Outcome(0, 0, 0, wanted) if wanted and revision == planned.revision else None

    def _reason(self, names: set[str], joining: Sequence[str], drained: set[str]) -> str:
        """Why this plan is made, in a word or two, for the audit."""
        before = self._planned_members
        if before is None:
            return "new leader" if len(names) > len(joining) else "initial"
        joined, left = names - before or set(joining), before - names
        if joined or left:
            return "join and leave" if joined and left else "join" if joined else "leave"
        if drained != self._planned_drained:
            return "drain" if drained - self._planned_drained else "undrain"
        return "pins or repair"
