"""Runs jobs as soon as they are committed. See :func:`run_inline`."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from jobsync_orm.queue import JobQueue
from jobsync_orm.testing.draining import Ran, finish, work_off
from jobsync_orm.testing.place import Place

__all__ = ["run_inline"]


@contextmanager
def run_inline(queue: JobQueue, *, check: bool = True) -> Iterator[list[Ran]]:
    """Within this block each job runs in the thread that enqueues it, as soon as its transaction is committed.

    That is within ``session.commit()``, or within :meth:`~jobsync_orm.JobQueue.submit`, with follow-up jobs and jobs of
    a key in order, as :func:`~jobsync_orm.testing.drain` does. What was enqueued on a Connection runs when the block
    ends, and so does whatever else is ready then; jobs for later do not run. Nothing is sent to workers, but if there
    are some on the same database, they may be faster.

    Parameters
    ----------
    queue : JobQueue
        Whose jobs.
    check : bool
        Raise at the end of the block if a job is left FAILED, but not by :class:`~jobsync_orm.Discard`, or RETRYING. It
        cannot be raised where the job runs: that would leave the session in the middle of its commit.

    Yields
    ------
    list of Ran
        The attempts that have been run so far.

    Raises
    ------
    HandlerFailed
        See ``check``.
    """
    runs: list[Ran] = []
    inline = _Inline(queue, runs)
    instead = queue.__dict__.get("_waker")
    wakes, queue.wakes = queue.wakes, True
    queue.__dict__["_waker"] = inline
    try:
        yield runs
        inline.wake(())
    finally:
        queue.wakes = wakes
        if instead is None:
            del queue.__dict__["_waker"]
        else:
            queue.__dict__["_waker"] = instead
    if inline.error is not None:
        raise inline.error
    if check:
        finish(runs)


class _Inline:
    """What is told of commits in place of the thread that wakes the workers."""

    def __init__(self, queue: JobQueue, runs: list[Ran]) -> None:
        self._queue = queue
        self._runs = runs
        self._place = Place(queue)
        self._here = threading.local()
        self.error: Exception | None = None

    def prepare(self) -> None:
        """Nothing has to be prepared."""

    def wake(self, lanes: Iterable[Any], blocked: Iterable[int] = ()) -> None:
        """Jobs have been committed."""
        if getattr(self._here, "busy", False):  # by a job that runs: it is followed by what it has enqueued
            return
        self._here.busy = True
        try:
            work_off(self._queue, self._place, self._runs)
        except Exception as error:  # noqa: BLE001  # raised when the block ends, not in the middle of a commit
            self.error = self.error or error
        finally:
            self._here.busy = False

    def wake_after(self, transaction: object, lanes: Iterable[Any], blocked: Iterable[int] = ()) -> None:
        """A Connection is about to commit: too early to run anything."""

    def close(self, seconds: float = 0) -> None:
        """There is no thread to end."""
