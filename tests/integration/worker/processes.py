"""Real processes that run queue jobs, watched."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from typing import Any

from sqlalchemy import URL

from tests.integration.cluster import ROOT


class Process:
    """One process that runs ``program.py``; ``config`` is that of its node, ``options`` go to its worker."""

    def __init__(self, url: URL, node: str | None = None, config: dict[str, Any] | None = None, **options: Any) -> None:
        self.events: list[dict[str, Any]] = []
        environment = {
            **os.environ,
            "URL": url.render_as_string(hide_password=False),
            "CONFIG": json.dumps(config or {}),
            "WORKER": json.dumps(options),
        }
        if node is not None:
            environment["NODE"] = node
        self.began_at = time.time()
        self.process = subprocess.Popen(
            [sys.executable, "-W", "error", "-m", "tests.integration.worker.program"],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.events.append(json.loads(line))

    def seen(self, event: str, **values: Any) -> dict[str, Any] | None:
        """The latest event of this kind that has these values."""
        return next(
            (e for e in reversed(self.events) if e["event"] == event and values.items() <= e.items()),
            None,
        )

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def kill(self) -> float:
        """SIGKILL; returns when."""
        self.process.kill()
        self.process.wait()
        return time.time()

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGCONT)
        self.process.kill()
        self.process.wait()
        self._reader.join()
        assert self.process.stdout is not None
        self.process.stdout.close()
