"""``examples/fastapi_app`` under real uvicorn processes."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import URL, Engine, text

from tests.integration.cluster import wait_for
from tests.integration.integrations.servers import WebServer, free_port, serving

UVICORN = ("-m", "uvicorn", "--app-dir", "examples", "fastapi_app.main:app", "--port", "{port}")

CODES = [f"P{number:03}" for number in range(200)]


@contextmanager
def application(database: URL, log: Path, *more: str) -> Iterator[WebServer]:
    with serving(database, log, *UVICORN, *more) as server:
        wait_for(lambda: server.get("/health/ready"), f"ready: {server.said()}")
        yield server


def fill(server: WebServer) -> None:
    for code in CODES:
        answer = server.request("POST", "/parcels", {"code": code})
        assert answer is not None
        assert answer[0] == 201, server.said()


def shares(*servers: WebServer) -> dict[str, dict[str, Any]]:
    """The latest share of each node that answers. Many at a time: one request alone always gets to the same process."""
    asked = [server for server in servers for _ in range(16)]
    with ThreadPoolExecutor(len(asked)) as threads:
        answers = threads.map(lambda server: server.get("/parcels/mine"), asked)
        return {share["node"]: share for share in answers if share is not None}


def fair(found: dict[str, dict[str, Any]], nodes: int) -> bool:
    """Whether so many nodes share all parcels, each with one of them."""
    codes = [code for share in found.values() for code in share["parcels"]]
    return len(found) == nodes and sorted(codes) == CODES


@pytest.mark.slow
def test_two_worker_processes(database: URL, engine: Engine, tmp_path: Path) -> None:
    with application(database, tmp_path / "log", "--workers", "2") as server:
        fill(server)
        before = wait_for(lambda: fair(found := shares(server), 2) and found, "two processes share the parcels")
        assert {name.rpartition("-")[2] for name in before} == {"1", "2"}
        wait_for(lambda: server.get("/parcels/P000")["label"] == "label of P000", "a job has run")

        packed = server.request("POST", "/parcels/mine/pack?limit=5")
        assert packed is not None
        node, codes = packed[1]["node"], packed[1]["packed"]
        assert len(codes) == 5
        assert set(codes) <= set(before[node]["parcels"])
        assert server.get(f"/parcels/{codes[0]}")["packed_by"] == node

        killed = min(before.values(), key=lambda share: share["pid"])
        os.kill(killed["pid"], signal.SIGKILL)
        # uvicorn starts another one, which takes the name and the parcels of the one that died.
        after = wait_for(
            lambda: (
                fair(found := shares(server), 2) and killed["pid"] not in (s["pid"] for s in found.values()) and found
            ),
            "two processes share the parcels again",
        )
        assert set(after) == set(before)
        assert server.end() == 0, server.said()
        with engine.connect() as connection:
            assert connection.scalar(text("SELECT count(*) FROM sync_node")) == 0, server.said()


@pytest.mark.slow
def test_the_other_server_takes_over(database: URL, engine: Engine, tmp_path: Path) -> None:
    with application(database, tmp_path / "one") as one, application(database, tmp_path / "two") as two:
        fill(one)
        wait_for(lambda: fair(shares(one, two), 2), "the two servers share the parcels")
        os.kill(one.process.pid, signal.SIGKILL)
        one.process.wait()
        wait_for(lambda: fair(shares(two), 1), "the other one has all of them")
        ready = two.get("/health/ready")
        assert (ready["status"], ready["problems"]) == ("ready", [])
        assert two.end() in (0, -signal.SIGTERM), two.said()  # uvicorn raises the signal again when it has shut down
        with engine.connect() as connection:
            assert connection.scalar(text("SELECT count(*) FROM sync_node")) == 0, two.said()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_the_database_is_waited_for(number: signal.Signals, database: URL, tmp_path: Path) -> None:
    (tmp_path / "waiting.py").write_text(
        "import logging, os\n"
        "from fastapi import FastAPI\n"
        "from jobsync_orm import CoordinationConfig\n"
        "from jobsync_orm.integrations.fastapi import jobsync_lifespan\n"
        "logging.basicConfig()\n"
        'config = CoordinationConfig(url=os.environ["DATABASE_URL"])\n'
        "app = FastAPI(lifespan=jobsync_lifespan(config, wait_on_enter=100_000))\n"
    )
    nobody = database.set(host="127.0.0.1", port=free_port())
    arguments = ("-m", "uvicorn", "waiting:app", "--port", "{port}")
    with serving(nobody, tmp_path / "log", *arguments, folder=tmp_path) as server:
        wait_for(lambda: "waiting for the database" in server.said(), "it waits for the database")
        server.end(number)
        assert "was stopped while it was starting" in server.said()
