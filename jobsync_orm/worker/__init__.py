"""Running jobs: ``JobWorker(queue, concurrency=8).run()``.

A worker is a node of the cluster. One background thread, the :class:`~jobsync_orm.worker.pump.Pump`, claims jobs and
writes how they ended; executors run them, in threads, in an event loop or in child processes.
"""

from jobsync_orm.worker.health import WorkerHealth
from jobsync_orm.worker.service import JobWorker

__all__ = ["JobWorker", "WorkerHealth"]
