"""The database server and the network to it.

A statement travels to the server, starts there (its snapshot), is carried out a moment or a good while later, and its
answer travels back; each leg takes a time drawn at random. What was sent on a connection arrives in order. When a
connection is reset, what was on its way arrives late or never; the server's end lives on until it has noticed, and
keeps the advisory lock as long. While a node's packets are lost, everything to and from it waits for better times.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING

from tests.simulation.scheduler import Scheduler
from tests.simulation.store import Backend, Row, Store

if TYPE_CHECKING:
    from tests.simulation.nodes import SimNode

__all__ = ["Call", "Connection", "Server"]

SQLSTATES = ("55P03", "40P01", "57014")


class Call:
    """One statement on its way: ``rows`` or ``failure`` once it is answered."""

    __slots__ = ("failure", "grants", "name", "rows", "sql", "values")

    def __init__(self, sql: str, name: str, values: tuple[str | None, ...]) -> None:
        self.sql = sql
        self.name = name
        self.values = values
        self.rows: list[Row] | None = None
        self.failure = ""
        self.grants: dict[int, int] = {}  # of a refresh: token -> number of the grant it saw


class Network:
    """How long things take. ``calm`` makes everything take the same short time."""

    def __init__(self, rng: random.Random, *, prompt: bool) -> None:
        self._rng = rng
        self.calm = False
        # The longest a node may take to hear of the end of its connection, where freed locks are trusted.
        self.hears_within = 0.7 if prompt else 3.0

    def travel(self) -> float:
        """To the server."""
        draw = self._rng.random()
        if self.calm or draw < 0.8:
            return 0.001 + 0.004 * (0.5 if self.calm else self._rng.random())
        return self._rng.random() * (0.3 if draw < 0.97 else 2.5)

    def back(self) -> float:
        """To the node."""
        draw = self._rng.random()
        if self.calm or draw < 0.85:
            return 0.001 + 0.004 * (0.5 if self.calm else self._rng.random())
        return self._rng.random() * self.hears_within

    def work(self) -> float:
        """From a statement's snapshot to its commit."""
        if self.calm:
            return 0.0
        draw = self._rng.random()
        return 0.0 if draw < 0.85 else self._rng.random() * (0.2 if draw < 0.97 else 2.0)

    def notice(self) -> float:
        """Until the server has noticed that a client is gone."""
        draw = self._rng.random()
        return 0.002 if self.calm else self._rng.random() * (0.1 if draw < 0.8 else 2.0)


class Connection(Backend):
    """Both ends of one connection. The node sees ``broken``; the server sees ``alive``."""

    def __init__(self, server: Server, node: SimNode, pid: int) -> None:
        super().__init__(pid)
        self.server = server
        self.node = node
        self.alive = True  # the server's process
        self.broken = False  # the end of the connection has reached the node
        self.closed = False  # by the node
        self.heard: set[str] = set()
        self._inbox: list[Call | None] = []  # None: the end of the stream
        self._busy = False
        self._there_by = self._back_by = 0.0
        self._kept: list[tuple[bool, Callable[..., object], tuple[object, ...]]] = []  # while packets are lost
        self._lost = self._severed = False

    # -- the wire ----------------------------------------------------------------------------------------------

    def _to_server(self, action: Callable[..., object], *arguments: object) -> None:
        scheduler, network = self.server.scheduler, self.server.network
        if self.node.cut_off:
            self._kept.append((True, action, arguments))
            return
        self._there_by = max(self._there_by, scheduler.time + network.travel())
        scheduler.at(self._there_by, action, *arguments)

    def _to_node(self, action: Callable[..., object], *arguments: object) -> None:
        scheduler, network = self.server.scheduler, self.server.network
        if self._severed:
            return
        if self.node.cut_off:
            self._kept.append((False, action, arguments))
            return
        self._back_by = max(self._back_by, scheduler.time + network.back())
        scheduler.at(self._back_by, action, *arguments)

    def packets_arrive_again(self) -> None:
        kept, self._kept = self._kept, []
        for there, action, arguments in kept:
            (self._to_server if there else self._to_node)(action, *arguments)

    # -- the node's end ----------------------------------------------------------------------------------------

    def send(self, call: Call) -> None:
        self._to_server(self._receive, call)

    def close(self) -> None:
        """The node closes its end, or its process has died and the kernel does."""
        if not self.closed:
            self.closed = True
            self._to_server(self._receive, None)

    def reset(self) -> None:
        """Something between both ends resets the connection."""
        scheduler, network = self.server.scheduler, self.server.network
        self._severed = True
        # Else what is on its way arrives, and is carried out before the end is noticed.
        self._lost = self.server.rng.random() < 0.5
        scheduler.after(network.notice(), self._receive, None)
        scheduler.after(self.server.rng.random() * network.hears_within, self._break)

    def _break(self) -> None:
        if not self.broken:
            self.broken = True
            if not self.closed:
                self.node.wakeup()

    def _answer(self, call: Call, rows: list[Row], failure: str) -> None:
        if not self.broken and not self.closed:
            call.rows, call.failure = rows, failure
            self.node.wakeup()

    def _hear(self, channel: str) -> None:
        if not self.broken and not self.closed:
            self.heard.add(channel)
            self.node.wakeup()

    # -- the server's end --------------------------------------------------------------------------------------

    def _receive(self, call: Call | None) -> None:
        if not self.alive or (self._lost and call is not None):
            return
        self._inbox.append(call)
        if not self._busy:
            self._next()

    def _next(self) -> None:
        while self.alive and self._inbox and not self._busy:
            call = self._inbox.pop(0)
            if call is None:
                self.end()
                return
            self._busy = True
            work = self.server.network.work()
            if work:
                self.server.scheduler.after(work, self._finish, call, self.server.store.now.snapshot())
            else:
                self._finish(call, None)

    def _finish(self, call: Call, seen: object) -> None:
        if not self.alive:
            return
        self._busy = False
        rows, failure = self.server.carry_out(self, call, seen)
        self._to_node(self._answer, call, rows, failure)
        self._next()

    def tell(self, channel: str) -> None:
        self._to_node(self._hear, channel)

    def end(self) -> None:
        """The server's process for this connection ends; what it had not committed is undone."""
        if self.alive:
            self.alive = False
            self.server.forget(self)
            self._to_node(self._break)


class Server:
    """One database server."""

    def __init__(self, scheduler: Scheduler, store: Store, rng: random.Random, *, prompt: bool) -> None:
        self.scheduler = scheduler
        self.store = store
        self.rng = rng
        self.network = Network(rng, prompt=prompt)
        self.backends: dict[int, Connection] = {}
        self.up = True
        self.failure_rate = 0.0
        self.log: Callable[[str], None] | None = None
        self.on_executed: Callable[[SimNode, Call], None] = lambda node, call: None
        self._pid = 1000

    def accept(self, node: SimNode) -> Connection | None:
        if not self.up:
            return None
        self._pid += 1
        connection = self.backends[self._pid] = Connection(self, node, self._pid)
        node.connections.append(connection)
        return connection

    def forget(self, backend: Connection) -> None:
        self.backends.pop(backend.pid, None)
        self.store.held = {name: holder for name, holder in self.store.held.items() if holder is not backend}

    def carry_out(self, backend: Connection, call: Call, seen: object) -> tuple[list[Row], str]:
        if self.failure_rate and self.rng.random() < self.failure_rate:
            return [], self.rng.choice(SQLSTATES)
        store = self.store
        snapshot = seen if seen is not None else store.now.snapshot()
        rows = store.execute(call.sql, backend, snapshot, call.values)  # type: ignore[arg-type]
        if self.log:
            self.log(f"{backend.node.title}: {call.name}{_short(call.values)} -> {rows}")
        self.on_executed(backend.node, call)
        for pid in store.ended:
            self.scheduler.after(self.network.work(), self.end_backend, pid)
        self.notify(store.notified)
        return rows, ""

    def notify(self, channels: list[str]) -> None:
        for channel in dict.fromkeys(channels):
            for backend in list(self.backends.values()):
                if channel in backend.channels:
                    backend.tell(channel)

    def end_backend(self, pid: int) -> None:
        if pid in self.backends:
            self.backends[pid].end()

    def stop(self) -> None:
        """All connections end, and new ones are refused until ``start``."""
        self.up = False
        for backend in list(self.backends.values()):
            backend.end()

    def start(self) -> None:
        self.up = True


def _short(values: tuple[str | None, ...]) -> str:
    return "(" + ", ".join("NULL" if v is None else v if len(v) < 30 else v[:8] + ".." for v in values) + ")"
