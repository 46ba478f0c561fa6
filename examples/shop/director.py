"""What happens when: web servers place orders, workers run, and every few seconds one of them is killed."""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parents[1]


class Director:
    """Starts the processes, and leaves none behind.

    Parameters
    ----------
    environment : dict
        What each process is told; see ``settings.py``.
    folder : Path
        For what they write to stdout and stderr.
    """

    def __init__(self, environment: dict[str, str], folder: Path) -> None:
        self._environment = {**os.environ, **environment, "PYTHONPATH": str(EXAMPLES)}
        self._log = folder / "processes.log"
        self.workers: dict[str, subprocess.Popen[bytes]] = {}
        self.web: list[subprocess.Popen[bytes]] = []
        self.kills = 0

    def __enter__(self) -> "Director":
        return self

    def __exit__(self, *exc: object) -> None:
        for process in [*self.web, *self.workers.values()]:
            if process.poll() is None:
                process.kill()
            process.wait()

    def _start(self, *command: str) -> subprocess.Popen[bytes]:
        with self._log.open("ab") as log:
            return subprocess.Popen(command, env=self._environment, cwd=EXAMPLES, stdout=log, stderr=log)

    def start_web(self, orders: int) -> None:
        self.web.append(self._start(sys.executable, "-m", "shop.web", str(orders)))

    def start_worker(self, name: str) -> None:
        command = str(Path(sys.executable).with_name("jobsync-orm"))
        self.workers[name] = self._start(
            command, "worker", "shop.jobs:queue", "--node-name", name, "--concurrency", "4"
        )

    def kill(self, name: str) -> None:
        """SIGKILL a worker, and start it again, as a supervisor would."""
        process = self.workers[name]
        process.send_signal(signal.SIGKILL)
        process.wait()
        self.kills += 1
        self.start_worker(name)

    def run(
        self,
        finished: Callable[[], int | bool],
        busy: Callable[[], list[str]],
        kill_every: float,
        kills: int | None,
        patience: float,
    ) -> None:
        """Until ``finished``, with a kill every ``kill_every`` seconds of a worker in the middle of a job.

        A kill waits until something has been done since the last one.

        Parameters
        ----------
        finished : callable
            True when all is done, until then how much is.
        busy : callable
            Names of the workers that are running a job.
        kill_every : float
            Seconds.
        patience : float
            Seconds for which nothing may get done.
        kills : int or None
            How many at most.

        Raises
        ------
        TimeoutError
            Nothing has been done for ``patience`` seconds.
        RuntimeError
            A web server has failed, or a worker ended that nobody killed.
        """
        moved = killed = time.monotonic()
        done_last = done_then = 0
        while (done := finished()) is not True:
            now = time.monotonic()
            if done > done_last:
                moved, done_last = now, done
            if now - moved > patience:
                raise TimeoutError(f"no job has been done for {patience:.0f} s; see {self._log}")
            if any(process.poll() for process in self.web):
                raise RuntimeError(f"a web server has failed; see {self._log}")
            if ended := [name for name, process in self.workers.items() if process.poll() is not None]:
                raise RuntimeError(f"{ended[0]} has ended by itself; see {self._log}")
            enough = kills is not None and self.kills >= kills
            # On a slow machine a worker may need longer to start than the next kill takes to come.
            if not enough and done > done_then and now - killed > kill_every and (names := busy()):
                killed, done_then = now, done
                self.kill(random.choice(names))
            time.sleep(0.2)

    def stop_workers(self) -> None:
        """Ask all workers to end, and wait for them."""
        for process in self.workers.values():
            process.send_signal(signal.SIGTERM)
        for name, process in self.workers.items():
            code = process.wait(timeout=60)
            if code not in (0, -signal.SIGTERM):  # one that was just starting does not know the signal yet
                raise RuntimeError(f"{name} ended with {code}; see {self._log}")
