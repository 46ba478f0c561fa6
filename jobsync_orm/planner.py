"""Who should own what: a pure function from tokens, members and pins to a plan.

No database, no clock, no randomness: the same input gives the same plan, in whatever order members and mappings
arrive, and planning the outcome of a plan gives an empty one. The goals, in this order:

1. **Pins are obeyed.** A pinned token goes to a member its pin allows, and to nobody if there is none.
2. **Balance.** Each member gets its share by weight, rounded down or up; the largest remainders are rounded up. With
   equal weights no two members differ by more than one token. Pinned tokens count. Where pins stand in the way, the
   loads are the fairest the pins allow: the highest load per weight is as low as it can be, then the next highest, and
   so on (before rounding, where weights differ).
3. **Pinned tokens are spread.** Those that the same members may have are shared out among these by weight, rounded
   down or up, as far as the balance of all tokens leaves it open: two nodes with a GPU get half of what needs one each.
4. **Fewest moves** of all plans that reach this.

    >>> plan({"a": [0, 1, 2, 3, 4, 5]}, [Member("a"), Member("b")]).move
    {('a', 'b'): [3, 4, 5]}

The numbers (fair loads, fewest moves) come from :mod:`jobsync_orm.balance`; single tokens are looked at only to sort
them into pools, one for each set of allowed members, and to write the plan down.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, filterfalse, pairwise
from types import MappingProxyType

from jobsync_orm.balance import Group, loads, settle, spread

__all__ = ["Member", "Plan", "plan"]

_NO_PINS: Mapping[int, Collection[str]] = MappingProxyType({})

# One search in a sorted list costs about as much as this many looks into a set, one after the other.
_SEARCH_COST = 20


@dataclass(frozen=True, slots=True)
class Member:
    """A live node.

    Parameters
    ----------
    name : str
        Unique among the members.
    weight : int
        Its share relative to the others', at least 1.
    """

    name: str
    weight: int = 1

    def __post_init__(self) -> None:
        if self.weight < 1:
            raise ValueError(f"weight={self.weight!r} of member {self.name!r} must be at least 1")


@dataclass(frozen=True, slots=True)
class Plan:
    """What has to change, and what comes of it. Lists of tokens are ascending, mappings in order of their
    keys.

    Attributes
    ----------
    assign : dict of str to list of int
        Tokens without a live owner, by the member that gets them at once.
    move : dict of (str, str) to list of int
        Tokens that one member hands to another, by (from, to).
    park : dict of str to list of int
        Tokens that a member must give up because no member may have them.
    parked : list of int
        All tokens that end without an owner, those in ``park`` included.
    targets : dict of str to int
        Number of tokens of each member afterwards.
    """

    assign: dict[str, list[int]]
    move: dict[tuple[str, str], list[int]]
    park: dict[str, list[int]]
    parked: list[int]
    targets: dict[str, int]

    @property
    def moved(self) -> int:
        """Number of tokens whose owner changes, by ``assign``, ``move`` or ``park``."""
        parts = (self.assign.values(), self.move.values(), self.park.values())
        return sum(map(len, chain.from_iterable(parts)))


def plan(
    owned: Mapping[str | None, Sequence[int]],
    members: Sequence[Member],
    pins: Mapping[int, Collection[str]] = _NO_PINS,
) -> Plan:
    """Plan who should own which token.

    Parameters
    ----------
    owned : mapping of str or None to sequence of int
        Each owner's tokens, **ascending**, each token once in all; lists or ``array("i")``. The tokens of an
        owner that is no member, and those of None (parked), are nobody's.
    members : sequence of Member
        The live nodes.
    pins : mapping of int to collection of str
        For a pinned token the names that may own it. Names of no member are ignored; if none is left, the
        token is parked. Pins of tokens that ``owned`` does not know are ignored. Frozensets are cheapest.

    Returns
    -------
    Plan
        Without members nothing is assigned, and ``parked`` has every token.

    Raises
    ------
    ValueError
        Two members of one name.
    """
    roster = sorted(members, key=lambda member: member.name)
    names = [member.name for member in roster]
    twice = [name for name, other in pairwise(names) if name == other]
    if twice:
        raise ValueError(f"two members are named {twice[0]!r}: names must be unique")
    if not roster:
        return Plan({}, {}, {}, sorted(chain.from_iterable(owned.values())), {})

    banned, pools = _pools(owned, names, pins)
    groups = [pool.group() for pool in pools]
    weights = [member.weight for member in roster]
    for group in groups[:-1]:  # the last one's are not pinned
        spread(group, weights)
    most, empty = loads(weights, groups)
    settle([*groups, *empty], most)

    assign: dict[str, list[int]] = defaultdict(list)
    move: dict[tuple[str, str], list[int]] = defaultdict(list)
    targets = dict.fromkeys(names, 0)
    for pool, group in zip(pools, groups, strict=True):
        for i, count in group.placed.items():
            targets[names[i]] += count
        for giver, taker, tokens in pool.transfers(group):
            if giver is None:
                assign[names[taker]] += tokens
            else:
                move[names[giver], names[taker]] += tokens
    return Plan(
        assign={name: sorted(assign[name]) for name in sorted(assign)},
        move={pair: sorted(move[pair]) for pair in sorted(move)},
        park={names[i]: list(tokens) for i, tokens in sorted(banned.tokens.items()) if tokens},
        parked=sorted(chain(banned.loose, *banned.tokens.values())),
        targets=targets,
    )


@dataclass(slots=True)
class _Pool:
    """The tokens of a group."""

    allowed: Collection[int]
    loose: list[int] = field(default_factory=list)
    """Those without a live owner."""
    tokens: dict[int, Sequence[int]] = field(default_factory=dict)
    """Those of each live owner, allowed or not."""
    foreign: Mapping[int, Collection[int]] = field(default_factory=dict)
    """What is in ``tokens``, but belongs to another pool."""

    def group(self) -> Group:
        held = {i: len(tokens) - len(self.foreign.get(i, ())) for i, tokens in self.tokens.items()}
        size = len(self.loose) + sum(held.values())
        return Group(self.allowed, size, {i: held[i] for i in self.allowed if held.get(i)})

    def _given(self, group: Group) -> Iterator[tuple[int | None, list[int]]]:
        yield None, self.loose
        for i, tokens in sorted(self.tokens.items()):
            foreign = self.foreign.get(i, ())
            count = len(tokens) - len(foreign) - group.placed.get(i, 0)
            if count > 0:
                tail = filterfalse(foreign.__contains__, tokens[-count - len(foreign) :])
                yield i, list(tail)[-count:]

    def transfers(self, group: Group) -> Iterator[tuple[int | None, int, list[int]]]:
        """(from, to, tokens) for each step from what is held to what shall be; from None: no live owner."""
        given = self._given(group)
        giver, tokens = next(given)
        start = 0
        for taker in sorted(group.placed):
            wanted = group.placed[taker] - group.held.get(taker, 0)
            while wanted > 0:
                if start == len(tokens):
                    giver, tokens = next(given)
                    start = 0
                part = tokens[start : start + wanted]
                start += len(part)
                wanted -= len(part)
                if part:
                    yield giver, taker, part


def _rules(pins: Mapping[int, Collection[str]], live: frozenset[str]) -> dict[int, frozenset[str]]:
    """Of each pinned token the live names that may own it, where those are not all."""
    known: dict[frozenset[str], frozenset[str]] = {}
    rules = {}
    for token, allowed in pins.items():
        key = frozenset(allowed)
        rule = known.get(key)
        if rule is None:
            rule = known[key] = key & live
        if rule != live:
            rules[token] = rule
    return rules


def _pinned(marked: frozenset[int], tokens: Sequence[int]) -> list[int]:
    """Those of ``tokens`` that are in ``marked``."""
    if len(marked) * _SEARCH_COST > len(tokens):
        return sorted(marked.intersection(tokens))
    places = ((token, bisect_left(tokens, token)) for token in marked)
    return sorted(token for token, place in places if place < len(tokens) and tokens[place] == token)


def _pools(
    owned: Mapping[str | None, Sequence[int]], names: Sequence[str], pins: Mapping[int, Collection[str]]
) -> tuple[_Pool, list[_Pool]]:
    """The pool of tokens nobody may have, and the others, those with the fewest allowed members first."""
    index: dict[str | None, int] = {name: i for i, name in enumerate(names)}
    rules = _rules(pins, frozenset(names))
    marked = frozenset(rules)
    by_rule = {
        rule: _Pool(dict.fromkeys(sorted(index[name] for name in rule))) for rule in {frozenset(), *rules.values()}
    }
    free = _Pool(range(len(names)))
    foreign: dict[int, Collection[int]] = {}
    for owner, tokens in owned.items():
        i = index.get(owner)
        pinned = _pinned(marked, tokens)
        parts: dict[frozenset[str], list[int]] = defaultdict(list)
        for token in pinned:
            parts[rules[token]].append(token)
        for rule, part in parts.items():
            if i is None:
                by_rule[rule].loose += part
            else:
                by_rule[rule].tokens[i] = part
        if i is not None:
            free.tokens[i] = tokens
            foreign[i] = frozenset(pinned)
        elif pinned:
            free.loose += filterfalse(frozenset(pinned).__contains__, tokens)
        else:
            free.loose += tokens
    free.foreign = foreign
    banned = by_rule.pop(frozenset())
    pools = sorted(by_rule.values(), key=lambda pool: (len(pool.allowed), list(pool.allowed)))
    for pool in (banned, *pools, free):
        pool.loose.sort()
    return banned, [*pools, free]
