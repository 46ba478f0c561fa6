"""The measurements of a run: which scenarios, with what arguments, for which libraries, how often."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["STEPS", "Step", "chosen"]

BOTH = ("original", "ours")
MOST_TRIALS, FEWER_TRIALS = 5, 3


@dataclass(frozen=True)
class Step:
    """One scenario with its arguments.

    Parameters
    ----------
    name : str
        Unique; what ``BENCH_ONLY`` names.
    command : str
        Module and arguments.
    libraries : tuple of str
        Whom it is measured on.
    together : bool
        Mostly waiting: the libraries run at the same time, each on its own database, so that both meet the same
        moments of the machine. Otherwise one after the other, in alternating order.
    quick : str or None
        Further arguments in a quick run; None leaves the step out of it, unless it is named.
    full : str
        Further arguments in a full run.
    trials : int
        Trials in a full run; a quick run makes one.
    """

    name: str
    command: str
    libraries: tuple[str, ...] = BOTH
    together: bool = False
    quick: str | None = ""
    full: str = ""
    trials: int = MOST_TRIALS


def _membership(event: str, mode: str, *, quick: bool) -> Step:
    steady = mode == "steady"
    return Step(
        event + ("-steady" if steady else ""),
        f"membership {event} --mode {mode}",
        # Ours has one mode; its row stands beside both of the original's.
        libraries=("original",) if steady else BOTH,
        together=True,
        quick="" if quick else None,
        trials=FEWER_TRIALS if steady else MOST_TRIALS,
    )


IN_QUICK = ("kill_follower", "kill_leader", "stop_follower", "join", "pause_follower")

STEPS = (
    *(
        _membership(event, "fresh", quick=event in IN_QUICK)
        for event in (
            "kill_follower",
            "kill_leader",
            "stop_follower",
            "stop_leader",
            "join",
            "swap",
            "pause_follower",
            "pause_leader",
        )
    ),
    *(
        _membership(event, "steady", quick=False)
        for event in ("kill_follower", "kill_leader", "stop_follower", "stop_leader", "join")
    ),
    Step("partition-follower", "partition --victim follower", together=True, quick="--watch 40", trials=FEWER_TRIALS),
    Step("partition-leader", "partition --victim leader", together=True, quick=None, trials=FEWER_TRIALS),
    Step("outage", "outage --down 20", quick="--watch 15", full="--watch 60"),
    Step("load", "load", together=True, quick="--seconds 30", full="--seconds 120"),
    Step("load-steady", "load --mode steady", libraries=("original",), quick=None, full="--seconds 120"),
    Step("redistribution", "distribute --tokens 10000"),
    Step("redistribution-1m", "distribute --tokens 1000000", trials=FEWER_TRIALS),
    Step("planning", "cpu compute --tokens 1000000"),
    Step("planning-pins", "cpu locked", trials=FEWER_TRIALS),
    Step("hot-path", "cpu hot", quick="--seconds 0.5"),
    Step("hash", "cpu hash", quick=None),
    Step("bulk", "bulk"),
    Step("memory", "memory", together=True, quick="--seconds 15"),
    Step("startup", "startup --workers 30 --tables new"),
    Step("claims", "claims", libraries=("ours",)),
    Step("owned-by", "owned_by", libraries=("ours",)),
    Step("fence", "fence", libraries=("ours",), quick="--rounds 4"),
)


def chosen(names: str | None, *, quick: bool) -> tuple[Step, ...]:
    """The steps that ``names`` lists, separated by commas; where it is empty, all that belong to such a run."""
    if not names:
        return tuple(step for step in STEPS if step.quick is not None or not quick)
    known = {step.name: step for step in STEPS}
    wanted = names.split(",")
    unknown = [name for name in wanted if name not in known]
    if unknown:
        raise SystemExit(f"no such step: {', '.join(unknown)}; there are {', '.join(known)}")
    return tuple(known[name] for name in wanted)
