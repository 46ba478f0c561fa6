"""``jobsync-orm worker --health-port``: a worker's probes over HTTP, from a thread of its own.

``/health/live`` answers as long as the process does: a worker whose loop ends by itself ends its process.
``/health/ready`` says whether the worker does its work, with status 200 or 503; no, while it is drained. Both answer
from memory.
"""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

from jobsync_orm.integrations.hosted import Probe, drained_reason

if TYPE_CHECKING:
    from jobsync_orm.worker import JobWorker

__all__ = ["serve_probes"]

# Longest that a client may take for its request.
REQUEST_SEC = 5


def serve_probes(worker: JobWorker, host: str, port: int) -> ThreadingHTTPServer:
    """Answer probes of ``worker`` on ``host:port`` from now on.

    Raises
    ------
    OSError
        The address is not to be had.
    """

    class Answers(BaseHTTPRequestHandler):
        timeout = REQUEST_SEC

        def do_GET(self) -> None:
            if self.path == "/health/live":
                probe, words = Probe(True, node=worker.node_name), ("live", "dead")
            elif self.path == "/health/ready":
                probe, words = _ready(worker), ("ready", "not ready")
            else:
                self.send_error(404)
                return
            body = json.dumps(probe.as_json(*words)).encode()
            self.send_response(200 if probe.ok else 503)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Cache-Control", "no-store")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """Nothing: a line for each probe tells nobody anything."""

    server = ThreadingHTTPServer((host, port), Answers)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, name="jobsync-probes", daemon=True).start()
    return server


def _ready(worker: JobWorker) -> Probe:
    health = worker.health()
    # What comes after the colon is the database's or the driver's.
    problems = [problem.partition(": ")[0] for problem in health.problems]
    if not problems and health.state != "running":
        problems = [f"the worker is {health.state}"]
    if not problems and health.drained and health.node is not None:
        problems = [drained_reason(health.node)]
    return Probe(not problems, tuple(problems), health.node)
