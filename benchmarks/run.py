"""Run the measurements on both libraries in turn, on one server, and write docs/benchmarks.md.

``make bench`` calls this with the environment of ours, after making one for each library.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psycopg

from benchmarks import report
from benchmarks.server import Server
from benchmarks.steps import Step, chosen

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"

# No scenario takes longer, the original's included.
STEP_SEC = 900


def about(dsn: str, mode: str) -> dict[str, Any]:
    """What must be known of machine and server to read the numbers."""
    with psycopg.connect(dsn) as connection:
        row = connection.execute(
            "select current_setting('server_version'), current_setting('fsync'),"
            " current_setting('shared_preload_libraries') like '%pg_stat_statements%'"
        ).fetchone()
    assert row is not None
    model = next(
        (line.partition(":")[2].strip() for line in _cpuinfo() if line.startswith("model name")), platform.machine()
    )
    return {
        "scenario": "run",
        "at": round(time.time(), 1),
        "mode": mode,
        "cpus": os.cpu_count(),
        "cpu": model,
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "postgresql": row[0],
        "fsync": row[1],
        "statements_counted": row[2],
        "load_before": round(os.getloadavg()[0], 2),
    }


def _cpuinfo() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text().splitlines() if path.exists() else []


class Run:
    """One run: where its results go, and with which interpreters."""

    def __init__(self, out: Path, pythons: dict[str, str], environment: dict[str, str], mode: str) -> None:
        self._out = out
        self._pythons = pythons
        self._environment = {**os.environ, **environment, "BENCH_OUT": str(out)}
        self._mode = mode

    def write(self, **line: Any) -> None:
        with self._out.open("a", encoding="utf-8") as out:
            out.write(json.dumps(line) + "\n")

    def all(self, steps: tuple[Step, ...]) -> None:
        """Trial after trial, so that the trials of one step are spread over the whole run."""
        full = self._mode == "full"
        rounds = max(step.trials for step in steps) if full else 1
        for trial in range(rounds):
            for step in steps:
                trials = step.trials if full else 1
                if trial < trials:
                    self.step(step, trial, trials)

    def step(self, step: Step, trial: int, trials: int) -> None:
        # Neither is always first.
        libraries = step.libraries if trial % 2 == 0 else tuple(reversed(step.libraries))
        groups = [libraries] if step.together else [(library,) for library in libraries]
        for group in groups:
            processes = {library: self._start(step, library, trial, trials) for library in group}
            for library, process in processes.items():
                try:
                    errors = process.communicate(timeout=STEP_SEC)[1]
                except subprocess.TimeoutExpired:
                    process.send_signal(signal.SIGINT)  # it ends its workers and drops its database
                    errors = process.communicate()[1] + f"\nended after {STEP_SEC} s"
                if process.returncode:
                    print(errors, file=sys.stderr, flush=True)
                    last = errors.strip().splitlines()[-1:] or [f"exit code {process.returncode}"]
                    self.write(scenario="failed", library=library, step=step.name, trial=trial, why=last[0][:300])

    def _start(self, step: Step, library: str, trial: int, trials: int) -> subprocess.Popen[str]:
        module, *arguments = shlex.split(step.command)
        extra = step.full if self._mode == "full" else step.quick or ""
        command = [
            *(self._pythons[library], "-m", f"benchmarks.coordination.{module}", *arguments, *shlex.split(extra)),
            *("--library", library, "--trial", str(trial), "--trials", str(trials)),
        ]
        print(f"{time.strftime('%H:%M:%S')} {step.name} {trial + 1}/{trials} {library}", flush=True)
        return subprocess.Popen(
            command,
            cwd=ROOT,
            env={**self._environment, "BENCH_STEP": step.name},
            text=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--original", required=True, metavar="PYTHON", help="interpreter that has the original")
    parser.add_argument("--mode", choices=("quick", "full"), default="quick")
    parser.add_argument("--only", metavar="STEP,...", help="these steps; prints the table and writes no page")
    arguments = parser.parse_args()
    steps = chosen(arguments.only, quick=arguments.mode == "quick")
    RESULTS.mkdir(parents=True, exist_ok=True)
    out = RESULTS / time.strftime(f"%Y%m%d-%H%M%S-{arguments.mode}.jsonl")
    pythons = {"original": arguments.original, "ours": sys.executable}
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    server = None if "BENCH_DSN" in os.environ else Server.create()
    try:
        environment = server.environment if server else {"BENCH_DSN": os.environ["BENCH_DSN"]}
        run = Run(out, pythons, environment, arguments.mode)
        run.write(**about(environment["BENCH_DSN"], arguments.mode))
        run.all(steps)
    finally:
        if server is not None:
            server.remove()
    if arguments.only:
        lines = report.read([out])
        print("\n".join([report.table(lines, [step.name for step in steps]), "", *report.failures(lines)]))
    else:
        report.write([out])
        print(f"written: {report.PAGE}")


if __name__ == "__main__":
    main()
