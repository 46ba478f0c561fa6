"""`jobsync-orm status|nodes|tokens|rebalances`."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from sqlalchemy import URL

from jobsync_orm import Job
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


def test_with_a_worker(database: URL, job: Job) -> None:
    status = run("status", url=database)
    assert (status.exit_code, status.stderr) == (0, "")
    lines = status.stdout.splitlines()
    assert lines[0] == "cluster sync_: healthy"
    assert lines[1].startswith("leader w1, epoch ")
    assert lines[2] == "tokens: 10000 owned, 0 draining, 0 parked, 0 without owner"
    assert "by w1: initial, 10000 tokens, 0 -> 1 nodes" in lines[3]
    assert lines[-1].split()[:3] == ["w1", "*", "live"]

    document = json.loads(run("status", "--json", url=database).stdout)
    assert document["healthy"] is True
    assert document["nodes"][0]["tokens"] == {"node": "w1", "owned": 10_000, "leaving": 0, "coming": 0}
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
