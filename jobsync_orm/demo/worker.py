"""One worker process of the demo: ``python -m jobsync_orm.demo.worker NAME SECONDS``.

It works through the files that are its own until it gets SIGTERM. ``SECONDS`` is the least time it spends on one file.
``JOBSYNC_DATABASE_URL`` names the database.

What makes every file be done exactly once while files change hands is the session it is stored with, an
``OwnedSession``: if the file's token is not this worker's any more, perhaps because the worker was paused for a minute
in the middle of the work, the commit raises ``OwnershipLost`` and nothing is stored. Two more things only save work:

- The file in hand is finished before its token is handed over: ``on_revoke`` waits for it. The question
  ``can_claim_task`` is asked right before the work, under the same lock, and is answered with no from then on.
- A list of files is as old as the query. If this worker's tokens have changed since, the list is dropped.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path

from sqlalchemy import create_engine
from sqlalchemy.orm import Session, sessionmaker

from jobsync_orm import CoordinationConfig, Job, OwnedSession, OwnershipLost, RevokeEvent
from jobsync_orm.demo.counting import count, standard_library
from jobsync_orm.demo.model import SCHEMA, RefusedCommit, SourceFile
from jobsync_orm.orm import OwnedQuerySession

__all__ = ["AT_WORK", "HEARTBEAT_TIMEOUT", "Worker"]

BATCH = 20

# Seconds after which a worker that does not answer is taken for dead; the default, 15, would make a long demo.
HEARTBEAT_TIMEOUT = 4

# What a worker's connection is called, in pg_stat_activity, while it works on a file.
AT_WORK = "{} at work"


class Worker:
    """Works through the files that belong to ``name``.

    Parameters
    ----------
    name : str
        The worker's name in the cluster.
    url : str
        The database.
    seconds : float
        Least seconds to spend on one file.
    """

    def __init__(self, name: str, url: str, seconds: float) -> None:
        self.name = name
        self.seconds = seconds
        self.root = standard_library()
        self.engine = create_engine(url)
        self.session = sessionmaker(self.engine, class_=OwnedQuerySession)
        self.at_work = create_engine(url, connect_args={"application_name": AT_WORK.format(name)})
        self.leaving = threading.Event()
        self.news = threading.Event()
        self.in_hand = threading.Lock()

    def run(self) -> None:
        """Join, work until ``leaving`` is set, leave."""
        config = CoordinationConfig(
            engine=self.engine, schema=SCHEMA, heartbeat_timeout_sec=HEARTBEAT_TIMEOUT, heartbeat_interval_sec=1
        )
        parent = os.getppid()
        with Job(self.name, config, on_rebalance=self.news.set, on_revoke=self.finish_file) as job:
            # A worker whose director has died ends too.
            while not self.leaving.is_set() and os.getppid() == parent:
                if not self.work(job):
                    self.news.wait(0.2)
                    self.news.clear()

    def finish_file(self, event: RevokeEvent) -> None:
        """Called when tokens are about to be handed over; the hand-over waits until this returns."""
        with self.in_hand:
            pass

    def work(self, job: Job) -> bool:
        """Do some of this worker's files; False if there are none."""
        version = job.token_version
        with self.session() as session:
            own = session.query(SourceFile.path).owned_by(job).filter(SourceFile.times_done == 0)
            paths = [row.path for row in own.order_by(SourceFile.path).limit(BATCH)]
        for path in paths:
            with self.in_hand:
                if self.leaving.is_set() or job.token_version != version or not job.can_claim_task(path):
                    break
                try:
                    self.do(path, job)
                except OwnershipLost as lost:
                    self.note(path, lost)
        return bool(paths)

    def do(self, path: str, job: Job) -> None:
        """Count one file and store the counts, in one transaction."""
        with OwnedSession(self.at_work, job=job) as session, session.begin():
            file = session.get_one(SourceFile, path)
            until = time.monotonic() + self.seconds
            counts = count(Path(self.root, path).read_bytes())
            time.sleep(max(0.0, until - time.monotonic()))
            file.lines, file.functions, file.classes, file.error = counts
            file.done_by = self.name
            file.times_done = SourceFile.times_done + 1

    def note(self, path: str, lost: OwnershipLost) -> None:
        """Tell the director that a commit came too late. This session is not fenced."""
        with Session(self.engine) as session, session.begin():
            (owner,) = lost.owners.values()
            session.add(RefusedCommit(path=path, worker=self.name, owner=owner))


def main() -> None:
    """Entry point of the process."""
    # Ctrl-C in a terminal reaches all its processes; the director sees to it that the workers end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    worker = Worker(sys.argv[1], os.environ["JOBSYNC_DATABASE_URL"], float(sys.argv[2]))
    signal.signal(signal.SIGTERM, lambda *_: worker.leaving.set())
    worker.run()


if __name__ == "__main__":
    main()
