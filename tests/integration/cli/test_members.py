"""`jobsync-orm drain|undrain|evict`."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

from sqlalchemy import URL, Engine, text

from jobsync_orm import CoordinationConfig, Job
from tests.conftest import dsn
from tests.integration.cli.commands import run
from tests.integration.cluster import QUICK, wait_for


def test_drain_wait_and_undrain(database: URL, job: Job) -> None:
    with Job("w2", CoordinationConfig(url=database, **QUICK)) as second:
        kept = run("drain", "w2", url=database)
        assert kept.exit_code == 2
        assert kept.stderr.startswith(
            "error: Move all tokens of 'w2' to other nodes? Nobody is there to ask: give --yes"
        )
        done = run("drain", "w2", "--yes", "--wait", "--timeout", "20", "--reason", "disk", url=database)
        assert (done.exit_code, done.stdout, done.stderr) == (0, "w2 has no tokens\n", "")
        wait_for(lambda: len(second.my_tokens) == 0, "w2 knows")
        status = run("status", url=database)
        assert status.exit_code == 0
        assert any(
            line.startswith("drained: w2 by ") and line.endswith("(disk)") for line in status.stdout.splitlines()
        )
        again = run("drain", "w2", "--yes", "--json", url=database)
        answer = {"node": "w2", "new": False, "tokens": 0, "claims": 0, "done": True}
        assert json.loads(again.stdout) == answer
        last = run("drain", "w1", "--yes", url=database)
        assert last.exit_code == 2
        assert "is the last node that takes tokens" in last.stderr
        assert run("undrain", "w2", url=database).stdout == "w2 gets tokens again\n"
        none = run("undrain", "w2", "--json", url=database)
        assert (none.exit_code, json.loads(none.stdout)) == (1, {"node": "w2", "undrained": False})


def test_a_drain_that_takes_too_long_is_a_no(database: URL, engine: Engine, job: Job) -> None:
    with engine.begin() as connection:  # a node that never hands anything over
        connection.execute(
            text("INSERT INTO sync_node (name, incarnation, state) VALUES ('w9', gen_random_uuid(), 'active')")
        )
        connection.execute(text("UPDATE sync_token SET node = 'w9' WHERE token_id < 10"))
    done = run("drain", "w9", "--yes", "--wait", "--timeout", "0", url=database)
    assert (done.exit_code, done.stdout) == (1, "w9 has 10 tokens left\n")


def test_evict_refuses_a_lease_that_runs(database: URL, job: Job) -> None:
    done = run("evict", "w1", "--yes", url=database)
    assert done.exit_code == 1
    assert done.stderr.startswith("error: 'w1' (process ")
    for word in ("may say yes to its tasks for another", "the leader takes it out by itself", "drain it", "--force"):
        assert word in done.stderr
    assert run("evict", "w9", "--yes", url=database).stderr == "error: there is no node 'w9'\n"


def test_evict_of_one_whose_heartbeat_goes_on_is_a_no(database: URL, engine: Engine) -> None:
    with engine.begin() as connection:
        connection.execute(
            text(
                "INSERT INTO sync_node (name, incarnation, state, last_heartbeat)"
                " VALUES ('w9', gen_random_uuid(), 'active', now() - interval '1 hour')"
            )
        )
    stopped = threading.Event()

    def beat() -> None:
        while not stopped.wait(0.2):
            # Slower than a heartbeat should be: its lease has ended each time the command looks at first.
            with engine.begin() as connection:
                connection.execute(text("UPDATE sync_node SET last_heartbeat = last_heartbeat + interval '1 s'"))

    with ThreadPoolExecutor(1) as pool:
        beating = pool.submit(beat)
        try:
            done = run("evict", "w9", "--yes", url=database)
        finally:
            stopped.set()
        beating.result()
    assert (done.exit_code, done.stdout) == (1, "w9 is alive: its heartbeat goes on\n")


def test_evict_by_force(database: URL, job: Job) -> None:
    assert run("evict", "w1", "--force", url=database).exit_code == 2
    done = run("evict", "w1", "--force", "--yes", url=database)
    assert (done.exit_code, done.stdout) == (
        0,
        "w1 has joined anew: its claims have ended, and it has its tokens again\n",
    )
    wait_for(lambda: job.can_claim_task(1), "it says yes again")


def test_a_person_is_asked_on_a_terminal(database: URL, job: Job) -> None:
    """And what they say counts."""
    command = [sys.executable, "-c", "from jobsync_orm.cli import main; main()", "drain", "w1", "--last"]
    environment = {**os.environ, "JOBSYNC_DATABASE_URL": dsn(database), "TERM": "dumb"}
    for answer, code, said in ((b"n\n", 1, "nothing was changed"), (b"y\n", 0, "tokens")):
        ours, theirs = pty.openpty()
        os.write(ours, answer)
        done = subprocess.run(command, env=environment, stdin=theirs, capture_output=True, text=True, timeout=60)
        os.close(ours)
        os.close(theirs)
        assert done.returncode == code, done.stderr
        assert "Move all tokens of 'w1' to other nodes?" in done.stderr
        assert said in done.stderr + done.stdout
