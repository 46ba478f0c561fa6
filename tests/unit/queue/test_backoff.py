from __future__ import annotations

from typing import Any

import pytest

from jobsync_orm.exceptions import InvalidJob
from jobsync_orm.queue import Backoff


def test_doubles_up_to_its_maximum() -> None:
    backoff = Backoff(jitter=0)
    assert [backoff(n) for n in range(8)] == [60, 120, 240, 480, 960, 1920, 3600, 3600]
    assert backoff(100_000) == 3600


def test_jitter_only_shortens() -> None:
    delays = [Backoff(base=100, jitter=0.2)(0, ValueError()) for _ in range(1000)]
    assert 80 <= min(delays) < 85
    assert 95 < max(delays) <= 100
    assert len(set(delays)) > 900


def test_constant() -> None:
    assert {Backoff(base=5, factor=1, jitter=0)(n) for n in range(10)} == {5}
    assert Backoff(base=0)(3) == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"base": -1}, "Backoff.base=-1"),
        ({"base": "1"}, "Backoff.base='1'"),
        ({"maximum": float("inf")}, "Backoff.maximum=inf"),
        ({"factor": 0.5}, "Backoff.factor=0.5"),
        ({"factor": True}, "Backoff.factor=True"),
        ({"jitter": 1.1}, "Backoff.jitter=1.1"),
        ({"jitter": float("nan")}, "Backoff.jitter=nan"),
    ],
)
def test_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidJob, match=message):
        Backoff(**options)
