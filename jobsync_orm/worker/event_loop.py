"""Handlers that are coroutine functions: tasks of one event loop, in a thread of its own.

An attempt that has to end is cancelled, as any task is. One that goes on all the same is abandoned: after a few seconds
its end is written as if it had given way, its place is free for the next one, and nothing it still does is taken.

The worker's claiming and its heartbeats run in other threads: a handler that blocks the loop (``time.sleep``, or a
database call that is not async) holds up the other coroutine handlers of this worker and nothing else. While it does,
no more of their jobs are claimed, a warning names the job, and the worker's health says so. Make such a handler a plain
function, or let it call ``await asyncio.to_thread(...)``.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any, Final

from jobsync_orm.logs import fields
from jobsync_orm.queue.execution import execute_async, failed, stopped

if TYPE_CHECKING:
    from jobsync_orm.queue import JobQueue
    from jobsync_orm.queue.jobs import Ending
    from jobsync_orm.worker.attempts import Attempt, Report, Why

__all__ = ["EventLoopExecutor"]

logger = logging.getLogger("jobsync_orm")

# Seconds a cancelled task has for what it does in ``finally``.
GIVE_WAY_SEC: Final = 5.0
# Seconds within which tasks have to end when the loop does.
CLOSE_SEC: Final = 1.0
# The loop says that often that it runs, in seconds, and counts as blocked when it has not for that long.
BEAT_SEC: Final = 0.25
BLOCKED_SEC: Final = 1.0
# Of what is abandoned, as a multiple of the slots: with more, nothing is claimed.
MOST_ABANDONED: Final = 4


class EventLoopExecutor:
    """See :class:`~jobsync_orm.worker.attempts.Executor`. Every call may come from any thread.

    Parameters
    ----------
    queue : JobQueue
        Whose jobs these are.
    slots : int
        How many tasks run at once.
    report : callable
        What is told of each attempt that has ended.
    name : str
        Of the thread.
    """

    def __init__(self, queue: JobQueue, slots: int, report: Report, name: str = "jobsync-loop") -> None:
        self.slots = slots
        self._queue = queue
        self._report = report
        self._name = name
        self._guard = threading.Lock()
        self._waiting: deque[Attempt] = deque()
        self._open: dict[Attempt, float | None] = {}  # submitted and not ended -> when it is to be abandoned
        self._abandoned: set[Attempt] = set()
        self._tasks: dict[Attempt, asyncio.Task[Ending]] = {}  # of the loop's thread
        self._called = False
        self._beat_at = 0.0
        self._warned = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._ending = False

    def start(self) -> None:
        """Start the loop."""
        loop = asyncio.new_event_loop()
        self._ending = False
        self._loop, self._beat_at = loop, time.monotonic()
        self._thread = threading.Thread(target=self._serve, args=(loop,), name=self._name[:40], daemon=True)
        self._thread.start()

    def free(self) -> int:
        """Slots that are not taken; none while the loop is blocked, or when too many tasks have been abandoned."""
        with self._guard:
            free = self.slots - len(self._open)
            stuck = len(self._abandoned) >= MOST_ABANDONED * self.slots
        return min(0, free) if stuck or self.lag(time.monotonic()) > BLOCKED_SEC else free

    def lag(self, now: float) -> float:
        """Seconds by which the loop is behind."""
        return 0.0 if self._loop is None else max(0.0, now - self._beat_at - BEAT_SEC)

    def running(self) -> list[Attempt]:
        """What runs now."""
        with self._guard:
            return [attempt for attempt in self._open if attempt.began_at is not None]

    def submit(self, attempt: Attempt) -> None:
        """Run it as a task as soon as there is a slot."""
        with self._guard:
            self._open[attempt] = None
            self._waiting.append(attempt)
            if self._called:
                return
            self._called = True
        self._call(self._take)

    def withdraw(self) -> list[Attempt]:
        """What is no task yet."""
        with self._guard:
            taken = list(self._waiting)
            self._waiting.clear()
            for attempt in taken:
                del self._open[attempt]
            return taken

    def give_up(self, attempt: Attempt, why: Why) -> None:
        """Cancel its task; abandon it if it goes on."""
        attempt.context.cancelled.set(why)
        with self._guard:
            if attempt not in self._open:  # it has ended just now
                return
            waits = attempt in self._waiting
            if waits:
                self._waiting.remove(attempt)
                del self._open[attempt]
            elif self._open[attempt] is None:
                self._open[attempt] = time.monotonic() + GIVE_WAY_SEC
        if waits:
            self._report_stopped(attempt)
        else:
            self._call(self._cancel, attempt)

    def look(self, now: float) -> None:
        """Abandon what has not given way, and see whether the loop is blocked; called now and then."""
        with self._guard:
            late = [attempt for attempt, until in self._open.items() if until is not None and until <= now]
        self._abandon(late)
        if self.lag(now) <= BLOCKED_SEC:
            self._warned = False
        elif not self._warned:
            self._warned = True
            logger.warning(
                "%s: the event loop of the coroutine handlers has been blocked for %.1f s by %s; "
                "use await asyncio.to_thread(...), or make it a plain function",
                self._name,
                self.lag(now),
                self._blocked_by(),
                extra=fields("event_loop_blocked"),
            )

    def problems(self) -> list[str]:
        """What is wrong, for the worker's health."""
        found = []
        lag = self.lag(time.monotonic())
        if lag > BLOCKED_SEC:
            found.append(f"the event loop has been blocked for {lag:.1f} s by {self._blocked_by()}")
        abandoned = len(self._abandoned)
        if abandoned >= MOST_ABANDONED * self.slots:
            found.append(f"{abandoned} coroutine handlers go on although they were cancelled: no more are started")
        return found

    def is_mine(self, thread: threading.Thread) -> bool:
        """The loop's."""
        return thread is self._thread

    @property
    def abandoned(self) -> int:
        """How many tasks go on although they were cancelled."""
        return len(self._abandoned)

    def stop(self, grace_sec: float) -> None:
        """Wait ``grace_sec`` for what runs, cancel the rest, and end the loop. What was cancelled is released."""
        thread, loop = self._thread, self._loop
        if thread is None or loop is None:
            return
        self._until_none_open(grace_sec)
        for attempt in list(self._open):
            self.give_up(attempt, "stopping")
        self._until_none_open(CLOSE_SEC)
        self._abandon(list(self._open))
        self._ending = True
        self._call(loop.stop)
        if thread is not threading.current_thread():
            thread.join(CLOSE_SEC)
        self._thread = self._loop = None

    def _until_none_open(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while self._open and time.monotonic() < until:
            time.sleep(0.01)

    def _abandon(self, attempts: list[Attempt]) -> None:
        for attempt in attempts:
            with self._guard:
                if attempt not in self._open:
                    continue
                del self._open[attempt]
                self._abandoned.add(attempt)
            job = attempt.job
            logger.warning(
                "%s: job %d (%s) goes on although it was cancelled",
                self._name,
                job.id,
                job.type,
                extra=fields("attempt_goes_on", attempt.context.worker, job=job),
            )
            self._report_stopped(attempt)
        if attempts:
            self._call(self._take)

    def _report_stopped(self, attempt: Attempt) -> None:
        if attempt.context.cancelled.reason != "lost":
            now = time.monotonic()
            self._report(attempt, stopped(attempt.handler, attempt.job, attempt.context, attempt.ran_since(), now))

    def _blocked_by(self) -> str:
        task = asyncio.current_task(self._loop) if self._loop is not None else None
        return task.get_name() if task is not None else "a callback"

    def _call(self, function: Any, *args: Any) -> None:
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(function, *args)

    # -- in the loop's thread -------------------------------------------------------------------------------------

    def _serve(self, loop: asyncio.AbstractEventLoop) -> None:
        asyncio.set_event_loop(loop)
        loop.call_soon(self._beat, loop)
        try:
            while not self._ending:
                self._run_loop(loop)
        finally:
            self._close(loop)

    def _run_loop(self, loop: asyncio.AbstractEventLoop) -> None:
        try:
            loop.run_forever()
        except BaseException:
            # SystemExit or KeyboardInterrupt, of a task or a callback that a handler has left in the loop.
            logger.exception(
                "%s: the event loop was left; the other handlers go on", self._name, extra=fields("event_loop_left")
            )
        else:
            if not self._ending:
                logger.warning(
                    "%s: a handler has stopped the event loop, which goes on",
                    self._name,
                    extra=fields("event_loop_left"),
                )

    def _beat(self, loop: asyncio.AbstractEventLoop) -> None:
        self._beat_at = time.monotonic()
        loop.call_later(BEAT_SEC, self._beat, loop)

    def _take(self) -> None:
        loop = asyncio.get_running_loop()
        with self._guard:
            self._called = False
            taken: list[Attempt] = []
            while self._waiting and len(self._tasks) - len(self._abandoned) + len(taken) < self.slots:
                attempt = self._waiting.popleft()
                attempt.began_at = time.monotonic()
                taken.append(attempt)
        for attempt in taken:
            task = loop.create_task(self._run(attempt), name=f"job {attempt.job.id} ({attempt.job.type})")
            self._tasks[attempt] = task
            task.add_done_callback(lambda task, attempt=attempt: self._done(attempt, task))  # type: ignore[misc]

    async def _run(self, attempt: Attempt) -> Ending:
        try:
            return await execute_async(self._queue, attempt.handler, attempt.job, attempt.context)
        except KeyboardInterrupt as error:  # raised by the handler: it would end the loop
            return failed(attempt.handler, attempt.job, error, attempt.ran_since(), time.monotonic())

    def _done(self, attempt: Attempt, task: asyncio.Task[Ending]) -> None:
        del self._tasks[attempt]
        with self._guard:
            self._abandoned.discard(attempt)
            mine = attempt in self._open
            self._open.pop(attempt, None)
            more = bool(self._waiting)
        if more:
            self._take()
        if not mine:
            return
        if task.cancelled():
            if attempt.context.cancelled:
                self._report_stopped(attempt)
                return
            ending = self._failed(attempt, asyncio.CancelledError("the handler cancelled its own task"))
        elif (error := task.exception()) is not None:
            ending = self._failed(attempt, error)
        else:
            ending = task.result()
        self._report(attempt, ending)

    def _failed(self, attempt: Attempt, error: BaseException) -> Ending:
        return failed(attempt.handler, attempt.job, error, attempt.ran_since(), time.monotonic())

    def _cancel(self, attempt: Attempt) -> None:
        task = self._tasks.get(attempt)
        if task is not None:
            task.cancel()

    def _close(self, loop: asyncio.AbstractEventLoop) -> None:
        """End the loop with all that still runs in it, the handlers' own tasks too."""
        left = asyncio.all_tasks(loop)
        for task in left:
            task.cancel()

        async def wait_for_tasks() -> None:
            if left:
                await asyncio.wait(left, timeout=CLOSE_SEC)

        for last in (wait_for_tasks, self._queue.dispose_async, loop.shutdown_asyncgens):
            try:
                loop.run_until_complete(asyncio.wait_for(last(), 2 * CLOSE_SEC))
            except BaseException as error:  # noqa: BLE001  # of a driver, or of what the application left in the loop
                logger.warning(
                    "%s: the event loop did not end well: %r", self._name, error, extra=fields("event_loop_left")
                )
        for task in left:
            if not task.done():
                # It has been said already that it goes on.
                task._log_destroy_pending = False  # type: ignore[attr-defined]
        self._tasks.clear()
        # Not shutdown_default_executor, which waits for its threads however long they take.
        loop.close()
