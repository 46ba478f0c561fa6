"""Web servers as real processes, and requests to them."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from sqlalchemy import URL

from tests.integration.cluster import ROOT


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


class WebServer:
    """A server and its worker processes, in a process group of their own; ``{port}`` in its arguments is its port."""

    def __init__(self, database: URL, log: Path, *arguments: str, folder: Path = ROOT, **environment: str) -> None:
        self.port = free_port()
        self.log = log
        with log.open("w") as out:
            self.process = subprocess.Popen(
                [sys.executable, *(argument.format(port=self.port) for argument in arguments)],
                cwd=folder,
                env={
                    **os.environ,
                    "PYTHONPATH": str(ROOT),
                    "DATABASE_URL": database.render_as_string(hide_password=False),
                    **environment,
                },
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def request(self, method: str, path: str, body: object = None) -> tuple[int, Any] | None:
        """Status and JSON of the answer; None if there is none."""
        data = None if body is None else json.dumps(body).encode()
        asked = Request(
            f"http://127.0.0.1:{self.port}{path}", data, {"Content-Type": "application/json"}, method=method
        )
        try:
            with urlopen(asked, timeout=10) as answer:
                return answer.status, json.load(answer)
        except HTTPError as error:
            with error:
                text = error.read()
            try:
                return error.code, json.loads(text)
            except ValueError:
                return error.code, text.decode()
        except (URLError, OSError):
            assert self.process.poll() is None, self.said()
            return None

    def get(self, path: str) -> Any:
        """What a path that answers with 200 says; None as long as nobody or something else answers."""
        found = self.request("GET", path)
        return found[1] if found is not None and found[0] == 200 else None

    def said(self) -> str:
        return self.log.read_text()

    def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Ask the server to end; its exit code."""
        self.process.send_signal(number)
        return self.process.wait(60)

    def close(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


@contextmanager
def serving(*arguments: Any, **environment: Any) -> Iterator[WebServer]:
    server = WebServer(*arguments, **environment)
    try:
        yield server
    finally:
        server.close()
