"""The one background loop of a worker: one thread, one connection.

Each turn claims what there is room for, writes how attempts ended, and does one thing for the queue as a whole, if one
is due; if there is nothing to do it waits, for a notification, for an executor's report, or for the next thing that is
due. A statement that fails gives up that turn, never the loop; a broken connection is made anew for as long as the
worker runs. Attempts under way go on meanwhile, and their ends are kept. Nothing of the user's runs here.

What the loop's process holds, it holds as rows that say so, never as open transactions: paused for a minute at any
point it finds, when it goes on, that its attempts are still its own, or that each of its writes changes nothing.

The loop itself is here; each of its parts has a module: ``connecting`` (its connection), ``claiming`` (what to claim),
``adopting`` (what it holds without knowing), ``reports`` (how attempts ended), ``chores`` (the rest), ``leaving``,
``telling`` (whom to tell of it).
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from jobsync_orm.coordinator.session import SessionLost, StatementFailed
from jobsync_orm.logs import fields
from jobsync_orm.queue.context import CancelFlag, JobContext
from jobsync_orm.queue.jobs import ClaimedJob, Ending
from jobsync_orm.queue.waker import lanes_of
from jobsync_orm.worker.adopting import Adopting
from jobsync_orm.worker.attempts import Attempt, Executor
from jobsync_orm.worker.chores import Chores, Duty
from jobsync_orm.worker.claiming import Claiming
from jobsync_orm.worker.connecting import Line
from jobsync_orm.worker.keyed import Keyed
from jobsync_orm.worker.leaving import Leaving
from jobsync_orm.worker.reports import Reports
from jobsync_orm.worker.telling import Telling

if TYPE_CHECKING:
    from jobsync_orm.queue import Handler, JobQueue

__all__ = ["Counters", "Pump"]

logger = logging.getLogger("jobsync_orm")

RECONNECT_FIRST_SEC, RECONNECT_MOST_SEC = 0.05, 1.0

# What failed is tried again after this time.
FAILED_SEC = 0.5


class Counters:
    """What this worker has done since it started."""

    __slots__ = ("claimed", "claimed_at", "completed", "failed", "lost", "reconnects", "released")

    def __init__(self) -> None:
        self.claimed = self.completed = self.failed = self.released = self.lost = self.reconnects = 0
        self.claimed_at: float | None = None  # time.monotonic() of the last claim that was answered


class Pump:
    """Claims jobs, submits them, and writes how they ended.

    Parameters
    ----------
    queue : JobQueue
        Whose jobs.
    node_name : str
        This worker.
    incarnation : callable
        This life of the node in its cluster, or an empty text while it is no member.
    handlers : mapping
        Type -> handler, of the types to run.
    batch : int
        Most jobs of one statement.
    poll_sec : float
        Seconds between looks for jobs of which no notification told.
    """

    def __init__(
        self,
        queue: JobQueue,
        node_name: str,
        incarnation: Callable[[], str],
        handlers: Mapping[str, Handler],
        *,
        batch: int,
        poll_sec: float,
    ) -> None:
        self.queue = queue
        self.node_name = node_name
        self.handlers = dict(handlers)
        self.poll_sec = poll_sec
        self.executors: dict[str, Executor] = {}
        self.duties: list[Duty] = []
        self.paused: set[str] = set()
        """Types not to be claimed; the empty text stands for all."""
        self.drained = False
        """Whether an operator has drained this node: it takes nothing new until it is undrained."""
        self.counters = Counters()
        self.under_way: dict[tuple[int, int], Attempt] = {}
        """Attempts that are claimed and not written down yet, the oldest first, by job id and attempt."""
        self.waiting: set[int] = set()
        """Ids of jobs that waited for one that has completed since."""
        self.delayed: Callable[[float], None] | None = None
        """Told in how many seconds a job is due that has just been written down as to be run again."""
        self.keyed: Keyed | None = None
        """Jobs with a key, if this worker takes any."""
        self.turned_at = time.monotonic()
        """When the last turn went through without a failure."""
        self.failure = ""
        """Why the last turn that failed did."""
        self.failing: dict[str, tuple[float, str]] = {}
        """Duties that fail, and claiming: since when, and why."""
        self.incarnation = ""
        """That which the attempts under way bear in the database."""
        self.line = Line(queue.config, queue.names.queue_channel)
        self.reports = Reports(self, batch)
        self.claiming = Claiming(self, batch)
        self.adopting = Adopting(self, incarnation)
        self.chores = Chores(self)
        self.leaving = Leaving(self)
        self.telling = Telling(self)
        self._asleep = False
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"jobsync-pump-{node_name}"[:40], daemon=True)

    # -- for other threads -------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the executors and the loop."""
        for executor in self.executors.values():
            executor.start()
        self._thread.start()

    def close(self) -> None:
        """Let go of what there is, of a loop that has ended, or has not begun."""
        self.leaving.end_executors()
        if self._thread.ident is None:
            self.line.close()

    def drain(self, grace_sec: float) -> None:
        """Claim nothing more; end when all attempts are over, and in any case within ``grace_sec`` seconds, or up to
        one more if they are less than five. A second call may shorten it."""
        self.leaving.begin(grace_sec)
        self.wake()

    def join(self, timeout: float | None = None) -> bool:
        """Wait until the loop has ended."""
        return self._ended.wait(timeout)

    @property
    def end_by(self) -> float:
        """When a worker that stops is to have left, its node included; ``time.monotonic()``."""
        return self.leaving.end_by

    @property
    def is_away(self) -> bool:
        """Whether it has ended, or is at a loss, because the database is away."""
        return self._thread.ident is not None and not self.leaving.in_order

    @property
    def is_alive(self) -> bool:
        """Whether the loop runs."""
        return self._thread.is_alive()

    @property
    def is_connected(self) -> bool:
        """Whether there is a connection that has shown no sign of a break."""
        return self.line.is_open

    @property
    def lost(self) -> int:
        """How many attempts ended too late."""
        return self.reports.too_late

    @property
    def stops(self) -> bool:
        """Whether nothing is claimed any more."""
        return self.leaving.has_begun

    @property
    def finishes(self) -> bool:
        """Whether nothing is claimed at the moment, and what waits for a slot goes back: it stops, or is drained."""
        return self.stops or self.drained

    def wake(self) -> None:
        """Make the loop look up."""
        self.line.wake()

    def report(self, attempt: Attempt, ending: Ending) -> None:
        """An attempt has ended. The first report of each counts."""
        self.reports.add(attempt, ending)
        if self._asleep:
            self._asleep = False
            self.line.wake()

    # -- for its parts and duties, in the pump's thread --------------------------------------------------------

    def look_again(self, type: str, priority: int) -> None:
        """There may be jobs of this type and priority that no claim has seen."""
        self.claiming.look_again(type, priority)

    def survey_soon(self) -> None:
        """Look everywhere."""
        self.claiming.survey_soon()

    def types(self) -> set[str]:
        """What may be claimed now, as far as there is room."""
        if self.finishes or "" in self.paused:
            return set()
        return self.handlers.keys() - self.paused

    def submit(self, jobs: Iterable[ClaimedJob]) -> None:
        """Run jobs that were claimed for this worker."""
        handlers, executors, queue, name = self.handlers, self.executors, self.queue, self.node_name
        now = time.monotonic()
        many = 0
        types: list[str] | None = [] if queue.audience.active else None
        for job in jobs:
            handler = handlers[job.type]
            attempt = Attempt(job, handler, JobContext(queue, job, name, CancelFlag()), now)
            self.under_way[job.id, job.attempt] = attempt
            executors[handler.kind].submit(attempt)
            many += 1
            if types is not None:
                types.append(job.type)
        self.counters.claimed += many
        self.counters.claimed_at = now
        if types:
            self.telling.claimed(types)

    def give_up(self, attempt: Attempt, why: Any) -> None:
        """End an attempt that should not run any more."""
        if why == "lost":  # nothing that it reports matters
            attempt.over = True
            self.reports.lost(attempt)
        self.executors[attempt.handler.kind].give_up(attempt, why)

    def connect(self) -> bool:
        """Make the connection anew. False if the database was not there in time, and is waited for no longer."""
        if not self.line.open():
            return False
        self.counters.reconnects += 1
        self.claiming.connected()
        self.adopting.connected()
        self.chores.connected()
        return True

    # -- the loop ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        backoff = RECONNECT_FIRST_SEC
        try:
            while not self.leaving.is_due():
                try:
                    if not self.line.is_open and not self.connect():
                        break
                    self._turn()
                    self.turned_at = time.monotonic()
                    backoff = RECONNECT_FIRST_SEC
                    continue
                except SessionLost as lost:
                    self.line.session.close()
                    self.failure = str(lost)
                    logger.warning(
                        "%s: the queue's connection: %s; reconnecting",
                        self.node_name,
                        lost,
                        extra=fields("queue_connection_lost", self.node_name),
                    )
                except StatementFailed as failed:
                    self.failure = str(failed)
                    logger.warning(
                        "%s: %s; trying again",
                        self.node_name,
                        failed,
                        extra=fields("queue_statement_failed", self.node_name),
                    )
                    backoff = max(backoff, FAILED_SEC)
                except Exception as error:
                    self.failure = repr(error)
                    # A defect of ours must not end the writing down of what has been done.
                    logger.exception(
                        "%s: this turn of the queue's loop failed; trying again",
                        self.node_name,
                        extra=fields("queue_loop_failed", self.node_name),
                    )
                    backoff = max(backoff, FAILED_SEC)
                self.reports.take()
                self._sleep(backoff * random.uniform(0.5, 1.0))
                backoff = min(2 * backoff, RECONNECT_MOST_SEC)
            self.leaving.leave()
        except BaseException:
            logger.exception(
                "%s: the queue's loop has failed", self.node_name, extra=fields("queue_loop_failed", self.node_name)
            )
        finally:
            self.line.close()
            self._ended.set()

    def _turn(self) -> None:
        self._hear(self.line.session.heard())
        self.reports.take()
        self.adopting.check_incarnation()
        self.adopting.restamp()
        self.chores.do_first()
        # First what somebody waits for: a free slot, and a job that has just come.
        if self.finishes:
            self.claiming.give_back_unbegun()
        else:
            self.claiming.claim_all()
        if self.reports.write_at() <= time.monotonic():
            self.reports.write()
        self.chores.do_one()
        if not self.finishes:
            self.claiming.give_back_stale()
        self._wait()

    def _hear(self, channels: set[str]) -> None:
        if not channels:
            return
        payloads = self.line.session.payloads.get(self.queue.names.queue_channel)
        if not payloads:
            return
        if self.queue.audience.active:
            self.telling.woken(len(payloads))
        for payload in payloads:
            if payload.startswith("{"):  # an order
                self.chores.first = True
                continue
            lanes = lanes_of(payload)
            if lanes is None:
                self.survey_soon()
                continue
            for type, priority, keyed in lanes:
                if not keyed:
                    self.look_again(type, priority)
        for duty in self.duties:
            duty.woken(payloads)

    def _wait(self) -> None:
        due, chores_at = self._due_at(), self.chores.due_at()
        now = time.monotonic()
        if due <= now:
            return
        session = self.line.session
        if chores_at <= now:
            self._hear(session.wait(0.0))
            return
        due = min(due, chores_at)
        self._asleep = True
        try:
            # A report between the look and the wait finds the flag set, and wakes.
            seconds = 0.0 if self.reports.there_are else max(0.0, due - time.monotonic())
            self._hear(session.wait(min(seconds, self.poll_sec)))
        finally:
            self._asleep = False

    def _due_at(self) -> float:
        """When there is something to write or to claim, unless a notification or a report comes first."""
        if self.reports.there_are:
            return 0.0
        claim_at = float("inf") if self.finishes else self.claiming.due_at()
        return min(self.reports.write_at(), self.leaving.wait_until, self.adopting.restamp_at(), claim_at)

    def _sleep(self, seconds: float) -> None:
        """Wait without a connection."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0 and not self.leaving.is_due():
            time.sleep(min(left, 0.05))
