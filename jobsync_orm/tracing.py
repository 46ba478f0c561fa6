"""Where spans are made: around the writing of jobs and the run of a handler.

Unlike what an :class:`~jobsync_orm.observe.Audience` is told, this is called where it happens, so that a span has the
application's own as its parent, and is the parent of what a handler does. ``queue.tracing`` is None unless somebody
asks for it (:mod:`jobsync_orm.integrations.opentelemetry` does), and costs one look at an attribute then.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Protocol

__all__ = ["Consuming", "Producing", "Tracing"]


class Producing(Protocol):
    """The writing of jobs, under way."""

    @property
    def carrier(self) -> str | None:
        """What is to be stored with the jobs, for those who run them; None: nothing."""

    def written(self, ids: list[int]) -> None:
        """These are the jobs."""


class Consuming(Protocol):
    """A handler that runs."""

    def ended(self, outcome: str, error: str | None) -> None:
        """The attempt has ended; ``error`` is ``Type: message``."""


class Tracing(Protocol):
    """Makes spans. Must not raise, and must not wait."""

    def enqueuing(self, type: str, many: int) -> AbstractContextManager[Producing]:
        """Jobs are being written."""

    def running(self, job: Any, node: str) -> AbstractContextManager[Consuming]:
        """A handler runs for ``job``, a ClaimedJob, on ``node``."""
