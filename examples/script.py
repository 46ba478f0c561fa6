"""A worker as a plain program: it works in a loop, and leaves politely at SIGTERM and Ctrl-C, between two items.

    pip install 'jobsync-orm[embedded]'
    python examples/script.py worker-01

``DATABASE_URL`` names a PostgreSQL; without it one is started in ``.jobsync``.
"""

import os
import signal
import sys
import threading

from jobsync_orm import CoordinationConfig, Job

stopping = threading.Event()


def stop(number: int, frame: object) -> None:
    """Only a note: a handler runs in the middle of whatever the program does."""
    stopping.set()


def main(name: str) -> None:
    url = os.environ.get("DATABASE_URL")
    config = CoordinationConfig(url=url, create_tables=True) if url else CoordinationConfig.embedded(".jobsync/pg")
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    with Job(name, coordination_config=config) as job:
        print(f"{name} owns {len(job.my_tokens)} tokens", flush=True)
        while not stopping.is_set():
            for customer in range(100):
                if stopping.is_set():
                    break
                if job.can_claim_task(customer):  # asked anew for each: tokens move
                    stopping.wait(0.01)  # the work
            stopping.wait(1)
    print(f"{name} has left", flush=True)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: script.py WORKER-NAME")
    main(sys.argv[1])
