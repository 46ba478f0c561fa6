from __future__ import annotations

from collections.abc import Iterator

import pytest
from sqlalchemy import URL, Engine, create_engine, text

from jobsync_orm.queue import JobQueue
from tests.conftest import Server
from tests.integration.queue.rows import Listener, listening

TABLES = ("job", "job_attempt", "job_dependency", "job_pause", "job_schedule", "job_worker", "node")


@pytest.fixture(scope="session")
def kept_database(server: Server, template: str) -> Iterator[URL]:
    """One database for all tests that need no workers: emptied between them, which is quicker than a new one."""
    url = server.create_database(template)
    yield url
    server.drop_database(url)


@pytest.fixture
def store(kept_database: URL) -> Iterator[Engine]:
    """An engine on a database whose queue is empty."""
    engine = create_engine(kept_database)
    with engine.begin() as connection:
        for kind in TABLES:
            connection.execute(text(f"DELETE FROM sync_{kind}"))
    yield engine
    engine.dispose()


@pytest.fixture
def queue(store: Engine) -> Iterator[JobQueue]:
    """A queue on ``store``."""
    made = JobQueue(engine=store)
    yield made
    made.dispose()


@pytest.fixture
def listener(kept_database: URL, queue: JobQueue) -> Iterator[Listener]:
    """Hears what workers of ``queue`` would hear."""
    with listening(kept_database, queue.names.queue_channel) as made:
        yield made
