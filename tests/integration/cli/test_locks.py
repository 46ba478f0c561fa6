"""`jobsync-orm locks`, `where`, `audit`, `rebalance`."""

from __future__ import annotations

import json
import subprocess
import sys

from sqlalchemy import URL

from jobsync_orm import Job
from jobsync_orm.hashing import task_to_token
from tests.conftest import dsn
from tests.integration.cli.commands import run
from tests.integration.cluster import wait_for

TOKEN = task_to_token("big", 10_000)


def test_the_life_of_a_pin(database: URL, job: Job) -> None:
    assert run("locks", "list", url=database).stdout == "no pins\n"
    added = run("locks", "add", "big", "gpu-%", "w%", "--reason", "why", "--days", "2", "--by", "me", url=database)
    assert added.exit_code == 0, added.stderr
    assert added.stdout.splitlines() == [
        f"task 'big' hashes to token {TOKEN}",
        "its pin allows w1, by pattern 'w%', since no live node matches 'gpu-%'",
        added.stdout.splitlines()[2],
    ]
    assert added.stdout.splitlines()[2].startswith("w1 has the token since epoch ")
    listed = run("locks", "list", url=database).stdout.splitlines()
    assert listed[0].split() == ["task", "token", "patterns", "by", "expires", "reason"]
    assert listed[1].split()[:5] == ["big", str(TOKEN), "gpu-%,", "w%", "me"]
    (pin,) = json.loads(run("locks", "list", "--json", url=database).stdout)
    assert (pin["patterns"], pin["reason"], pin["expired"]) == (["gpu-%", "w%"], "why", False)
    explained = json.loads(run("locks", "explain", "big", "--json", url=database).stdout)
    assert (explained["place"]["node"], explained["allowed"]) == ("w1", ["w1"])

    kept = run("locks", "clear", "big", url=database)
    assert kept.exit_code == 2
    assert kept.stderr == (
        "error: Delete the pin of task 'big'? Nobody is there to ask: give --yes to do it. Nothing was changed\n"
    )
    assert run("locks", "clear", "big", "--yes", url=database).stdout == "1 cleared\n"
    none = run("locks", "clear", "--all", "--yes", "--json", url=database)
    assert (none.exit_code, json.loads(none.stdout)) == (1, {"cleared": 0})


def test_what_to_clear_must_be_said_once(database: URL) -> None:
    for arguments in ([], ["x", "--all"], ["--all", "--by", "me"]):
        done = run("locks", "clear", *arguments, "--yes", url=database)
        assert (done.exit_code, done.stderr) == (2, "error: say what to clear: TASK..., or --by CREATOR, or --all\n")


def test_pins_of_one_creator_are_cleared(database: URL) -> None:
    for task, creator in (("a", "me"), ("b", "me"), ("c", "you")):
        assert run("locks", "add", task, "%", "--by", creator, url=database).exit_code == 0
    assert run("locks", "clear", "--by", "me", "--yes", url=database).stdout == "2 cleared\n"
    limited = run("locks", "list", "--limit", "1", url=database)
    assert limited.stdout.splitlines()[1].startswith("c ")
    assert limited.stderr == "there may be more than 1: see --limit\n"


def test_a_bad_pattern_is_refused(database: URL) -> None:
    done = run("locks", "add", "x", "gpu\\", url=database)
    assert done.exit_code == 2
    assert "must not end in a lone backslash" in done.stderr


def test_where(database: URL, job: Job) -> None:
    claim = job.claim_task("big")
    done = run("where", "big", url=database)
    assert done.exit_code == 0
    lines = done.stdout.splitlines()
    assert lines[0] == f"task big -> token {TOKEN} -> w1"
    assert lines[1].startswith("claimed by w1 since ")
    claim.release()
    run("locks", "add", "big", "nobody", url=database)
    parked = wait_for(lambda: (r := run("where", "big", url=database)).exit_code and r, "parked")
    assert parked.exit_code == 1
    assert parked.stdout == f"task big -> token {TOKEN} -> nobody, pinned\n"
    assert json.loads(run("where", "big", "--json", url=database).stdout)["live"] is False


def test_audit(database: URL, job: Job) -> None:
    assert run("audit", url=database).stdout == "nothing is written\n"
    for task in ("a", "b"):
        with job.claim_task(task):
            pass
    done = run("audit", "--limit", "1", url=database)
    assert done.stdout.splitlines()[1].split()[-3] == "b"
    last = done.stderr.split()[-1]
    (entry,) = json.loads(run("audit", "--before", last, "--since", "2026-01-01", "--json", url=database).stdout)
    assert (entry["task_id"], entry["node"]) == ("a", "w1")
    assert json.loads(run("audit", "--task", "b", "--node", "w2", "--json", url=database).stdout) == []


def test_rebalance(database: URL, job: Job) -> None:
    dry = run("rebalance", "--dry-run", url=database)
    assert (dry.exit_code, dry.stderr) == (0, "")
    assert dry.stdout.splitlines() == ["nothing would move", "", "node    now   then", "w1    10000  10000"]
    told = run("rebalance", "--json", url=database)
    assert json.loads(told.stdout)["loads"] == [{"node": "w1", "now": 10_000, "then": 10_000}]


def test_as_a_process(database: URL) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", "from jobsync_orm.cli import main; main()", "locks", "clear", "--all"],
        env={"JOBSYNC_DATABASE_URL": dsn(database), "PATH": ""},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert "give --yes" in done.stderr


def test_a_star_is_no_wildcard(database: URL) -> None:
    assert run("locks", "add", "big", "gpu-%", "%*", url=database).stderr == ""
    assert run("locks", "add", "big", "%", "gpu-*", url=database).stderr == (
        "'gpu-*' means a node with a * in its name: patterns are SQL LIKE, write % for *\n"
    )
