"""One run: nodes, server, application and faults, from a seed.

The same seed and the same faults give the same run, step by step. After the last fault everything heals; then, within
a bound, every token must have an owner that says yes to it, and the load must be balanced.
"""

from __future__ import annotations

import contextlib
import logging
import random
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import pytest

from jobsync_orm.config import CoordinationConfig
from jobsync_orm.coordinator import Coordinator, membership
from jobsync_orm.coordinator.pinning import allowed_nodes
from jobsync_orm.coordinator.statements import Statements
from jobsync_orm.exceptions import NodeNameInUse
from jobsync_orm.planner import Member, plan
from tests.simulation import faults as faults_module
from tests.simulation.application import Application
from tests.simulation.faults import Fault
from tests.simulation.invariants import Ledger, Violation
from tests.simulation.nodes import Killed, SimNode
from tests.simulation.scheduler import Scheduler
from tests.simulation.server import Call, Server
from tests.simulation.store import Backend, Pin, Store

__all__ = ["Outcome", "Weakening", "World", "simulate", "surroundings"]

logger = logging.getLogger("jobsync_orm")

FAULTS_SEC = 20.0
# A plan that nothing announces is made every 30 s (RECONCILE_SEC); a dead node is found in less than 10.
SETTLED_WITHIN_SEC = 45.0
NAMES = "abcdefghijklmnop"


@dataclass(frozen=True)
class Weakening:
    """Safeguards switched off: of the statements, of the fence, and in each coordinator."""

    statements: tuple[str, ...] = ()
    fence: str = "full"
    mix: Mapping[str, int] | None = None  # of the faults, where the usual one seldom meets what is looked for
    coordinator: Callable[[Coordinator], None] = field(default=lambda coordinator: None)


class _Errors(logging.Handler):
    """Catches what the loop survives but should never have met."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, Violation):
            raise error
        if error is not None and not isinstance(error, Killed | NodeNameInUse):
            self.found.append(f"{record.getMessage()}: {error!r}")


@contextlib.contextmanager
def surroundings(seed: int) -> Iterator[_Errors]:
    """Randomness and names of this process by ``seed``, and the coordinator's log at hand."""
    state, level, propagate = random.getstate(), logger.level, logger.propagate
    errors, made = _Errors(), random.Random(seed)
    random.seed(seed)
    patch = pytest.MonkeyPatch()
    patch.setattr(membership.uuid, "uuid4", lambda: uuid.UUID(int=made.getrandbits(128)))
    patch.setattr(membership.os, "getpid", lambda: 1)
    patch.setattr(membership.socket, "gethostname", lambda: "here")
    patch.setattr(membership, "_version", lambda: "0")  # takes longer than the rest of making a node
    logger.addHandler(errors)
    logger.setLevel(logging.ERROR)
    logger.propagate = False
    try:
        yield errors
    finally:
        logger.removeHandler(errors)
        logger.setLevel(level)
        logger.propagate = propagate
        patch.undo()
        random.setstate(state)


class World:
    """Everything of one run.

    Parameters
    ----------
    seed : int
        Decides everything that is random.
    weakening : Weakening
        What is switched off.
    traced : bool
        Keep a trace, in ``trace``.
    trust_freed_locks, rejoin_grace_sec, total_tokens
        The cluster's settings.
    """

    def __init__(
        self,
        seed: int,
        weakening: Weakening,
        *,
        traced: bool = False,
        trust_freed_locks: bool = True,
        rejoin_grace_sec: float = 0,
        total_tokens: int = 8,
    ) -> None:
        self.total_tokens = total_tokens
        self.trace: list[str] | None = [] if traced else None
        self._weakening = weakening
        self._seed = seed
        self._rng = random.Random(seed)
        self.config = CoordinationConfig(
            url="postgresql+psycopg://nobody@nowhere/none",
            total_tokens=total_tokens,
            heartbeat_interval_sec=1,
            heartbeat_timeout_sec=4,
            connection_grace_sec=0.6,
            drain_timeout_sec=1,
            rejoin_grace_sec=rejoin_grace_sec,
            lock_watch_interval_sec=0.7,
            trust_freed_locks=trust_freed_locks,
            callback_timeout_sec=2,
        )
        self.scheduler = Scheduler()
        self.ledger = Ledger(total_tokens)
        rate = self._rate()
        self.store = Store(self.config.names, total_tokens, lambda: rate * self.scheduler.time, weakening.statements)
        self.store.on_token = self.ledger.on_token
        self.store.on_refresh = self._refreshed
        self.server = Server(self.scheduler, self.store, random.Random(seed + 1), prompt=trust_freed_locks)
        if traced:
            self.server.log = self.log
        self.server.on_executed = self._executed
        self.application = Application(self, random.Random(seed + 2), weakening.fence)
        self.on_step: Callable[[SimNode, str, str], None] | None = None  # around each statement, in the process
        self.nodes: list[SimNode] = []
        self._count = 0
        self.server_life = object()
        self._standby = [self.store.now.snapshot()]
        self._replicate()
        self._grants: dict[int, int] = {}

    def _rate(self) -> float:
        """Clocks differ by at most one in a hundred; the lease's margin is five in a hundred."""
        return 1 + 0.005 * self._rng.uniform(-1, 1)

    def log(self, text: str, *values: object) -> None:
        if self.trace is not None:
            self.trace.append(f"{self.scheduler.time:9.4f}  {text % values if values else text}")

    # -- nodes -------------------------------------------------------------------------------------------------

    def start(self, name: str | None = None) -> SimNode:
        """A new process, under a new name if none is given."""
        self._count += 1
        number = self._count
        name = name or f"n{number}"
        rng = random.Random(1000 * self._seed + number)
        node = SimNode(self.scheduler, self.server, name, f"{name}#{number}", self.config, rng, self._rate())
        self._weakening.coordinator(node.coordinator)
        node.on_step = self.on_step
        self.nodes.append(node)
        self.log("%s starts", node.title)
        node.start()
        self.application.attend(node)
        return node

    def _refreshed(self, incarnation: str, owned: dict[int, bool]) -> None:
        self._grants = self.ledger.on_refresh(incarnation, owned)

    def _executed(self, node: SimNode, call: Call) -> None:
        if call.name == "refresh":
            call.grants, self._grants = self._grants, {}

    # -- time --------------------------------------------------------------------------------------------------

    def step(self) -> None:
        """One event, and what must hold after it."""
        self.scheduler.step()
        self.ledger.check_one_yes(self.nodes)

    def run_until(self, time: float) -> None:
        while self.scheduler.next_by(time):
            self.step()
        self._look_after_the_dead()

    def _look_after_the_dead(self) -> None:
        for node in self.nodes:
            if node.dead and node.failure is not None and not isinstance(node.failure, Killed | NodeNameInUse):
                raise Violation(f"{node.title} has ended: {node.failure!r}")
        self.nodes = [node for node in self.nodes if not node.dead]

    # -- faults ------------------------------------------------------------------------------------------------

    def inject(self, fault: Fault) -> None:
        """Let one fault happen."""
        self.nodes = [node for node in self.nodes if not node.dead] if fault.kind != "join" else self.nodes
        if fault.kind == "join" or not self.nodes:
            if len({node.name for node in self.nodes}) < 5:
                self.start()
            return
        node = self.nodes[fault.whom % len(self.nodes)]
        self.log("-- %s %s for %.3f s", fault.kind, node.title, fault.seconds)
        match fault.kind:
            case "leave":
                node.leave()
            case "kill":
                node.kill()
            case "restart":
                node.kill()
                self.scheduler.after(fault.seconds, self.start, node.name)
            case "twin":
                self.start(node.name)
            case "pause":
                node.pause(fault.seconds)
            case "stall":
                node.stall = (fault.number // 2, fault.seconds, fault.number % 2 == 0)
            case "starve":
                node.pause(fault.seconds, whole=False)
            case "reset":
                for connection in node.connections:
                    if connection.alive and not connection.broken:
                        connection.reset()
            case "terminate":
                # What a node cannot hear of while its packets are lost, a freed lock must not say of it: see
                # "Certainty" in docs/architecture.md.
                if not (node.cut_off and self.config.trust_freed_locks):
                    self.server.end_backend(node.session.pid)
            case "packets lost":
                self.lose_packets(node, fault.seconds)
            case "server restart":
                self.server.stop()
                self.store.started_at = self.store.clock()
                self.scheduler.after(fault.seconds / 2, self.server.start)
            case "promotion":
                self._promote(fault.seconds / 4)
                self.scheduler.after(fault.number % 8 / 10, self.server.start)
            case "pin":
                name = f"n{1 + fault.number % 5}"
                self._pin(
                    f"p{fault.number}", Pin(fault.number % self.total_tokens, (name, "%")[: 1 + fault.number % 2])
                )
            case "unpin":
                if self.store.now.pins:
                    self._pin(next(iter(self.store.now.pins)), None)

            case "drain":
                self._operate("drain", f"n{1 + fault.number % 5}", "me", "", str(self.store.now.revision))
            case "undrain":
                self._operate("undrain", min(self.store.now.drained, default=""))
            case "expel":
                self._operate("expel", node.name, node.coordinator.incarnation)

    def _operate(self, statement: str, *parameters: str) -> None:
        """An operator's statement."""
        sql = vars(Statements(self.config.names))[statement]
        self.store.execute(sql, Backend(0), self.store.now.snapshot(), parameters)
        self.server.notify(self.store.notified)

    def _replicate(self) -> None:
        """The standby keeps up, more or less."""
        self._standby = [*self._standby[-7:], self.store.now.snapshot()]
        self.scheduler.after(0.3, self._replicate)

    def _promote(self, lag: float) -> None:
        """The standby takes over; it lacks what was committed in about the last ``lag`` seconds."""
        self.server.stop()
        self.server_life = object()
        standby = self._standby[-min(len(self._standby), 1 + round(lag / 0.3))]
        self.log("-- epoch %d is forgotten, %d goes on", self.store.now.epoch, standby.epoch)
        self.ledger.on_promotion(self.store.now.tokens, standby.tokens)
        self.store.promote(standby)

    def _pin(self, task: str, pin: Pin | None) -> None:
        if pin is None:
            del self.store.now.pins[task]
        else:
            self.store.now.pins[task] = pin
        self.store.now.pins_revision += 1
        self.server.notify([self.config.names.cluster_channel])

    def lose_packets(self, node: SimNode, seconds: float) -> None:
        """Nothing gets to this node or from it for a while."""
        if node.cut_off:
            return
        node.lose_packets(True)
        self.scheduler.after(seconds, node.lose_packets, False)
        # The server gives such a connection up, but no earlier than the lease may have ended.
        patience = self.config.heartbeat_timeout_sec if self.config.trust_freed_locks else 0.5
        for connection in node.connections:
            self.scheduler.after(patience + self._rng.random(), self._give_up, node, connection, self.scheduler.time)

    def _give_up(self, node: SimNode, connection: Backend, since: float) -> None:
        if node.cut_off_since == since:
            self.server.end_backend(connection.pid)

    # -- the end -----------------------------------------------------------------------------------------------

    def heal(self) -> None:
        """No more faults: everything that was held up goes on."""
        self.log("-- heal")
        self.server.network.calm = True
        self.server.failure_rate = 0
        self.server.start()
        for node in self.nodes:
            node.stall = None
            node.resume_now()
            node.lose_packets(False)

    def settle(self) -> None:
        """Run until all is as it should be, at most for the bound."""
        until = self.scheduler.time + SETTLED_WITHIN_SEC
        while why := self.unsettled():
            if all(node.dead for node in self.nodes):
                self.start()
            if self.scheduler.time > until:
                raise Violation(f"not settled {SETTLED_WITHIN_SEC} s after the last fault: {why}")
            self.run_until(self.scheduler.time + 0.5)

    def unsettled(self) -> str:
        """What is not yet as it should be."""
        tables = self.store.now
        names = {node.name for node in self.nodes if not node.dead}
        rows = {row.name: row for row in tables.nodes.values()}
        if set(rows) != names or any(row.state != "active" for row in rows.values()):
            return f"{sorted(names)} live, members are {sorted((r.name, r.state) for r in rows.values())}"
        if any(row.next_node is not None for row in tables.tokens):
            return f"marks: {tables.tokens}"
        pins = [(pin.token_id, pin.patterns) for pin in tables.pins.values()]
        takers = names - tables.drained
        allowed = allowed_nodes(pins, takers)
        owned: dict[str | None, list[int]] = {}
        for token, row in enumerate(tables.tokens):
            owned.setdefault(row.node, []).append(token)
        wanted = plan(owned, [Member(name) for name in sorted(takers)], allowed)
        if wanted.moved or set(owned) - takers - {None}:
            return f"not balanced: {owned}"
        for name, tokens in owned.items():
            mine = sum(1 << 8 * token for token in tokens)
            if name is not None and not any(n.name == name and n.saying_yes() == mine for n in self.nodes):
                return f"{name} does not say yes to just {tokens}"
        return ""


@dataclass
class Outcome:
    """How a run went. ``violation`` is empty if everything held."""

    seed: int
    faults: Sequence[Fault]
    violation: str
    at: float
    commits: int
    refused: int
    trace: list[str]


def simulate(
    seed: int, weakening: Weakening | None = None, faults: Sequence[Fault] | None = None, *, traced: bool = False
) -> Outcome:
    """Run one seed, with the faults drawn from it unless others are given."""
    weakening = weakening or Weakening()
    rng = random.Random(7919 * seed + 1)
    trust = rng.random() < 0.75
    rejoin = 3.0 if rng.random() < 0.25 else 0.0
    starters = rng.choice((1, 2, 3, 3, 4))
    drawn = faults_module.draw(rng, FAULTS_SEC, weakening.mix or faults_module.WEIGHTS)
    chosen = drawn if faults is None else faults
    with surroundings(seed) as errors:
        world = World(seed, weakening, traced=traced, trust_freed_locks=trust, rejoin_grace_sec=rejoin)
        world.server.failure_rate = 0.003
        violation = ""
        try:
            for _ in range(starters):
                world.scheduler.after(rng.random(), world.start)
            for fault in chosen:
                world.scheduler.at(fault.at, world.inject, fault)
            world.run_until(FAULTS_SEC)
            world.heal()
            world.settle()
            world.run_until(world.scheduler.time + 1)
            if errors.found:
                raise Violation(f"an error inside the loop: {errors.found[0]}")
        except Violation as found:
            violation = str(found)
            world.log("VIOLATION: %s", violation)
        finally:
            for node in world.nodes:
                node.kill()
    return Outcome(
        seed, chosen, violation, world.scheduler.time, world.ledger.commits, world.ledger.refused, world.trace or []
    )
