"""From what is stored to the steps of a plan."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobsync_orm.coordinator import steps as steps_module
from jobsync_orm.coordinator.statements import PARK
from jobsync_orm.coordinator.steps import FORCE, GRANT, MARK, UNMARK, Group, Step, batches_of, runs_of, steps_of
from jobsync_orm.planner import Member

A, B, C = Member("a"), Member("b"), Member("c")


def flat(steps: list[Step]) -> dict[int, tuple[int, str | None]]:
    """Token -> (kind, target)."""
    found: dict[int, tuple[int, str | None]] = {}
    for step in steps:
        for token in step.tokens:
            assert token not in found, "one step for each token"
            found[token] = (step.kind, step.target)
    return found


def test_tokens_without_live_owner_are_granted_at_once() -> None:
    groups = [Group(None, None, False, [0, 1]), Group("dead", None, False, [2]), Group("dead", "a", False, [3])]
    assert flat(steps_of(groups, [A], [], {})) == dict.fromkeys(range(4), (GRANT, "a"))


def test_tokens_between_live_nodes_are_only_marked() -> None:
    steps = flat(steps_of([Group("a", None, False, [0, 1, 2, 3])], [A, B], [], {}))
    assert list(steps.values()) == [(MARK, "b")] * 2


def test_a_hand_off_under_way_is_not_started_anew() -> None:
    groups = [Group("a", None, False, [0, 1]), Group("a", "b", False, [2, 3])]
    assert steps_of(groups, [A, B], [], {}) == []


def test_an_overdue_hand_off_is_forced() -> None:
    groups = [Group("a", None, False, [0, 1]), Group("a", "b", True, [2, 3])]
    assert flat(steps_of(groups, [A, B], [], {})) == {2: (FORCE, "b"), 3: (FORCE, "b")}


def test_mark_towards_a_dead_node_is_withdrawn_or_redirected() -> None:
    groups = [Group("a", None, False, [0, 1]), Group("a", "dead", False, [2, 3])]
    assert flat(steps_of(groups, [A], [], {})) == {2: (UNMARK, None), 3: (UNMARK, None)}
    steps = flat(steps_of(groups, [A, B], [], {}))
    assert sorted(kind for kind, _ in steps.values() if kind == MARK) == [MARK, MARK]
    assert all(steps[token] in ((UNMARK, None), (MARK, "b")) for token in (2, 3))


def test_a_token_that_turns_back_to_its_owner_is_unmarked() -> None:
    groups = [Group("a", "b", False, [0, 1]), Group("b", None, False, [2])]
    steps = steps_of(groups, [A, B], [], {0: ("a",), 1: ("a",)})
    assert flat(steps) == {0: (UNMARK, None), 1: (UNMARK, None)}


def test_pinned_to_nobody_is_parked_in_two_phases() -> None:
    pins = {1: ()}
    assert flat(steps_of([Group("a", None, False, [0, 1])], [A], [], pins)) == {1: (MARK, PARK)}
    marked = [Group("a", None, False, [0]), Group("a", PARK, False, [1])]
    assert steps_of(marked, [A], [], pins) == []
    overdue = [Group("a", None, False, [0]), Group("a", PARK, True, [1])]
    assert flat(steps_of(overdue, [A], [], pins)) == {1: (FORCE, None)}
    assert flat(steps_of(marked, [A], [], {})) == {1: (UNMARK, None)}, "the pin is gone"
    parked = [Group("a", None, False, [0]), Group(None, None, False, [1])]
    assert steps_of(parked, [A], [], pins) == []


def test_pinned_to_nobody_under_a_dead_name_loses_the_name() -> None:
    groups = [Group("a", None, False, [0]), Group("dead", None, False, [1])]
    assert flat(steps_of(groups, [A], [], {1: ()})) == {1: (GRANT, None)}


def test_tokens_of_a_resting_node_rest() -> None:
    groups = [Group("a", None, False, [0, 1]), Group("b", None, False, [2, 3]), Group("r", None, False, [4, 5, 6, 7])]
    assert steps_of(groups, [A, B], ["r"], {}) == []


def test_a_drained_node_is_asked_for_its_tokens() -> None:
    groups = [Group("d", None, False, [0, 1]), Group("a", None, False, [2, 3])]
    assert flat(steps_of(groups, [A, B], [], {}, ["d"])) == {0: (MARK, "b"), 1: (MARK, "b")}
    under_way = [Group("d", "b", False, [0, 1]), Group("a", None, False, [2, 3])]
    assert steps_of(under_way, [A, B], [], {}, ["d"]) == []
    overdue = [Group("d", "b", True, [0, 1]), Group("a", None, False, [2, 3])]
    assert flat(steps_of(overdue, [A, B], [], {}, ["d"])) == {0: (FORCE, "b"), 1: (FORCE, "b")}


def test_what_is_on_its_way_to_a_drained_node_stays() -> None:
    groups = [Group("a", "d", False, [0, 1])]
    assert flat(steps_of(groups, [A], [], {}, ["d"])) == {0: (UNMARK, None), 1: (UNMARK, None)}


def test_a_drained_node_parks_what_nobody_may_have() -> None:
    assert flat(steps_of([Group("d", None, False, [0])], [], [], {}, ["d"])) == {0: (MARK, PARK)}
    assert steps_of([Group("d", PARK, False, [0])], [], [], {}, ["d"]) == []
    assert flat(steps_of([Group("d", PARK, True, [0])], [], [], {}, ["d"])) == {0: (FORCE, None)}
    assert flat(steps_of([Group("d", PARK, False, [0])], [A], [], {}, ["d"])) == {0: (MARK, "a")}
    pinned = flat(steps_of([Group("d", None, False, [0, 1])], [A], [], {1: ()}, ["d"]))
    assert pinned == {0: (MARK, "a"), 1: (MARK, PARK)}


def test_a_drained_node_that_is_undrained_keeps_what_it_still_has() -> None:
    steps = flat(steps_of([Group("d", "a", False, [0, 1])], [A, Member("d")], [], {}))
    assert list(steps.values()) == [(UNMARK, None)]


def test_nobody_to_give_to() -> None:
    assert steps_of([Group(None, None, False, [0, 1])], [], [], {}) == []


@given(
    st.lists(
        st.tuples(
            st.sampled_from([None, "a", "b", "dead", "drained"]),
            st.sampled_from([None, "a", "b", "c", "dead", "drained", PARK]),
            st.booleans(),
        ),
        min_size=1,
        max_size=30,
    ),
    st.dictionaries(st.integers(0, 29), st.sets(st.sampled_from(["a", "b", "c"]))),
)
def test_carried_out_the_steps_lead_to_a_state_that_needs_none(
    tokens: list[tuple[str | None, str | None, bool]], allowed: dict[int, set[str]]
) -> None:
    state = {
        number: (node, None if node is None or mark == node else mark, late and mark not in (None, node))
        for number, (node, mark, late) in enumerate(tokens)
    }
    pins = {token: tuple(sorted(names)) for token, names in allowed.items() if token in state}

    def groups() -> list[Group]:
        by: dict[tuple[str | None, str | None, bool], list[int]] = {}
        for token, key in sorted(state.items()):
            by.setdefault(key, []).append(token)
        return [Group(*key, tokens) for key, tokens in by.items()]

    for _ in range(3):
        steps = steps_of(groups(), [A, B, C], [], pins, ["drained"])
        flat(steps)
        for step in steps:
            for token in step.tokens:
                node, mark, _ = state[token]
                assert (node, mark) == (step.source, step.marked)
                if step.kind in (GRANT, FORCE):
                    assert (node in ("a", "b", "drained")) == (step.kind == FORCE)
                    assert step.kind == GRANT or state[token][2], "a live owner lets go itself unless overdue"
                    state[token] = (step.target, None, False)
                elif step.kind == MARK:
                    state[token] = (node, step.target, False)
                else:
                    state[token] = (node, None, False)
        for token, (node, mark, _) in state.items():  # every owner releases what it is asked for
            if node in ("a", "b", "c", "drained") and mark is not None:
                state[token] = (mark or None, None, False)
    assert steps_of(groups(), [A, B, C], [], pins, ["drained"]) == []
    owners = {token: node for token, (node, _, _) in state.items()}
    for token, node in owners.items():
        assert node != "drained"
        assert node in (pins[token] or [None]) if token in pins else node is not None


@given(st.sets(st.integers(0, 60)))
def test_runs_are_the_same_tokens(tokens: set[int]) -> None:
    ranges = runs_of(sorted(tokens))
    assert {token for low, high in ranges for token in range(low, high + 1)} == tokens
    assert all(b > a + 1 for (_, a), (b, _) in itertools.pairwise(ranges))


def test_batches_are_the_same_steps_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps_module, "BATCH_TOKENS", 10)
    steps = [Step(range(25), "a", None, MARK, "b"), Step(range(25, 29), "a", None, MARK, "c")]
    batches = batches_of(steps)
    assert [sum(len(step.tokens) for step in batch) for batch in batches] == [10, 10, 9]
    assert [token for batch in batches for step in batch for token in step.tokens] == list(range(29))
    assert flat([step for batch in batches for step in batch]) == flat(steps)
    assert batches_of([]) == []


def test_tokens_marked_for_their_own_owner_are_left_to_it() -> None:
    """Since the cluster was formed anew; the owner takes them up by itself."""
    groups = [Group("a", "a", False, [0, 1]), Group("b", "b", False, [2, 3])]
    assert steps_of(groups, [Member("a", 1), Member("b", 1)], [], {}) == []


def test_tokens_marked_for_their_own_owner_can_be_marked_for_another() -> None:
    steps = steps_of([Group("a", "a", False, [0, 1])], [Member("a", 1), Member("b", 1)], [], {})
    assert [(step.source, step.marked, step.kind, step.target) for step in steps] == [("a", "a", MARK, "b")]


def test_tokens_marked_for_their_own_owner_that_is_gone_are_given_away_at_once() -> None:
    steps = steps_of([Group("a", "a", False, [0, 1])], [Member("b", 1)], [], {})
    assert [(step.source, step.marked, step.kind, step.target) for step in steps] == [("a", "a", GRANT, "b")]
