"""What stands in for ``coordinator.session.Session``: the same calls, on simulated time and the simulated server."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING

from jobsync_orm.coordinator.session import Param, Row, SessionLost, StatementFailed
from tests.simulation.server import Call, Connection

if TYPE_CHECKING:
    from tests.simulation.nodes import SimNode

__all__ = ["SimSession"]

LISTEN = re.compile(r"LISTEN (\w+)")
CONNECT_SEC = 3.0


class SimSession:
    """One node's session."""

    def __init__(self, node: SimNode, on_look: Callable[[float], None], tick_sec: float, setup: str) -> None:
        self._node = node
        self._on_look = on_look
        self._tick_sec = tick_sec
        self._channels = frozenset(LISTEN.findall(setup))
        self._connection: Connection | None = None
        self.pid = 0
        self.pooled = False

    # -- as the real one ---------------------------------------------------------------------------------------

    def open(self) -> None:
        self.close()
        node = self._node
        until = node.clock.now() + CONNECT_SEC
        node.block(node.clock.now() + 2 * node.server.network.travel())
        while node.cut_off:
            if node.clock.now() >= until:
                raise SessionLost("cannot connect: timeout expired")
            node.block(until)
        self._connection = node.server.accept(node)
        if self._connection is None:
            raise SessionLost("cannot connect: connection refused")
        self._connection.channels.update(self._channels)
        self.pid = self._connection.pid

    def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    @property
    def is_open(self) -> bool:
        return self._connection is not None and not self._connection.broken

    def script(self, sql: str, *, timeout: float = 10) -> None:
        raise NotImplementedError("the setup is part of open()")

    def execute(self, sql: str, *params: Param, timeout: float) -> list[Row]:
        values = tuple(None if p is None else ("t" if p else "f") if isinstance(p, bool) else str(p) for p in params)
        node, connection = self._node, self._connection
        if connection is None:
            raise SessionLost("there is no connection")
        call = Call(sql, node.server.store.name_of(sql), values)
        node.step(call.name, "before")
        deadline = node.clock.now() + timeout
        connection.send(call)
        node.step(call.name, "sent")
        while call.rows is None:
            if connection.broken:
                self.close()
                raise SessionLost("connection lost")
            if node.clock.now() >= deadline:
                self.close()
                raise SessionLost("the server did not answer in time")
            node.block(deadline)
        node.step(call.name, "answered")
        if call.failure:
            raise StatementFailed("refused on purpose", call.failure)
        if call.name == "refresh":
            node.grants = call.grants
        return call.rows

    def wait(self, timeout: float) -> set[str]:
        node = self._node
        deadline = node.clock.now() + timeout
        while True:
            connection = self._connection
            if connection is None or connection.broken:
                self.close()
                raise SessionLost("connection lost")
            looked_at = node.clock.now()
            if connection.heard or node.woken or looked_at >= deadline:
                if not connection.heard:
                    self._on_look(looked_at)
                heard, connection.heard, node.woken = connection.heard, set(), False
                return heard
            node.block(deadline)

    # -- for the simulation ------------------------------------------------------------------------------------

    @property
    def connection(self) -> Connection | None:
        return self._connection

    def tick(self) -> None:
        """The look that ``wait`` and ``execute`` take every ``tick_sec``."""
        if self._connection is not None and not self._connection.broken:
            self._on_look(self._node.clock.read())
