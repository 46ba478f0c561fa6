"""How many tokens each member shall have, and of which group, so that loads are fair and moves are few.

The arithmetic below the planner: it knows numbers of tokens only. A group is a number of tokens that the same members
may have; members are known by number.

*Loads* (:func:`loads`). Members that the same groups may go to are interchangeable, so a flow from groups to classes
of members tells whether every member can have its rounded share. Whom to round up is a greedy choice by remainder,
which is exact: the sets of members that can be rounded up together are the independent sets of a matroid. If the
shares cannot be had, some set of members is overfull; it becomes a problem of its own, and so does the rest (the
decomposition algorithm of S. Fujishige, "Lexicographically optimal base of a polymatroid", 1980; for equal weights in
the integral form of A. Frank and K. Murota, "Decreasing minimization on M-convex sets", 2022).

*Moves* (:func:`settle`). A minimum-cost flow by successive shortest paths: everybody keeps what they hold, then what
is too much is sent to where it lacks, and taking a token from its holder costs one. Where a group is to be spread
(:func:`spread`), a token beyond a member's share of that group costs more than all moves together, and one beyond the
share rounded up twice as much: costs that rise with the number, so that the cheapest flow is still found in this way.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise

__all__ = ["Group", "loads", "settle", "spread"]

# What an uneven token costs: more than all tokens can move.
UNEVEN = 1 << 40


@dataclass(slots=True)
class Group:
    """A number of tokens that the same members may have."""

    allowed: Collection[int]
    """Members, by their place among the sorted names, ascending."""
    size: int
    held: dict[int, int] = field(default_factory=dict)
    """How many of them each allowed member holds."""
    limit: int | None = None
    """The most that one member may have of them."""
    shares: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Each allowed member's share of them, rounded down and up, if they are to be spread."""
    placed: dict[int, int] = field(default_factory=dict)
    """How many of them each allowed member shall have."""

    def room(self, i: int) -> tuple[int, int]:
        """How many more member ``i`` can take at which cost each: at first its own back, -1, then others, 0."""
        placed, held = self.placed.get(i, 0), self.held.get(i, 0)
        end, cost = (held, -1) if placed < held else (self.size if self.limit is None else self.limit, 0)
        for share in self.shares.get(i, ()):
            if placed < share:
                end = min(end, share)
            else:
                cost += UNEVEN
        return end - placed, cost

    def stock(self, i: int) -> tuple[int, int]:
        """How many member ``i`` can give at which cost each: at first what it does not hold, 0, then its own, 1."""
        placed, held = self.placed.get(i, 0), self.held.get(i, 0)
        end, cost = (held, 0) if placed > held else (0, 1)
        for share in self.shares.get(i, ()):
            if placed > share:
                end = max(end, share)
                cost -= UNEVEN
        return placed - end, cost


class _Transport:
    """A flow from sources with so many units each to sinks; grows by shortest augmenting paths.

    Parameters
    ----------
    supply : dict of int to int
        Units by source.
    sources : sequence of sequence of int
        The sources that may send to each sink.
    """

    def __init__(self, supply: Mapping[int, int], sources: Sequence[Sequence[int]]) -> None:
        self.left = dict(supply)
        self.total_left = sum(supply.values())
        self._sources = sources
        self._sent: dict[int, dict[int, int]] = {source: {} for source in supply}

    def push(self, sink: int, amount: int) -> int:
        """Bring up to ``amount`` more units to ``sink``, others keep theirs; how many it were."""
        brought = 0
        while brought < amount and self.total_left and (path := self._path(sink)):
            takes = [(source, other) for (_, other), (source, _) in pairwise(path)]
            step = min(amount - brought, self.left[path[0][0]], *(self._sent[source][other] for source, other in takes))
            self.left[path[0][0]] -= step
            self.total_left -= step
            for source, other in takes:
                self._sent[source][other] -= step
            for source, other in path:
                self._sent[source][other] = self._sent[source].get(other, 0) + step
            brought += step
        return brought

    def _path(self, sink: int) -> list[tuple[int, int]]:
        """(source, sink) pairs: the first source has units left; each next one takes from the sink before."""
        onward: dict[int, tuple[int, int]] = {}
        seen = set()
        queue = deque([sink])
        while queue:
            here = queue.popleft()
            for source in self._sources[here]:
                if source in seen:
                    continue
                seen.add(source)
                if self.left[source]:
                    path = [(source, here)]
                    while path[-1][1] != sink:
                        path.append(onward[path[-1][1]])
                    return path
                for other, units in self._sent[source].items():
                    if units and other != sink and other not in onward:
                        onward[other] = (source, here)
                        queue.append(other)
        return []

    def overfull(self) -> set[int]:
        """The sinks that must serve the units left and what they themselves have displaced."""
        targets: dict[int, list[int]] = defaultdict(list)
        for sink, sources in enumerate(self._sources):
            for source in sources:
                targets[source].append(sink)
        queue = [source for source, units in self.left.items() if units]
        reached = set(queue)
        sinks: set[int] = set()
        while queue:
            for sink in targets[queue.pop()]:
                if sink not in sinks:
                    sinks.add(sink)
                    fresh = [s for s in self._sources[sink] if s not in reached and self._sent[s].get(sink)]
                    reached.update(fresh)
                    queue += fresh
        return sinks


def loads(weights: Sequence[int], groups: Sequence[Group]) -> tuple[list[int], list[Group]]:
    """The fairest loads.

    Returns
    -------
    most : list of int
        Of each member its load when rounded up.
    empty : list of Group
        Places to be left empty: each group says how many of its members, no matter which, are rounded down.
    """
    most = [0] * len(weights)
    empty: list[Group] = []
    everywhere: dict[int, Collection[int]] = {g: group.allowed for g, group in enumerate(groups) if group.size}
    todo = [(list(range(len(weights))), everywhere)]
    while todo:
        members, allowed = todo.pop()
        supply = {g: groups[g].size for g in allowed}
        by_source: dict[int, list[int]] = {i: [] for i in members}
        for g, some in allowed.items():
            for i in some:
                by_source[i].append(g)
        classes: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for i in members:
            classes[tuple(by_source[i])].append(i)
        sources, alike = list(classes), list(classes.values())

        units, weight = sum(supply.values()), sum(weights[i] for i in members)
        ties = _rounded(_Transport(supply, sources), alike, {i: units * weights[i] for i in members}, weight)
        if ties is not None:
            for i in members:
                most[i] = -(-units * weights[i] // weight)
            empty += ties
            continue
        full = {i for c in _bottleneck(supply, sources, alike, weights) for i in alike[c]}
        inner = {g: some for g, some in allowed.items() if full.issuperset(some)}
        outer: dict[int, Collection[int]] = {
            g: [i for i in some if i not in full] for g, some in allowed.items() if g not in inner
        }
        todo += [([i for i in members if i in full], inner), ([i for i in members if i not in full], outer)]
    return most, empty


def _rounded(
    flow: _Transport, alike: Sequence[Sequence[int]], shares: Mapping[int, int], whole: int
) -> list[Group] | None:
    """Whether all members can have ``shares[i] / whole``, rounded; then how many are rounded down."""
    for c, some in enumerate(alike):
        least = sum(shares[i] // whole for i in some)
        if flow.push(c, least) < least:
            return None
    ties: dict[int, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for c, some in enumerate(alike):
        for i in some:
            if remainder := shares[i] % whole:
                ties[remainder][c].append(i)
    empty = []
    for remainder in sorted(ties, reverse=True):
        down = sum(len(some) - flow.push(c, len(some)) for c, some in ties[remainder].items())
        empty.append(Group(sorted(chain.from_iterable(ties[remainder].values())), down, limit=1))
    return None if flow.total_left else empty


def _bottleneck(
    supply: Mapping[int, int],
    sources: Sequence[Sequence[int]],
    alike: Sequence[Sequence[int]],
    weights: Sequence[int],
) -> set[int]:
    """Classes of members that must carry more than their share, where :func:`_rounded` has found no way."""
    units = sum(supply.values())
    count, weight = sum(map(len, alike)), sum(weights[i] for some in alike for i in some)
    if len({weights[i] for some in alike for i in some}) == 1:
        trials = [(1, [limit * len(some) for some in alike]) for limit in (-(-units // count), units // count)]
    else:
        trials = [(weight, [units * sum(weights[i] for i in some) for some in alike])]
    for scale, limits in trials:
        flow = _Transport({source: scale * amount for source, amount in supply.items()}, sources)
        for c, limit in enumerate(limits):
            flow.push(c, limit)
        if flow.total_left:
            return flow.overfull()
    raise AssertionError("shares that can be had were taken for impossible")


class _Settlement:
    """Places what each group has so that each member gets ``most`` of all groups together, at the least cost.

    Nodes of the graph are the members, ``0 .. len(most) - 1``, and after them the groups. A step from a member to a
    group takes one token of the group from it, a step from a group to a member gives it one.
    """

    def __init__(self, groups: Sequence[Group], most: Sequence[int]) -> None:
        self._groups = groups
        self._members = len(most)
        self._groups_of: list[list[int]] = [[] for _ in most]
        self._over = [-limit for limit in most]
        for g, group in enumerate(groups):
            group.placed = {}
            for i in group.allowed:
                self._groups_of[i].append(g)
                if not group.shares:
                    self._put(group, i, group.held.get(i, 0))
        for group in groups:
            if group.shares:
                self._place_evenly(group)
        for group in sorted(groups, key=lambda group: group.limit is None):
            if not group.shares:
                self._place_loose(group)

    def _place_loose(self, group: Group) -> None:
        # What no allowed member holds costs nothing wherever it goes, so any start is a cheapest one for the loads it
        # makes. This one leaves little to mend: empty places to those who hold least, tokens to where they lack.
        loose = group.size - sum(group.held.values())
        order = sorted(group.allowed, key=lambda i: (self._over[i], -i)) if group.limit else group.allowed
        for i in order:
            if not loose:
                return
            loose -= self._put(group, i, min(loose, group.limit or max(0, -self._over[i])))
        self._put(group, next(iter(order)), loose)

    def _place_evenly(self, group: Group) -> None:
        # The cheapest first: what each holds of its share, what is missing of it, and the same for those rounded up.
        left = group.size
        for rounded in (0, 1):
            for own in (True, False):
                for i in sorted(group.allowed, key=lambda i: (self._over[i], i)):
                    share = group.shares[i][rounded]
                    wanted = (min(share, group.held.get(i, 0)) if own else share) - group.placed.get(i, 0)
                    left -= self._put(group, i, min(left, max(0, wanted)))

    def _put(self, group: Group, i: int, amount: int) -> int:
        if amount:
            group.placed[i] = group.placed.get(i, 0) + amount
            self._over[i] += amount
        return amount

    def _steps(self, node: int, first: Collection[int] = ()) -> Iterator[tuple[int, int, int]]:
        """Where one step leads: (node, how many tokens may go there, cost of each); from a group ``first`` first."""
        if node < self._members:
            for g in self._groups_of[node]:
                yield self._members + g, *self._groups[g].stock(node)
        else:
            group = self._groups[node - self._members]
            for i in chain(filter(group.allowed.__contains__, first), group.allowed):
                yield i, *group.room(i)

    def run(self) -> None:
        """Do it: send what is too much along cheapest paths until no member has too much."""
        while sources := [i for i, amount in enumerate(self._over) if amount > 0]:
            cost = self._costs(sources)
            lacking = dict.fromkeys(i for i, amount in enumerate(self._over) if amount < 0)
            if cost.keys().isdisjoint(lacking):
                raise AssertionError("loads that were found possible are not")
            dead: set[int] = set()
            for source in sources:
                while self._over[source] > 0 and (path := self._path(source, cost, lacking, dead)):
                    self._send(path)
                    if not self._over[path[-1]]:
                        del lacking[path[-1]]

    def _send(self, path: Sequence[int]) -> None:
        """Send as many tokens along ``path`` as have the same cost."""
        takes = [(self._groups[g - self._members], i) for i, g in zip(path[::2], path[1::2], strict=False)]
        puts = [(self._groups[g - self._members], i) for g, i in zip(path[1::2], path[2::2], strict=True)]
        amount = min(
            self._over[path[0]],
            -self._over[path[-1]],
            *(group.stock(i)[0] for group, i in takes),
            *(group.room(i)[0] for group, i in puts),
        )
        for group, i in takes:
            self._put(group, i, -amount)
        for group, i in puts:
            self._put(group, i, amount)

    def _costs(self, sources: Iterable[int]) -> dict[int, int]:
        """Least cost from any source to each node that can be reached (Bellman and Ford's algorithm)."""
        cost = dict.fromkeys(sources, 0)
        queue = deque(cost)
        while queue:
            here = queue.popleft()
            for there, amount, price in self._steps(here):
                if amount and (there not in cost or cost[here] + price < cost[there]):
                    cost[there] = cost[here] + price
                    queue.append(there)
        return cost

    def _path(self, source: int, cost: Mapping[int, int], lacking: Collection[int], dead: set[int]) -> list[int] | None:
        """A cheapest path from ``source`` to a member that lacks; nodes that lead to none join ``dead``."""
        if cost[source]:
            return None  # another source reaches this one at a gain, so paths from here are none of the cheapest
        before = {source: source}
        queue = deque([source])
        while queue:
            here = queue.popleft()
            for there, amount, price in self._steps(here, lacking):
                if amount and there not in before and there not in dead and cost[there] == cost[here] + price:
                    before[there] = here
                    if there in lacking:
                        path = [there]
                        while path[-1] != source:
                            path.append(before[path[-1]])
                        return path[::-1]
                    queue.append(there)
        dead.update(before)
        return None


def spread(group: Group, weights: Sequence[int]) -> None:
    """Have a group's tokens go to its members in equal parts, by weight, as far as the loads of all groups allow."""
    whole = sum(weights[i] for i in group.allowed)
    parts = {i: group.size * weights[i] for i in group.allowed}
    group.shares = {i: (part // whole, -(-part // whole)) for i, part in parts.items()}


def settle(groups: Sequence[Group], most: Sequence[int]) -> None:
    """Fill ``placed`` of each group so that member ``i`` has ``most[i]`` of all groups together.

    Groups with shares are spread as evenly as that allows, and then there are as few moves as can be.
    """
    _Settlement(groups, most).run()
