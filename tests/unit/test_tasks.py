"""Task: identity, order, and which ids it takes."""

from __future__ import annotations

import uuid

import pytest

from jobsync_orm import InvalidTaskId, Task, UnstableTaskId
from jobsync_orm.tasks import task_ids


def test_compared_ordered_and_hashed_by_id() -> None:
    assert Task(1, "a") == Task(1, "b")
    assert Task(1) != Task(2)
    assert Task(1) != 1
    assert sorted([Task(3), Task(1), Task(2)]) == [Task(1), Task(2), Task(3)]
    assert {Task(1), Task(1)} == {Task(1)}
    assert repr(Task(1, "a")) == "id:1,name:a"


@pytest.mark.parametrize("id", [1.5, b"x", (1, 2), [1], {"a": 1}, frozenset("a"), object()])
def test_ids_of_unstable_text_are_refused(id: object) -> None:
    with pytest.raises(UnstableTaskId):
        Task(id)


@pytest.mark.parametrize("id", ["a\0b", "\ud800"])
def test_ids_that_cannot_be_stored_are_refused(id: str) -> None:
    with pytest.raises(InvalidTaskId):
        Task(id)


def test_one_task_or_many() -> None:
    id = uuid.UUID(int=7)
    assert task_ids(Task(id)) == [id]
    assert task_ids("abc") == ["abc"]
    assert task_ids(b"abc") == [b"abc"]
    assert task_ids({"a": 1}) == [{"a": 1}]
    assert task_ids([1, Task(2), "3"]) == [1, 2, "3"]
    assert task_ids(Task(n) for n in range(3)) == [0, 1, 2]
