"""Without any one safeguard the simulation finds a violation: it can fail."""

from __future__ import annotations

import pytest

from tests.simulation.replay import shrink
from tests.simulation.safeguards import SAFEGUARDS
from tests.simulation.world import simulate

# Most are found within 30 seeds, the rarest within 150.
SEEDS = 1500


@pytest.mark.parametrize("name", SAFEGUARDS)
def test_it_is_found_that_this_is_missing(name: str) -> None:
    assert any(simulate(seed, SAFEGUARDS[name]).violation for seed in range(SEEDS)), f"not found without: {name}"


def test_a_violation_is_shrunk_to_the_faults_it_takes() -> None:
    weakening = SAFEGUARDS["a mark is forced only once it has been applied"]
    found = next(o for o in (simulate(seed, weakening) for seed in range(SEEDS)) if o.violation and len(o.faults) > 4)
    least = shrink(found, weakening)
    assert least.violation
    assert least.trace
    assert len(least.faults) < len(found.faults)
    for fault in least.faults:
        rest = [other for other in least.faults if other is not fault]
        assert not simulate(found.seed, weakening, rest).violation, "this fault is not needed"
