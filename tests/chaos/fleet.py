"""The worker processes of a run, each behind its own link, with its own log and control."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sqlalchemy import URL

from tests.chaos.control import Control
from tests.chaos.relay import Network
from tests.chaos.settings import IDLE_IN_TRANSACTION_SEC

__all__ = ["Fleet", "Life"]

ROOT = Path(__file__).parents[2]

DEFAULTS = {
    "TRIGGERS": "off",
    "WORK": "mixed",
    "IDLE_SEC": str(IDLE_IN_TRANSACTION_SEC),
    "FENCE": "on",
    "LEASE": "kept",
}

# A compiled module notices that the worker's datetime is another one.
_OWN_DATETIME = "ignore:datetime.datetime size changed:RuntimeWarning"


@dataclass(slots=True)
class Life:
    """One process of one worker."""

    node: str
    number: int
    process: subprocess.Popen[bytes]
    log: Path

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    @property
    def stopped(self) -> bool:
        """Whether the process is stopped by a signal at this moment."""
        try:
            return Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
        except OSError:
            return False

    def events(self) -> list[dict[str, Any]]:
        """What it has written down so far."""
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        return [json.loads(line) for line in lines]

    def seen(self, event: str) -> dict[str, Any] | None:
        """The first event of this kind."""
        return next((one for one in self.events() if one["e"] == event), None)


class Fleet:
    """Starts workers and keeps hold of every process until the end.

    Parameters
    ----------
    folder : Path
        For logs and control files.
    url : URL
        The server; each worker gets it through its link.
    seed : int
        For what workers do at random.
    **environment : str
        What differs from ``DEFAULTS``, see worker.py.
    """

    def __init__(self, folder: Path, url: URL, network: Network, seed: int, **environment: str) -> None:
        self.folder = folder
        self.network = network
        self.lives: list[Life] = []
        self.current: dict[str, Life] = {}
        self._url = url
        self._environment = {**os.environ, "SEED": str(seed), **DEFAULTS, **environment}
        # Each worker gets by with one thread; numeric libraries and the like are not to start more.
        self._errors = (folder / "errors.log").open("ab")

    def start(self, node: str) -> Life:
        """Start a process under this name, whose link is made if it is new."""
        link = self.network.link(node)
        number = len(self.lives) + 1
        self.control(node).stop_at = 0  # type: ignore[assignment]
        life = Life(
            node,
            number,
            subprocess.Popen(
                [sys.executable, "-W", _OWN_DATETIME, "-m", "tests.chaos.worker"],
                cwd=ROOT,
                env={
                    **self._environment,
                    "URL": self._url.set(port=link.port).render_as_string(hide_password=False),
                    "NODE": node,
                    "LIFE": str(number),
                    "CONTROL": str(self._control_file(node)),
                    "LOG": str(self.folder / f"{number:03}-{node}.jsonl"),
                },
                stdin=subprocess.DEVNULL,
                stdout=self._errors,
                stderr=self._errors,
            ),
            self.folder / f"{number:03}-{node}.jsonl",
        )
        self.lives.append(life)
        self.current[node] = life
        return life

    def _control_file(self, node: str) -> Path:
        return self.folder / f"{node}.control"

    def control(self, node: str) -> Control:
        return Control(self._control_file(node))

    def signal(self, node: str, number: signal.Signals) -> bool:
        """Signal a worker; False if it is not there any more."""
        life = self.current.get(node)
        if life is None or not life.alive:
            return False
        life.process.send_signal(number)
        return True

    def resume_all(self) -> None:
        """Let every process run that is stopped or about to stop itself."""
        for life in self.lives:
            if life.alive:
                self.control(life.node).stop_at = 0  # type: ignore[assignment]
                life.process.send_signal(signal.SIGCONT)

    def end(self, patience: float = 0.0) -> None:
        """Ask everybody to leave, and after ``patience`` seconds make them."""
        self.resume_all()
        if patience:
            for life in self.lives:
                if life.alive:
                    life.process.terminate()
            deadline = time.monotonic() + patience
            while time.monotonic() < deadline and any(life.alive for life in self.lives):
                time.sleep(0.05)
        for life in self.lives:
            if life.alive:
                life.process.kill()
            life.process.wait()
        self._errors.close()
