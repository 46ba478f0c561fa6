"""Handlers that are plain functions: a fixed number of threads take them from one queue."""

from __future__ import annotations

import threading
import time
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

from jobsync_orm.queue.execution import execute, failed

if TYPE_CHECKING:
    from jobsync_orm.queue import JobQueue
    from jobsync_orm.worker.attempts import Attempt, Report, Why

__all__ = ["ThreadExecutor"]


class _Slot:
    """One thread, and how many attempts it has ended. Each has one writer, so that no lock is needed to count."""

    __slots__ = ("attempt", "ended", "thread")

    def __init__(self) -> None:
        self.attempt: Attempt | None = None
        self.ended = 0
        self.thread: threading.Thread | None = None


class ThreadExecutor:
    """See :class:`~jobsync_orm.worker.attempts.Executor`.

    Parameters
    ----------
    queue : JobQueue
        Whose jobs these are.
    slots : int
        Number of threads.
    report : callable
        What is told of each attempt that has ended.
    name : str
        Beginning of the threads' names.
    """

    def __init__(self, queue: JobQueue, slots: int, report: Report, name: str = "jobsync-worker") -> None:
        self.slots = slots
        self._queue = queue
        self._report = report
        self._name = name
        self._waiting: SimpleQueue[Attempt | None] = SimpleQueue()
        self._submitted = 0
        self._slots = [_Slot() for _ in range(slots)]

    def start(self) -> None:
        """Start the threads."""
        for number, slot in enumerate(self._slots):
            slot.thread = threading.Thread(
                target=self._serve, args=(slot,), name=f"{self._name}-{number}"[:40], daemon=True
            )
            slot.thread.start()

    def free(self) -> int:
        """Threads that do nothing, less the attempts that wait for one."""
        return self.slots - self._submitted + sum(slot.ended for slot in self._slots)

    def submit(self, attempt: Attempt) -> None:
        """Hand it to the next thread that is free."""
        self._submitted += 1
        self._waiting.put(attempt)

    def withdraw(self) -> list[Attempt]:
        """What waits for a thread: whoever takes it from the queue has it."""
        taken: list[Attempt] = []
        try:
            while True:
                attempt = self._waiting.get_nowait()
                if attempt is not None:
                    taken.append(attempt)
        except Empty:
            self._submitted -= len(taken)
            return taken

    def give_up(self, attempt: Attempt, why: Why) -> None:
        """Tell the handler. A thread cannot be ended from outside."""
        attempt.context.cancelled.set(why)

    def stop(self, grace_sec: float) -> None:
        """End the threads that do nothing; wait for the others."""
        for _ in self._slots:
            self._waiting.put(None)
        until = time.monotonic() + grace_sec
        for slot in self._slots:
            if slot.thread is not None:
                slot.thread.join(max(0.0, until - time.monotonic()))

    def _serve(self, slot: _Slot) -> None:
        take, queue, report, clock = self._waiting.get, self._queue, self._report, time.monotonic
        while (attempt := take()) is not None:
            attempt.began_at = clock()
            slot.attempt = attempt
            try:
                ending = execute(queue, attempt.handler, attempt.job, attempt.context)
            except BaseException as error:  # noqa: BLE001  # a Ctrl-C of the handler's own: only the main thread gets real ones
                ending = failed(attempt.handler, attempt.job, error, attempt.began_at, clock())
            slot.attempt = None
            slot.ended += 1
            report(attempt, ending)
