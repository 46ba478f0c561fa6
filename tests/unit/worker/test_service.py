"""What a worker cannot be made of."""

from __future__ import annotations

from typing import Any

import pytest

from jobsync_orm import CoordinationConfig, JobQueue, JobWorker
from jobsync_orm.exceptions import ConfigurationError


@pytest.mark.parametrize("queue", ["shop.jobs:queue", None, JobQueue])
def test_what_is_no_queue(queue: Any) -> None:
    with pytest.raises(ConfigurationError, match="JobWorker needs a JobQueue, not"):
        JobWorker(queue)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"job": "worker-01"}, "job='worker-01' is no Job: .*node_name="),
        ({"types": "resize"}, "types='resize' must be a list of types"),
        ({"types": 5}, "types=5 must be a list of types"),
    ],
)
def test_what_cannot_be_given(given: Any, message: str) -> None:
    queue = JobQueue(CoordinationConfig())
    with pytest.raises(ConfigurationError, match=message):
        JobWorker(queue, **given)
