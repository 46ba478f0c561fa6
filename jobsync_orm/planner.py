"""Who should own what: a pure function from tokens, members and pins to a plan.

No database, no clock, no randomness: the same input gives the same plan, in whatever order members and mappings
arrive, and planning the outcome of a plan gives an empty one. The goals, in this order:

1. **Pins are obeyed.** A pinned token goes to a member its pin allows, and to nobody if there is none.
2. **Balance.** Each member gets its share by weight, rounded down or up; the largest remainders are rounded up. With
   equal weights no two members differ by more than one token. Pinned tokens count. Where pins stand in the way, the
   loads are the fairest the pins allow: the highest load per weight is as low as it can be, then the next highest,
   and so on.
3. **Fewest moves** of all plans that reach this balance.

    >>> plan({"a": [0, 1, 2, 3, 4, 5]}, [Member("a"), Member("b")]).move
    {('a', 'b'): [3, 4, 5]}

How it works
------------
Tokens whose pins allow the same members form a group; the free tokens are the group that all members may have. From here
on only numbers of tokens per group and member matter, and no step looks at single tokens until the end.

*Loads.* Members that the same groups may go to are interchangeable, so a flow from groups to classes of members tells
whether every member can have its rounded share. Whom to round up is a greedy choice by remainder, exact because the sets
of members that can be rounded up together are the independent sets of a matroid. If shares cannot be had, some set of
members is overfull: it becomes a problem of its own, and so does the rest (the decomposition algorithm of S. Fujishige,
"Lexicographically optimal base of a polymatroid", 1980; for equal weights in the integral form of A. Frank and K. Murota,
"Decreasing minimization on M-convex sets", 2022).

*Moves.* A minimum-cost flow: start with everybody keeping what they hold, then send what is too much to where it lacks
along cheapest paths (successive shortest paths), where taking a token from its holder costs one.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, filterfalse
from types import MappingProxyType

__all__ = ["Member", "Plan", "plan"]

_NO_PINS: Mapping[int, Collection[str]] = MappingProxyType({})

# Searching a sorted list for one token costs about as much as looking at this many tokens in a row.
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
    """What has to change, and what comes of it. Every list of tokens is ascending, every mapping in order of its keys.

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
        return sum(len(tokens) for part in (self.assign, self.move, self.park) for tokens in part.values())


def plan(
    owned: Mapping[str | None, Sequence[int]],
    members: Sequence[Member],
    pins: Mapping[int, Collection[str]] = _NO_PINS,
) -> Plan:
    """Plan who should own which token.

    Parameters
    ----------
    owned : mapping of str or None to sequence of int
        Each owner's tokens, **ascending**, each token once in all; lists or ``array('i')``. The tokens of an owner that
        is no member, and those of None (parked), are nobody's.
    members : sequence of Member
        The live nodes.
    pins : mapping of int to collection of str
        For a pinned token the names that may own it. Names of no member are ignored; if none is left the token is
        parked. Frozensets shared between tokens are read once.

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
    index = {name: i for i, name in enumerate(names)}
    if len(index) < len(names):
        twice = next(a for a, b in zip(names, names[1:], strict=False) if a == b)
        raise ValueError(f"two members are named {twice!r}: names must be unique")
    if not roster:
        return Plan({}, {}, {}, sorted(chain.from_iterable(owned.values())), {})

    rules = _rules(pins, frozenset(names))
    found = {owner: _find(rules, tokens) for owner, tokens in owned.items()}
    pools: dict[frozenset[str], _Pool] = {rule: _Pool() for rule in rules.values()}
    for owner, pinned in found.items():
        for token in pinned:
            pools[rules[token]].add(index.get(owner) if owner is not None else None, token)

    unowned = pools.pop(frozenset(), _Pool())
    free = _FreePool(
        held={i: owned.get(name, ()) for i, name in enumerate(names)},
        pinned={i: frozenset(found.get(name, ())) for i, name in enumerate(names)},
        loose=sorted(
            chain.from_iterable(
                filterfalse(frozenset(found[owner]).__contains__, tokens) if found[owner] else tokens
                for owner, tokens in owned.items()
                if owner is None or owner not in index
            )
        ),
    )
    ...
