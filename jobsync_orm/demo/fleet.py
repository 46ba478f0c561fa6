"""The demo's worker processes: start, kill, ask to leave, and never leave one behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from sqlalchemy import URL

__all__ = ["Fleet", "Member", "WorkerError"]

# Seconds a worker may take to end after SIGTERM.
PATIENCE = 20


class WorkerError(Exception):
    """A worker ended that should not have, or with an error."""


@dataclass
class Member:
    """A worker process. ``state`` is working, paused, killed, leaving or left."""

    name: str
    process: subprocess.Popen[bytes]
    state: str = "working"
    paused_at: float = 0.0


class Fleet:
    """All worker processes; as a context manager it ends those that still run.

    Parameters
    ----------
    url : URL
        The database.
    seconds : float
        Least seconds a worker spends on one file.
    logs : Path
        Folder for what the workers write to stdout and stderr.
    """

    def __init__(self, url: URL, seconds: float, logs: Path) -> None:
        self._url = url.render_as_string(hide_password=False)
        self._seconds = seconds
        self._logs = logs
        self.members: list[Member] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        running = [member.process for member in self.members if member.process.poll() is None]
        for process in running:
            process.terminate()
            process.send_signal(signal.SIGCONT)  # one that is paused could not end
        for process in running:
            with suppress(subprocess.TimeoutExpired):
                process.wait(PATIENCE)
            process.kill()
            process.wait()

    @property
    def working(self) -> list[Member]:
        """The workers that are to go on working, in the order of their start."""
        return [member for member in self.members if member.state == "working"]

    def start(self) -> Member:
        """Start one more worker."""
        name = f"worker-{len(self.members) + 1}"
        with self._log(name).open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "jobsync_orm.demo.worker", name, str(self._seconds)],
                env={**os.environ, "JOBSYNC_DATABASE_URL": self._url},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        self.members.append(Member(name, process))
        return self.members[-1]

    def kill(self, member: Member) -> None:
        """End it as a crash would."""
        member.state = "killed"
        member.process.kill()

    def pause(self, member: Member) -> None:
        """Stop it where it stands, as a machine that is suspended or out of memory would."""
        member.state = "paused"
        member.paused_at = time.monotonic()
        member.process.send_signal(signal.SIGSTOP)

    def resume(self, member: Member, *, at_least: float = 0.0) -> float:
        """Let it go on as if nothing had happened, ``at_least`` so many seconds later. Returns how many it were."""
        time.sleep(max(0.0, member.paused_at + at_least - time.monotonic()))
        member.state = "working"
        member.process.send_signal(signal.SIGCONT)
        return time.monotonic() - member.paused_at

    def ask_to_leave(self, member: Member) -> None:
        """Let it finish the file in hand, hand its tokens over and go."""
        member.state = "leaving"
        member.process.terminate()

    def check(self) -> None:
        """Note who has left.

        Raises
        ------
        WorkerError
            A worker has ended by itself, or with an error.
        """
        for member in self.members:
            code = member.process.poll()
            if code is None or (member.state == "killed" and code == -signal.SIGKILL):
                continue
            if member.state not in ("leaving", "left") or code != 0:
                text = self._log(member.name).read_text(errors="replace")
                raise WorkerError(f"{member.name} ended with code {code} while {member.state}:\n{text[-4000:]}")
            member.state = "left"

    def finish(self) -> None:
        """Let everyone leave, and wait until they have."""
        for member in self.working:
            self.ask_to_leave(member)
        for member in self.members:
            try:
                member.process.wait(PATIENCE)
            except subprocess.TimeoutExpired as error:
                raise WorkerError(f"{member.name} has not ended {PATIENCE} s after it was asked to") from error
        self.check()

    def _log(self, name: str) -> Path:
        return self._logs / f"{name}.log"
