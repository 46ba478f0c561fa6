"""Does what the schedule says, and writes down when it was really done."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import psycopg

from tests.chaos.control import Point
from tests.chaos.fleet import Fleet
from tests.chaos.schedule import Act
from tests.chaos.server import Server

__all__ = ["Disturbance", "Nemesis"]


@dataclass(frozen=True, slots=True)
class Disturbance:
    """Something that happened to a worker, or to the server, from ``begun`` to ``ended`` on the monotonic clock."""

    begun: float
    ended: float
    kind: str
    worker: str
    fault: str


class Nemesis:
    """Executes acts on a fleet and its server."""

    def __init__(self, fleet: Fleet, server: Server, say: Callable[[str], None]) -> None:
        self._fleet = fleet
        self._server = server
        self._say = say
        self._repairs: list[threading.Thread] = []
        self._one_at_a_time = threading.Lock()
        self.done: list[Disturbance] = []
        self.failures: list[BaseException] = []

    def run(self, acts: Iterable[Act]) -> None:
        """Do each act at its time, counted from now."""
        begun = time.monotonic()
        for act in acts:
            time.sleep(max(0.0, begun + act.at - time.monotonic()))
            self._say(f"{act.at:6.1f} s  {act.kind} {act.worker} {act.how} {act.amount or ''}".rstrip())
            self.do(act)

    def do(self, act: Act) -> None:
        """Do one act."""
        if act.kind in ("restart", "crash"):
            # The server takes a while to stop and start, which holds nothing else up.
            repair = threading.Thread(target=self._server_act, args=(act,))
            self._repairs.append(repair)
            repair.start()
            return
        begun = time.monotonic()
        getattr(self, "_" + act.kind.replace(" ", "_"))(act)
        self.done.append(Disturbance(begun, time.monotonic(), act.kind, act.worker, act.fault))

    def calm(self) -> None:
        """End every fault: all run, all is delivered, the server is there."""
        begun = time.monotonic()
        for repair in self._repairs:
            repair.join()
        if self.failures:
            raise self.failures[0]
        for link in self._fleet.network.links.values():
            link.heal()
        self._fleet.resume_all()
        self.done.append(Disturbance(begun, time.monotonic(), "calm", "", ""))

    # -- workers -----------------------------------------------------------------------------------------------

    def _kill(self, act: Act) -> None:
        self._fleet.signal(act.worker, signal.SIGKILL)

    def _start(self, act: Act) -> None:
        self._fleet.start(act.worker)

    _join = _start

    def _leave(self, act: Act) -> None:
        self._fleet.signal(act.worker, signal.SIGTERM)

    def _pause(self, act: Act) -> None:
        self._fleet.signal(act.worker, signal.SIGSTOP)

    def _continue(self, act: Act) -> None:
        self._fleet.control(act.worker).stop_at = Point.NOWHERE
        self._fleet.signal(act.worker, signal.SIGCONT)

    def _stop_in_work(self, act: Act) -> None:
        self._fleet.control(act.worker).stop_at = Point[act.how]

    def _clock_step(self, act: Act) -> None:
        self._fleet.control(act.worker).clock_ahead += act.amount

    # -- the network -------------------------------------------------------------------------------------------

    def _cut(self, act: Act) -> None:
        self._fleet.network.link(act.worker).cut(reset=act.how == "reset")

    def _delay(self, act: Act) -> None:
        self._fleet.network.link(act.worker).delay(act.amount)

    def _blackhole(self, act: Act) -> None:
        self._fleet.network.link(act.worker).lose(*(() if act.how == "both" else (act.how,)))

    def _heal(self, act: Act) -> None:
        self._fleet.network.link(act.worker).heal()

    # -- the server --------------------------------------------------------------------------------------------

    def _terminate(self, act: Act) -> None:
        names = {"coordination": ["jobsync"], "work": ["chaos"], "all": ["jobsync", "chaos"]}[act.how]
        self._ask(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = ANY (%s)",
            [[f"{kind} {act.worker}" for kind in names]],
        )

    def _ask(self, sql: str, parameters: list[Any]) -> list[tuple[Any, ...]]:
        """Rows of a query; none if the server is away just now."""
        try:
            with self._server.connect() as connection:
                return connection.execute(sql, parameters).fetchall()
        except psycopg.OperationalError:
            return []

    def _server_act(self, act: Act) -> None:
        with self._one_at_a_time:
            self._do_to_server(act)

    def _do_to_server(self, act: Act) -> None:
        begun = time.monotonic()
        try:
            if act.kind == "crash":
                # One process of the server dies badly: it ends all sessions and recovers by itself.
                sql = "SELECT pid FROM pg_stat_activity WHERE application_name LIKE %s ORDER BY pid LIMIT 1"
                for (backend,) in self._ask(sql, ["chaos w%"]):
                    self._server.kill(backend)
            else:
                self._server.stop(signal.SIGINT if act.how == "fast" else signal.SIGQUIT)
                time.sleep(act.amount)
                self._server.start()
        except BaseException as failure:
            self.failures.append(failure)
        self.done.append(Disturbance(begun, time.monotonic(), act.kind, "", act.fault))
