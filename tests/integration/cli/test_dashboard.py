"""`jobsync-orm dashboard` as a process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
from sqlalchemy import URL

from tests.conftest import dsn
from tests.integration.cli.commands import run

ROOT = Path(__file__).parents[3]

MAIN = "from jobsync_orm.cli import main; main()"
HOOKS = """
def who(request):
    return request.headers.get("x-user")
"""


def test_it_serves_this_machine_until_it_is_interrupted(database: URL, tmp_path: Path) -> None:
    (tmp_path / "hooks.py").write_text(HOOKS, encoding="utf-8")
    command = [sys.executable, "-W", "error", "-c", MAIN, "dashboard", "--port", "0", "--json"]
    process = subprocess.Popen(
        [*command, "--allow-writes", "--auth", "hooks:who"],
        cwd=tmp_path,
        env={**os.environ, "JOBSYNC_DATABASE_URL": dsn(database), "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        url = json.loads(process.stdout.readline())["url"]
        assert url.startswith("http://127.0.0.1:")
        with urlopen(f"{url}api/cluster", timeout=20) as answer:
            assert json.load(answer)["value"]["status"]["total_tokens"] == 10_000
        with urlopen(Request(f"{url}api/session", headers={"x-user": "ada"}), timeout=20) as answer:
            assert json.load(answer)["who"] == "ada"
        # A site whose name has been made to point to this machine.
        with pytest.raises(HTTPError) as refused:
            urlopen(Request(f"{url}api/cluster", headers={"host": "evil.example"}), timeout=20)
        assert refused.value.code == 400
        refused.value.close()
        process.send_signal(signal.SIGINT)
        _, told = process.communicate(timeout=20)
        assert process.returncode == 130
        assert "Traceback" not in told
        assert "interrupted" not in told
    finally:
        process.kill()
        process.communicate()


def test_what_cannot_be_is_said_in_a_line(database: URL) -> None:
    refused = run("dashboard", "--allow-writes", url=database)
    assert (refused.exit_code, "needs auth" in refused.stderr) == (2, True)
    refused = run("dashboard", "--read-auth", "no_such_module:who", url=database)
    assert (refused.exit_code, "cannot be had" in refused.stderr) == (2, True)
    refused = run("dashboard", "--read-auth", "json", url=database)
    assert (refused.exit_code, "MODULE:FUNCTION" in refused.stderr) == (2, True)
    refused = run("dashboard", "--host", "192.0.2.1", url=database)
    assert (refused.exit_code, "cannot listen at 192.0.2.1" in refused.stderr) == (2, True)
