"""``examples/flask_app`` under a real gunicorn, which loads it before it forks, and under Flask's reloader."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import URL, Engine, text

from tests.integration.cluster import ROOT, wait_for
from tests.integration.integrations.servers import serving
from tests.integration.integrations.test_fastapi_app import fair, fill, shares

EXAMPLES = ROOT / "examples"


def make_tables(database: URL) -> None:
    subprocess.run(
        [sys.executable, "-m", "flask", "--app", "flask_app", "parcels", "init"],
        cwd=EXAMPLES,
        env={**os.environ, "PYTHONPATH": str(ROOT), "DATABASE_URL": database.render_as_string(hide_password=False)},
        check=True,
        timeout=60,
    )


def nodes(engine: Engine) -> dict[str, int]:
    with engine.connect() as connection:
        return {row.name: row.pid for row in connection.execute(text("SELECT name, pid FROM sync_node"))}


@pytest.mark.slow
def test_gunicorn_with_preload(database: URL, engine: Engine, tmp_path: Path) -> None:
    make_tables(database)
    arguments = ("-m", "gunicorn", "-c", "gunicorn_conf.py", "-b", "127.0.0.1:{port}", "flask_app:create_app()")
    with serving(database, tmp_path / "log", *arguments, folder=EXAMPLES) as server:
        wait_for(lambda: len(nodes(engine)) == 2, "two processes have started jobs")
        assert server.process.pid not in nodes(engine).values(), "the parent has none"
        wait_for(lambda: server.get("/health/ready"), "ready")
        fill(server)
        before = wait_for(lambda: fair(found := shares(server), 2) and found, "two processes share the parcels")
        packed = server.request("POST", "/parcels/mine/pack")
        assert packed is not None
        assert len(packed[1]["packed"]) == 10
        killed = min(before.values(), key=lambda share: share["pid"])
        os.kill(killed["pid"], signal.SIGKILL)

        def again() -> Any:
            found = shares(server)
            return fair(found, 2) and killed["pid"] not in {share["pid"] for share in found.values()}

        wait_for(again, "a new process has the parcels of the one that was killed")
        assert server.end() == 0, server.said()
        assert nodes(engine) == {}, server.said()


@pytest.mark.slow
def test_the_reloaders_parent_starts_no_job(database: URL, engine: Engine, tmp_path: Path) -> None:
    make_tables(database)
    arguments = ("-m", "flask", "--app", "flask_app", "run", "--debug", "--port", "{port}")
    with serving(database, tmp_path / "log", *arguments, folder=EXAMPLES) as server:
        wait_for(lambda: server.get("/health/ready"), "ready")
        assert server.process.pid not in nodes(engine).values()
        assert len(nodes(engine)) == 1
        assert server.get("/parcels/mine")["parcels"] == []


def test_the_command(database: URL) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "flask", "--app", "flask_app", "jobsync", "tokens"],
        cwd=EXAMPLES,
        env={**os.environ, "PYTHONPATH": str(ROOT), "DATABASE_URL": database.render_as_string(hide_password=False)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    assert "10000 without owner" in done.stdout
