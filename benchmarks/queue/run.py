"""Measure the queue beside other libraries', on one server, in turns, and write docs/benchmarks-queue.md.

``make bench-queue`` calls this in an environment that has them all. Three passes over the short steps, so that no peer
is always first; ``--only`` names steps, prints the table and writes no page. A page can be put together from several
runs' results: ``--page results.jsonl ...``.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from importlib.metadata import version
from pathlib import Path

from benchmarks.queue import page
from benchmarks.queue.arena import Arena
from benchmarks.queue.steps import STEPS
from benchmarks.server import Server

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"


def measure(steps: list[str], passes: int, out: Path) -> None:
    for number in range(passes):
        for name in steps:
            step = STEPS[name]
            if step.once and number:
                continue
            pairs = list(step.pairs) if number % 2 == 0 else list(reversed(step.pairs))
            for peer, config in pairs:
                print(f"{time.strftime('%H:%M:%S')} {name} {peer} ({config})", flush=True)
                about = {"step": name, "peer": peer, "config": config}
                try:
                    lines = list(step.measure(peer, config))
                except Exception as error:
                    lines = [{"what": "failed", "value": None, "why": str(error)[:500]}]
                    print(error, file=sys.stderr)
                with out.open("a", encoding="utf-8") as file:
                    for line in lines:
                        file.write(json.dumps({**about, **line, "at": time.time()}) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", metavar="STEP,...", help=f"some of {', '.join(STEPS)}")
    parser.add_argument("--passes", type=int, default=3)
    parser.add_argument("--page", nargs="+", type=Path, metavar="RESULTS", help="write the page of these results")
    arguments = parser.parse_args()
    if arguments.page:
        page.write(arguments.page)
        return
    steps = arguments.only.split(",") if arguments.only else list(STEPS)
    if unknown := [step for step in steps if step not in STEPS]:
        parser.error(f"no such step: {', '.join(unknown)}")
    RESULTS.mkdir(parents=True, exist_ok=True)
    out = RESULTS / time.strftime("queue-%Y%m%d-%H%M%S.jsonl")
    server = None if "BENCH_DSN" in os.environ else Server.create()
    try:
        if server is not None:
            os.environ.update(server.environment)
        with Arena("ours") as arena, arena.connect() as connection:
            row = connection.execute("SELECT current_setting('server_version'), current_setting('fsync')").fetchone()
        assert row is not None
        versions = {name: version(name) for name in ("jobsync-orm", "pgqueuer", "asyncpg", "procrastinate", "psycopg")}
        with out.open("a", encoding="utf-8") as file:
            about = {"postgresql": row[0], "fsync": row[1], "cpus": os.cpu_count(), "versions": versions}
            file.write(json.dumps({"step": "run", "at": time.time(), **about}) + "\n")
        measure(steps, arguments.passes, out)
    finally:
        if server is not None:
            server.remove()
    if arguments.only:
        print(page.table(page.read([out])))
    else:
        page.write([out])


if __name__ == "__main__":
    main()
