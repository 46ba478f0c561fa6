"""From what is stored and what the planner wants to the steps that lead there, in batches. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from jobsync_orm.coordinator.statements import PARK
from jobsync_orm.planner import Member, Plan, plan

__all__ = ["FORCE", "GRANT", "MARK", "UNMARK", "Group", "Step", "batches_of", "runs_of", "steps_of"]

# The tokens of one publishing statement: it must take much less time than a heartbeat may be late (about 2 s here), but
# each batch makes its owners read their tokens anew.
BATCH_TOKENS = 400_000

# What a step does; the numbers are those of the publishing statement.
GRANT, MARK, UNMARK, FORCE = 0, 1, 2, 3


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


def steps_of(
    groups: Sequence[Group],
    active: Sequence[Member],
    resting: Iterable[str],
    pins: Mapping[int, Collection[str]],
    drained: Iterable[str] = (),
) -> list[Step]:
    """The steps from what is stored to what the planner wants.

    A token on its way from one live node to another counts as the latter's, so that a plan made in the middle of a
    hand-off does not start it anew. Tokens of resting nodes stay where they are. Those of drained nodes, which are live
    but not ``active``, count as nobody's; but as such a node says yes to them, it is asked for them.
    """
    names = {member.name for member in active}
    resting, drained = set(resting), frozenset(drained)
    holders: dict[str | None, list[Group]] = {}
    for group in groups:
        if group.node in resting:
            continue
        holder = group.node if group.node in names else None
        if group.next_node in names and (holder is not None or group.node in drained):
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
                    steps.extend(_moving(part, holder, aim, chosen, drained))
            matters = _staying_matters(part, holder, names, drained)
            if going and matters:
                gone = {token for _, tokens in going for token in tokens}
                stay = [token for token in part.tokens if token not in gone]
            if stay and matters:
                steps.append(_staying(part, holder, stay, drained))
    return steps


def _moving(
    part: Group, holder: str | None, target: str | None, tokens: Sequence[int], drained: Collection[str]
) -> list[Step]:
    """Tokens of ``part`` that ``holder`` is to lose to ``target`` (None: to nobody)."""
    if holder is None and part.node not in drained:  # no live owner: at once
        return [Step(tokens, part.node, part.next_node, GRANT, target)]
    if part.node == target:
        return [Step(tokens, part.node, part.next_node, UNMARK, None)]
    aim = PARK if target is None else target
    if part.next_node == aim:
        # Being parked and still to be parked: only the deadline matters.
        return [Step(tokens, part.node, aim, FORCE, target)] if part.overdue else []
    return [Step(tokens, part.node, part.next_node, MARK, aim)]


def _staying_matters(part: Group, holder: str | None, names: set[str], drained: Collection[str]) -> bool:
    if holder is None and part.node in drained:
        return part.overdue or part.next_node != PARK  # nobody is to have it, its owner neither
    if holder is None:
        return part.node is not None  # parked, but still under the name of a dead node
    return part.next_node is not None and (part.overdue or part.next_node not in names)


def _staying(part: Group, holder: str | None, tokens: Sequence[int], drained: Collection[str]) -> Step:
    if holder is None and part.node in drained:
        parking = part.next_node == PARK
        return Step(tokens, part.node, part.next_node, FORCE if parking else MARK, None if parking else PARK)
    if holder is None:
        return Step(tokens, part.node, part.next_node, GRANT, None)
    if part.next_node == holder:  # on its way, and overdue
        return Step(tokens, part.node, part.next_node, FORCE, holder)
    return Step(tokens, part.node, part.next_node, UNMARK, None)  # the target is gone, or the pin was lifted


def runs_of(tokens: Sequence[int]) -> list[tuple[int, int]]:
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


def batches_of(steps: Sequence[Step]) -> list[list[Step]]:
    """The steps in order, no more than ``BATCH_TOKENS`` tokens together."""
    batches: list[list[Step]] = []
    room = 0
    for step in steps:
        for start in range(0, len(step.tokens), BATCH_TOKENS):
            part = replace(step, tokens=step.tokens[start : start + BATCH_TOKENS])
            if len(part.tokens) > room:
                batches.append([])
                room = BATCH_TOKENS
            batches[-1].append(part)
            room -= len(part.tokens)
    return batches
