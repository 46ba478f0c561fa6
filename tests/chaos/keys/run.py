"""``make queue-chaos``: ordered work while workers come and are killed, checked."""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

from sqlalchemy import create_engine, make_url

from jobsync_orm import embedded, migrate
from tests.chaos.keys.trial import trial
from tests.conftest import Server

__all__ = ["main"]


def main(arguments: list[str] | None = None) -> int:
    """Run, print, and return 1 if something was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--duration", type=float, default=60, help="seconds of kills")
    parser.add_argument("--seed", type=int, default=None, help="decides whom they hit; by default a new one")
    parser.add_argument("--keys", type=int, default=200)
    parser.add_argument("--rate", type=float, default=120, help="jobs enqueued per second")
    options = parser.parse_args(arguments)
    seed = random.SystemRandom().randrange(1_000_000) if options.seed is None else options.seed
    again = f"DURATION={options.duration:g} SEED={seed} make queue-chaos"
    print(f"seed {seed}: repeat with {again}", flush=True)
    # So that a run that is told to end takes its workers with it.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    folder = Path(tempfile.mkdtemp(prefix="jobsync-keys-"))
    given = os.environ.get("JOBSYNC_TEST_URL")
    url = make_url(given).set(drivername="postgresql+psycopg") if given else embedded.server_url(folder / "data")
    server = Server(url)
    database = server.create_database()
    engine = create_engine(database)
    migrate.upgrade(engine)
    engine.dispose()
    begun = time.monotonic()
    try:
        with trial(database, folder, keys=options.keys, seed=seed) as run:
            for name in ("w1", "w2", "w3", "w4"):
                run.add(name)
            run.produce(options.rate)
            while len(run.members()) < 3:
                time.sleep(0.2)
            run.torment(options.duration, say=partial(print, flush=True))
            verdict = run.finish()
        print(verdict)
        print(
            f"{'all in order' if verdict.good else f'VIOLATIONS; logs in {folder}'}; {time.monotonic() - begun:.0f} s"
        )
    finally:
        server.drop_database(database)
        if not given:
            embedded.stop(folder / "data")
    if verdict.good:
        shutil.rmtree(folder, ignore_errors=True)
    return 0 if verdict.good else 1


if __name__ == "__main__":
    sys.exit(main())
