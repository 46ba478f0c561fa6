from __future__ import annotations

from collections.abc import Iterator

import pytest
from sqlalchemy import URL

from jobsync_orm import CoordinationConfig, JobQueue
from tests.integration.cluster import QUICK
from tests.integration.integrations.collected import Collected


@pytest.fixture
def config(database: URL) -> CoordinationConfig:
    return CoordinationConfig(url=database, **QUICK)


@pytest.fixture
def queue(config: CoordinationConfig) -> Iterator[JobQueue]:
    queue = JobQueue(config)
    yield queue
    queue.dispose()


@pytest.fixture
def collected() -> Collected:
    return Collected()
