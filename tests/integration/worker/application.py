"""An application with a worker, run as ``python -m``: what it does is printed, one JSON text a line.

``URL`` is the database, ``OPTIONS`` the worker's, ``DEFAULTS`` leaves its cluster's settings as users get them,
``ASYNC`` runs it in an event loop of the application's.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import time
from typing import Any

from sqlalchemy import make_url

from jobsync_orm import CoordinationConfig, JobQueue, JobWorker
from jobsync_orm.queue import JobContext
from tests.integration.cluster import QUICK

config = {} if "DEFAULTS" in os.environ else QUICK
queue = JobQueue(CoordinationConfig(url=make_url(os.environ["URL"]), **config))  # type: ignore[arg-type]


def say(event: str, **more: Any) -> None:
    # One write: print() makes two of a line, and other threads and processes write here too.
    os.write(1, f"{json.dumps({'event': event, 'pid': os.getpid(), **more})}\n".encode())


@queue.handler("thread")
def thread(ctx: JobContext, seconds: float) -> None:
    say("thread runs")
    time.sleep(seconds)


@queue.handler("process", kind="process")
def process(ctx: JobContext, seconds: float) -> None:
    say("process runs")
    time.sleep(seconds)


@queue.handler("stubborn")
async def stubborn(ctx: JobContext, seconds: float) -> None:
    say("stubborn runs")
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(0.1)


@queue.handler("task")
async def task(ctx: JobContext, seconds: float) -> None:
    say("task runs")
    await asyncio.sleep(seconds)


async def run_async(worker: JobWorker) -> None:
    async def tick() -> None:
        while True:
            say("tick")
            await asyncio.sleep(0.1)

    ticking = asyncio.create_task(tick())
    running = asyncio.create_task(worker.run_async())
    if "CANCEL" in os.environ:
        while not worker.is_running:
            await asyncio.sleep(0.05)
        running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    say("run_async has ended", cancelled=running.cancelled())
    ticking.cancel()


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    worker = JobWorker(queue, **json.loads(os.environ.get("OPTIONS", "{}")))
    say("starts")
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    if "ASYNC" in os.environ:
        asyncio.run(run_async(worker))
    else:
        worker.run()
    after = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    say("ended", restored=after == before)


if __name__ == "__main__":
    main()
