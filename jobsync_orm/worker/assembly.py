"""A worker's pump with its executors, its keys and its duties, ready to be started."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from jobsync_orm.worker.event_loop import EventLoopExecutor
from jobsync_orm.worker.keyed import Keyed
from jobsync_orm.worker.processes import ProcessExecutor
from jobsync_orm.worker.pump import Pump
from jobsync_orm.worker.threads import ThreadExecutor
from jobsync_orm.worker.ticking import Ticking
from jobsync_orm.worker.upkeep import Upkeep

if TYPE_CHECKING:
    from jobsync_orm.job import Job
    from jobsync_orm.queue import Handler, JobQueue

__all__ = ["Sizes", "assemble"]


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much a worker does at once, and how often it looks; see :class:`~jobsync_orm.JobWorker`."""

    concurrency: int
    processes: int
    async_concurrency: int
    batch: int
    poll_sec: float


def assemble(queue: JobQueue, job: Job, handlers: Mapping[str, Handler], sizes: Sizes) -> tuple[Pump, Upkeep]:
    """The pump of the worker that is the node ``job``, and its upkeep."""

    def incarnation() -> str:
        return job.incarnation

    name = job.node_name
    pump = Pump(queue, name, incarnation, handlers, batch=sizes.batch, poll_sec=sizes.poll_sec)
    pump.duties.append(Ticking(queue.statements, queue.periodic_jobs, queue.names.queue_channel, name))
    kinds = {handler.kind for handler in handlers.values()}
    report = pump.report
    if "thread" in kinds:
        pump.executors["thread"] = ThreadExecutor(queue, sizes.concurrency, report, f"jobsync-{name}")
    if "async" in kinds:
        pump.executors["async"] = EventLoopExecutor(queue, sizes.async_concurrency, report, f"jobsync-loop-{name}")
    if "process" in kinds:
        pump.executors["process"] = ProcessExecutor(queue, sizes.processes, report, name, handlers)
    upkeep = Upkeep(pump, incarnation, sizes.concurrency, sizes.poll_sec)
    pump.keyed = Keyed(
        queue.statements,
        name,
        lambda: pump.incarnation,
        pump.types,
        lambda: view.owned if (view := job.held_view()) else b"",
        sizes.poll_sec,
        queue.ageing_sec,
        handlers,
    )
    pump.duties.append(pump.keyed.search)
    return pump, upkeep
