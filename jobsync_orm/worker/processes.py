"""Handlers of kind ``"process"``: each slot is a child process, which runs one attempt at a time.

Children are started when there is work for them, and kept. What an attempt that has to end does makes no difference:
its process is killed, with all it has started, and the next attempt gets a new one. One that ends by itself, by a
fault, ``os._exit`` or for want of memory, is a failure of the attempt it ran. See
:mod:`jobsync_orm.worker.child` for what a child can do.

One thread starts the children, gives them their jobs and hears from all of them.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import multiprocessing
import os
import signal
import threading
import time
from collections import deque
from multiprocessing import resource_tracker
from multiprocessing.connection import wait
from typing import TYPE_CHECKING, Any, Final

from jobsync_orm.coordinator.waker import Waker
from jobsync_orm.exceptions import InvalidJob, ProcessDied
from jobsync_orm.logs import fields
from jobsync_orm.queue.execution import failed, stopped
from jobsync_orm.queue.jobs import Ending
from jobsync_orm.worker.child import SIGNALS, Recipe, serve

if TYPE_CHECKING:
    from collections.abc import Mapping
    from multiprocessing.connection import Connection
    from multiprocessing.context import SpawnProcess

    from jobsync_orm.queue import Handler, JobQueue
    from jobsync_orm.worker.attempts import Attempt, Report, Why

__all__ = ["ProcessExecutor"]

logger = logging.getLogger("jobsync_orm")

# Seconds within which a child must have imported what it needs, and within which one that was asked to must have ended.
START_LIMIT_SEC: Final = 120.0
END_LIMIT_SEC: Final = 1.0
# Seconds for which a job waits here for a child that starts. Another worker takes it 30 s after its timeout.
PATIENCE_SEC: Final = 15.0
# A child that has left somebody behind who holds its descriptors ends without a sign: it is looked for this often.
LOOK_SEC: Final = 1.0

_spawn = multiprocessing.get_context("spawn")


class _Child:
    """One child process. What it does is written by the executor's own thread, and by ``give_up``, under its lock."""

    __slots__ = ("attempt", "connection", "leaving", "process", "ready", "started_at")

    def __init__(self) -> None:
        self.connection: Connection
        self.connection, theirs = _spawn.Pipe()
        self.process: SpawnProcess = _spawn.Process(target=serve, args=(theirs,), name="jobsync-child")
        self.attempt: Attempt | None = None
        self.ready = self.leaving = False
        self.started_at = time.monotonic()
        try:
            self.process.start()
        except BaseException:
            self.connection.close()
            raise
        finally:
            theirs.close()

    @property
    def idle(self) -> bool:
        return self.ready and self.attempt is None and not self.leaving

    def kill(self) -> None:
        """End it and what it has started, now."""
        self.leaving = True
        self.kill_group()
        self.process.kill()  # one so young that it leads no group yet

    def kill_group(self) -> None:
        """End it, if it still lives, and what it has started."""
        pid = self.process.pid
        if pid is None:
            return
        try:
            if hasattr(os, "waitid"):
                os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            os.killpg(pid, signal.SIGKILL)
        except (ChildProcessError, ProcessLookupError, PermissionError):
            return  # it has been reaped, so its number may be another's; or there is no such group

    def why(self) -> str:
        """How it ended by itself."""
        code = self.process.exitcode
        if code is None:
            return "is gone"
        if code >= 0:
            return f"ended with exit code {code}"
        try:
            name = signal.Signals(-code).name
        except ValueError:
            name = f"signal {-code}"
        return f"was ended by {name}" + (" (out of memory?)" if -code == signal.SIGKILL else "")


class ProcessExecutor:
    """See :class:`~jobsync_orm.worker.attempts.Executor`. Every call may come from any thread.

    Parameters
    ----------
    queue : JobQueue
        Whose jobs these are.
    slots : int
        How many child processes at most.
    report : callable
        What is told of each attempt that has ended.
    worker : str
        Name of the worker, for the handlers to see.
    handlers : mapping
        Type -> handler; those of kind ``"process"`` are run.
    """

    def __init__(
        self, queue: JobQueue, slots: int, report: Report, worker: str, handlers: Mapping[str, Handler]
    ) -> None:
        self.slots = slots
        self._queue = queue
        self._report = report
        self._worker = worker
        self._handlers = handlers
        self._guard = threading.Lock()
        self._waiting: deque[Attempt] = deque()
        self._children: list[_Child] = []  # those that may run something
        self._coming = 0  # those that are just being made
        self._leaving: list[_Child] = []  # those that are to end
        self._recipe: Recipe | None = None
        self._waker: Waker | None = None
        self._thread: threading.Thread | None = None
        self._stopping = False
        self._pid = os.getpid()

    def start(self) -> None:
        """Get ready; the children are started when there is something to do.

        Raises
        ------
        InvalidJob
            A child could not import one of the handlers.
        """
        self._recipe = Recipe.of(self._queue, self._handlers, self._worker)
        self._stopping = False
        self._pid = os.getpid()
        self._waker = Waker()
        self._thread = threading.Thread(
            target=self._supervise, args=(self._waker,), name="jobsync-children", daemon=True
        )
        self._thread.start()
        # Before multiprocessing waits for the children, at the end of a process that has not stopped its worker.
        atexit.register(self._kill_all)

    def free(self) -> int:
        """Slots that are not taken; one whose child still starts counts as taken."""
        with self._guard:
            busy = sum(child.attempt is not None for child in self._children)
            starting = self._coming + sum(not child.ready for child in self._children)
            return self.slots - busy - max(starting, len(self._waiting))

    def running(self) -> list[Attempt]:
        """What runs now."""
        with self._guard:
            return [child.attempt for child in self._children if child.attempt is not None]

    def submit(self, attempt: Attempt) -> None:
        """Give it to the next child that is free; start one if there are less than ``slots``."""
        with self._guard:
            self._waiting.append(attempt)
        self._wake()

    def withdraw(self) -> list[Attempt]:
        """What no child has got yet, but for those whose child starts or is about to, unless that takes long."""
        latest = time.monotonic() - PATIENCE_SEC
        with self._guard:
            waiting = list(self._waiting)
            places = self.slots - sum(child.ready for child in self._children)
            kept = [attempt for attempt in waiting[:places] if attempt.claimed_at > latest]
            self._waiting = deque(kept)
            return [attempt for attempt in waiting if attempt not in kept]

    def give_up(self, attempt: Attempt, why: Why) -> None:
        """Kill the child that runs it."""
        attempt.context.cancelled.set(why)
        with self._guard:
            child = next((child for child in self._children if child.attempt is attempt), None)
            if child is not None:
                self._discard(child)
            elif attempt in self._waiting:
                self._waiting.remove(attempt)
            else:  # it has ended just now
                return
        self._wake()
        self._report_stopped(attempt)

    def stop(self, grace_sec: float) -> None:
        """Wait ``grace_sec`` for what runs, kill the rest, and end the children. What was killed is released."""
        with self._guard:
            self._stopping = True
        self._wake()
        thread = self._thread
        if thread is None:
            return
        until = time.monotonic() + grace_sec
        while self.running() and (left := until - time.monotonic()) > 0:
            thread.join(min(left, 0.02))
        for attempt in self.running():
            self.give_up(attempt, "stopping")
        thread.join(END_LIMIT_SEC)
        self._kill_all()
        thread.join(END_LIMIT_SEC)
        atexit.unregister(self._kill_all)

    def look(self, now: float) -> None:
        """End the children that take too long to start; called now and then."""
        with self._guard:
            late = [c for c in self._children if not c.ready and now - c.started_at > START_LIMIT_SEC]
            for child in late:
                # Not given up, so that the job it is started for learns of it.
                child.kill()

    def is_mine(self, thread: threading.Thread) -> bool:
        """Handlers run in other processes."""
        return False

    @property
    def abandoned(self) -> int:
        """Processes can be killed."""
        return 0

    def problems(self) -> list[str]:
        """Without its thread nothing runs."""
        if self._thread is None or self._thread.is_alive() or self._stopping:
            return []
        return ["the thread that looks after the child processes has failed: no jobs run in them"]

    def _report_stopped(self, attempt: Attempt) -> None:
        if attempt.context.cancelled.reason != "lost":
            now = time.monotonic()
            self._report(attempt, stopped(attempt.handler, attempt.job, attempt.context, attempt.ran_since(), now))

    def _wake(self) -> None:
        if self._waker is not None:
            self._waker.wake()

    def _discard(self, child: _Child) -> None:
        child.attempt = None
        child.kill()
        self._children.remove(child)
        self._leaving.append(child)

    def _kill_all(self) -> None:
        if os.getpid() != self._pid:  # a fork of the worker ends: they are not its children
            return
        with self._guard:
            for child in (*self._children, *self._leaving):
                child.kill()

    # -- the executor's own thread --------------------------------------------------------------------------------

    def _supervise(self, waker: Waker) -> None:
        look_at = 0.0
        try:
            while self._assign():
                with self._guard:
                    known = [*self._children, *self._leaving]
                by: dict[Any, _Child] = {child.process.sentinel: child for child in known}
                by.update((child.connection, child) for child in known if not child.connection.closed)
                ready = set(wait([waker.descriptor, *by], LOOK_SEC))
                if waker.descriptor in ready:
                    with contextlib.suppress(BlockingIOError):
                        os.read(waker.descriptor, 4096)
                # A child that has sent something before it ended is heard first.
                for child in {id(by[one]): by[one] for one in ready if one in by}.values():
                    self._hear(child)
                    if child.process.sentinel in ready:
                        self._bury(child)
                if (now := time.monotonic()) >= look_at:
                    look_at = now + LOOK_SEC
                    for child in known:
                        if child.process.sentinel not in ready and child.process.exitcode is not None:
                            self._bury(child)
        finally:
            waker.close()

    def _assign(self) -> bool:
        """Give out what waits, start the children that are missing; False when all is over."""
        sending: list[tuple[_Child, Any]] = []
        with self._guard:
            if self._stopping:
                for child in [child for child in self._children if child.attempt is None]:
                    child.leaving = True
                    self._children.remove(child)
                    self._leaving.append(child)
                    sending.append((child, None))
            idle = [child for child in self._children if child.idle]
            while self._waiting and idle:
                child, attempt = idle.pop(), self._waiting.popleft()
                child.attempt = attempt
                attempt.began_at = time.monotonic()
                sending.append((child, attempt.job))
            starting = sum(not child.ready for child in self._children)
            missing = min(len(self._waiting) - starting, self.slots - len(self._children))
            self._coming = missing = 0 if self._stopping else max(0, missing)
            over = self._stopping and not self._children and not self._leaving
        # Outside of the lock: a child that somebody has stopped may not read, and must be killed all the same.
        for child, message in sending:
            with contextlib.suppress(OSError):  # it is dead; its sentinel says so too
                child.connection.send(message)
        for _ in range(missing):
            self._start_child()
        return not over

    def _start_child(self) -> None:
        # A child inherits what is blocked, and so outlives a Ctrl-C that comes before it can ignore it. Starting its
        # tracker, multiprocessing unblocks these.
        resource_tracker.ensure_running()
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        try:
            child = _Child()
        except Exception as error:  # noqa: BLE001  # no memory, no processes: whatever the system says
            with self._guard:
                self._coming -= 1
            self._fail_one(f"no child process could be started: {error}")
            return
        with self._guard:
            self._children.append(child)
            self._coming -= 1
        with contextlib.suppress(OSError):
            child.connection.send(self._recipe)

    def _hear(self, child: _Child) -> None:
        try:
            while child.connection.poll():
                self._heard(child, child.connection.recv())
        except (EOFError, OSError):
            child.connection.close()  # at its end, or about to be: the sentinel says which

    def _heard(self, child: _Child, message: Ending | str | float | None) -> None:
        with self._guard:
            if message is None:
                child.ready = True
                return
            if isinstance(message, float):
                if child.attempt is not None:
                    child.attempt.context.limit = message
                return
            attempt, child.attempt = child.attempt, None
        if attempt is None:  # given up meanwhile
            return
        if isinstance(message, str):
            self._report_failed(attempt, InvalidJob(f"the child process cannot import the handler:\n{message}"))
        else:
            self._report(attempt, message)

    def _bury(self, child: _Child) -> None:
        with self._guard:
            attempt, child.attempt = child.attempt, None
            for children in (self._children, self._leaving):
                if child in children:
                    children.remove(child)
            child.kill()  # what it has left behind; and itself, if all it did was to close its descriptors
            child.process.join()
        child.connection.close()
        if attempt is not None:
            self._report_failed(attempt, ProcessDied(f"the child process that ran the job {child.why()}"))
        elif not child.ready and not self._stopping:
            self._fail_one(
                f"a child process {child.why()} before it was ready; its standard error output says why. "
                'A script that starts a worker needs if __name__ == "__main__":'
            )

    def _fail_one(self, why: str) -> None:
        """A child could not be had: the attempt that waits longest is told, so that this ends somewhere."""
        with self._guard:
            attempt = self._waiting.popleft() if self._waiting else None
        logger.warning("%s", why, extra=fields("process_died"))
        if attempt is not None:
            self._report_failed(attempt, ProcessDied(why))

    def _report_failed(self, attempt: Attempt, error: Exception) -> None:
        now = time.monotonic()
        self._report(attempt, failed(attempt.handler, attempt.job, error, attempt.ran_since(), now))
