"""Each promise of the planner, against every other way to do it (small clusters) or a closed form (large ones)."""

from __future__ import annotations

import itertools
import math
from array import array
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from fractions import Fraction

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from jobsync_orm.planner import Member, Plan, plan

Owned = Mapping[str | None, Sequence[int]]
Pins = Mapping[int, Collection[str]]

NAMES = "abcd"


def apply(owned: Owned, outcome: Plan, members: Iterable[Member]) -> dict[int, str | None]:
    """Owner of each token after ``outcome``; fails if the plan takes a token from where it is not."""
    live = {member.name for member in members}
    owner = {token: name if name in live else None for name, tokens in owned.items() for token in tokens}
    steps = [
        *((None, name, tokens) for name, tokens in outcome.assign.items()),
        *((giver, taker, tokens) for (giver, taker), tokens in outcome.move.items()),
        *((name, None, tokens) for name, tokens in outcome.park.items()),
    ]
    touched = set()
    for giver, taker, tokens in steps:
        assert tokens == sorted(tokens)
        assert tokens
        assert giver != taker
        for token in tokens:
            assert token not in touched
            touched.add(token)
            assert owner[token] == giver
            owner[token] = taker
    assert outcome.moved == len(touched)
    return owner


def by_owner(owner: Mapping[int, str | None]) -> dict[str | None, list[int]]:
    owned: dict[str | None, list[int]] = {}
    for token in sorted(owner):
        owned.setdefault(owner[token], []).append(token)
    return owned


def allowed_of(owned: Owned, members: Iterable[Member], pins: Pins) -> dict[int, frozenset[str]]:
    live = frozenset(member.name for member in members)
    return {token: live & frozenset(pins.get(token, live)) for tokens in owned.values() for token in tokens}


@st.composite
def clusters(
    draw: st.DrawFn, weights: Sequence[int] = (1,), tokens: int = 7, names: str = NAMES
) -> tuple[dict[str | None, list[int]], list[Member], dict[int, list[str]]]:
    """Owners (some dead, some None), members and pins (contradictory, to unknown names, to nobody)."""
    live = names[: draw(st.integers(1, len(names)))]
    owners = draw(st.lists(st.sampled_from([*live, "dead", "gone", None]), min_size=0, max_size=tokens))
    owned: dict[str | None, list[int]] = {}
    for token, name in enumerate(owners):
        owned.setdefault(name, []).append(token)
    members = [Member(name, draw(st.sampled_from(weights))) for name in live]
    rules = draw(st.lists(st.lists(st.sampled_from([*names, "unknown"]), max_size=3, unique=True), max_size=3))
    pins = {}
    if rules:
        chosen = st.sampled_from([None, *range(len(rules))])
        for token in range(len(owners) + 1):
            rule = draw(chosen)
            if rule is not None:
                pins[token] = rules[rule]
    return owned, members, pins


equal = clusters()
weighted = clusters(weights=(1, 2, 3, 7))
any_cluster = st.one_of(equal, weighted)


@given(any_cluster)
def test_every_token_ends_in_one_place_that_its_pin_allows(cluster) -> None:
    owned, members, pins = cluster
    outcome = plan(owned, members, pins)
    owner = apply(owned, outcome, members)
    allowed = allowed_of(owned, members, pins)
    assert owner.keys() == allowed.keys()
    for token, name in owner.items():
        if allowed[token]:
            assert name in allowed[token]
        else:
            assert name is None
    assert outcome.parked == sorted(token for token in allowed if not allowed[token])
    count = Counter(owner.values())
    assert outcome.targets == {member.name: count[member.name] for member in members}


def unevenness(members: Sequence[Member], owner: Mapping[int, str], allowed: Mapping[int, frozenset[str]]) -> int:
    """Pinned tokens beyond their owner's share of those with the same names, and those beyond it rounded up again."""
    weight = {member.name: member.weight for member in members}
    uneven = 0
    for names in {some for some in allowed.values() if some and some != weight.keys()}:
        count = Counter(owner[token] for token, some in allowed.items() if some == names)
        for name in names:
            share = Fraction(count.total() * weight[name], sum(weight[some] for some in names))
            uneven += max(0, count[name] - math.floor(share)) + max(0, count[name] - math.ceil(share))
    return uneven


def choices(owned: Owned, members: Sequence[Member], pins: Pins) -> Iterable[tuple[dict[str, int], tuple[int, int]]]:
    """(loads, (unevenness, tokens of live owners that change hands)) for every way to obey the pins."""
    allowed = {token: names for token, names in allowed_of(owned, members, pins).items() if names}
    before = {token: name for name, tokens in owned.items() for token in tokens}
    for way in itertools.product(*map(sorted, allowed.values())):
        loads = dict.fromkeys((member.name for member in members), 0)
        for name in way:
            loads[name] += 1
        owner = dict(zip(allowed, way, strict=True))
        yield loads, (unevenness(members, owner, allowed), sum(before[token] != owner[token] for token in owner))


def cost_of(outcome: Plan, owned: Owned, members: Sequence[Member], pins: Pins) -> tuple[int, int]:
    """As :func:`choices` has it, of a plan."""
    owner = {token: name for token, name in apply(owned, outcome, members).items() if name is not None}
    to_nobody = sum(map(len, outcome.park.values()))
    return unevenness(members, owner, allowed_of(owned, members, pins)), outcome.moved - to_nobody


@settings(max_examples=150, deadline=None)
@given(equal)
@example(  # two pools that share a member, where a wrong first guess has to be mended through the other pool
    (
        {"a": [0, 1, 2], "b": [3], None: [4, 5, 6]},
        [Member("a"), Member("b"), Member("c")],
        {0: ["a", "b"], 1: ["a", "b"], 4: ["b", "c"], 5: ["b"], 6: ["b"]},
    )
)
def test_equal_weights_the_fairest_loads_pins_spread_with_the_fewest_moves(cluster) -> None:
    owned, members, pins = cluster
    outcome = plan(owned, members, pins)
    best = min((sorted(loads.values(), reverse=True), cost) for loads, cost in choices(owned, members, pins))
    assert (sorted(outcome.targets.values(), reverse=True), cost_of(outcome, owned, members, pins)) == best


def shares(members: Sequence[Member], count: int) -> dict[str, Fraction]:
    whole = sum(member.weight for member in members)
    return {member.name: Fraction(count * member.weight, whole) for member in members}


def fairest_before_rounding(members: Sequence[Member], pools: Mapping[frozenset[str], int]) -> dict[str, Fraction]:
    """By trying every set of members: the one that must carry most for its weight comes first, then the rest."""
    weight = {member.name: member.weight for member in members}
    loads: dict[str, Fraction] = {}
    while weight:
        density, _, full = max(
            (
                Fraction(
                    sum(size for names, size in pools.items() if names <= set(some)), sum(weight[m] for m in some)
                ),
                len(some),
                some,
            )
            for size in range(1, len(weight) + 1)
            for some in itertools.combinations(sorted(weight), size)
        )
        for name in full:
            loads[name] = density * weight.pop(name)
        rest: Counter[frozenset[str]] = Counter()
        for names, size in pools.items():
            if names - set(full):
                rest[names - set(full)] += size
        pools = rest
    return loads


@settings(max_examples=150, deadline=None)
@given(weighted)
def test_weights_the_largest_remainders_pins_spread_with_the_fewest_moves(cluster) -> None:
    owned, members, pins = cluster
    outcome = plan(owned, members, pins)
    pools = Counter(names for names in allowed_of(owned, members, pins).values() if names)
    share = shares(members, pools.total())

    def rounded_up(loads: Mapping[str, int]) -> Fraction | None:
        """Sum of the remainders of those that were rounded up; None if some load is no rounded share."""
        if any(abs(loads[name] - share[name]) >= 1 for name in share):
            return None
        return sum((share[name] % 1 for name in share if loads[name] > share[name]), Fraction(0))

    possible = [
        (-remainders, cost)
        for loads, cost in choices(owned, members, pins)
        if (remainders := rounded_up(loads)) is not None
    ]
    if possible:
        remainders = rounded_up(outcome.targets)
        assert remainders is not None
        assert (-remainders, cost_of(outcome, owned, members, pins)) == min(possible)
    else:
        fairest = fairest_before_rounding(members, pools)
        assert all(abs(outcome.targets[name] - fairest[name]) < 1 for name in fairest)


@given(any_cluster)
def test_a_plan_carried_out_leaves_nothing_to_do(cluster) -> None:
    owned, members, pins = cluster
    outcome = plan(owned, members, pins)
    again = plan(by_owner(apply(owned, outcome, members)), members, pins)
    assert again.moved == 0
    assert again == Plan({}, {}, {}, outcome.parked, outcome.targets)


@given(any_cluster, st.randoms(use_true_random=False))
def test_order_of_input_does_not_matter(cluster, random) -> None:
    owned, members, pins = cluster

    def shuffled(items):
        items = list(items)
        random.shuffle(items)
        return items

    other = plan(
        dict(shuffled(owned.items())),
        shuffled(members),
        {token: frozenset(shuffled(names)) for token, names in shuffled(pins.items())},
    )
    outcome = plan(owned, members, pins)
    assert other == outcome
    for part in ("assign", "move", "park", "targets"):
        assert list(getattr(other, part)) == sorted(getattr(outcome, part))


@given(
    held=st.lists(st.integers(0, 400), min_size=1, max_size=30),
    joining=st.integers(0, 10),
    leaving=st.integers(0, 10),
    parked=st.integers(0, 50),
)
def test_without_pins_moves_are_the_least_that_balance_needs(held, joining, leaving, parked) -> None:
    names = [f"n{i:02}" for i in range(len(held))]
    tokens = itertools.count()
    owned: dict[str | None, Sequence[int]] = {
        name: array("i", itertools.islice(tokens, count)) for name, count in zip(names, held, strict=True)
    }
    owned[None] = list(itertools.islice(tokens, parked))
    members = [Member(name) for name in names[leaving:]] + [Member(f"new{i}") for i in range(joining)]
    outcome = plan(owned, members)
    total = sum(held) + parked
    if not members:
        assert outcome == Plan({}, {}, {}, list(range(total)), {})
        return
    assert set(apply(owned, outcome, members)) == set(range(total))
    assert max(outcome.targets.values()) - min(outcome.targets.values()) <= 1
    # Each member above its quota must give what is too much; those that may keep one more are the ones that have it.
    low, ups = divmod(total, len(members))
    had = sorted((len(owned.get(member.name, ())) for member in members), reverse=True)
    least = sum(max(0, count - low) for count in had) - min(ups, sum(count > low for count in had))
    assert sum(map(len, outcome.move.values())) == least
    orphans = [t for name, some in owned.items() if name not in outcome.targets for t in some]
    assert sorted(itertools.chain(*outcome.assign.values())) == sorted(orphans)


@given(
    st.lists(st.integers(1, 20), min_size=1, max_size=12),
    st.integers(0, 2000),
    st.lists(st.integers(0, 11), max_size=9),
)
def test_without_pins_shares_follow_the_largest_remainder(weights, total, held) -> None:
    members = [Member(f"n{i:02}", weight) for i, weight in enumerate(weights)]
    share = shares(members, total)
    outcome = plan({None: list(range(total))}, members)
    up = total - sum(int(part) for part in share.values())
    by_remainder = sorted(share.values(), key=lambda part: part % 1, reverse=True)
    assert all(abs(outcome.targets[name] - share[name]) < 1 for name in share)
    assert sorted(share[name] % 1 for name in share if outcome.targets[name] > share[name]) == sorted(
        part % 1 for part in by_remainder[:up]
    )


@given(st.integers(1, 60), st.integers(0, 30))
def test_more_members_than_tokens(count, total) -> None:
    outcome = plan({"n00": list(range(total))}, [Member(f"n{i:02}") for i in range(count)])
    assert sum(outcome.targets.values()) == total
    assert max(outcome.targets.values()) - min(outcome.targets.values()) <= 1


@settings(max_examples=50)
@given(st.randoms(use_true_random=False), st.integers(1, 40), st.integers(0, 3000), st.integers(0, 30))
def test_many_pins_in_a_large_cluster(random, count, total, patterns) -> None:
    names = [f"n{i:02}" for i in range(count)]
    members = [Member(name) for name in random.sample(names, random.randint(1, count))]
    owned: dict[str | None, list[int]] = {}
    for token in range(total):
        owned.setdefault(random.choice([*names, None]), []).append(token)
    rules = [frozenset(random.sample(names, random.randint(0, min(5, count)))) for _ in range(patterns)]
    pins = {token: random.choice(rules) for token in range(total) if rules and random.random() < 0.2}
    outcome = plan(owned, members, pins)
    owner = apply(owned, outcome, members)
    allowed = allowed_of(owned, members, pins)
    assert all(name in allowed[token] if allowed[token] else name is None for token, name in owner.items())
    assert plan(by_owner(owner), members, pins).moved == 0
    # Nobody could be relieved: no token of a fuller member may go to one that has two fewer.
    for token, name in owner.items():
        if name is not None:
            assert all(outcome.targets[name] - outcome.targets[other] <= 1 for other in allowed[token])


def test_two_members_become_three() -> None:
    owned = {"a": list(range(5000)), "b": list(range(5000, 10_000))}
    outcome = plan(owned, [Member("c"), Member("a"), Member("b")])
    # The last tokens of each, in contiguous runs.
    assert outcome.move == {("a", "c"): list(range(3334, 5000)), ("b", "c"): list(range(8333, 10_000))}
    assert outcome.assign == outcome.park == {}
    assert outcome.targets == {"a": 3334, "b": 3333, "c": 3333}
    assert outcome.moved == 3333


def test_the_last_free_tokens_go_and_pinned_ones_among_them_stay() -> None:
    members = [Member("a"), Member("b")]
    assert plan({"a": [0, 1, 2, 3, 4, 5]}, members, {0: ["a"]}).move == {("a", "b"): [3, 4, 5]}
    assert plan({"a": [0, 1, 2, 3, 4, 5]}, members, {4: ["a"]}).move == {("a", "b"): [2, 3, 5]}


@pytest.mark.parametrize("owners", list(itertools.permutations(["a", "b", "x", "y"])))
def test_several_givers_and_takers_are_matched_by_name(owners) -> None:
    tokens = {"a": [0, 1, 2, 3, 4, 5], "b": [6, 7, 8, 9, 10, 11], "x": [12, 14], "y": [13, 15]}
    outcome = plan({name: tokens[name] for name in owners}, [Member(name) for name in "edcba"])
    assert outcome.assign == {"c": [12, 13, 14], "d": [15]}
    assert outcome.move == {("a", "d"): [4, 5], ("b", "e"): [9, 10, 11]}


def test_who_holds_more_keeps_the_odd_token() -> None:
    members = [Member("a"), Member("b"), Member("c")]
    assert plan({"a": [0, 1], "b": [2, 3, 4], "c": [5, 6]}, members).moved == 0
    assert plan({"a": [0, 1], "b": [2, 3], "c": [4, 5, 6]}, members).moved == 0


def test_tokens_of_the_dead_are_assigned_at_once() -> None:
    outcome = plan({"a": [0, 3], "dead": [1, 2], None: [4, 5]}, [Member("a"), Member("b")])
    assert outcome.move == {}
    assert outcome.assign == {"a": [1], "b": [2, 4, 5]}
    assert outcome.parked == []


def test_a_pin_without_a_live_member_parks_the_token_whoever_had_it() -> None:
    owned = {"a": [0, 1, 2], "b": [3], "dead": [4], None: [5]}
    outcome = plan(owned, [Member("a"), Member("b")], {0: ["x"], 4: [], 5: ("x", "y")})
    assert outcome.park == {"a": [0]}
    assert outcome.parked == [0, 4, 5]
    assert outcome.targets == {"a": 2, "b": 1}
    assert outcome.moved == 1


def test_pinned_tokens_count_as_load() -> None:
    outcome = plan({None: list(range(10))}, [Member("a"), Member("b")], {token: ["a"] for token in range(4)})
    assert outcome.assign == {"a": [0, 1, 2, 3, 4], "b": [5, 6, 7, 8, 9]}


def test_pinned_tokens_are_spread_over_the_members_they_may_go_to() -> None:
    members = [Member("cpu-1"), Member("cpu-2"), Member("gpu-1"), Member("gpu-2")]
    owned = {member.name: list(range(i, 1000, 4)) for i, member in enumerate(members)}
    pins = {token: ["gpu-1", "gpu-2"] for token in range(0, 320, 10)}

    def on(owned: Owned, name: str) -> int:
        return len(pins.keys() & set(owned[name]))

    placed = by_owner(apply(owned, plan(owned, members, pins), members))
    assert (on(placed, "gpu-1"), on(placed, "gpu-2")) == (16, 16)
    alone = [member for member in members if member.name != "gpu-2"]
    without = by_owner(apply(placed, plan(placed, alone, pins), alone))
    assert on(without, "gpu-1") == 32
    back = by_owner(apply(without, plan(without, members, pins), members))
    assert (on(back, "gpu-1"), on(back, "gpu-2")) == (16, 16)
    assert {name: len(tokens) for name, tokens in back.items()} == dict.fromkeys(owned, 250)


def test_pinned_tokens_are_spread_only_as_far_as_the_balance_of_all_allows() -> None:
    members = [Member("a"), Member("b"), Member("c")]
    pins = {token: ["a", "b"] if token < 6 else ["a"] for token in range(10)}
    owned = by_owner(apply({None: list(range(15))}, plan({None: list(range(15))}, members, pins), members))
    assert {name: len(pins.keys() & set(tokens)) for name, tokens in owned.items()} == {"a": 5, "b": 5, "c": 0}
    assert len(set(range(6)) & set(owned["a"])) == 1, "three would be its part, but then it would have seven"
    assert plan(owned, members, pins).moved == 0


def test_pins_that_forbid_balance_load_their_members_and_spare_them_the_rest() -> None:
    pins = {token: ["a", "b"] for token in range(6)}
    outcome = plan({None: list(range(8))}, [Member("a"), Member("b"), Member("c"), Member("d")], pins)
    assert outcome.targets == {"a": 3, "b": 3, "c": 1, "d": 1}


def test_pins_that_no_token_knows_and_names_that_no_member_has_are_ignored() -> None:
    owned = {"a": [0, 1], "b": [2, 3]}
    outcome = plan(owned, [Member("a"), Member("b")], {99: ["a"], -1: [], 2: ["b", "unknown"]})
    assert outcome == Plan({}, {}, {}, [], {"a": 2, "b": 2})


def test_no_members_nothing_to_do() -> None:
    assert plan({"dead": [1, 3], None: [0, 2]}, [], {0: ["a"]}) == Plan({}, {}, {}, [0, 1, 2, 3], {})


def test_the_caller_keeps_its_lists() -> None:
    owned = {"a": [0, 1, 2, 3], "dead": [4, 5], None: [6]}
    plan(owned, [Member("a"), Member("b")], {0: ["b"], 1: []})
    assert owned == {"a": [0, 1, 2, 3], "dead": [4, 5], None: [6]}


def test_bad_members_are_refused() -> None:
    with pytest.raises(ValueError, match="two members are named 'a'"):
        plan({}, [Member("a"), Member("b"), Member("a")])
    with pytest.raises(ValueError, match="weight=0 of member 'a' must be at least 1"):
        Member("a", 0)
