"""The examples run as their docstrings say."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import Server

EXAMPLE = Path(__file__).parents[2] / "examples" / "two_terminals.py"


class Terminal:
    def __init__(self, folder: str, name: str) -> None:
        self.name = name
        self.process = subprocess.Popen(
            [sys.executable, str(EXAMPLE), name], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def read_until(self, line: str) -> list[str]:
        """The lines up to ``line``."""
        assert self.process.stdout is not None
        lines: list[str] = []
        while not lines or lines[-1] != line:
            lines.append(self.process.stdout.readline().rstrip("\n"))
            assert lines[-1] or self.process.poll() is None, f"ended without {line!r}: {lines}"
        return lines

    def end(self, number: signal.Signals) -> str:
        self.process.send_signal(number)
        lines, errors = self.process.communicate(timeout=60)
        # Root's server runs as another user, and says what it has opened for it.
        others = [line for line in errors.splitlines() if "everybody may pass" not in line]
        assert (self.process.returncode, others) == (0, [])
        return lines


@pytest.fixture
def folder() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="jobsync-") as folder:
        yield folder


def done(lines: list[str]) -> set[str]:
    return {line.split()[-1] for line in lines if " does " in line}


def test_two_terminals(folder: str) -> None:
    one = Terminal(folder, "worker-01")
    first = one.read_until("worker-01 owns 10000 of 10000 tokens")
    first += one.read_until("worker-01 does sku-0004")
    two = Terminal(folder, "worker-02")
    second = two.read_until("worker-02 owns 5000 of 10000 tokens")
    first += one.read_until("worker-01 owns 5000 of 10000 tokens")
    second += two.end(signal.SIGINT).splitlines()
    first += one.read_until("worker-01 owns 10000 of 10000 tokens")
    first += one.end(signal.SIGTERM).splitlines()
    assert len(done(first)) >= 5
    assert not done(first) & done(second), "an item was done twice"
    assert not (Path(folder) / ".jobsync" / "pg" / "postmaster.pid").exists(), "the server runs on"


@pytest.mark.slow
def test_the_shop(server: Server) -> None:
    """A small one: the proof at its end decides."""
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "shop",
            "--orders",
            "40",
            "--kill-every",
            "2",
            "--kills",
            "2",
            "--url",
            server.url.render_as_string(False),
        ],
        cwd=EXAMPLE.parent,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "each of 40 orders was paid once" in " ".join(done.stdout.split())
