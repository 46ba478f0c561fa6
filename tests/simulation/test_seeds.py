"""More than a thousand runs, each with its own faults at its own moments: the promises hold in all of them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.simulation.replay import report
from tests.simulation.world import simulate

ROOT = Path(__file__).parents[2]

# Each part is one test, so that a run by several processes shares them.
PARTS, RUNS = 8, 150


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_the_promises_hold(part: int) -> None:
    commits = refused = 0
    for seed in range(part * RUNS, (part + 1) * RUNS):
        outcome = simulate(seed)
        assert not outcome.violation, report(outcome)
        commits += outcome.commits
        refused += outcome.refused
    assert commits > 10 * RUNS, "the application has hardly worked"
    assert refused > RUNS / 20, "no work was ever late"


@pytest.mark.chaos
def test_the_promises_hold_for_as_long_as_one_likes() -> None:
    first, count = int(os.environ.get("SEED", "100000")), int(os.environ.get("SEEDS", "20000"))
    for seed in range(first, first + count):
        outcome = simulate(seed)
        assert not outcome.violation, report(outcome)


def test_a_seed_is_one_run() -> None:
    """Whatever the process, its hash seed and what ran before: a violation that was found can be seen again."""
    command = [sys.executable, "-m", "tests.simulation.replay", "--seed", "14", "--trace"]
    runs = [
        subprocess.run(command, env={**os.environ, "PYTHONHASHSEED": salt}, cwd=ROOT, capture_output=True, text=True)
        for salt in ("1", "2")
    ]
    assert runs[0].returncode == 0, runs[0].stderr
    assert len(runs[0].stdout) > 1000
    assert runs[0].stdout == runs[1].stdout
