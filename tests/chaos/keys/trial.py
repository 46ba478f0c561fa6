"""A trial: workers come and are killed while ordered increments are enqueued, and what became of them is checked."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import psycopg
from sqlalchemy import URL
from sqlalchemy.orm import Session

from jobsync_orm import CoordinationConfig, JobQueue
from tests.integration.cluster import QUICK, ROOT

__all__ = ["Trial", "Verdict", "trial"]

TABLES = """
    CREATE TABLE counter (key text PRIMARY KEY, value int NOT NULL DEFAULT 0);
    CREATE TABLE effect (id bigint GENERATED ALWAYS AS IDENTITY, key text, n int, value int, worker text);
    CREATE TABLE span (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, key text, n int, job bigint, attempt int,
        worker text, began_at timestamptz DEFAULT clock_timestamp(), ended_at timestamptz);
"""

# An attempt lives from its first sign to its last. One whose worker was killed or taken for dead lives, as far as
# anybody may rely on it, until its job was taken from it: what it does after that is fenced, and changes nothing, even
# if a worker that stood still begins with it only then.
FENCED = "a.outcome = 'died' AND s.began_at >= a.ended_at"
OVERLAPS = f"""
    WITH life AS (
        SELECT s.key, s.job, s.attempt, s.worker, s.began_at,
            CASE WHEN a.outcome = 'died' THEN least(coalesce(s.ended_at, a.ended_at), a.ended_at)
                ELSE coalesce(s.ended_at, a.ended_at) END AS ended_at
        FROM span s LEFT JOIN sync_job_attempt a ON a.job_id = s.job AND a.attempt = s.attempt
        WHERE ({FENCED}) IS NOT TRUE)
    SELECT format('%s: attempt %s of job %s (%s) began at %s, before attempt %s of job %s (%s) had ended at %s', key,
        attempt, job, worker, began_at, other_attempt, other_job, other_worker, other_ended)
    FROM (SELECT *, lag(ended_at) OVER w AS other_ended, lag(job) OVER w AS other_job,
            lag(attempt) OVER w AS other_attempt, lag(worker) OVER w AS other_worker
        FROM life WINDOW w AS (PARTITION BY key ORDER BY began_at)) AS one
    WHERE began_at < other_ended OR (other_job IS NOT NULL AND other_ended IS NULL)"""

BEGUN_TOO_LATE = f"""
    SELECT count(*) FROM span s JOIN sync_job_attempt a ON a.job_id = s.job AND a.attempt = s.attempt WHERE {FENCED}"""

# In the order in which they were committed: the jobs of a key follow one another.
DISORDER = """
    SELECT format('%s: %s came as number %s, the counter was at %s', key, n, place, value)
    FROM (SELECT *, row_number() OVER (PARTITION BY key ORDER BY id) - 1 AS place FROM effect) AS e
    WHERE n <> place OR value <> place + 1"""

LATENCY = """
    SELECT count(*), percentile_cont(ARRAY[0.5, 0.95, 0.99, 1]) WITHIN GROUP (ORDER BY sec)
    FROM (SELECT extract(epoch FROM min(s.began_at) - j.ready_at) AS sec
        FROM sync_job j JOIN span s ON s.job = j.id AND s.attempt = 1 GROUP BY j.id, j.ready_at) AS one"""


@dataclass
class Verdict:
    """What became of it all."""

    figures: dict[str, Any]
    violations: dict[str, list[str]]

    @property
    def good(self) -> bool:
        return not any(self.violations.values())

    def __str__(self) -> str:
        lines = [f"{name}: {value}" for name, value in self.figures.items()]
        for rule, found in self.violations.items():
            lines.append(f"{rule}: {len(found)}")
            lines += [f"    {one}" for one in found[:10]]
        return "\n".join(lines)


class Trial:
    """See the module. Use :func:`trial`."""

    def __init__(self, url: URL, folder: Path, keys: int, seed: int) -> None:
        self.url = url
        self.keys = [f"order:{n}" for n in range(keys)]
        self._fate, self._work = random.Random(seed), random.Random(seed)  # the one has no part in the other
        self.workers: dict[str, subprocess.Popen[bytes]] = {}
        self.faults = {"killed": 0, "stopped": 0, "paused": 0, "started": 0}
        self._folder = folder
        self._logs: list[TextIO] = []
        self._next = dict.fromkeys(self.keys, 0)
        self._queue = JobQueue(CoordinationConfig(url=url))
        self._stop = threading.Event()
        self._producer: threading.Thread | None = None
        self._failure: BaseException | None = None
        dsn = url.set(drivername="postgresql").render_as_string(hide_password=False)
        self._connection = psycopg.connect(dsn, autocommit=True)
        self._connection.execute(TABLES)
        with self._connection.cursor() as cursor:
            cursor.executemany("INSERT INTO counter (key) VALUES (%s)", [(key,) for key in self.keys])

    def rows(self, sql: str) -> list[tuple[Any, ...]]:
        with self._connection.cursor() as cursor:
            return cursor.execute(sql).fetchall()

    def execute(self, sql: str, *values: object) -> None:
        self._connection.execute(sql, values)

    # -- work ------------------------------------------------------------------------------------------------------

    def enqueue(self, jobs: int, fails: float = 0.05) -> None:
        """The next jobs of keys chosen at random, several in one transaction."""
        rng = self._work
        with Session(self._queue.engine) as session, session.begin():
            for _ in range(jobs):
                key = rng.choice(self.keys)
                payload = {"n": self._next[key], "sec": rng.uniform(0, 0.02), "fails": int(rng.random() < fails)}
                self._queue.enqueue(session, "increment", payload, key=key, max_retries=1000)
                self._next[key] += 1

    def produce(self, rate: float, most: int = 600) -> None:
        """Enqueue so many jobs a second until :meth:`finish`, but never more than ``most`` that wait."""

        def run() -> None:
            try:
                due = time.monotonic()
                while not self._stop.is_set():
                    jobs = self._work.randint(1, 20)
                    while self._waiting() > most and not self._stop.is_set():
                        time.sleep(0.1)
                        due = time.monotonic()
                    self.enqueue(jobs)
                    due += jobs / rate
                    self._stop.wait(max(0.0, due - time.monotonic()))
            except BaseException as error:
                self._failure = error
                raise

        self._producer = threading.Thread(target=run, name="producer", daemon=True)
        self._producer.start()

    def _waiting(self) -> int:
        return sum(self._next.values()) - self.done()

    def done(self) -> int:
        """How many jobs have had their effect."""
        return int(self.rows("SELECT count(*) FROM effect")[0][0])

    # -- workers ---------------------------------------------------------------------------------------------------

    def add(self, name: str) -> None:
        log = (self._folder / f"{name}.log").open("a")
        self._logs.append(log)
        self.workers[name] = subprocess.Popen(
            [sys.executable, "-W", "error", "-m", "tests.chaos.keys.worker"],
            cwd=ROOT,
            env={
                **os.environ,
                "URL": self.url.render_as_string(hide_password=False),
                "NODE": name,
                "CONFIG": json.dumps(QUICK),
            },
            stdout=log,
            stderr=log,
        )
        self.faults["started"] += 1

    def kill(self, name: str) -> None:
        process = self.workers.pop(name)
        process.kill()
        process.wait()
        self.faults["killed"] += 1

    def stop(self, name: str) -> None:
        self.workers.pop(name).terminate()
        self.faults["stopped"] += 1

    def pause(self, name: str, seconds: float) -> None:
        """Let it stand still until everybody takes it for dead, and go on then."""
        process = self.workers[name]
        process.send_signal(signal.SIGSTOP)
        self.faults["paused"] += 1
        threading.Timer(seconds, lambda: process.poll() is None and process.send_signal(signal.SIGCONT)).start()

    def members(self) -> set[str]:
        """Workers that are at work, as the cluster sees it."""
        return {name for (name,) in self.rows("SELECT node FROM sync_job_worker")} & self.workers.keys()

    def torment(self, seconds: float, every: float = 5.0, say: Callable[[str], None] = print) -> None:
        """Kill, stop, pause and add workers, and leave one that is at work."""
        until, number = time.monotonic() + seconds, len(self.workers)
        while time.monotonic() + every < until:
            time.sleep(every)
            acts = []
            victim, what = "", self._fate.choice(["kill", "kill", "kill", "stop", "pause"])
            if len(members := self.members()) > 1:
                victim = self._fate.choice(sorted(members))
                acts.append(f"{what} {victim}")
                if what == "kill":
                    self.kill(victim)
                elif what == "stop":
                    self.stop(victim)
                else:
                    self.pause(victim, self._fate.uniform(5, 8))
            while len(self.workers) < self._fate.randint(4, 6):
                # Half of those that were killed come back under their name.
                number += 1
                name = victim if what == "kill" and self._fate.random() < 0.5 else f"w{number}"
                name = f"w{number}" if name in self.workers or not name else name
                self.add(name)
                acts.append(f"add {name}")
            say(f"{self.done():7} done; {', '.join(acts)}")

    # -- the end ---------------------------------------------------------------------------------------------------

    def finish(self, timeout: float = 90) -> Verdict:
        """Wait until all is done, and check it."""
        self._stop.set()
        if self._producer is not None:
            self._producer.join()
        if self._failure is not None:
            raise self._failure
        deadline = time.monotonic() + timeout
        open_jobs = "SELECT state, count(*) FROM sync_job WHERE state <> 'completed' GROUP BY 1"
        while (left := self.rows(open_jobs)) and time.monotonic() < deadline:
            time.sleep(0.1)
        enqueued = sum(self._next.values())
        ((effects,),) = self.rows("SELECT count(*) FROM effect")
        missing = self.rows("SELECT key, value FROM counter")
        outcomes = dict(self.rows("SELECT outcome, count(*) FROM sync_job_attempt GROUP BY 1"))
        ((_, latency),) = self.rows(LATENCY)
        figures = {
            "workers": self.faults,
            "keys": len(self.keys),
            "jobs": enqueued,
            "effects": effects,
            "attempts": outcomes,
            "begun when they had been fenced": self.rows(BEGUN_TOO_LATE)[0][0],
            "seconds from ready to start (p50, p95, p99, most)": ", ".join(f"{sec:.3f}" for sec in latency or []),
        }
        violations = {
            "not done": [f"{count} {state}" for state, count in left],
            "lost or doubled": [f"{k}: {v} of {self._next[k]}" for k, v in missing if v != self._next[k]],
            "out of order": [text for (text,) in self.rows(DISORDER)],
            "two at once": [text for (text,) in self.rows(OVERLAPS)],
        }
        if effects != enqueued:
            violations["lost or doubled"].append(f"{effects} effects of {enqueued} jobs")
        return Verdict(figures, violations)

    def close(self) -> None:
        self._stop.set()
        for process in self.workers.values():
            process.kill()
            process.wait()
        for log in self._logs:
            log.close()
        self._connection.close()
        self._queue.dispose()


@contextmanager
def trial(url: URL, folder: Path, *, keys: int, seed: int) -> Iterator[Trial]:
    """A trial on a database with the library's tables; ``folder`` gets the workers' logs."""
    made = Trial(url, folder, keys, seed)
    try:
        yield made
    finally:
        made.close()
