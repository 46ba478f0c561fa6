"""Tasks: what is claimed, checkpointed and put down in the audit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import total_ordering
from typing import Any

from jobsync_orm.hashing import task_key

__all__ = ["Task", "task_ids"]


@total_ordering
class Task:
    """A unit of work, compared, ordered and hashed by its id alone.

    Parameters
    ----------
    id : int, str, uuid.UUID or another type of stable text
        What is hashed to a token. 1 and "1" have the same text and are one task.
    name : str, optional
        For people.

    Raises
    ------
    UnstableTaskId
        The text of ``id`` would differ from process to process.
    InvalidTaskId
        The text of ``id`` cannot be stored.
    """

    __slots__ = ("id", "name")

    def __init__(self, id: Any, name: str | None = None) -> None:
        task_key(id)
        self.id = id
        self.name = name

    def __repr__(self) -> str:
        return f"id:{self.id},name:{self.name}"

    def __hash__(self) -> int:
        return hash(self.id)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Task):
            return NotImplemented
        return bool(self.id == other.id)

    def __lt__(self, other: object) -> bool:
        if not isinstance(other, Task):
            return NotImplemented
        return bool(self.id < other.id)


def task_ids(tasks: object) -> list[object]:
    """The ids of one task, or of an iterable of them. Text, bytes and mappings are never taken apart."""
    if isinstance(tasks, Task):
        return [tasks.id]
    if isinstance(tasks, Iterable) and not isinstance(tasks, str | bytes | bytearray | memoryview | Mapping):
        return [task.id if isinstance(task, Task) else task for task in tasks]
    return [tasks]
