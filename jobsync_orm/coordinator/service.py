"""The one background loop of a node: one thread, one connection.

Each turn waits for a notification, a wake-up or the next thing that is due, and then does what is due, in this order:
heartbeat, refresh, release, evict, plan. Any failed statement gives up that turn, never the loop; a broken connection
is made anew for as long as the job runs. Nothing of the user's runs here.
"""

from __future__ import annotations

import logging
import os
import random
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

from jobsync_orm.config import CoordinationConfig
from jobsync_orm.coordinator.admission import Admission, refusal
from jobsync_orm.coordinator.callbacks import Callback
from jobsync_orm.coordinator.clock import SYSTEM, Clock
from jobsync_orm.coordinator.entering import Entering
from jobsync_orm.coordinator.handoff import Handoff
from jobsync_orm.coordinator.history import History
from jobsync_orm.coordinator.leadership import Leadership, Outcome
from jobsync_orm.coordinator.membership import Membership
from jobsync_orm.coordinator.observation import Observer, Seen
from jobsync_orm.coordinator.session import Session, SessionLost, StatementFailed
from jobsync_orm.coordinator.statements import Statements
from jobsync_orm.coordinator.view import Ownership
from jobsync_orm.coordinator.waker import Waker
from jobsync_orm.exceptions import JobsyncError, NodeNameInUse, NotRunning
from jobsync_orm.logs import fields
from jobsync_orm.observe import Audience, Evicted, FailedOver, Heartbeat, NodesTakenForDead, Rebalanced, SessionBroke

__all__ = ["Coordinator"]

logger = logging.getLogger("jobsync_orm")

# Between a freed lock and its conviction the watcher looks this often.
SUSPECT_SEC = 0.25

# The look that can convict is made this much after the time that must have passed.
VERDICT_SEC = 0.001

# The next in line looks at the leader's lock this much less often than the leader looks at everybody's: together they
# stay within the load of a cluster that does nothing.
NEXT_IN_LINE = 1.5

RECONNECT_FIRST_SEC, RECONNECT_MOST_SEC = 0.05, 1.0

# After a statement failed, the same turn is tried again after this time.
FAILED_SEC = 0.5

# While a node waits for its database to enter, its log says so this often.
SAY_SEC = 30.0

# Longest a leaving node goes on trying to reach a database that does not answer.
LEAVE_SEC = 5.0


class Coordinator:
    """Runs one node of the cluster.

    Parameters
    ----------
    config : CoordinationConfig
        The settings.
    node_name : str
        This node.
    on_rebalance, on_revoke : callable, optional
        The user's callbacks.
    audience : Audience, optional
        Who is told what happens.
    clock, make_session, make_callback
        The loop's time, its connection, and what runs the user's callbacks. Replaced where several nodes run in one
        thread on simulated time.
    """

    def __init__(
        self,
        config: CoordinationConfig,
        node_name: str,
        on_rebalance: Callable[..., Any] | None = None,
        on_revoke: Callable[..., Any] | None = None,
        *,
        audience: Audience | None = None,
        clock: Clock = SYSTEM,
        make_session: Callable[[CoordinationConfig, int, Callable[[float], None], float, str], Session] | None = None,
        make_callback: Callable[[str, Callable[..., Any], Callable[[], None]], Callback] = Callback,
    ) -> None:
        self._clock = clock
        self._config = config
        self._name = node_name
        self._audience = audience or Audience()
        self.ownership = Ownership(config.total_tokens, config.certainty_wait_sec)
        self._sql = Statements(config.names)
        self._waker = Waker()
        self._on_rebalance = make_callback("on_rebalance", on_rebalance, self.wake) if on_rebalance else None
        self._on_revoke = make_callback("on_revoke", on_revoke, self.wake) if on_revoke else None
        self._tick_sec = config.connection_grace_sec / 3
        self._admission = Admission(config, node_name, self._sql)
        self._session = (make_session or _session)(
            config, self._waker.descriptor, self._look, self._tick_sec, self._admission.setup_sql()
        )
        self._membership = Membership(config, node_name, self._sql, clock)
        self._history = History(self._sql, node_name, config.heartbeat_timeout_sec, self._membership.answer_sec)
        self._handoff = Handoff(
            self._sql,
            self._membership,
            self.ownership,
            config.drain_timeout_sec,
            self._on_rebalance,
            self._on_revoke,
            clock,
            self._audience,
        )
        self._observer = Observer(2 * config.heartbeat_interval_sec + 1, config.trust_freed_locks)
        self._leadership = Leadership(
            config.names,
            self._sql,
            node_name,
            config.drain_timeout_sec,
            clock,
        )
        # The margin covers clocks that run at different rates, and a reader that is slow to read its clock.
        self._lease_sec = config.heartbeat_timeout_sec - max(0.2, config.heartbeat_interval_sec / 5)
        self._lease_until = 0.0
        self._looked_at = 0.0  # when the connection was last seen without a sign of a break
        self._certain = False  # this session has refreshed the view, and has not broken
        self._asked_at = 0.0
        self._seen: list[Seen] = []
        self._dead_since: list[float] = []  # of nodes this one has evicted, and whose tokens are not others' yet
        self._next_beat = 0.0
        self._refresh_due = False
        self._stop = threading.Event()
        self._entering = Entering(config, node_name, clock)
        self._ended = threading.Event()
        self._failure: BaseException | None = None
        self._say_at = 0.0
        self._state = "new"
        self.live_nodes = 0
        self.drained = False  # by an operator, as far as the last heartbeat knew
        self.last_beat_at: float | None = None  # time.time() of the last acknowledged heartbeat, for people
        self._starting = threading.Lock()
        self._thread = threading.Thread(target=self._run, name=f"jobsync-{node_name}"[:40], daemon=True)
        _running.add(self)

    # -- for the application's threads -------------------------------------------------------------------------

    @property
    def incarnation(self) -> str:
        """This life of the node."""
        return self._membership.incarnation

    @property
    def leads(self) -> bool:
        """Whether this node leads, as far as its last heartbeat knew."""
        return self._certain and self._leadership.leads

    @property
    def epoch(self) -> int:
        """The highest epoch of the cluster that this process has seen."""
        return self._history.known_epoch

    @property
    def lease_left_sec(self) -> float:
        """Seconds for which the last answered heartbeat still lets this node say yes; 0 if it does not."""
        return max(0.0, self._lease_until - self._clock.now())

    @property
    def healthy(self) -> bool:
        """Whether this node may say yes to its tokens now."""
        return self._certain and self._clock.now() < self._lease_until and self._thread.is_alive()

    @property
    def state(self) -> str:
        """``new``, ``joining``, ``active``, ``reconnecting``, ``leaving`` or ``stopped``."""
        return self._state

    def start(self, wait_sec: float) -> None:
        """Start the loop and wait until this node is a full member.

        Raises
        ------
        TimeoutError
            Fewer than ``minimum_nodes`` are there, no leader has planned, or the database has not been reached,
            within ``wait_sec``.
        JobsyncError
            Any reason why this node may not join.
        """
        self._entering.deadline = self._clock.now() + wait_sec
        with self._starting:
            if not self._stop.is_set():
                self._state = "joining"
                self._thread.start()
        if self._thread.ident is not None:
            self._entering.done.wait()
        if self._failure is not None:
            raise self._failure
        if self._stop.is_set():
            raise NotRunning(f"{self._name} was stopped while it was starting")
        first = self._handoff.first_rebalance
        if first is not None:
            # Do not hand out tasks before the application has heard of its tokens; nor wait for it without end.
            left = self._entering.deadline - self._clock.now()
            first.done.wait(max(0.0, min(left, self._config.callback_timeout_sec)))

    def give_up(self) -> None:
        """Make the loop end, without waiting for it."""
        self._stop.set()
        self.wake()

    def stop(self) -> None:
        """Leave the cluster and end the loop. Returns once the tokens are without owner, or a deadline has passed."""
        self.give_up()
        with self._starting:
            started = self._thread.ident is not None
        if not started:
            self._state = "stopped"
            self._waker.close()
        elif self._thread is not threading.current_thread():
            most = self._config.callback_timeout_sec + self._membership.answer_sec + LEAVE_SEC + 1
            if not self._ended.wait(most):
                logger.warning(
                    "%s: the loop has not ended after %.0f s; going on without it",
                    self._name,
                    most,
                    extra=self._about("loop_hangs"),
                )
        for callback in (self._on_rebalance, self._on_revoke):
            if callback is not None:
                callback.finish(self._config.callback_timeout_sec)

    def wake(self) -> None:
        """Make the loop look up."""
        self._waker.wake()

    # -- the loop ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        backoff = RECONNECT_FIRST_SEC
        try:
            while not self._stop.is_set():
                try:
                    self._connect()
                    backoff = RECONNECT_FIRST_SEC
                    self._serve()
                except SessionLost as lost:
                    self._entering.unreachable = str(lost)
                    self._lost(lost)
                except StatementFailed as failed:
                    self._entering.unreachable = str(failed)
                    self._lost(failed)
                except Exception as error:
                    if not self._entering.done.is_set():
                        raise
                    logger.exception(
                        "%s: coordination failed; trying again",
                        self._name,
                        extra=self._about("coordination_failed"),
                    )
                    self._lost(error)
                if not self._stop.is_set():
                    self._pause(backoff * random.uniform(0.5, 1.0))
                    backoff = min(2 * backoff, RECONNECT_MOST_SEC)
        except BaseException as error:
            if self._entering.done.is_set() or not isinstance(error, JobsyncError | TimeoutError):
                logger.exception(
                    "%s: coordination has failed",
                    self._name,
                    extra=self._about("coordination_failed"),
                )
            self._failure = error
        finally:
            try:
                self._leave()
            finally:
                self._state = "stopped"
                self._certain = False
                self.ownership.clear()
                self._session.close()
                self._waker.close()
                self._entering.done.set()
                self._ended.set()

    def _pause(self, seconds: float) -> None:
        """Wait without a connection."""
        until = self._clock.now() + seconds
        while not self._stop.is_set() and (left := until - self._clock.now()) > 0:
            if self._clock.now() >= self._lease_until:
                self.ownership.deny()
            self._clock.wait(self._stop, min(left, self._tick_sec))
        self._check_deadline(connected=False)

    def _lost(self, why: Exception) -> None:
        """The session is gone: whether this node still owns anything is open until it is back."""
        self._certain = False
        self.ownership.doubt()
        if self._clock.now() >= self._lease_until:
            self.ownership.deny()
        self._session.close()
        self._observer.reset()
        self._leadership.forget()
        self._dead_since = []
        self._audience.tell(SessionBroke(self._name))
        if self._state == "active":
            logger.warning(
                "%s: %s; reconnecting",
                self._name,
                why,
                extra=self._about("connection_lost"),
            )
            self._state = "reconnecting"

    def _connect(self) -> None:
        """Open a session, and be a member on it."""
        first = self._session.pid == 0
        try:
            self._session.open()
        except SessionLost as lost:
            if first and (refused := refusal(lost, self._config)) is not None:
                raise refused from lost
            if first and self._clock.now() >= self._say_at:
                self._say_at = self._clock.now() + SAY_SEC
                left = self._entering.deadline - self._clock.now()
                logger.warning(
                    "%s: %s; trying again for up to %.0f s (wait_on_enter)",
                    self._name,
                    lost,
                    left,
                    extra=self._about("waiting_for_database"),
                )
            raise
        self._admission.check(self._session, self._membership.answer_sec)
        self._history.settle(self._session)
        if self._membership.incarnation:
            # Until the server has freed the lock of the session before, this node must not say yes; and if another
            # process has taken the name, the heartbeat will not find this life of the node.
            while not self._membership.hold_lock(self._session) and not self._stop.is_set():
                self._check_taken()
                self._session.wait(SUSPECT_SEC)
            if not self._beat():
                self._evicted()
        if not self._membership.incarnation:
            self._register()

    def _register(self) -> None:
        deadline = self._entering.deadline if not self._entering.done.is_set() else float("inf")
        while not self._stop.is_set():
            try:
                if self._membership.register(self._session, deadline, self._stop.is_set, self._history.is_told):
                    self._refresh_due = True
                    self._beat()
                    return
            except NodeNameInUse as error:
                if not self._entering.done.is_set():
                    raise
                # It was this node's name before it was evicted; the other process has it now.
                logger.error(
                    "%s; this process owns nothing until that one is gone",
                    error,
                    extra=self._about("name_taken"),
                )
                self._session.wait(self._config.heartbeat_timeout_sec)

    def _check_taken(self) -> None:
        """The lock is not to be had: see whether this life of the node is over, without prolonging its lease."""
        rows = self._session.execute(self._sql.find, self._name, timeout=self._membership.answer_sec)
        if not rows or rows[0][0] != self._membership.incarnation:
            self._evicted()
            raise SessionLost("another process has taken this node's name")

    def _serve(self) -> None:
        """Turn after turn on an open session."""
        names = self._config.names
        mine, everyones = names.node_channel(self._name), names.cluster_channel
        if not self._membership.incarnation:
            return
        self._refresh_due = True
        while not self._stop.is_set():
            try:
                at = self._clock.now()
                if at >= self._next_beat and not self._beat():
                    self._evicted()
                    self._register()
                if self._clock.now() >= self._handoff.refresh_at:
                    self._refresh_due = True
                if self._refresh_due and not self._refresh():
                    self._evicted()
                    self._register()
                    continue
                ready = self._clock.now() >= self._handoff.release_at or self._handoff.revoked
                if ready and self._handoff.release(self._session):
                    self._refresh_due = True
                self._lead()
                self._check_entered()
            except (SessionLost, TimeoutError):
                raise
            except Exception as error:
                if isinstance(error, JobsyncError) and not self._entering.done.is_set():
                    raise
                if isinstance(error, StatementFailed):
                    logger.warning(
                        "%s: %s; trying again",
                        self._name,
                        error,
                        extra=self._about("statement_failed"),
                    )
                else:  # a defect of ours must not end a node's heartbeats, and with them its work
                    logger.exception(
                        "%s: this turn of coordination failed; trying again",
                        self._name,
                        extra=self._about("coordination_failed"),
                    )
                self._session.wait(FAILED_SEC)
                self._check_deadline(connected=True)
                continue
            if self._refresh_due:
                continue
            turns = (self._next_beat, self._handoff.refresh_at, self._handoff.release_at, self._leadership.plan_at)
            due = min(*turns, self._entering.look_again_at(self.live_nodes))
            heard = self._session.wait(max(0.0, due - self._clock.now()))
            if everyones in heard and (self._leadership.is_in_line or not self._entering.done.is_set()):
                self._next_beat = 0.0
            if mine in heard:
                self._refresh_due = True

    def _beat(self) -> bool:
        """One heartbeat. False if this life of the node is over."""
        leads, watches = self._leadership.leads, self._leadership.is_next
        applied = self._handoff.known_epoch
        beat = self._membership.beat(self._session, applied, everyone=leads, locks=leads or watches)
        if beat.epoch < self._history.known_epoch:
            # The database has been put back to an older state under a connection that works.
            self._history.settle(self._session)
            return False
        self._history.see(beat.epoch)
        if beat.state is None:
            return False
        if self._audience.active:
            self._audience.tell(Heartbeat(self._name, beat.received_at - beat.sent_at))
        self._seen = beat.seen
        self._observer.look(beat.seen, beat.sent_at, beat.received_at, self._history.is_told)
        self._leadership.heard(beat.oldest, beat.revisions)
        if not self._leadership.leads:
            self._dead_since = []
        self.live_nodes, self.drained = beat.members, beat.drained
        self._lease_until = beat.sent_at + self._lease_sec
        self._asked_at = beat.sent_at
        self.last_beat_at = time.time()
        # An answer shows that the connection worked when the question was sent.
        self._look(beat.sent_at)
        if beat.epoch != self._handoff.known_epoch or self._handoff.coming:
            # The lease is renewed for the view as the database has it now; see to it that this is the view.
            self._refresh_due = True
        self._next_beat = self._clock.now() + self._beat_gap()
        if self._leadership.leads != leads or self._leadership.is_next != watches:
            self._next_beat = 0.0  # with the rows and locks that the new part needs
        return True

    def _beat_gap(self) -> float:
        config = self._config
        if self._observer.suspects and (self._leadership.leads or self._leadership.is_next):
            gap = min(SUSPECT_SEC, config.lock_watch_interval_sec)
            # The look that convicts is not to be late.
            left = self._observer.verdict_at(self._asked_at) + VERDICT_SEC - self._clock.now()
            return min(gap, max(0.0, left))
        if self._leadership.leads:
            return min(config.lock_watch_interval_sec, config.heartbeat_interval_sec)
        if self._leadership.is_next:
            return min(NEXT_IN_LINE * config.lock_watch_interval_sec, config.heartbeat_interval_sec)
        return config.heartbeat_interval_sec

    def _refresh(self) -> bool:
        found = self._handoff.refresh(self._session, self._valid_until, self._history.known_epoch)
        if found.epoch < self._history.known_epoch:
            self._history.settle(self._session)
        if found.state is None:
            return False
        self._history.see(found.epoch)
        self._refresh_due = False
        self._certain = True
        if self._entering.done.is_set():
            self._state = "active"
        self._entering.refreshed(found)
        return True

    def _lead(self) -> None:
        """Evict whom the evidence convicts; plan when a plan is due."""
        wards = self._leadership.wards(seen.name for seen in self._seen)
        dead = self._observer.dead(self._asked_at, wards)
        if dead:
            gone = self._leadership.evict(self._session, dead)
            if gone:
                logger.warning(
                    "%s: taken for dead: %s",
                    self._name,
                    ", ".join(sorted(gone)),
                    extra=self._about("nodes_taken_for_dead"),
                )
                self._audience.tell(NodesTakenForDead(self._name, len(gone)))
                self._dead_since += [e.since for e in dead if e.name in gone and e.since is not None]
            self._next_beat = 0.0
        if self._leadership.leads and self._clock.now() >= self._leadership.plan_at:
            known, began = self._history.known_epoch, self._clock.now()
            outcome = self._leadership.plan(self._session, self._membership.incarnation, known)
            if outcome is not None:
                self._tell_planned(outcome, began)
                self._history.see(outcome.epoch)
                logger.info(
                    "%s: plan of epoch %d moves %d tokens",
                    self._name,
                    outcome.epoch,
                    outcome.moved,
                    extra=fields("rebalanced", self._name, outcome.epoch),
                )
                self._refresh_due = True

            elif self._leadership.plan_at > self._clock.now() + FAILED_SEC:  # nothing was to be done for the dead
                self._dead_since = []

    def _tell_planned(self, outcome: Outcome, began: float) -> None:
        if not outcome.moved:
            return
        dead_since, self._dead_since = self._dead_since, []
        if self._audience.active:
            now = self._clock.now()
            moved = Rebalanced(self._name, outcome.epoch, outcome.reason, outcome.moved, now - began)
            self._audience.tell(moved)
            for since in dead_since:
                self._audience.tell(FailedOver(self._name, now - since))

    def _about(self, event: str) -> dict[str, Any]:
        return fields(event, self._name, self._handoff.known_epoch)

    # -- certainty ---------------------------------------------------------------------------------------------

    def _valid_until(self) -> float:
        return min(self._lease_until, self._looked_at + self._config.connection_grace_sec)

    def _look(self, at: float) -> None:
        """The connection showed no sign of a break at this time."""
        self._looked_at = max(self._looked_at, at)
        if self._certain and (until := self._valid_until()) > self._clock.now():
            self.ownership.extend(until)
        # Else the view has lapsed by itself, and readers wait for what the next answer says.

    def _evicted(self) -> None:
        logger.warning(
            "%s was taken for dead, or the cluster was formed anew; its tokens are gone, joining anew",
            self._name,
            extra=self._about("evicted"),
        )
        self._certain = False
        self._audience.tell(Evicted(self._name))
        self._dead_since = []
        self._membership.incarnation = ""
        self._leadership.forget()
        self._handoff.lose_all()

    # -- entering and leaving ----------------------------------------------------------------------------------

    def _check_entered(self) -> None:
        if self._entering.done.is_set():
            return
        if self._entering.may(self.live_nodes):
            self._state = "active"
            self._entering.done.set()
        else:
            self._check_deadline(connected=True)

    def _check_deadline(self, *, connected: bool) -> None:
        if self._stop.is_set() or not self._entering.is_late():
            return
        if not connected:
            raise self._entering.no_database()
        raise self._entering.no_entry(self._membership.members(self._session))

    def _leave(self) -> None:
        """Say no, let on_revoke run, hand everything over, end."""
        self._state = "leaving"
        if not self._membership.incarnation:
            return
        delivery = self._handoff.revoke_all()
        self._certain = False
        if delivery is not None:
            self._clock.wait(delivery.done, self._config.callback_timeout_sec)
        until = self._clock.now() + LEAVE_SEC
        while self._clock.now() < until:
            try:
                if not self._session.is_open:
                    self._session.open()
                self._membership.leave(self._session)
                return
            except (SessionLost, StatementFailed) as error:
                logger.warning(
                    "%s: %s while leaving; trying again",
                    self._name,
                    error,
                    extra=self._about("leave_failed"),
                )
                self._clock.sleep(RECONNECT_FIRST_SEC)
        logger.warning(
            "%s could not tell the database that it leaves; it will be taken for dead",
            self._name,
            extra=self._about("leave_failed"),
        )


def _session(
    config: CoordinationConfig, wake_fd: int, on_look: Callable[[float], None], tick_sec: float, setup: str
) -> Session:
    return Session(config.connection_pool(), wake_fd, on_look, tick_sec, setup)


def _forget_in_child() -> None:
    """A forked child has no loop: it owns nothing, and leaves the parent's connection alone."""
    for coordinator in list(_running):
        coordinator.ownership = Ownership(coordinator._config.total_tokens, 0)
        coordinator.ownership.doubt()  # so that whoever asks gets to where it is said that this is a fork
        coordinator._certain = False
        coordinator._state = "stopped"
        # New ones: the parent's may have been locked at the moment of the fork.
        coordinator._ended, coordinator._entering.done = threading.Event(), threading.Event()
        coordinator._ended.set()
        coordinator._entering.done.set()


_running: weakref.WeakSet[Coordinator] = weakref.WeakSet()
os.register_at_fork(after_in_child=_forget_in_child)
