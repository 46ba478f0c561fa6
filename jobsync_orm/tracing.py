"""Where spans are made: around the writing of jobs and the run of a handler; and how the one finds the other.

Unlike what an :class:`~jobsync_orm.observe.Audience` is told, this is called where it happens, so that a span has the
application's own as its parent, and is the parent of what a handler does. ``queue.tracing`` is None unless somebody
asks for it (:mod:`jobsync_orm.integrations.opentelemetry` does), and costs one look at an attribute then.

What is to reach those who run a job travels in its row: the ``carrier`` of the writing is stored in the column
``trace``, and handed back with the job as ``job.trace``, at each attempt. What it means is up to who makes the spans.
Anybody who may write the table can have written it, so that it is checked like any other input.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final, Protocol

__all__ = ["LONGEST_TRACE", "UNTRACED", "Consuming", "Producing", "Tracing", "trace_column"]

# Characters of a carrier. A longer one is not stored, and one that is stored is not handed on.
LONGEST_TRACE: Final = 600


class Producing(Protocol):
    """The writing of jobs, under way."""

    @property
    def carrier(self) -> str | None:
        """What is to be stored with the jobs, for those who run them: printable ASCII; None: nothing."""

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


def trace_column(span: Producing) -> dict[str, str]:
    """The column of jobs that are written within ``span``; none if there is nothing to store, or nothing storable."""
    carrier = span.carrier
    if not carrier or len(carrier) > LONGEST_TRACE or not (carrier.isascii() and carrier.isprintable()):
        return {}
    return {"trace": carrier}


class _Untraced:
    carrier = None

    def written(self, ids: list[int]) -> None:
        """Nobody wants to know."""


UNTRACED: Final[AbstractContextManager[Producing]] = nullcontext(_Untraced())
