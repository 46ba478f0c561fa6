"""One worker process of either library. Prints JSON lines; leaves gracefully on SIGTERM.

The one argument is a JSON object:

    library    "original" or "ours"
    dsn        postgresql://user[:password]@host:port/dbname
    node       its name
    settings   settings of the library's CoordinationConfig
    tasks      how many task ids (0..n-1) to ask for with can_claim_task in each sweep
    sweep      seconds between sweeps
    count      false: never look at my_tokens, whose size then disturbs no measurement of memory
    trace      seconds after entering at which to report the memory allocated since the imports (0: never)

Each line has t (unix seconds), node and ev, and is one of

    start | ready | tokens {owned, version, leader, condition} | claims {gain, lose, t_last}
    | stall {t_last, t0, yes} | memory {bytes} | stopping | stopped | error {msg}
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import threading
import time
import tracemalloc
from typing import Any

from benchmarks.coordination import adapters


class Reporter:
    def __init__(self, node: str) -> None:
        self._node = node
        self._lock = threading.Lock()

    def emit(self, event: str, **values: Any) -> None:
        line = json.dumps({"t": time.time(), "node": self._node, "ev": event, **values})
        with self._lock:
            print(line, flush=True)


def like_an_application(dsn: str) -> None:
    """Connect once through SQLAlchemy, so that what any application has loaded does not count as the library's."""
    import sqlalchemy

    engine = sqlalchemy.create_engine(sqlalchemy.make_url(dsn).set(drivername="postgresql+psycopg"))
    with engine.connect() as connection:
        connection.execute(sqlalchemy.text("select 1"))
    engine.dispose()


def allocated() -> int:
    gc.collect()
    return tracemalloc.get_traced_memory()[0]


def sweep(adapter: Any, job: Any, options: dict[str, Any], report: Reporter, stop: threading.Event) -> None:
    """Ask for every task again and again, and report what changes."""
    tasks, period, trace_at = options["tasks"], options["sweep"], time.time() + options["trace"]
    last_view: tuple[Any, ...] | None = None
    held: set[int] = set()
    previous = time.time()
    while not stop.is_set():
        t0 = time.time()
        owned = len(job.my_tokens) if options["count"] else None
        view = (owned, job.token_version, adapter.leads(job), adapter.condition(job))
        if view != last_view:
            report.emit("tokens", owned=view[0], version=view[1], leader=view[2], condition=view[3])
            last_view = view
        now_held = {task for task in range(tasks) if job.can_claim_task(task)}
        if t0 - previous > max(1.0, 3 * period):  # this process has not run for a while
            report.emit("stall", t_last=previous, t0=t0, yes=len(now_held))
        if now_held != held:
            report.emit("claims", gain=sorted(now_held - held), lose=sorted(held - now_held), t_last=previous)
            held = now_held
        previous = t0
        if options["trace"] and t0 > trace_at:
            report.emit("memory", bytes=allocated() - options["base"])
            options["trace"] = 0
        stop.wait(period)


def main() -> None:
    options = json.loads(sys.argv[1])
    report = Reporter(options["node"])
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    adapter = adapters.load(options["library"])
    if options["trace"]:
        like_an_application(options["dsn"])
        tracemalloc.start()
        options["base"] = allocated()
    report.emit("start", pid=os.getpid())
    try:
        with adapter.make_job(options["dsn"], options["node"], options["settings"]) as job:
            report.emit("ready")
            sweep(adapter, job, options, report, stop)
            report.emit("stopping")
        report.emit("stopped")
    except BaseException as error:
        report.emit("error", msg=f"{type(error).__name__}: {error}"[:300])
        raise


if __name__ == "__main__":
    main()
