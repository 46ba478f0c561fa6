"""One worker process of a peer: ``python -m benchmarks.queue.worker PEER DSN SETTINGS``."""

from __future__ import annotations

import importlib
import json
import sys

if __name__ == "__main__":
    peer, dsn, settings = sys.argv[1:]
    importlib.import_module(f"benchmarks.queue.peers.{peer}").work(dsn, json.loads(settings))
