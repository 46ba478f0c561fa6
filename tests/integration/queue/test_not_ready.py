"""A database in which nobody has made the tables, or only those of a version before."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from sqlalchemy import Engine, create_engine, text
from sqlalchemy.exc import ProgrammingError
from sqlalchemy.orm import Session, sessionmaker

from jobsync_orm import ConfigurationError, NewJob, migrate
from jobsync_orm.config import CoordinationConfig
from jobsync_orm.exceptions import SchemaNotReady
from jobsync_orm.queue import JobQueue
from tests.conftest import Server

CALLS: list[Callable[[JobQueue], Any]] = [
    lambda queue: queue.submit("t"),
    lambda queue: queue.submit("t", key="k", idempotency_key="i"),
    lambda queue: queue.cancel(1),
    lambda queue: queue.status(1),
    lambda queue: queue.stats(),
    lambda queue: queue.dequeue("t", "me"),
]


@pytest.fixture(scope="module", params=[None, "0002", "0003"])
def unready(server: Server, request: pytest.FixtureRequest) -> Iterator[Engine]:
    url = server.create_database()
    engine = create_engine(url)
    if request.param is not None:
        migrate.upgrade(engine, total_tokens=3, revision=request.param)
    yield engine
    engine.dispose()
    server.drop_database(url)


def test_the_error_names_the_command(unready: Engine) -> None:
    queue = JobQueue(engine=unready, wake=False)
    command = r"jobsync-orm db upgrade --appname sync_ --url postgresql\+psycopg://USER@HOST/DATABASE"
    with unready.connect() as connection:
        complete = connection.scalar(text("SELECT to_regclass('sync_job') IS NOT NULL"))
    for number, call in enumerate(CALLS):
        if complete and 2 <= number <= 4:  # which read nothing that came later
            continue
        with pytest.raises(SchemaNotReady, match=command):
            call(queue)
    with Session(unready) as session:
        for many in ("t", [NewJob("t")]):
            with pytest.raises(SchemaNotReady, match=r"has ended the transaction .* roll it back"):
                queue.enqueue_many(session, many, [{}] if isinstance(many, str) else None)
            session.rollback()
        with pytest.raises(SchemaNotReady, match=command):
            queue.enqueue(session, "t")


def test_a_table_of_the_applications_that_is_missing_is_none_of_ours(unready: Engine) -> None:
    queue = JobQueue(engine=unready, wake=False)
    with pytest.raises(ProgrammingError, match="invoice"):
        queue._autocommit.execute(text("SELECT * FROM invoice"), {})


def test_a_session_is_no_factory(unready: Engine) -> None:
    with Session(unready) as session, pytest.raises(ConfigurationError, match=r"sessionmaker\(engine\)"):
        JobQueue(engine=unready, session_factory=session)
    assert JobQueue(engine=unready, session_factory=sessionmaker(unready)).session_factory is not None


def test_a_queue_shows_no_password() -> None:
    queue = JobQueue(CoordinationConfig(url="postgresql://me:secret@db:5433/shop?password=secret"))
    queue.register("mail", print)
    assert repr(queue) == '<JobQueue "sync_job" at db:5433/shop, handlers: mail>'
