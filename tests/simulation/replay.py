"""Run a seed again, find the fewest faults that still break it, and show what happened.

    python -m tests.simulation.replay --seed N [--trace] [--keep I,J,...] [--off SAFEGUARD]

``--keep`` names the faults to keep, by their places in the run's list; ``--off`` switches a safeguard off.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from tests.simulation.faults import Fault
from tests.simulation.safeguards import SAFEGUARDS
from tests.simulation.world import Outcome, Weakening, simulate

__all__ = ["report", "shrink"]

LAST_STEPS = 60


def shrink(found: Outcome, weakening: Weakening | None = None) -> Outcome:
    """The same seed with the fewest faults that still break something, as far as leaving out one by one goes."""
    best = found
    kept = [fault for fault in found.faults if fault.at <= found.at]
    while True:
        for fault in (None, *reversed(kept)):
            fewer = [other for other in kept if other is not fault]
            if fault is None and len(fewer) == len(best.faults):
                continue
            outcome = simulate(found.seed, weakening, fewer)
            if outcome.violation:
                best, kept = outcome, [f for f in fewer if f.at <= outcome.at]
                break
        else:
            return simulate(found.seed, weakening, best.faults, traced=True)


def report(found: Outcome, weakening: Weakening | None = None) -> str:
    """What to print of a run that has broken something."""
    least = shrink(found, weakening)
    places = ",".join(str(list(found.faults).index(fault)) for fault in least.faults)
    lines = [
        f"seed {found.seed}: {found.violation}",
        f"with the fewest faults: {least.violation}",
        *(f"  {fault}" for fault in least.faults),
        "the end of it:",
        *(line[:240] for line in least.trace[-LAST_STEPS:]),
        f"again, whole: python -m tests.simulation.replay --trace --seed {found.seed} --keep '{places}'",
    ]
    return "\n".join(lines)


def _kept(seed: int, weakening: Weakening | None, places: str | None) -> Sequence[Fault] | None:
    if places is None:
        return None
    drawn = simulate(seed, weakening).faults
    return [drawn[int(place)] for place in places.split(",") if place]


def main() -> None:
    parser = argparse.ArgumentParser(description="Run one seed of the simulation again.")
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--keep", help="places of the faults to keep, with commas between them")
    parser.add_argument("--off", choices=SAFEGUARDS, help="a safeguard to switch off")
    parser.add_argument("--trace", action="store_true", help="print every step")
    arguments = parser.parse_args()
    weakening = SAFEGUARDS[arguments.off] if arguments.off else None
    faults = _kept(arguments.seed, weakening, arguments.keep)
    outcome = simulate(arguments.seed, weakening, faults, traced=arguments.trace)
    for number, fault in enumerate(outcome.faults):
        print(f"{number:3} {fault}")
    print("\n".join(outcome.trace))
    if outcome.violation and not arguments.trace:
        print(report(outcome, weakening))
    print(f"seed {outcome.seed}: {outcome.violation or 'all promises hold'}")
    raise SystemExit(bool(outcome.violation))


if __name__ == "__main__":
    main()
