"""One worker process of the demo: ``python -m jobsync_orm.demo.worker NAME SECONDS``.

It works through the files that are its own until it gets SIGTERM. ``SECONDS`` is the least time it spends on one file.
``JOBSYNC_DATABASE_URL`` names the database.

Two things make every file be done exactly once while files change hands:

- The file in hand is finished before its token is handed over: ``on_revoke`` waits for it. The question
  ``can_claim_task`` is asked right before the work, under the same lock, and is answered with no from then on.
- A list of files is as old as the query. If this worker's tokens have changed since, the list is dropped: a file on it
  may have gone to another worker, been done there, and come back.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path

from sqlalchemy import create_engine, update
from sqlalchemy.orm import sessionmaker

from jobsync_orm import CoordinationConfig, Job, RevokeEvent
from jobsync_orm.demo.counting import count, standard_library
from jobsync_orm.demo.model import SCHEMA, SourceFile
from jobsync_orm.orm import OwnedQuerySession

__all__ = ["Worker"]

BATCH = 20


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
        self.leaving = threading.Event()
        self.news = threading.Event()
        self.in_hand = threading.Lock()

    def run(self) -> None:
        """Join, work until ``leaving`` is set, leave."""
        config = CoordinationConfig(engine=self.engine, schema=SCHEMA)
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
                self.do(path)
        return bool(paths)

    def do(self, path: str) -> None:
        """Count one file and store the counts."""
        until = time.monotonic() + self.seconds
        counts = count(Path(self.root, path).read_bytes())
        time.sleep(max(0.0, until - time.monotonic()))
        stored = {**counts._asdict(), "done_by": self.name, "times_done": SourceFile.times_done + 1}
        with self.session.begin() as session:
            session.execute(update(SourceFile).where(SourceFile.path == path).values(stored))


def main() -> None:
    """Entry point of the process."""
    # Ctrl-C in a terminal reaches all its processes; the director sees to it that the workers end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    worker = Worker(sys.argv[1], os.environ["JOBSYNC_DATABASE_URL"], float(sys.argv[2]))
    signal.signal(signal.SIGTERM, lambda *_: worker.leaving.set())
    worker.run()


if __name__ == "__main__":
    main()
