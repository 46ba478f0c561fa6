"""The one background loop of a worker: one thread, one connection.

Each turn claims what there is room for, writes how attempts ended, and does one thing for the queue as a whole, if one
is due; if there is nothing to do it waits, for a notification, for an executor's report, or for the next thing that is
due. A statement that fails gives up that turn, never the loop; a broken connection is made anew for as long as the
worker runs. Attempts under way go on meanwhile, and their ends are kept. Nothing of the user's runs here.

What the loop's process holds, it holds as rows that say so, never as open transactions: paused for a minute at any
point it finds, when it goes on, that its attempts are still its own, or that each of its writes changes nothing.
"""

from __future__ import annotations

import json
import logging
import math
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from jobsync_orm.coordinator.clock import now
from jobsync_orm.coordinator.session import Session, SessionLost, StatementFailed, array
from jobsync_orm.coordinator.waker import Waker
from jobsync_orm.models.states import AttemptOutcome, JobState
from jobsync_orm.queue.context import CancelFlag, JobContext
from jobsync_orm.queue.handlers import option_arrays
from jobsync_orm.queue.jobs import ClaimedJob, Ending, claimed
from jobsync_orm.queue.statements import SESSION
from jobsync_orm.queue.waker import lanes_of
from jobsync_orm.worker.attempts import Attempt, Executor
from jobsync_orm.worker.connecting import open_in_time
from jobsync_orm.worker.finishing import Finishing
from jobsync_orm.worker.keyed import Keyed
from jobsync_orm.worker.lanes import Lanes
from jobsync_orm.worker.room import Room

if TYPE_CHECKING:
    from jobsync_orm.queue import Handler, JobQueue

__all__ = ["Counters", "Duty", "Pump"]

logger = logging.getLogger("jobsync_orm")

# A server that has not answered by now is asked again on a new connection.
ANSWER_SEC = 10.0

# The server gives up earlier by itself: else it would go on with what nobody waits for, and each new try would add to
# those that wait for a lock.
LIMITS = "SET lock_timeout = '5s'; SET statement_timeout = '9s'"

# Between looks at the connection while waiting.
TICK_SEC = 1.0

RECONNECT_FIRST_SEC, RECONNECT_MOST_SEC = 0.05, 1.0

# What failed is tried again after this time.
FAILED_SEC = 0.5

# Claims of one turn for one executor, where jobs with a key and without are as urgent as each other.
MOST_CLAIMS = 8

# A survey takes this share of the time at most.
SURVEY_SHARE = 20

# Jobs taken in advance go back when they have waited for a slot this long. How often that is looked at.
STALE_SEC, STALE_LOOK_SEC = 1.0, 0.25

# Nothing more is claimed while so many batches of ended attempts could not be written down.
MOST_UNWRITTEN = 3

# Of an answer with claimed jobs: with longer ones fewer jobs are claimed at a time.
MOST_CHARACTERS = 8_000_000

# After a new connection: when to look for jobs that a claim took whose answer was lost. The server may go on with a
# statement for a while after its client has left.
ADOPT_SEC = (0.0, 1.0, 5.0, ANSWER_SEC, 30.0)

# Of its grace, a worker that stops keeps so much for giving back what has not ended and writing everything down, but no
# more than this share. With a grace that is short it takes a second for that in any case.
LEAVE_SEC, LEAVE_SHARE, LEAVE_LEAST_SEC = 2.0, 0.25, 1.0

# What its node has of that, to leave the cluster.
NODE_SEC = 0.3


class Duty(Protocol):
    """Something the pump does now and then, in its thread and on its connection."""

    def due_at(self) -> float:
        """When it is to run next; ``time.monotonic()``."""

    def run(self, session: Session) -> None:
        """Do it. What it raises is logged, and it is tried again after half a second."""

    def woken(self, payloads: set[str]) -> None:
        """These notifications have come on the queue's channel."""


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
        self.executors: dict[str, Executor] = {}
        self.duties: list[Duty] = []
        self.paused: set[str] = set()
        """Types not to be claimed; the empty text stands for all."""
        self.counters = Counters()
        self.under_way: dict[tuple[int, int], Attempt] = {}
        """Attempts that are claimed and not written down yet, the oldest first, by job id and attempt."""
        self.waiting: set[int] = set()
        """Ids of jobs that waited for one that has completed since."""
        self.delayed: Callable[[float], None] | None = None
        """Told in how many seconds a job is due that has just been written down as to be run again."""
        self.farewells: list[Callable[[Session], None]] = []
        """Done last, when everything is written down."""
        self.keyed: Keyed | None = None
        """Jobs with a key, if this worker takes any."""
        self.room = Room(batch)
        self.turned_at = time.monotonic()
        """When the last turn went through without a failure."""
        self.failure = ""
        """Why the last turn that failed did."""
        self.failing: dict[str, tuple[float, str]] = {}
        """Duties that fail, and claiming: since when, and why."""
        self.incarnation = ""
        """That which the attempts under way bear in the database."""
        self._incarnation = incarnation
        self._sql = queue.statements
        self._batch = batch
        self._poll_sec = poll_sec
        self._lanes = Lanes(queue.ageing_sec)
        self._finishing = Finishing(self._sql, batch, ANSWER_SEC, self._lost)
        self._reports: deque[tuple[Attempt, Ending]] = deque()
        self._asleep = False
        self._waker = Waker()
        self._session = Session(
            queue.config.connection_pool(), self._waker.descriptor, _no_look, TICK_SEC, self._setup()
        )
        self._clock_offset = 0.0  # the database's clock less time.monotonic(), in microseconds
        self._survey_at = 0.0
        self._survey_not_before = 0.0
        self._chores_first = True
        self._last_chore = -1
        self._stale_at = 0.0
        self._adopt_at: list[float] = []
        self._stranded: list[Attempt] = []  # claimed in a life of the node that is over
        self._restamp_at = 0.0
        self._claim_most = batch
        self._not_before: dict[Any, float] = {}
        self._claim_not_before = 0.0
        self._unreachable = False  # and a thread that is left behind has the session
        self._draining = threading.Event()
        self._drain_until = math.inf
        self.end_by = math.inf
        """When a worker that stops is to have left, its node included; ``time.monotonic()``."""
        self.left_in_order = False
        """Whether the database was there to the end."""
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"jobsync-pump-{node_name}"[:40], daemon=True)

    def _setup(self) -> str:
        return f'{SESSION}; {LIMITS}; LISTEN "{self.queue.names.queue_channel}"'

    # -- for other threads -------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the executors and the loop."""
        for executor in self.executors.values():
            executor.start()
        self._thread.start()

    def close(self) -> None:
        """Let go of what there is, of a loop that has ended, or has not begun."""
        self._end_executors(time.monotonic() + min(LEAVE_LEAST_SEC, max(0.0, self.end_by - time.monotonic())))
        if self._thread.ident is None:
            self._waker.close()

    def drain(self, grace_sec: float) -> None:
        """Claim nothing more; end when all attempts are over, and in any case within ``grace_sec`` seconds, or one
        second where that is more. A second call may shorten it."""
        now = time.monotonic()
        wait_sec = grace_sec - min(LEAVE_SEC, LEAVE_SHARE * grace_sec)
        self._drain_until = min(self._drain_until, now + wait_sec)
        self.end_by = min(self.end_by, now + max(grace_sec, wait_sec + LEAVE_LEAST_SEC))
        # A statement that hangs leaves time for another try.
        self._hang_until(self._drain_until + (self.end_by - self._drain_until) / 4)
        self._draining.set()
        self.wake()

    def _hang_until(self, at: float) -> None:
        # The session's clock also counts the time for which the machine was asleep.
        self._session.until = now() + at - time.monotonic()

    def join(self, timeout: float | None = None) -> bool:
        """Wait until the loop has ended."""
        return self._ended.wait(timeout)

    @property
    def is_away(self) -> bool:
        """Whether it has ended, or is at a loss, because the database is away."""
        return self._thread.ident is not None and not self.left_in_order

    @property
    def is_alive(self) -> bool:
        """Whether the loop runs."""
        return self._thread.is_alive()

    @property
    def is_connected(self) -> bool:
        """Whether there is a connection that has shown no sign of a break."""
        return self._session.is_open

    @property
    def lost(self) -> int:
        """How many attempts ended too late."""
        return self._finishing.lost

    @property
    def stops(self) -> bool:
        """Whether nothing is claimed any more."""
        return self._draining.is_set()

    def wake(self) -> None:
        """Make the loop look up."""
        self._waker.wake()

    def report(self, attempt: Attempt, ending: Ending) -> None:
        """An attempt has ended. The first report of each counts."""
        self._reports.append((attempt, ending))
        if self._asleep:
            self._asleep = False
            self._waker.wake()

    # -- for duties, in the pump's thread ----------------------------------------------------------------------

    def look_again(self, type: str, priority: int) -> None:
        """There may be jobs of this type and priority that no claim has seen."""
        if type in self.handlers:
            self._lanes.look_again(type, priority, int(time.monotonic() * 1e6 + self._clock_offset))

    def survey_soon(self) -> None:
        """Look everywhere."""
        self._survey_at = min(self._survey_at, self._survey_not_before)

    def types(self) -> set[str]:
        """What may be claimed now, as far as there is room."""
        if self._draining.is_set() or "" in self.paused:
            return set()
        return self.handlers.keys() - self.paused

    def submit(self, jobs: Iterable[ClaimedJob], incarnation: str) -> None:
        """Run jobs that were claimed for this worker under ``incarnation``."""
        handlers, executors, queue, name = self.handlers, self.executors, self.queue, self.node_name
        now = time.monotonic()
        many = 0
        for job in jobs:
            handler = handlers[job.type]
            attempt = Attempt(job, handler, JobContext(queue, job, name, CancelFlag()), now)
            self.under_way[job.id, job.attempt] = attempt
            executors[handler.kind].submit(attempt)
            many += 1
        self.counters.claimed += many
        self.counters.claimed_at = now

    def give_up(self, attempt: Attempt, why: Any) -> None:
        """End an attempt that should not run any more."""
        if why == "lost":  # nothing that it reports matters
            attempt.over = True
            self._lost(attempt)
        self.executors[attempt.handler.kind].give_up(attempt, why)

    def release(self, attempts: Iterable[Attempt]) -> None:
        """Give jobs back that have not begun, or are not waited for any longer."""
        now = time.monotonic()
        for attempt in attempts:
            job = attempt.job
            began = attempt.ran_since()
            released = Ending(job.id, job.attempt, AttemptOutcome.RELEASED, JobState.PENDING, began, now)
            self._reports.append((attempt, released))

    # -- the loop ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        backoff = RECONNECT_FIRST_SEC
        try:
            while not self._is_done():
                try:
                    if not self._session.is_open and not self._connect():
                        break
                    self._turn()
                    self.turned_at = time.monotonic()
                    backoff = RECONNECT_FIRST_SEC
                    continue
                except SessionLost as lost:
                    self._session.close()
                    self.failure = str(lost)
                    logger.warning("%s: the queue's connection: %s; reconnecting", self.node_name, lost)
                except StatementFailed as failed:
                    self.failure = str(failed)
                    logger.warning("%s: %s; trying again", self.node_name, failed)
                    backoff = max(backoff, FAILED_SEC)
                except Exception as error:
                    self.failure = repr(error)
                    # A defect of ours must not end the writing down of what has been done.
                    logger.exception("%s: this turn of the queue's loop failed; trying again", self.node_name)
                    backoff = max(backoff, FAILED_SEC)
                self._take_reports()
                self._sleep(backoff * random.uniform(0.5, 1.0))
                backoff = min(2 * backoff, RECONNECT_MOST_SEC)
            self._leave()
        except BaseException:
            logger.exception("%s: the queue's loop has failed", self.node_name)
        finally:
            if not self._unreachable:
                self._session.close()
            self._waker.close()
            self._ended.set()

    def _connect(self) -> bool:
        """False if the database was not there in time, and is not to be waited for any longer."""
        self._unreachable = not open_in_time(self._session)
        if self._unreachable:
            return False
        self.counters.reconnects += 1
        # What happened meanwhile, nobody has told.
        self._survey_at = self._survey_not_before = 0.0
        self._chores_first = True
        now = time.monotonic()
        self._adopt_at = [now + sec for sec in ADOPT_SEC]
        for duty in self.duties:
            duty.woken({""})
        return True

    def _turn(self) -> None:
        session = self._session
        self._hear(session.heard())
        self._take_reports()
        self._check_incarnation()
        if self._stranded:
            self._restamp()
        if self._chores_first:
            # What has been ordered (to leave a type alone, say) holds for the next claim.
            self._chores_first = False
            for _ in range(len(self.duties) + 2):
                if not self._do_chore():
                    break
        # First what somebody waits for: a free slot, and a job that has just come.
        if self._draining.is_set():
            self._give_back_unbegun()
        else:
            self._claim_all()
        if self._finishing.due_at() <= time.monotonic():
            self._write()
        self._do_chore()
        if not self._draining.is_set():
            self._give_back_stale()
        self._wait()

    def _hear(self, channels: set[str]) -> None:
        if not channels:
            return
        payloads = self._session.payloads.get(self.queue.names.queue_channel)
        if not payloads:
            return
        for payload in payloads:
            if payload.startswith("{"):  # an order
                self._chores_first = True
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

    def _take_reports(self) -> None:
        reports = self._reports
        if not reports:
            return
        ended: list[tuple[Attempt, Ending]] = []
        while reports:
            report = reports.popleft()
            attempt = report[0]
            if not attempt.over:
                attempt.over = True
                ended.append(report)
        self.room.learn([(a.job.type, e.ended_at - e.began_at) for a, e in ended if e.outcome != "released"])
        self._finishing.add(ended)

    def _lost(self, attempt: Attempt) -> None:
        """Its job turned out to be somebody else's."""
        self.under_way.pop((attempt.job.id, attempt.job.attempt), None)
        if self.keyed is not None:
            self.keyed.settled(attempt.job, JobState.PENDING)
        self.counters.lost += 1

    def _write(self) -> None:
        done, waiting = self._finishing.write(self._session)
        under_way, counters = self.under_way, self.counters
        completed = 0
        for attempt, ending in done:
            under_way.pop((ending.job_id, ending.attempt), None)
            if attempt.job.key is not None and self.keyed is not None:
                self.keyed.settled(attempt.job, ending.state)
            outcome = ending.outcome
            if outcome is AttemptOutcome.COMPLETED:
                completed += 1
            elif outcome is AttemptOutcome.RELEASED:
                counters.released += 1
                self.look_again(attempt.job.type, attempt.job.priority)
            elif outcome in (AttemptOutcome.FAILED, AttemptOutcome.TIMEOUT, AttemptOutcome.DISCARDED):
                counters.failed += 1
                _tell_failed(attempt.job, ending)
            elif outcome is AttemptOutcome.DIED:
                counters.lost += 1
            if ending.delay is not None and self.delayed is not None:
                self.delayed(ending.delay)
        counters.completed += completed
        if waiting:
            self.waiting.update(waiting)

    def _check_incarnation(self) -> None:
        """See whether this node has been taken for dead and has joined anew: its attempts then bear another life's
        name, and whoever looks for jobs of dead nodes takes them."""
        now_called = self._incarnation()
        if now_called == self.incarnation or not now_called:
            return
        self.incarnation = now_called
        self._stranded = list(self.under_way.values())
        self._restamp_at = self._survey_at = 0.0

    def _restamp(self) -> None:
        """Have the attempts of the life before go on in this one, if nobody has taken them yet."""
        attempts = [attempt for attempt in self._stranded if not attempt.over]
        if not attempts:
            self._stranded = []
            return
        if time.monotonic() < self._restamp_at:
            return
        self._restamp_at = time.monotonic() + FAILED_SEC
        ids, numbers = array(a.job.id for a in attempts), array(a.job.attempt for a in attempts)
        ((answer,),) = self._session.execute(
            self._sql.restamp, ids, numbers, self.node_name, self.incarnation, timeout=ANSWER_SEC
        )
        kept = set(json.loads(answer or "[]"))
        missing = [attempt for attempt in attempts if attempt.job.id not in kept]
        ids, numbers = array(a.job.id for a in missing), array(a.job.attempt for a in missing)
        ((answer,),) = self._session.execute(self._sql.lost, ids, numbers, timeout=ANSWER_SEC)
        # Held by somebody's transaction: that of the attempt itself, perhaps, which is about to commit.
        held = {id for id, _, under_way, _ in json.loads(answer or "[]") if under_way}
        self._stranded = [attempt for attempt in missing if attempt.job.id in held]
        taken = [attempt for attempt in missing if attempt.job.id not in held]
        logger.warning(
            "%s has joined anew: %d attempts under way go on, %d have been taken from it",
            self.node_name,
            len(kept),
            len(taken),
        )
        for attempt in taken:
            self.give_up(attempt, "lost")

    def _do_chore(self) -> bool:
        """Do one thing that is due, in turn: a claim never waits for all of them, and none of them for another."""
        now, due = time.monotonic(), self._chores_due()
        for step in range(1, len(due) + 1):
            number = (self._last_chore + step) % len(due)
            if due[number] <= now:
                self._last_chore = number
                if number < len(self.duties):
                    self._do(self.duties[number])
                elif number == len(self.duties):
                    self._survey()
                else:
                    self._adopt()
                return True
        return False

    def _chores_due(self) -> list[float]:
        """When each duty is due, a survey, and a look for jobs of lost answers."""
        due = [max(duty.due_at(), self._not_before.get(duty, 0.0)) for duty in self.duties]
        due.append(math.inf if self._draining.is_set() else self._survey_at)
        due.append(self._adopt_at[0] if self._adopt_at else math.inf)
        return due

    def _do(self, duty: Duty) -> None:
        try:
            duty.run(self._session)
            self._not_before.pop(duty, None)
            self.failing.pop(type(duty).__name__, None)
        except SessionLost:
            raise
        except Exception as error:
            self._not_before[duty] = time.monotonic() + FAILED_SEC
            self._fails(type(duty).__name__, error)
            if isinstance(error, StatementFailed):
                logger.warning("%s: %s: %s; trying again", self.node_name, type(duty).__name__, error)
            else:
                logger.exception("%s: %s failed; trying again", self.node_name, type(duty).__name__)

    def _adopt(self) -> None:
        """Run what this node holds and does not know of: jobs of a claim whose answer was lost."""
        if not self.incarnation or self._draining.is_set():
            self._adopt_at = []
            return
        del self._adopt_at[0]
        session, incarnation = self._session, self.incarnation
        ((answer,),) = session.execute(self._sql.held, incarnation, timeout=ANSWER_SEC)
        unknown = [id for id, attempt in json.loads(answer or "[]") if (id, attempt) not in self.under_way]
        if unknown:
            ((answer,),) = session.execute(self._sql.adopt, array(unknown), incarnation, timeout=ANSWER_SEC)
            jobs = [job for job in claimed(answer) if (job.id, job.attempt) not in self.under_way]
            logger.warning("%s: %d jobs were claimed by a statement whose answer was lost", self.node_name, len(jobs))
            self.submit([job for job in jobs if job.type in self.handlers], incarnation)

    def _survey(self) -> None:
        began = time.monotonic()
        ((answer, clock),) = self._session.prepared(self._sql.survey, array(self.handlers), timeout=ANSWER_SEC)
        now = time.monotonic()
        self._lanes.surveyed([(type, priority, at) for type, priority, at in json.loads(answer or "[]")])
        self._clock_offset = int(clock or 0) - now * 1e6
        self._survey_not_before = now + SURVEY_SHARE * (now - began)
        self._survey_at = max(now + self._poll_sec, self._survey_not_before)

    def _allowed(self, kind: str, executor: Executor) -> dict[str, int]:
        """How many jobs to claim for an executor, by type. Empty if there is nothing to claim."""
        free = executor.free()
        allowed: dict[str, int] = {}
        for type, handler in self.handlers.items():
            if handler.kind != kind or type in self.paused:
                continue
            ahead = self.room.ahead(type, executor.slots)
            # Not one by one: each claim is a commit.
            if free > 0 or free + ahead > ahead // 2:
                allowed[type] = min(self._claim_most, free + ahead)
        return {type: many for type, many in allowed.items() if many > 0}

    def _may_claim(self) -> bool:
        too_many = len(self._finishing) > MOST_UNWRITTEN * self._batch
        return bool(self.incarnation) and "" not in self.paused and not too_many

    def _claim_all(self) -> None:
        if not self._may_claim() or time.monotonic() < self._claim_not_before:
            return
        answered_at = self.counters.claimed_at
        for kind, executor in self.executors.items():
            try:
                for _ in range(MOST_CLAIMS):
                    allowed = self._allowed(kind, executor)
                    if not allowed or not self._claim_next(allowed):
                        break
            except (StatementFailed, SessionLost) as error:
                # It may have been too much for the time or the memory there is.
                self._claim_most = max(1, self._claim_most // 2)
                self._claim_not_before = time.monotonic() + FAILED_SEC
                self._fails("claiming", error)
                raise
        if self.counters.claimed_at != answered_at:
            self.failing.pop("claiming", None)

    def _fails(self, what: str, error: Exception) -> None:
        since, _ = self.failing.get(what, (time.monotonic(), ""))
        self.failing[what] = (since, str(error))

    def _claim_next(self, allowed: dict[str, int]) -> bool:
        """Claim from lanes or of keys, whichever has the more urgent, down to the other's urgency. Whether to go on."""
        now = time.monotonic()
        lanes = self._lanes.urgency(allowed, now)
        keys = math.inf if self.keyed is None else self.keyed.keys.urgency(allowed, now)
        if keys <= lanes and keys < math.inf:
            self._claim_keyed(allowed, lanes)
        else:
            self._claim(allowed, keys)
        return keys < math.inf

    def _claim_keyed(self, allowed: dict[str, int], before: float) -> None:
        incarnation = self.incarnation
        assert self.keyed is not None
        jobs = self.keyed.claim(self._session, allowed, before, incarnation)
        self._claim_most = min(self._batch, 2 * self._claim_most)
        if jobs:
            self.submit(jobs, incarnation)

    def _claim(self, allowed: dict[str, int], before: float) -> None:
        began = time.monotonic()
        walks = self._lanes.plan(allowed, began, before)
        if not walks:
            return
        most = max(walk.most for walk in walks)
        incarnation = self.incarnation
        ((answer,),) = self._session.prepared(
            self._sql.claim,
            array([walk.lane.type for walk in walks]),
            array([walk.lane.priority for walk in walks]),
            array([walk.mark[0] for walk in walks]),
            array([walk.mark[1] for walk in walks]),
            array([walk.most for walk in walks]),
            most,
            self.node_name,
            incarnation,
            *option_arrays(self.handlers, [walk.lane.type for walk in walks]),
            timeout=ANSWER_SEC,
        )
        jobs = claimed(answer)
        if len(answer or "") > MOST_CHARACTERS:
            self._claim_most = max(1, min(self._claim_most, len(jobs)) // 2)
        else:
            self._claim_most = min(self._batch, 2 * self._claim_most)
        if jobs:
            self.submit(jobs, incarnation)
        else:
            self.counters.claimed_at = time.monotonic()
        self._lanes.claimed(walks, jobs, most, began, time.monotonic())

    def _give_back_stale(self) -> None:
        """Jobs taken in advance whose slots turned out to be busy for longer are for other workers."""
        now = time.monotonic()
        if now < self._stale_at:
            return
        self._stale_at = now + STALE_LOOK_SEC
        stale = {
            attempt.handler.kind
            for attempt in list(self.under_way.values())
            if attempt.began_at is None and not attempt.over and now - attempt.claimed_at > STALE_SEC
        }
        for kind in stale:
            attempts = self.executors[kind].withdraw()
            for type in {attempt.job.type for attempt in attempts}:
                self.room.stalled(type, STALE_SEC)
            self.release(attempts)

    def _give_back_unbegun(self) -> None:
        for executor in self.executors.values():
            self.release(executor.withdraw())

    def _wait(self) -> None:
        due, chores_at = self._due_at(), min(self._chores_due())
        now = time.monotonic()
        if due <= now:
            return
        if chores_at <= now:
            self._hear(self._session.wait(0.0))
            return
        due = min(due, chores_at)
        self._asleep = True
        try:
            # A report between the look and the wait finds the flag set, and wakes.
            seconds = 0.0 if self._reports else max(0.0, due - time.monotonic())
            self._hear(self._session.wait(min(seconds, self._poll_sec)))
        finally:
            self._asleep = False

    def _due_at(self) -> float:
        """When there is something to write or to claim, unless a notification or a report comes first."""
        if self._reports:
            return 0.0
        due = [self._finishing.due_at(), self._drain_until]
        if self._stranded:
            due.append(self._restamp_at)
        if not self._draining.is_set():
            if self.under_way:
                due.append(self._stale_at)
            if self._may_claim():
                for kind, executor in self.executors.items():
                    allowed = self._allowed(kind, executor)
                    if allowed:
                        at = self._lanes.due_at(allowed)
                        if self.keyed is not None:
                            at = min(at, self.keyed.keys.due_at(allowed, time.monotonic()))
                        due.append(max(at, self._claim_not_before))
        return min(due)

    def _sleep(self, seconds: float) -> None:
        """Wait without a connection."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0 and not self._is_done():
            time.sleep(min(left, 0.05))

    # -- the end -----------------------------------------------------------------------------------------------

    def _is_done(self) -> bool:
        """Whether there is nothing left to wait for."""
        if not self._draining.is_set():
            return False
        return time.monotonic() >= self._drain_until or not (self.under_way or self._reports)

    def _leave(self) -> None:
        """Give back what has not ended, and write everything down."""
        self._give_back_unbegun()
        until = self.end_by - NODE_SEC
        # What can be ended is ended before its job is given to others; threads are told.
        now = time.monotonic()
        self._end_executors(now + max(0.0, until - now) / 2)
        self._take_reports()
        unfinished = [attempt for attempt in self.under_way.values() if not attempt.over]
        for attempt in unfinished:
            attempt.context.cancelled.set("stopping")
        self.release(unfinished)
        self._hang_until(until)
        while not self._unreachable:
            self._take_reports()
            if not len(self._finishing):
                self._say_farewell()
                return
            try:
                if not self._session.is_open and not self._connect():
                    break
                if self._finishing.due_at() <= time.monotonic():
                    self._write()
                else:
                    time.sleep(0.02)
            except (SessionLost, StatementFailed) as error:
                logger.warning("%s: %s while stopping; trying again", self.node_name, error)
                time.sleep(RECONNECT_FIRST_SEC)
            if time.monotonic() > until:
                break
        self._take_reports()
        if unwritten := len(self._finishing):
            logger.warning(
                "%s: how %d attempts ended could not be written down: they will be taken for dead, and run again",
                self.node_name,
                unwritten,
            )

    def _end_executors(self, until: float) -> None:
        """All at once, and without those that take longer."""
        ending = []
        for executor in self.executors.values():
            thread = threading.Thread(target=self._end_executor, args=(executor,), name="jobsync-ending", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # the system has no more of them
                self._end_executor(executor)
            else:
                ending.append(thread)
        for thread in ending:
            thread.join(max(0.0, until - time.monotonic()))

    def _end_executor(self, executor: Executor) -> None:
        try:
            executor.stop(0)
        except Exception:
            # What has ended is written down in any case.
            logger.exception("%s: an executor did not stop in order", self.node_name)

    def _say_farewell(self) -> None:
        if not self._session.is_open:
            return  # others will notice
        try:
            for farewell in self.farewells:
                farewell(self._session)
        except (SessionLost, StatementFailed) as error:
            logger.warning("%s: %s while stopping", self.node_name, error)
        self.left_in_order = self._session.is_open


def _tell_failed(job: ClaimedJob, ending: Ending) -> None:
    what = f"job {job.id} ({job.type}), attempt {job.attempt}: {ending.error}"
    if ending.state is JobState.FAILED:
        logger.error("%s; it has failed for good%s", what, f"\n{ending.traceback}" if ending.traceback else "")
    else:
        logger.warning("%s; again in %.3g s", what, ending.delay or 0)


def _no_look(at: float) -> None:
    """A queue's connection proves nothing about ownership."""
