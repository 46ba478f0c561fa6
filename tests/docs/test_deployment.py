"""The manifests of ``docs/deployment`` say what the page promises, and the script ends as it says."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from configparser import RawConfigParser
from pathlib import Path

import pytest
import yaml
from sqlalchemy import URL, Engine, text

from tests.docs.test_code_blocks import ROOT, does_not_parse

FOLDER = ROOT / "docs" / "deployment"
UNIT = FOLDER / "shop-worker@.service"


def test_kubernetes() -> None:
    deployment, budget = yaml.safe_load_all((FOLDER / "worker.yaml").read_text())
    pod = deployment["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert does_not_parse(container["args"][1:]) is None
    options = dict(zip(container["args"][3::2], container["args"][4::2], strict=True))
    assert pod["terminationGracePeriodSeconds"] > int(options["--grace"])
    assert options["--node-name"] == "$(POD_NAME)"
    assert int(options["--health-port"]) == container["ports"][0]["containerPort"]
    assert container["livenessProbe"]["httpGet"]["path"] == "/health/live"
    assert container["readinessProbe"]["httpGet"]["path"] == "/health/ready"
    assert deployment["spec"]["strategy"]["rollingUpdate"] == {"maxSurge": 1, "maxUnavailable": 0}
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert deployment["spec"]["selector"]["matchLabels"] == budget["spec"]["selector"]["matchLabels"] == labels


def test_systemd() -> None:
    unit = RawConfigParser(strict=True)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read_string(UNIT.read_text())
    service = unit["Service"]
    program, worker, *arguments = service["ExecStart"].split()[1:]
    assert program == "jobsync-orm"
    assert does_not_parse([worker, *arguments]) is None
    grace = re.search(r"--grace (\d+)", service["ExecStart"])
    assert grace is not None
    assert int(service["TimeoutStopSec"]) > int(grace[1])
    assert (service["KillSignal"], service["KillMode"], service["Restart"]) == ("SIGTERM", "mixed", "always")


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not there")
def test_systemd_reads_the_unit(tmp_path: Path) -> None:
    unit = shutil.copy(UNIT, tmp_path / "shop-worker@1.service")
    done = subprocess.run(["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, check=False)
    assert "shop-worker@1.service" not in done.stderr, done.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_script(database: URL, engine: Engine, number: signal.Signals) -> None:
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "examples" / "script.py"), "w1"],
        env={**os.environ, "PYTHONPATH": str(ROOT), "DATABASE_URL": database.render_as_string(hide_password=False)},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "w1 owns 10000 tokens\n"
        process.send_signal(number)
        assert process.communicate(timeout=60)[0] == "w1 has left\n"
        assert process.returncode == 0
        with engine.connect() as connection:
            assert connection.scalar(text("SELECT count(*) FROM sync_node")) == 0
    finally:
        process.kill()
        process.wait()
