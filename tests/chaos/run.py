"""``make chaos``: one run under seeded faults, checked; see docs/chaos.md."""

from __future__ import annotations

import argparse
import random
import signal
import sys
import time
from collections import Counter
from functools import partial

from tests.chaos import checker
from tests.chaos.arena import Arena
from tests.chaos.history import History
from tests.chaos.schedule import first_workers, schedule

__all__ = ["main", "report"]

SHOWN = 10


def report(history: History, found: dict[str, list[str]]) -> str:
    """Faults by kind, what was done under them, and what the checker found."""
    faults = Counter(one.fault for one in history.disturbances if one.fault)
    outcomes = Counter(attempt.outcome for attempt in history.attempts)
    stopped = sum(one.kind == "stopped itself" for one in history.disturbances)
    gaps, marks = checker.unserved(history), checker.marks(history)
    moves = Counter(row.token for row in history.ownership)
    lines = ["faults injected:"]
    lines += [f"  {count:4}  {fault}" for fault, count in sorted(faults.items())]
    lines += [
        f"  {sum(faults.values()):4}  in all; {stopped} stops in the middle of a transaction were reached",
        f"worker processes: {len(history.sweeps)}",
        f"tasks inserted: {history.confirmed}, done: {sum(todo.done for todo in history.todos)}, "
        f"effects: {len(history.effects)}",
        f"transactions committed: {outcomes['done']}, refused (OwnershipLost): {outcomes['refused']}, "
        f"failed: {outcomes['failed']}, outcome never known: {outcomes['unknown']}",
        f"claims completed: {sum(history.audit.values())}",
        f"changes of token rows: {sum(moves.values())}, of {len(moves)} tokens",
        f"longest time a token was without a yes: {max((gap.seconds for gap in gaps), default=0):.1f} s, undisturbed "
        f"{max((gap.undisturbed for gap in gaps), default=0):.1f} s (bound {history.bound_sec:.1f} s)",
        f"longest drain of a token: {max((gap.seconds for gap in marks), default=0):.1f} s, undisturbed "
        f"{max((gap.undisturbed for gap in marks), default=0):.1f} s (bound {history.bound_sec:.1f} s)",
    ]
    for rule, violations in found.items():
        lines.append(f"{rule}: {len(violations)}")
        lines += [f"    {violation}" for violation in violations[:SHOWN]]
        if len(violations) > SHOWN:
            lines.append(f"    and {len(violations) - SHOWN} more")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Run, print, and return 1 if something was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--duration", type=float, default=60, help="seconds of faults")
    parser.add_argument("--seed", type=int, default=None, help="decides the faults; by default a new one")
    parser.add_argument("--keep", action="store_true", help="keep the folder with logs and data in any case")
    options = parser.parse_args(arguments)
    seed = random.SystemRandom().randrange(1_000_000) if options.seed is None else options.seed
    again = f"DURATION={options.duration:g} SEED={seed} make chaos"
    print(f"chaos, seed {seed}: repeat with {again}", flush=True)
    # So that a run that is told to end takes its server and workers with it.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    begun = time.monotonic()
    # Where the tables have the trigger every commit is checked twice, so it is left out every other time.
    triggers = "on" if seed % 2 else "off"
    with Arena(seed, say=partial(print, flush=True), TRIGGERS=triggers) as arena:
        arena.keep = options.keep
        arena.begin(first_workers(seed))
        arena.nemesis.run(schedule(seed, options.duration))
        history = arena.finish()
        found = checker.check(history)
        print(report(history, found))
        bad = sum(map(len, found.values()))
        arena.keep = arena.keep or bad > 0
        verdict = "nothing lost, nothing twice" if not bad else f"{bad} VIOLATIONS; logs in {arena.folder}"
        print(f"{verdict}; seed {seed}, {time.monotonic() - begun:.0f} s; repeat with {again}", flush=True)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
