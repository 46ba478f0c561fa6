"""`jobsync-orm reshard`."""

from __future__ import annotations

import json

from sqlalchemy import URL, Engine, text

from jobsync_orm import Job
from tests.integration.cli.commands import run


def test_asks_first_and_says_what_it_does(database: URL, engine: Engine) -> None:
    with engine.begin() as connection:
        connection.execute(
            text(
                "CREATE TABLE item (id int, token_id int GENERATED ALWAYS AS (sync_token_of(id\\:\\:text)) STORED);"
                " INSERT INTO item SELECT generate_series(1, 1000); ANALYZE item"
            )
        )
    kept = run("reshard", "--total-tokens", "20000", url=database)
    assert kept.exit_code == 2
    lines = kept.stdout.splitlines()
    assert lines[0] == "10000 tokens -> 20000"
    assert lines[2].split()[:3] == ["public.item", "token_id", "1000"]
    assert "give --yes" in kept.stderr
    dry = run("reshard", "--total-tokens", "20000", "--dry-run", "--json", url=database)
    assert (dry.exit_code, json.loads(dry.stdout)["total_before"]) == (0, 10_000)
    done = run("reshard", "--total-tokens", "20000", "--yes", url=database)
    assert done.exit_code == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "give every worker total_tokens=20000; VACUUM (ANALYZE) the tables"
    again = run("reshard", "--total-tokens", "20000", "--json", url=database)
    assert json.loads(again.stdout) == {"total_before": 20_000, "total_after": 20_000}
    back = json.loads(run("reshard", "--total-tokens", "10000", "--yes", "--json", url=database).stdout)
    assert (back["total_after"], back["tables"], back["rows"] > 300) == (10_000, 1, True)


def test_refused_while_workers_run(database: URL, job: Job) -> None:
    done = run("reshard", "--total-tokens", "7", "--yes", url=database)
    assert done.exit_code == 2
    assert "1 node is registered (w1): stop every worker" in done.stderr
    dry = run("reshard", "--total-tokens", "7", "--dry-run", url=database)
    assert dry.exit_code == 1
    assert "in the way: these nodes are registered: w1" in dry.stdout
