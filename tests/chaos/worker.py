"""One worker process under chaos: does tasks of the lanes it owns, and writes down all it does and says.

Environment: URL (through the worker's own link), NODE, LIFE (a number of its own for each process), CONTROL (file, see
control.py), LOG (file of JSON lines), SEED, TRIGGERS ("on" where the tables have them).

For directed runs: WORK ("mixed", or "plain": rows are only read, under READ COMMITTED), IDLE_SEC (limit of a session
idle in a transaction), FENCE ("on", or "off" with plain work), LEASE ("kept" or "ignored"). With the last two the
library's safeguards are switched off, so that the checker can be shown to find what they prevent.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

# isort: off
from tests.chaos.inside import NODE, reach, stopping, tell  # first: it sets the clocks

from sqlalchemy import create_engine

from jobsync_orm import CoordinationConfig, Job
from jobsync_orm.coordinator.service import Coordinator
from jobsync_orm.coordinator.view import Ownership
from tests.chaos.control import Point
from tests.chaos.model import lanes
from tests.chaos.settings import COORDINATION, LOCK_TIMEOUT_SEC
from tests.chaos.work import Work

# isort: on

SAMPLE_SEC = 1 / 15


def sample(job: Job) -> None:
    """Ask for every lane, again and again; each answer falls between the two times of its line."""
    while not stopping.wait(SAMPLE_SEC):
        begun = time.monotonic()
        bits = 0
        for token, lane in enumerate(lanes()):
            if job.can_claim_task(lane):
                bits |= 1 << token
        tell("yes", begun=begun, held=f"{bits:x}")


def switch_off_the_lease() -> None:
    """What this node once held it goes on saying yes to, whatever its clock and its connection say."""
    Coordinator._valid_until = lambda self: float("inf")  # type: ignore[method-assign]
    Ownership.doubt = Ownership.deny = lambda self: None  # type: ignore[method-assign]


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: stopping.set())
    url = os.environ["URL"]
    if os.environ["LEASE"] == "ignored":
        switch_off_the_lease()
    idle = os.environ["IDLE_SEC"]
    options = f"-c lock_timeout={LOCK_TIMEOUT_SEC}s -c idle_in_transaction_session_timeout={idle}s"
    engine = create_engine(
        url,
        pool_size=1,
        max_overflow=1,
        connect_args={"application_name": f"chaos {NODE}", "options": options, "connect_timeout": 3},
    )
    send_commit = engine.dialect.do_commit

    def do_commit(connection: Any) -> None:
        reach(Point.FENCED)
        send_commit(connection)

    engine.dialect.do_commit = do_commit  # type: ignore[method-assign]
    tell("start", pid=os.getpid())
    while not stopping.is_set():
        job = Job(NODE, CoordinationConfig(url=url, **COORDINATION), wait_on_enter=30)
        try:
            job.start()
        except Exception as error:
            tell("no start", why=f"{type(error).__name__}: {error}")
            job.stop()
            stopping.wait(0.5)
            continue
        tell("ready")
        sampler = threading.Thread(target=sample, args=(job,), daemon=True)
        sampler.start()
        try:
            Work(job, engine).run()
        finally:
            stopping.set()
            sampler.join(5)
            job.stop()
    engine.dispose()
    tell("end")


if __name__ == "__main__":
    try:
        main()
    except BaseException as error:
        tell("broken", why=f"{type(error).__name__}: {error}")
        raise
