"""One worker cut off from the database: its packets vanish while it keeps running.

The victim talks to the server through a TCP relay, which stops forwarding, without closing anything, at phase K/N of
the library's slowest timer. Reports for how long the victim goes on saying yes, when the others have taken over, and
the overlap between them.
"""

from __future__ import annotations

import argparse
import contextlib
import socket
import threading
import time
from functools import partial
from urllib.parse import urlsplit, urlunsplit

from benchmarks.coordination.cluster import Cluster
from benchmarks.coordination.overlap import overlap_and_gap, yes_until
from benchmarks.coordination.scenario import Scenario


class Relay:
    """Forwards TCP; while cut, reads nothing and accepts nothing."""

    def __init__(self, target: tuple[str, int]) -> None:
        self._target = target
        self._through = threading.Event()
        self._through.set()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        self._through.clear()

    def _accept(self) -> None:
        while True:
            client, _ = self._listener.accept()
            self._through.wait()
            server = socket.create_connection(self._target)
            for source, sink in ((client, server), (server, client)):
                threading.Thread(target=self._pump, args=(source, sink), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                self._through.wait()
                data = source.recv(65536)
                self._through.wait()
                if not data:
                    break
                sink.sendall(data)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


def run(scenario: Scenario, cluster: Cluster, arguments: argparse.Namespace) -> None:
    u = urlsplit(cluster.dsn)
    relay = Relay((u.hostname or "127.0.0.1", u.port or 5432))
    credentials = u.netloc.rpartition("@")[0]
    via = urlunsplit(u._replace(netloc=f"{credentials}@127.0.0.1:{relay.port}"))
    # The oldest leads.
    victim_node = "w1" if arguments.victim == "leader" else "w3"
    for node in ("w1", "w2", "w3"):
        worker = cluster.add(node, **({"dsn": via} if node == victim_node else {}))
        cluster.require(partial(worker.first, "start"), 30, f"{node} has not started")
        time.sleep(1)
    cluster.require(cluster.formed, 200, "the cluster has not formed")
    scenario.settle()
    victim = cluster.workers[victim_node]
    led = victim.leads
    others = [worker for worker in cluster.live if worker is not victim]
    happened = time.time()
    relay.cut()
    took = cluster.wait(lambda: cluster.covered(others), arguments.watch)
    time.sleep(max(0.0, happened + arguments.watch - time.time()))
    until = time.time()
    last_yes = yes_until(victim, cluster.tasks, until)
    scenario.record(
        victim="leader" if led else "follower",
        watched_s=arguments.watch,
        others_cover_s=took and round(took, 2),
        victim_yes_until_s=last_yes and round(last_yes - happened, 2),
        victim_still_says_yes=bool(victim.held()),
        victim_condition=victim.condition,
        **overlap_and_gap(cluster.workers.values(), cluster.tasks, happened, until),
    )


def main() -> None:
    scenario = Scenario("partition", __doc__)
    scenario.parser.add_argument("--victim", choices=("follower", "leader"), default="follower")
    scenario.parser.add_argument("--watch", type=float, default=150, metavar="SECONDS")
    scenario.parser.add_argument("--tasks", type=int, default=2000)
    arguments = scenario.parse()
    with Cluster(scenario.adapter, tasks=arguments.tasks) as cluster:
        run(scenario, cluster, arguments)


if __name__ == "__main__":
    main()
