"""`jobsync-orm queue`."""

from __future__ import annotations

import json
from typing import Any

from sqlalchemy import URL, Engine

from tests.integration.cli.commands import run
from tests.integration.queue.rows import SQL, put, states, tried

OLD = {"finished_at": SQL("now() - interval '8 days'"), "created_at": SQL("now() - interval '9 days'")}


def answer(*arguments: str, url: URL, code: int = 0) -> Any:
    done = run("queue", *arguments, "--json", url=url)
    assert done.exit_code == code, done.stderr
    return json.loads(done.stdout)


def test_stats(database: URL, engine: Engine) -> None:
    put(engine, count=3)
    (failed,) = put(engine, "failed", type="mail")
    tried(engine, failed, "failed", began=10, ended=5)
    assert run("queue", "pause", "mail", "--reason", "why", "--yes", url=database).stdout == (
        "type 'mail' is paused; what runs goes on\n"
    )
    lines = run("queue", "stats", url=database).stdout.splitlines()
    assert lines[0].split()[:9] == ["type", *(s for s in ["pending", "scheduled", "blocked", "processing", "retrying"]),
                                    "completed", "failed", "cancelled"]  # fmt: skip
    assert [line.split()[:8] for line in lines[1:4]] == [
        ["mail", "0", "0", "0", "0", "0", "0", "1"],
        ["t", "3", "0", "0", "0", "0", "0", "0"],
        ["(all)", "3", "0", "0", "0", "0", "0", "1"],
    ]
    assert lines[4].startswith("mail is paused since ")
    assert lines[5] == "no live worker runs t"
    found = answer("stats", url=database)
    assert (found["counts"]["pending"], found["by_type"]["mail"]["counts"]["failed"]) == (3, 1)
    assert found["paused"][0]["reason"] == "why"
    assert answer("stats", "--type", "t", url=database)["by_type"] == {}


def test_jobs(database: URL, engine: Engine) -> None:
    ids = put(engine, count=3)
    (failed,) = put(engine, "failed", type="mail", key="k", error="Refused: \x1b[2Jby the server\nmore")
    listed = answer("jobs", url=database)
    assert [job["id"] for job in listed] == [failed, *reversed(ids)]
    page = run("queue", "jobs", "--limit", "2", url=database)
    assert page.stderr == f"there may be more: see --limit, or --before {ids[-1]}\n"
    assert [job["id"] for job in answer("jobs", "--before", str(ids[-1]), url=database)] == ids[1::-1]
    assert [job["id"] for job in answer("jobs", "--after", str(ids[-1]), url=database)] == [failed]
    for narrowed in (["--type", "mail"], ["--state", "failed"], ["--key", "k"], ["--error", "BY THE"]):
        assert [job["id"] for job in answer("jobs", *narrowed, url=database)] == [failed]
    shown = run("queue", "jobs", "--key", "k", url=database).stdout
    assert "\x1b" not in shown
    assert "by the server" in shown
    assert "more" not in shown
    assert run("queue", "jobs", "--key", "none", url=database).stdout == "no jobs\n"
    assert run("queue", "jobs", "--state", "gone", url=database).exit_code == 2


def test_show(database: URL, engine: Engine) -> None:
    (id,) = put(engine, "failed", payload='{"a": "ü"}')
    tried(engine, id, "failed", began=10, ended=8, error="ValueError: no", traceback="Traceback:\n  line 1\x1b[2J")
    done = run("queue", "show", str(id), url=database)
    lines = done.stdout.splitlines()
    assert lines[0] == f"job {id} (t) is failed"
    assert 'payload         {"a": "ü"}' in lines
    assert lines[lines.index("traceback of attempt 1:") + 1 :] == ["Traceback:", "  line 1\N{REPLACEMENT CHARACTER}[2J"]
    found = answer("show", str(id), url=database)
    assert (found["payload"], found["why"], found["attempts"][0]["outcome"]) == ({"a": "ü"}, [], "failed")
    (waiting,) = put(engine)
    assert "  ! no live worker runs jobs of type 't'" in run("queue", "show", str(waiting), url=database).stdout
    none = run("queue", "show", "999999", url=database)
    assert (none.exit_code, none.stderr) == (1, "error: there is no job 999999\n")


def test_retry_by_id(database: URL, engine: Engine) -> None:
    failed, done = *put(engine, "failed"), *put(engine, "completed")
    asked = run("queue", "retry", str(failed), url=database)
    assert asked.exit_code == 2
    assert asked.stderr.startswith(f"error: Retry job {failed}? Nobody is there to ask")
    assert states(engine)[failed] == "failed"
    mixed = run("queue", "retry", str(failed), str(done), "99", "--yes", url=database)
    assert mixed.exit_code == 1
    assert mixed.stdout.splitlines() == [
        "1 retried",
        "2 left as they are",
        f"  job {done} has completed: failed, cancelled and retrying jobs can be retried",
        "  there is no job 99",
    ]
    assert states(engine) == {failed: "pending", done: "completed"}


def test_retry_by_filter(database: URL, engine: Engine) -> None:
    disk = put(engine, "failed", count=2, error="Disk full")
    (other,) = put(engine, "failed", error="no route")
    (gone,) = put(engine, "cancelled")
    asked = run("queue", "retry", "--error", "disk", url=database)
    assert asked.stderr.startswith("error: Retry 2 jobs?")
    found = answer("retry", "--error", "disk", "--yes", url=database)
    assert found == {"matched": 2, "changed": [{"id": id, "state": "pending"} for id in disk], "refused": []}
    assert states(engine)[other] == "failed"
    assert states(engine)[gone] == "cancelled"
    assert run("queue", "retry", "--error", "disk", "--yes", url=database).stdout == "no job fits\n"
    assert [one["id"] for one in answer("retry", "--all", "--yes", url=database)["changed"]] == [other]  # failed ones
    assert answer("retry", "--state", "cancelled", "--yes", url=database)["changed"] == [
        {"id": gone, "state": "pending"}
    ]


def test_cancel(database: URL, engine: Engine) -> None:
    (one,) = put(engine, key="k")
    (running,) = put(engine, "processing", key="r")
    others = put(engine, type="mail", count=3)
    assert run("queue", "cancel", str(one), "--yes", url=database).stdout == "1 cancelled\n"
    told = run("queue", "cancel", "--key", "r", "--yes", url=database).stdout
    assert told == "1 cancelled, 1 of them told to stop where they run\n"
    assert len(answer("cancel", "--type", "mail", "--yes", url=database)["changed"]) == 3
    assert states(engine) == {one: "cancelled", running: "processing", **dict.fromkeys(others, "cancelled")}
    assert answer("cancel", "--all", "--yes", url=database)["matched"] == 1  # the one that runs, once more


def test_what_to_steer_must_be_said_once(database: URL, engine: Engine) -> None:
    (id,) = put(engine)
    for arguments in ([], [str(id), "--type", "t"], [str(id), "--all"]):
        done = run("queue", "cancel", *arguments, "--yes", url=database)
        assert done.exit_code == 2
        assert done.stderr.startswith("error: say what to cancel: ID..., or --type")
    assert "must be among" in run("queue", "cancel", "--state", "failed", "--yes", url=database).stderr
    assert "must be among" in run("queue", "retry", "--state", "pending", "--yes", url=database).stderr
    assert states(engine) == {id: "pending"}


def test_pause_and_resume(database: URL, engine: Engine) -> None:
    put(engine)
    unknown = run("queue", "pause", "tt", "--yes", url=database)
    assert unknown.stderr == "there is no job of type 'tt', and no worker runs it: is it spelled right?\n"
    assert run("queue", "pause", "t", url=database).exit_code == 2
    assert answer("pause", "--all", "--yes", url=database) == {"type": None, "paused": True}
    first = run("queue", "resume", "--all", url=database)
    assert (first.exit_code, first.stdout, first.stderr) == (
        0, "the whole queue goes on\n", "still paused by themselves: tt\n",
    )  # fmt: skip
    assert run("queue", "resume", "t", url=database).exit_code == 1
    assert answer("resume", "tt", url=database) == {"type": "tt", "resumed": True}
    for arguments in ([], ["t", "--all"]):
        assert run("queue", "resume", *arguments, url=database).exit_code == 2


def test_prune(database: URL, engine: Engine) -> None:
    put(engine, "completed", count=5, **OLD)
    (failed,), (young,) = put(engine, "failed", **OLD), put(engine, "completed")
    asked = run("queue", "prune", "--older-than", "7d", url=database)
    assert "Remove all completed jobs that finished more than 7 d 0 h ago?" in asked.stderr
    assert answer("prune", "--older-than", "7d", "--batch", "2", "--yes", url=database) == {"removed": 5}
    assert set(states(engine)) == {failed, young}
    both = ("--state", "failed", "--state", "completed")
    assert run("queue", "prune", "--older-than", "0s", *both, "--yes", url=database).stdout == "2 removed\n"
    assert run("queue", "prune", "--older-than", "7", "--yes", url=database).exit_code == 2
    assert run("queue", "prune", "--older-than", "7d", "--state", "pending", "--yes", url=database).exit_code == 2


def test_tables_that_are_missing_are_one_line(empty_database: URL) -> None:
    for arguments in (["stats"], ["jobs"], ["show", "1"], ["retry", "--all"], ["prune", "--older-than", "1d", "--yes"]):
        done = run("queue", *arguments, url=empty_database)
        assert done.exit_code == 2, arguments
        assert "jobsync-orm db upgrade" in done.stderr
        assert "roll it back" not in done.stderr  # there is no transaction of the caller's
        assert done.stderr.count("\n") == 1
