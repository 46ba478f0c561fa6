"""One worker process of a test cluster; prints what it sees as JSON lines and leaves on SIGTERM.

Environment: URL, NODE, CONFIG (settings as JSON), JOB (Job arguments as JSON), TASKS (how many task ids to ask for),
CLAIM (how many of them to claim at once, and never to complete), SET_CLAIM (how many to mark with set_claim),
CHECKPOINT (up to which number to count in checkpoints of one task of its own, holding its claim),
SWEEP (seconds between two rounds of asking), CLOCK_AHEAD (seconds the process's wall clock is ahead), CALLBACK
("sleep:SECONDS" or "raise").
"""

from __future__ import annotations

import datetime
import json
import os
import signal
import sys
import threading
import time

from jobsync_orm import CoordinationConfig, Job, OwnershipLost

ahead = float(os.environ.get("CLOCK_AHEAD", "0"))
if ahead:
    real_time, real_datetime = time.time, datetime.datetime

    class Skewed(real_datetime):
        @classmethod
        def now(cls, tz=None):
            return real_datetime.now(tz) + datetime.timedelta(seconds=ahead)

    datetime.datetime = Skewed
    time.time = lambda: real_time() + ahead

printing = threading.Lock()


def tell(event: str, **more: object) -> None:
    with printing:
        print(json.dumps({"event": event, "t": time.monotonic(), **more}), flush=True)


def callback(event: object) -> None:
    kind, _, argument = os.environ["CALLBACK"].partition(":")
    tell("callback", begin=True)
    if kind == "sleep":
        time.sleep(float(argument))
    elif kind == "raise":
        raise ValueError("on purpose")
    tell("callback", begin=False)


def count(job: Job, most: int) -> None:
    task = next(n for n in range(100_000) if job.can_claim_task(n))
    try:
        with job.claim_task(task):
            for position in range(most):
                job.checkpoint(task, position)
                if position == 0:
                    tell("checkpoint", task=task)
                time.sleep(0.005)
    except OwnershipLost as lost:
        tell("checkpoint refused", owners=lost.owners)


def main() -> None:
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    tasks, sweep = int(os.environ.get("TASKS", "0")), float(os.environ.get("SWEEP", "0.05"))
    config = CoordinationConfig(url=os.environ["URL"], **json.loads(os.environ.get("CONFIG", "{}")))
    options = json.loads(os.environ.get("JOB", "{}"))
    if os.environ.get("CALLBACK"):
        options["on_rebalance"] = callback
    tell("start", pid=os.getpid())
    try:
        with Job(os.environ["NODE"], config, **options) as job:
            claims = job.claim_tasks(range(int(os.environ.get("CLAIM", "0"))))
            marked = job.set_claim(range(int(os.environ.get("SET_CLAIM", "0"))))
            tell("ready", tokens=len(job.my_tokens), claims=[c.task_id for c in claims], marked=marked)
            if os.environ.get("CHECKPOINT"):
                threading.Thread(target=count, args=(job, int(os.environ["CHECKPOINT"])), daemon=True).start()
            held: set[int] = set()
            last = time.monotonic()
            while not stop.is_set():
                began = time.monotonic()
                now_held = {task for task in range(tasks) if job.can_claim_task(task)}
                if began - last > 1.0:
                    # This process did not run for a while: what it said yes to before, it may not have meanwhile.
                    tell("pause", last=last, resumed=began)
                if now_held != held:
                    tell("claims", gain=sorted(now_held - held), lose=sorted(held - now_held), began=began, last=last)
                    held = now_held
                last = began
                stop.wait(sweep)
            tell("stopping", last=last)
        tell("stopped")
    except BaseException as error:
        tell("error", kind=type(error).__name__, message=str(error))
        raise


if __name__ == "__main__":
    sys.exit(main())
