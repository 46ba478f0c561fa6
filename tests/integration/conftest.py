from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from sqlalchemy import URL, Engine, create_engine

from jobsync_orm import CoordinationConfig, Job
from tests.integration.cluster import QUICK, Cluster


@pytest.fixture
def make_cluster(database: URL) -> Iterator[Callable[..., Cluster]]:
    made: list[Cluster] = []

    def make(url: URL | None = None, **settings: object) -> Cluster:
        cluster = Cluster(url or database, **settings)  # type: ignore[arg-type]
        made.append(cluster)
        return cluster

    yield make
    for cluster in made:
        cluster.close()


@pytest.fixture
def cluster(make_cluster: Callable[..., Cluster]) -> Cluster:
    """Real worker processes on a database with the library's tables."""
    return make_cluster()


@pytest.fixture
def own_engine(database: URL) -> Iterator[Engine]:
    """An engine that a job uses, and nobody else."""
    engine = create_engine(database)
    yield engine
    engine.dispose()


@pytest.fixture
def job(own_engine: Engine) -> Iterator[Job]:
    """The only worker, on ``own_engine``."""
    with Job("w1", CoordinationConfig(engine=own_engine, **QUICK)) as job:
        yield job
