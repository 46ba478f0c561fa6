"""Handlers that are plain functions: a fixed number of threads take them from one queue.

A thread cannot be ended from outside. An attempt that is to end is told by its ``ctx.cancelled``, and a handler that
may take long looks there now and then, or calls ``ctx.check()``. One that goes on until its timeout is abandoned: the
attempt ends as such, another thread takes the place of its thread, and nothing it still does is taken. The thread stays
behind until its function returns; the worker's health says so when many do. A handler that may hang for ever belongs
into a process (``kind="process"``).
"""

from __future__ import annotations

import logging
import sys
import threading
import time
import traceback
from contextvars import copy_context
from dataclasses import replace
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Final

from jobsync_orm.logs import fields
from jobsync_orm.queue.execution import execute, failed, stopped
from jobsync_orm.wording import counted

if TYPE_CHECKING:
    from jobsync_orm.queue import JobQueue
    from jobsync_orm.queue.jobs import Ending
    from jobsync_orm.worker.attempts import Attempt, Report, Why

__all__ = ["ThreadExecutor"]

logger = logging.getLogger("jobsync_orm")


# Of threads left behind, as a multiple of the slots: with more, nothing is claimed.
MOST_ABANDONED: Final = 4


class _Slot:
    """One thread, and how many attempts have ended in its place. Its lock decides who ends an attempt: the thread, or
    whoever abandons it."""

    __slots__ = ("abandoned", "attempt", "ended", "guard", "thread")

    def __init__(self, ended: int = 0) -> None:
        self.guard = threading.Lock()
        self.attempt: Attempt | None = None
        self.ended = ended
        self.abandoned = False
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
        self._abandoned: set[_Slot] = set()
        self._stopping = False
        self._starting = threading.Lock()

    def start(self) -> None:
        """Start the threads."""
        for number, slot in enumerate(self._slots):
            self._start(number, slot)

    def _start(self, number: int, slot: _Slot) -> None:
        thread = threading.Thread(target=self._serve, args=(slot,), name=f"{self._name}-{number}"[:40], daemon=True)
        thread.start()
        slot.thread = thread

    def free(self) -> int:
        """Threads that do nothing, less the attempts that wait for one; none if too many have been left behind."""
        free = self.slots - self._submitted + sum(slot.ended - (slot.thread is None) for slot in self._slots)
        return min(0, free) if self._too_many_abandoned() else free

    def running(self) -> list[Attempt]:
        """What runs now."""
        return [attempt for slot in self._slots if (attempt := slot.attempt) is not None]

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
        """Tell the handler; at its timeout, abandon its thread and start another one."""
        attempt.context.cancelled.set(why)
        if why != "timeout":
            return
        for number, slot in enumerate(self._slots):
            with slot.guard:
                # Somebody else may have given it up between the look at this slot and the lock: its place is another's.
                if slot.attempt is not attempt or slot.abandoned:
                    continue
                slot.abandoned = True
                self._abandoned.add(slot)
                where = _stack(slot.thread)
                self._slots[number] = _Slot(slot.ended + 1)
            self.look(time.monotonic())
            job = attempt.job
            logger.warning(
                "%s: job %d (%s) goes on; it is in\n%s",
                self._name,
                job.id,
                job.type,
                where,
                extra=fields("attempt_goes_on", attempt.context.worker, job=job),
            )
            if attempt.context.cancelled.reason != "lost":
                ending = stopped(attempt.handler, job, attempt.context, attempt.ran_since(), time.monotonic())
                self._report(attempt, replace(ending, traceback=where))
            return

    def look(self, now: float) -> None:
        """Start the threads that are missing: one that was abandoned had no other yet."""
        with self._starting:  # two threads of one slot would hide each other's attempt
            for number, slot in enumerate(self._slots):
                if slot.thread is None and not self._stopping:
                    try:
                        self._start(number, slot)
                    except RuntimeError as error:  # the system has no more of them, for now
                        logger.warning("%s: %s; trying again", self._name, error, extra=fields("thread_not_started"))
                        return

    @property
    def abandoned(self) -> int:
        """How many threads have been left behind and go on."""
        return len(self._abandoned)

    def _too_many_abandoned(self) -> bool:
        return len(self._abandoned) >= MOST_ABANDONED * self.slots

    def problems(self) -> list[str]:
        """Too many threads left behind, or none to be had."""
        missing = sum(slot.thread is None for slot in self._slots)
        found = [f"{counted(missing, 'thread', 'threads')} for handlers could not be started"] if missing else []
        if not self._too_many_abandoned():
            return found
        return [
            *found,
            f"{counted(len(self._abandoned), 'thread goes', 'threads go')} on whose jobs have timed out: no more jobs "
            'are started. Give their handlers kind="process", or let them look at ctx.cancelled; end this process to '
            "get rid of them",
        ]

    def stop(self, grace_sec: float) -> None:
        """End the threads that do nothing, wait for the others, and tell those that are left."""
        self._stopping = True
        for _ in self._slots:
            self._waiting.put(None)
        until = time.monotonic() + grace_sec
        for slot in self._slots:
            if slot.thread is not None and slot.thread is not threading.current_thread():
                slot.thread.join(max(0.0, until - time.monotonic()))
        for attempt in self.running():
            attempt.context.cancelled.set("stopping")

    def is_mine(self, thread: threading.Thread) -> bool:
        """Those of the slots, and those left behind."""
        return any(slot.thread is thread for slot in (*self._slots, *list(self._abandoned)))

    def _serve(self, slot: _Slot) -> None:
        take, queue, clock = self._waiting.get, self._queue, time.monotonic
        attempt: Attempt | None = None
        going_on = True
        while going_on:
            try:
                # An error raised into this thread from outside finds what was taken in ``attempt``: between the two,
                # this kind of loop leaves no room for one.
                for attempt in iter(take, None):
                    attempt.began_at = clock()
                    slot.attempt = attempt
                    if attempt.context.cancelled.reason is not None:  # while it waited
                        ending = stopped(attempt.handler, attempt.job, attempt.context, attempt.began_at, clock())
                    else:
                        # What a handler sets in its context is nothing to the next one.
                        ending = copy_context().run(execute, queue, attempt.handler, attempt.job, attempt.context)
                    if not self._end(slot, attempt, ending):
                        break
                    attempt = None
                going_on = False
            except BaseException as error:
                # A Ctrl-C of the handler's own (real ones go to the main thread), or one that somebody has raised into
                # this thread, as some ways to limit a function's time do, and that has come too late for that function.
                if attempt is None:
                    logger.exception("%s: an error from outside", self._name, extra=fields("thread_interrupted"))
                    continue
                if attempt.began_at is None:
                    attempt.began_at = clock()
                    slot.attempt = attempt
                if slot.attempt is attempt:
                    ending = failed(attempt.handler, attempt.job, error, attempt.began_at, clock())
                    going_on = self._end(slot, attempt, ending)
                attempt = None
        self._abandoned.discard(slot)

    def _end(self, slot: _Slot, attempt: Attempt, ending: Ending) -> bool:
        """The attempt in this slot has ended; False if its thread has been abandoned meanwhile."""
        with slot.guard:
            slot.attempt = None
            slot.ended += 1
            if slot.abandoned:
                return False
        self._report(attempt, ending)
        return True


def _stack(thread: threading.Thread | None) -> str:
    """What a thread is doing, as a traceback; empty if that is not known."""
    frame = sys._current_frames().get(thread.ident or 0) if thread is not None else None
    if frame is None:
        return ""
    return "".join(["Traceback (most recent call last):\n", *traceback.format_stack(frame)])
