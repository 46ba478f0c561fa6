"""A worker whose application is busy is alive: it is not declared dead, and keeps its tokens and its epoch.

The worker is a real process with the default settings (``python -m`` of this file), in which every thread waits for the
only connection of the application's pool while a C call holds the interpreter lock for five seconds.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from sqlalchemy import URL, Engine, create_engine, text
from sqlalchemy.exc import TimeoutError as PoolTimeout

from jobsync_orm import CoordinationConfig, Job

HELD_SEC = 5
THREADS = 20


def standing(engine: Engine) -> tuple[list[tuple[object, ...]], list[tuple[object, ...]]]:
    """Who is a member, in which life; and who owns each token, since which epoch."""
    with engine.connect() as connection:
        nodes = connection.execute(text("SELECT name, incarnation, ordinal FROM sync_node ORDER BY 1")).all()
        tokens = connection.execute(text("SELECT token_id, node, epoch, next_node FROM sync_token ORDER BY 1")).all()
        return list(map(tuple, nodes)), list(map(tuple, tokens))


@pytest.mark.parametrize("leads", [True, False], ids=["the leader", "a follower"])
def test_busy_in_every_thread_and_deaf_for_five_seconds(database: URL, engine: Engine, leads: bool) -> None:
    config = CoordinationConfig(url=database)
    busy = Job("busy", config)
    watcher = Job("watcher", config)
    if not leads:
        watcher.start()
    process = subprocess.Popen(
        [sys.executable, "-m", __name__],
        cwd=Path(__file__).parents[3],
        env={**os.environ, "URL": database.render_as_string(hide_password=False), "NODE": busy.node_name},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdin is not None
        assert process.stdout is not None
        assert json.loads(process.stdout.readline()) == "joined"
        if leads:
            watcher.start()
        process.stdin.write("go\n")
        process.stdin.flush()
        assert json.loads(process.stdout.readline()) == "deaf from now on"
        before = standing(engine)
        assert [row[0] for row in before[0]] == ["busy", "watcher"]
        after = json.loads(process.stdout.readline())
        assert standing(engine) == before, "nobody was declared dead, no token moved, no epoch was raised"
        assert watcher.am_i_leader() is not leads
        assert after["yes"] == after["owned"] == 5000, "it still owns what it owned, and says so"
        assert after["waited"] == THREADS, "its pool was exhausted all the time"
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()
        watcher.stop()


def main() -> None:
    application = create_engine(os.environ["URL"], pool_size=1, max_overflow=0, pool_timeout=HELD_SEC + 2)
    config = CoordinationConfig(engine=application)
    waited: list[int] = []

    def wait_for_a_connection() -> None:
        try:
            application.connect()
        except PoolTimeout:
            waited.append(1)

    with Job(os.environ["NODE"], config) as job:
        print(json.dumps("joined"), flush=True)
        sys.stdin.readline()
        with application.connect():
            threads = [threading.Thread(target=wait_for_a_connection, daemon=True) for _ in range(THREADS)]
            for thread in threads:
                thread.start()
            print(json.dumps("deaf from now on"), flush=True)
            ctypes.PyDLL(None).sleep(HELD_SEC)  # unlike CDLL, PyDLL keeps the interpreter lock during the call
            yes = sum(job.can_claim_task(task) for task in one_task_for_each_token(job))
            owned = len(job.my_tokens)
            for thread in threads:
                thread.join()
            print(json.dumps({"yes": yes, "owned": owned, "waited": len(waited)}), flush=True)
            sys.stdin.readline()


def one_task_for_each_token(job: Job) -> list[int]:
    tasks: dict[int, int] = {}
    task = 0
    while len(tasks) < job.total_tokens:
        tasks.setdefault(job.task_to_token(task), task)
        task += 1
    return list(tasks.values())


if __name__ == "__main__":
    main()
