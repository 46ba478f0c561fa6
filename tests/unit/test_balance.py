"""The numbers below the planner, at sizes where one cannot try everything: optimality is shown by a certificate."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

from hypothesis import given, settings
from hypothesis import strategies as st

from jobsync_orm.balance import Group, loads, settle, spread


@st.composite
def instances(draw: st.DrawFn) -> tuple[list[int], list[Group]]:
    """Weights of some members, and groups that they hold in part."""
    count = draw(st.integers(1, 6))
    weights = draw(st.lists(st.sampled_from(draw(st.sampled_from([(1,), (1, 2, 3)]))), min_size=count, max_size=count))
    everyone = range(count)
    groups = []
    for _ in range(draw(st.integers(1, 5))):
        allowed = sorted(draw(st.sets(st.sampled_from(everyone), min_size=1)))
        held = {i: n for i in allowed if (n := draw(st.integers(0, 12)))}
        group = Group(allowed, sum(held.values()) + draw(st.integers(0, 12)), held)
        if draw(st.booleans()):
            spread(group, weights)
        groups.append(group)
    return weights, groups


def improvement(groups: Sequence[Group], count: int) -> bool:
    """Whether passing single tokens around in a ring, loads unchanged, would spread them better or save moves.

    That is a negative cycle (found by Bellman and Ford's algorithm) among the changes of cost that one token makes when
    group ``g`` takes it from member ``i`` and gives it to member ``j``. A flow without one is a cheapest one.
    """

    def kept(group: Group, i: int, change: int) -> int:
        placed = group.placed.get(i, 0) + change
        uneven = sum(max(0, placed - share) for share in group.shares.get(i, ()))
        return min(group.held.get(i, 0), placed) - 10_000 * uneven

    price: dict[tuple[int, int], int] = {}
    for group in groups:
        for i, j in product(group.allowed, repeat=2):
            if i != j and group.placed.get(i, 0) and (group.limit is None or group.placed.get(j, 0) < group.limit):
                lost = kept(group, i, 0) - kept(group, i, -1) + kept(group, j, 0) - kept(group, j, 1)
                price[i, j] = min(lost, price.get((i, j), lost))
    cost = [0] * count
    for _ in range(count):
        for (i, j), lost in price.items():
            cost[j] = min(cost[j], cost[i] + lost)
    return any(cost[i] + lost < cost[j] for (i, j), lost in price.items())


@settings(max_examples=200, deadline=None)
@given(instances())
def test_no_ring_of_exchanges_would_save_a_move(instance) -> None:
    weights, groups = instance
    most, empty = loads(weights, groups)
    settle([*groups, *empty], most)
    for group in [*groups, *empty]:
        assert sum(group.placed.values()) == group.size
        assert all(i in group.allowed for i, n in group.placed.items() if n)
        assert all(0 <= n <= (group.size if group.limit is None else group.limit) for n in group.placed.values())
    for i, limit in enumerate(most):
        assert sum(group.placed.get(i, 0) for group in [*groups, *empty]) == limit
    assert not improvement([*groups, *empty], len(weights))


@settings(max_examples=200, deadline=None)
@given(instances())
def test_no_member_could_be_relieved_by_one_with_less_to_carry(instance) -> None:
    weights, groups = instance
    most, empty = loads(weights, groups)
    settle([*groups, *empty], most)
    load = [sum(group.placed.get(i, 0) for group in groups) for i in range(len(weights))]
    # Along chains: member i can be relieved of one token in favour of j.
    reach = {
        (i, j) for group in groups for i in group.allowed if group.placed.get(i, 0) for j in group.allowed if i != j
    }
    for k, i, j in product(range(len(weights)), repeat=3):
        if (i, k) in reach and (k, j) in reach:
            reach.add((i, j))
    for i, j in reach:
        # Each load is less than one from its share before rounding, and there i had no more for its weight than j.
        assert (load[i] - 1) * weights[j] < (load[j] + 1) * weights[i]


def test_a_chain_of_two_moves_where_no_single_move_helps() -> None:
    # Member 0 has too much of what only 0 and 1 may have, 2 lacks, and only 1 and 2 may have the rest.
    groups = [Group([0, 1], 4, {0: 4}), Group([1, 2], 2, {1: 2})]
    most, empty = loads([1, 1, 1], groups)
    settle([*groups, *empty], most)
    assert (most, sum(group.size for group in empty)) == ([2, 2, 2], 0)
    assert [{i: n for i, n in group.placed.items() if n} for group in groups] == [{0: 2, 1: 2}, {2: 2}]


def test_overfull_members_are_a_problem_of_their_own() -> None:
    most, empty = loads([1, 1, 1, 1], [Group([0, 1], 7), Group([0, 1, 2, 3], 3)])
    assert most == [4, 4, 2, 2]
    assert sorted((list(group.allowed), group.size) for group in empty) == [([0, 1], 1), ([2, 3], 1)]


def test_a_token_that_was_on_its_way_comes_back_where_that_is_cheaper() -> None:
    groups = [Group([0, 2, 3], 11, {2: 5, 3: 6}), Group([0, 1, 2], 6, {0: 1, 2: 5})]
    most, empty = loads([1, 1, 1, 1], groups)
    settle([*groups, *empty], most)
    assert not improvement([*groups, *empty], 4)
    kept = sum(min(n, group.held.get(i, 0)) for group in groups for i, n in group.placed.items())
    assert 17 - kept == 7
