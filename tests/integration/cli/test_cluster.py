"""`jobsync-orm status|nodes|tokens|rebalances`."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from sqlalchemy import URL, Engine
from sqlalchemy.orm import Session

from jobsync_orm import Job, JobQueue
from tests.integration.cli.commands import run


def test_without_workers_the_answer_is_no(database: URL) -> None:
    status = run("status", url=database)
    assert status.exit_code == 1
    assert status.stdout.splitlines()[:3] == [
        "cluster sync_: NOT HEALTHY",
        "  ! no node is live: nobody works on any token",
        "  ! 10000 tokens have no owner yet",
    ]
    assert (run("nodes", url=database).exit_code, run("tokens", url=database).exit_code) == (1, 1)
    assert run("rebalances", url=database).stdout == "no rebalances yet\n"


def test_with_a_worker(database: URL, own_engine: Engine, job: Job) -> None:
    status = run("status", url=database)
    assert (status.exit_code, status.stderr) == (0, "")
    lines = status.stdout.splitlines()
    assert lines[0] == "cluster sync_: healthy"
    assert lines[1].startswith("leader w1, epoch ")
    assert lines[2] == "tokens: 10000 owned, 0 draining, 0 parked, 0 without owner"
    assert "by w1: initial, 10000 tokens, 0 -> 1 node" in lines[3]
    assert lines[4] == "queue: 0 pending, 0 processing"
    assert lines[-1].split()[:3] == ["w1", "*", "live"]
    queue = JobQueue(engine=own_engine)
    with Session(own_engine) as session:
        queue.enqueue(session, "work", {}, key="k")
        queue.enqueue(session, "work", {}, delay=3600)
        session.commit()
    assert (
        run("status", url=database)
        .stdout.splitlines()[4]
        .startswith("queue: 1 pending, 1 scheduled, 0 processing, ready for up to ")
    )

    document = json.loads(run("status", "--json", url=database).stdout)
    assert document["healthy"] is True
    assert document["queue"]["counts"] == {"pending": 1, "scheduled": 1, "blocked": 0, "processing": 0, "retrying": 0}
    assert document["nodes"][0]["tokens"] == {"node": "w1", "owned": 10_000, "leaving": 0, "coming": 0, "waiting": 0}
    assert json.loads(run("nodes", "--json", url=database).stdout)[0]["name"] == "w1"
    assert json.loads(run("tokens", "--json", url=database).stdout)["owned"] == 10_000
    (rebalance,) = json.loads(run("rebalances", "--json", url=database).stdout)
    assert (rebalance["reason"], rebalance["tokens_moved"]) == ("initial", 10_000)
    assert json.loads(run("rebalances", "--since", "2999-01-01", "--json", url=database).stdout) == []
    assert run("tokens", url=database).stdout.splitlines()[-1].startswith("10000 of 10000 owned, 0 draining")


def test_as_a_process(database: URL, job: Job) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", "from jobsync_orm.cli import main; main()", "nodes", "--json"],
        env={**os.environ, "JOBSYNC_DATABASE_URL": database.render_as_string(hide_password=False)},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert [node["condition"] for node in json.loads(done.stdout)] == ["live"]


@pytest.mark.parametrize("arguments", [["nodes", "--no-such"], ["no-such"], ["rebalances", "--limit", "0"]])
def test_an_error_of_usage_is_json_too(arguments: list[str]) -> None:
    command = [sys.executable, "-W", "error", "-c", "from jobsync_orm.cli import main; main()", *arguments]
    done = subprocess.run([*command, "--json"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    error = json.loads(done.stderr)["error"]
    assert (error["type"], arguments[-1] in error["message"] or "limit" in error["message"]) == ("Usage", True)


def test_exit_codes_with_json_are_the_same(database: URL) -> None:
    command = [sys.executable, "-W", "error", "-c", "from jobsync_orm.cli import main; main()", "tokens", "--json"]
    done = subprocess.run(
        command,
        env={**os.environ, "JOBSYNC_DATABASE_URL": database.render_as_string(hide_password=False)},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, json.loads(done.stdout)["unowned"], done.stderr) == (1, 10_000, "")
