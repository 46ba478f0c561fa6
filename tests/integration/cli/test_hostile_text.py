"""What is in the database is whatever somebody has put there: no command lets it steer the terminal."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Iterator

import pytest
from sqlalchemy import URL, Engine, create_engine

from jobsync_orm.queue import JobQueue
from tests.conftest import Server
from tests.integration.cli.commands import run
from tests.integration.queue.rows import put, tried

# Clears the screen, sets the title, answers in the reader's name; the same in one character; turns the direction.
HOSTILE = "\x1b[2J\x1b]0;x\x07\x1b[6n\x9b2J\x7f\x85\u202e\u2028\r\x08name"
VALUE = "E'" + "".join(f"\\U{ord(c):08X}" for c in HOSTILE) + "'::text"

READING = [
    ["status"],
    ["nodes"],
    ["tokens"],
    ["rebalances"],
    ["rebalance", "--dry-run"],
    ["top", "--once"],
    ["doctor"],
    ["where", "task"],
    ["audit"],
    ["locks", "list"],
    ["locks", "explain", HOSTILE],
    ["queue", "stats"],
    ["queue", "jobs"],
    ["queue", "show", "1"],
    ["queue", "show", "2"],
    ["queue", "resume", "--all"],
    ["queue", "pause", HOSTILE, "--yes"],
    ["queue", "retry", "1", "2"],
    ["reshard", "--total-tokens", "20000", "--dry-run"],
    ["reshard", "--total-tokens", "20000", "--yes"],
    ["drain", HOSTILE, "--yes"],
    ["undrain", HOSTILE],
    ["evict", HOSTILE],
    ["db", "check"],
    ["db", "reform"],
]


@pytest.fixture(scope="module")
def hostile(server: Server, template: str) -> Iterator[URL]:
    url = server.create_database(template)
    engine = create_engine(url)
    fill(engine)
    engine.dispose()
    yield url
    server.drop_database(url)


def fill(engine: Engine) -> None:
    """Such text wherever there may be text."""
    put(engine, "failed", type=HOSTILE, error=HOSTILE + "\n" + HOSTILE, worker=HOSTILE, idempotency_key=HOSTILE)
    put(engine, "pending", type=HOSTILE, key=HOSTILE)
    put(engine, "pending", type=HOSTILE, idempotency_key=HOSTILE)
    tried(engine, 1, "failed", began=9, ended=3, error=HOSTILE, traceback=f"Traceback:\n\t{HOSTILE}")
    JobQueue(engine=engine, wake=False).pause()
    with engine.begin() as connection:
        for sql in (
            "UPDATE sync_job_attempt SET worker = {v}",
            "UPDATE sync_job SET result = to_jsonb({v}), payload = jsonb_build_object({v}, {v})",
            "UPDATE sync_job_pause SET reason = {v}",
            "INSERT INTO sync_job_pause (type, reason) VALUES ({v}, {v})",
            "INSERT INTO sync_node (name, incarnation, join_epoch, state, weight, can_lead, heartbeat_timeout_sec,"
            " connection_grace_sec, rejoin_grace_sec, labels, host, pid, version, last_heartbeat, registered_at)"
            " VALUES ({v}, gen_random_uuid(), 1, 'active', 1, true, 15, 0.5, 0, jsonb_build_object({v}, {v}), {v},"
            " 7, {v}, now() - interval '1 hour', now())",
            "UPDATE sync_token SET node = {v}, next_node = {v} || 'x', next_epoch = 1, drain_deadline = now()",
            "UPDATE sync_cluster SET drained = jsonb_build_object({v}, jsonb_build_object('since', now(), 'by', {v},"
            " 'reason', {v})), rest_until = now() + interval '1 hour'",
            "INSERT INTO sync_rebalance (triggered_at, trigger_reason, leader_node, nodes_before, nodes_after,"
            " tokens_moved, duration_ms, epoch) VALUES (now(), {v}, {v}, 1, 1, 1, 1, 1)",
            "INSERT INTO sync_lock (task_id, token_id, node_patterns, reason, created_at, created_by, ephemeral)"
            " VALUES ({v}, 7, jsonb_build_array({v}), {v}, now(), {v}, false)",
            "INSERT INTO sync_claim (task_id, token_id, node, incarnation, epoch, claimed_at)"
            " VALUES ('task', sync_token_of('task'), {v}, gen_random_uuid(), 1, now())",
            "INSERT INTO sync_audit (date, node, task_id, token_id, epoch, created_on)"
            " VALUES (now(), {v}, {v}, 7, 1, now())",
        ):
            connection.exec_driver_sql(sql.format(v=VALUE))
        table = HOSTILE.replace('"', "")
        connection.exec_driver_sql(
            f'CREATE TABLE "{table}" (id int PRIMARY KEY, sku text,'
            " token_id int GENERATED ALWAYS AS (sync_token_of(sku)) STORED)"
        )
        connection.exec_driver_sql(f'CREATE INDEX "{table}i" ON "{table}" (sync_token_of(sku))')


def steering(said: str) -> list[str]:
    """What in ``said`` is neither to be read nor the end of a line."""
    return [c for c in said if unicodedata.category(c) in ("Cc", "Cf", "Zl", "Zp") and c not in "\n\t"]


@pytest.mark.parametrize("as_json", [False, True], ids=["text", "json"])
@pytest.mark.parametrize(
    "command", READING, ids=lambda command: "-".join(command[:2]).encode("unicode_escape").decode()
)
def test_nothing_steers_the_terminal(hostile: URL, command: list[str], as_json: bool) -> None:
    done = run(*command, *(["--json"] if as_json else []), url=hostile)
    said = done.stdout + done.stderr
    assert said, done
    assert not isinstance(done.exception, Exception) or isinstance(done.exception, SystemExit), done.exception
    assert steering(said) == []
    if as_json and done.stdout:
        assert len(done.stdout.splitlines()) == 1
        json.loads(done.stdout)


def test_json_says_what_is_stored(hostile: URL) -> None:
    jobs = json.loads(run("queue", "jobs", "--json", url=hostile).stdout)
    assert {job["type"] for job in jobs} == {HOSTILE}


def test_a_name_with_lines_is_one_line(database: URL, engine: Engine) -> None:
    (id,) = put(engine, "failed", type="t\nforged", key="k\nforged", error="ValueError: no\n  at line 2")
    lines = run("queue", "show", str(id), url=database).stdout.splitlines()
    assert "forged" not in {line.strip() for line in lines}
    assert "  at line 2" in lines
