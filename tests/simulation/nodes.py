"""One worker process: the real coordinator in a greenlet, its clock, and an application that works on its tokens."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

import greenlet

from jobsync_orm.config import CoordinationConfig
from jobsync_orm.coordinator import Coordinator
from jobsync_orm.coordinator.callbacks import Delivery
from jobsync_orm.coordinator.clock import Clock
from tests.simulation.server import Connection, Server
from tests.simulation.session import SimSession

if TYPE_CHECKING:
    from tests.simulation.scheduler import Scheduler

__all__ = ["Killed", "SimNode"]


# Of the values in a view, only 1 is a yes.
SAYS_YES = bytes(int(value == 1) for value in range(256))


class Killed(BaseException):
    """Raised inside a process that is killed, so that its greenlet ends."""


class SimClock(Clock):
    """A node's clock: it runs at a rate of its own, also while the process is stopped."""

    def __init__(self, node: SimNode, rate: float, offset: float) -> None:
        self._node = node
        self._rate = rate
        self._offset = offset

    def read(self) -> float:
        return self._offset + self._rate * self._node.scheduler.time

    def when(self, local: float) -> float:
        """The true time at which this clock shows ``local``."""
        return (local - self._offset) / self._rate

    def now(self) -> float:
        node = self._node
        if node.dead:
            return float("inf")
        value = self.read()
        node.maybe_stall()
        return value

    def wait(self, event: threading.Event, seconds: float) -> bool:
        until = self.read() + seconds
        while not event.is_set() and self.read() < until and not self._node.dead:
            self._node.block(until)
        return event.is_set()

    def sleep(self, seconds: float) -> None:
        self.wait(threading.Event(), seconds)


class SimCallback:
    """The user's on_revoke: returns after a while."""

    def __init__(self, node: SimNode, after: Callable[[], None]) -> None:
        self._node = node

    def send(self, event: object) -> Delivery:
        delivery = Delivery(event)
        self._node.scheduler.after(self._node.revoke_takes(), self._done, delivery)
        return delivery

    def _done(self, delivery: Delivery) -> None:
        delivery.done.set()
        self._node.woken = True
        self._node.wakeup()


class SimNode:
    """One process. It runs from ``start`` until it has left, failed or been killed.

    Parameters
    ----------
    scheduler, server
        The world it lives in.
    name : str
        The node's name; two processes may have the same one.
    title : str
        Unique, for messages.
    config : CoordinationConfig
        The settings.
    rng : random.Random
        For what is random about it.
    rate : float
        Seconds its clock shows in a true second.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        server: Server,
        name: str,
        title: str,
        config: CoordinationConfig,
        rng: random.Random,
        rate: float,
    ) -> None:
        self.scheduler = scheduler
        self.server = server
        self.name = name
        self.title = title
        self.rng = rng
        self.clock = SimClock(self, rate, 1000.0 * rng.random())
        self.dead = self.woken = False
        self.cut_off_since: float | None = None  # packets to and from it are lost
        self.paused = False  # the whole process
        self.starved = False  # the loop only; the application's threads run
        self.stall: tuple[int, float, bool] | None = None  # after so many readings of the clock, for so long, all of it
        self.grants: dict[int, int] = {}  # as of the refresh that was answered last
        self.on_step: Callable[[SimNode, str, str], None] | None = None
        self.session: SimSession = None  # type: ignore[assignment]
        self.connections: list[Connection] = []  # those that may still be of interest
        self._hub = greenlet.getcurrent()
        self._greenlet = greenlet.greenlet(self._live)
        self._blocked = self._frozen = self._pending = False
        self._timer = 0
        self.coordinator = Coordinator(
            config,
            name,
            on_revoke=lambda: None,
            clock=self.clock,
            make_session=self._make_session,  # type: ignore[arg-type]
            make_callback=lambda name, function, after: SimCallback(self, after),  # type: ignore[arg-type, return-value]
        )
        self._tick_sec = config.connection_grace_sec / 3

    def _make_session(
        self, config: CoordinationConfig, wake_fd: int, on_look: Callable[[float], None], tick_sec: float, setup: str
    ) -> SimSession:
        self.session = SimSession(self, on_look, tick_sec, setup)
        return self.session

    def revoke_takes(self) -> float:
        """Seconds the user's on_revoke takes."""
        draw = 0.0 if self.server.network.calm else self.rng.random()
        return 0.01 if draw < 0.7 else 2.5 * (draw - 0.7) / 0.3

    # -- its life ----------------------------------------------------------------------------------------------

    def start(self) -> None:
        self.coordinator._entering.deadline = self.clock.read() + 1000
        self.coordinator._state = "joining"
        self.scheduler.after(self._tick_sec * self.rng.random(), self._tick)
        self._greenlet.switch()

    def _live(self) -> None:
        with contextlib.suppress(Killed):
            self.coordinator._run()
        self.dead = True

    @property
    def failure(self) -> BaseException | None:
        """Why it has ended, if not by leaving."""
        return self.coordinator._failure

    @property
    def running(self) -> bool:
        """Whether its threads can run at this moment."""
        return not self.dead and not self.paused

    @property
    def cut_off(self) -> bool:
        """Whether its packets are lost at this moment."""
        return self.cut_off_since is not None

    @property
    def _stopped(self) -> bool:
        """Whether its loop cannot run at this moment."""
        return self.paused or self.starved

    def _tick(self) -> None:
        if self.dead:
            return
        if not self._stopped and self._blocked:
            self.session.tick()
        self.scheduler.after(self._tick_sec, self._tick)

    def block(self, until: float) -> None:
        """Called by the process: sleep until its clock shows ``until``, or something has happened."""
        if self.dead:
            raise Killed
        self._timer += 1
        self._blocked = True
        if until < 1e12:
            self.scheduler.at(self.clock.when(until) + 1e-9, self._time_out, self._timer)
        self._hub.switch()

    def _time_out(self, timer: int) -> None:
        if self._blocked and timer == self._timer:
            self.wakeup()

    def wakeup(self) -> None:
        """Something has happened that the process waits for."""
        if not self.dead and self._blocked and not self._pending:
            self._pending = True
            if not self._stopped:
                self.scheduler.after(0, self._continue)

    def _continue(self) -> None:
        if not self.dead and not self._stopped and self._pending:
            self._pending = self._blocked = False
            self._greenlet.switch()

    # -- what happens to it ------------------------------------------------------------------------------------

    def pause(self, seconds: float, *, whole: bool = True) -> None:
        """SIGSTOP, and SIGCONT after a while; or, if not ``whole``, its loop gets no turn. Its clock goes on."""
        if self.dead or self._stopped:
            return
        self.paused, self.starved = whole, not whole
        looked_at = self.clock.read() if self._blocked and self.rng.random() < 0.5 else None
        self.scheduler.after(seconds, self._resume, looked_at)

    def _resume(self, looked_at: float | None) -> None:
        if self.dead or not self._stopped:
            return
        self.paused = self.starved = False
        if self._frozen:
            self._frozen = False
            self._greenlet.switch()
            return
        if looked_at is not None and self.session.is_open:
            self.session._on_look(looked_at)  # it was stopped between the look and the call
        if self._pending:
            self.scheduler.after(0, self._continue)

    def resume_now(self) -> None:
        self._resume(None)

    def maybe_stall(self) -> None:
        """Stop here, in the middle of the code, if it has been so arranged."""
        if self.stall is None or greenlet.getcurrent() is not self._greenlet:
            return
        readings, seconds, whole = self.stall
        if readings > 0:
            self.stall = (readings - 1, seconds, whole)
            return
        self.stall = None
        self.freeze(seconds, whole=whole)

    def freeze(self, seconds: float, *, whole: bool = True) -> None:
        """Called by the process: be stopped right here."""
        self.paused, self.starved, self._frozen = whole, not whole, True
        self.scheduler.after(seconds, self._resume, None)
        self._hub.switch()
        if self.dead:
            raise Killed

    def step(self, statement: str, phase: str) -> None:
        """Called by the process around each statement."""
        if self.on_step is not None:
            self.on_step(self, statement, phase)

    def kill(self) -> None:
        """SIGKILL. The kernel closes its connection."""
        if self.dead:
            return
        self.dead = True
        if self.session.connection is not None:
            self.session.connection.close()
        if greenlet.getcurrent() is self._greenlet:
            raise Killed
        if self._greenlet:
            self._greenlet.throw(Killed)

    def leave(self) -> None:
        """The job is stopped in the regular way."""
        self.coordinator.give_up()
        self.woken = True
        self.wakeup()

    def lose_packets(self, lost: bool) -> None:
        """From now on nothing gets through, or everything again."""
        if self.cut_off == lost:
            return
        self.cut_off_since = self.scheduler.time if lost else None
        if not lost:
            for connection in self.connections:
                connection.packets_arrive_again()
            self.connections = [connection for connection in self.connections if connection.alive]
            self.wakeup()

    # -- what it says ------------------------------------------------------------------------------------------

    def saying_yes(self) -> int:
        """The tokens it says yes to now, one byte for each; 0 while it cannot run."""
        view = self.coordinator.ownership.view
        if not view.count or self.dead or self.paused or self.clock.read() >= view.valid_until:
            return 0
        return int.from_bytes(view.owned.translate(SAYS_YES), "little")

    def says_yes(self, token: int) -> bool:
        return self._sure_of(token) == 1

    def may_finish(self, token: int) -> bool:
        """Whether it owns this token, be it only to finish what it has begun."""
        return self._sure_of(token) in (1, 2)

    def _sure_of(self, token: int) -> int:
        view = self.coordinator.ownership.view
        return view.owned[token] if self.running and self.clock.read() < view.valid_until else 0
