from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from sqlalchemy import URL

from tests.integration.cluster import Cluster


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
