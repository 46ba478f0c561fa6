"""What threads of one process exclude each other from."""

from __future__ import annotations

from jobsync_orm.open_tasks import OpenTasks


def test_a_claim_excludes_claims_and_additions() -> None:
    tasks = OpenTasks()
    one, two = object(), object()
    assert tasks.open(["a", "b", "a"], one) == ["a", "b"]
    assert tasks.open(["b", "c"], two) == ["c"]
    assert tasks.add(["a", "d", "d"]) == ["d"]
    assert (tasks.holder("a"), tasks.holder("c"), tasks.holder("d")) == (one, two, None)
    assert [tasks.has(key) for key in "abcdx"] == [True, True, True, True, False]


def test_only_its_holder_closes_a_claim() -> None:
    tasks = OpenTasks()
    one, two = object(), object()
    tasks.open(["a", "b"], one)
    tasks.hand_over([("a", two)], one)
    tasks.close(["a", "b"], one)
    assert (tasks.holder("a"), tasks.has("b")) == (two, False)
    tasks.hand_over([("a", one)], one)
    assert tasks.holder("a") is two
    tasks.drop(["a", "x"])
    assert not tasks.has("a")


def test_additions_are_counted_and_exclude_claims() -> None:
    tasks = OpenTasks()
    assert tasks.add(["a"]) == tasks.add(["a"]) == ["a"]
    tasks.remove(["a"])
    assert tasks.open(["a"], object()) == []
    tasks.remove(["a"])
    assert tasks.open(["a"], object()) == ["a"]
