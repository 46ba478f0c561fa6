"""What is synchronous needs no greenlet, which SQLAlchemy 2.1 does not bring along: programs in which it is missing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from sqlalchemy import URL

from tests.docs.test_code_blocks import ROOT, RUNNER, blocks

MISSING = "import sys\nsys.modules['greenlet'] = None\n"

SESSIONS = """
import os
from sqlalchemy import create_engine, select
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, scoped_session, sessionmaker
from jobsync_orm import ConfigurationError, CoordinationConfig, Job, OwnedSession, TokenOwned
from jobsync_orm import filter_session, unfilter_session

class Base(DeclarativeBase):
    pass

class Item(TokenOwned, Base):
    __tablename__ = "item"
    __token_key__ = "sku"
    id: Mapped[int] = mapped_column(primary_key=True)
    sku: Mapped[str]

engine = create_engine(os.environ["JOBSYNC_DATABASE_URL"])
Base.metadata.create_all(engine)
with Job("n1", coordination_config=CoordinationConfig(engine=engine)) as job:
    job.run(sessionmaker(engine, class_=OwnedSession, job=job), lambda session: session.add(Item(sku="a")))
    for factory in (sessionmaker(engine), scoped_session(sessionmaker(engine))):
        filter_session(factory, job)
        with factory() as session:
            job.bind(session)
            assert len(job.claim(session, select(Item), limit=10)) == 1
            session.commit()
        unfilter_session(factory)
    calls = (job.bind, lambda it: filter_session(it, job), lambda it: job.claim(it, select(Item), limit=1))
    for refused in calls:
        try:
            refused(object())
        except ConfigurationError as error:
            assert "is no session" in str(error), error
        else:
            raise AssertionError("accepted")
"""

# A handler's attempt must be the first: that it is tried again hides a failure.
QUEUE = """
import os
from sqlalchemy import create_engine, text
from sqlalchemy.orm import scoped_session, sessionmaker
from jobsync_orm import JobContext, JobQueue, JobState, JobWorker

engine = create_engine(os.environ["JOBSYNC_DATABASE_URL"])
queue = JobQueue(engine=engine, session_factory=FACTORY)

@queue.handler("one")
def one(ctx: JobContext) -> int:
    return ctx.session.scalar(text("SELECT 1"))

@queue.handler("two")
async def two(ctx: JobContext) -> int:
    return 2

with sessionmaker(engine).begin() as session:
    jobs = [queue.enqueue(session, name) for name in ("one", "two")]
with JobWorker(queue):
    for job, result in zip(jobs, (1, 2)):
        done = queue.wait(job, timeout=30)
        assert (done.state, done.result, done.attempt) == (JobState.COMPLETED, result, 1), done
queue.dispose()
engine.dispose()
"""


def run(code: str, folder: Path, url: URL, *arguments: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", MISSING + code, *arguments],
        cwd=folder,
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "JOBSYNC_DATABASE_URL": url.render_as_string(hide_password=False),
        },
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize("page", ["README.md", "docs/quickstart.md"])
def test_first_pages(page: str, empty_database: URL, tmp_path: Path) -> None:
    python = [block for block in blocks(ROOT / page) if block.language == "python"]
    run(RUNNER, tmp_path, empty_database, str(ROOT / page), *(f"{b.first},{b.last},{b.indent}" for b in python))


def test_sessions(database: URL, tmp_path: Path) -> None:
    run(SESSIONS, tmp_path, database)


@pytest.mark.parametrize("factory", ["None", "sessionmaker(engine)", "scoped_session(sessionmaker(engine))"])
def test_queue(factory: str, database: URL, tmp_path: Path) -> None:
    run(QUEUE.replace("FACTORY", factory), tmp_path, database)
