"""A server, a network, workers and a producer of one run, and the history they leave."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psycopg
from sqlalchemy import create_engine

from jobsync_orm import migrate
from tests.chaos.fleet import Fleet
from tests.chaos.history import History, load
from tests.chaos.model import create
from tests.chaos.nemesis import Nemesis
from tests.chaos.producer import Producer
from tests.chaos.relay import Network
from tests.chaos.server import Server
from tests.chaos.settings import TOKENS, bound_sec

__all__ = ["Arena", "until"]

# For workers to start and share everything, and at the end to do what is left; neither is what is tested.
PATIENCE_SEC = 60.0

# Longest that a worker may take to leave.
LEAVE_SEC = 15.0


def until(condition: Callable[[], Any], what: str, seconds: float) -> bool:
    """Wait for ``condition``; False, said aloud, if ``seconds`` have passed."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            print(f"not within {seconds:.0f} s: {what}", flush=True)
            return False
        time.sleep(0.1)
    return True


class Arena:
    """Everything of one run, in a folder of its own; a context manager.

    Parameters
    ----------
    seed : int
        For tasks and workers.
    produce : bool
        Whether tasks are made all the time.
    say : callable
        Takes a line about what is done.
    **environment : str
        See worker.py.
    """

    def __init__(
        self, seed: int, *, produce: bool = True, say: Callable[[str], None] = print, **environment: str
    ) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="jobsync-chaos-"))
        os.chmod(self.folder, 0o755)
        self.keep = False
        self.server = Server(self.folder)
        try:
            self.server.start()
            engine = create_engine(self.server.url)
            migrate.upgrade(engine, total_tokens=TOKENS)
            create(engine, triggers=environment.get("TRIGGERS") == "on")
            engine.dispose()
        except BaseException:
            self.server.close()
            raise
        self.network = Network(self.server.port)
        self.fleet = Fleet(self.folder, self.server.url, self.network, seed, **environment)
        self.producer = Producer(self.server, seed)
        self.nemesis = Nemesis(self.fleet, self.server, say)
        self._produce = produce
        self._begun = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.keep = self.keep or error is not None
        self.fleet.end()
        self.network.close()
        self.server.close()
        if not self.keep:
            shutil.rmtree(self.folder)

    # -- what goes on ------------------------------------------------------------------------------------------

    def rows(self, sql: str, *parameters: object) -> list[tuple[Any, ...]]:
        """Rows of a query, asked past the relay; none while the server is away."""
        try:
            with self.server.connect() as connection:
                return connection.execute(sql, parameters).fetchall()
        except psycopg.OperationalError:
            return []

    def shared(self) -> bool:
        """Whether each token belongs to a live node and stays with it, and each live process has some."""
        alive = {life.node for life in self.fleet.lives if life.alive}
        sql = """SELECT t.node, count(*) FILTER (WHERE next_node IS NULL AND n.name IS NOT NULL)
            FROM sync_token t LEFT JOIN sync_node n ON n.name = t.node AND n.state = 'active' GROUP BY 1"""
        found = dict(self.rows(sql))
        return set(found) == alive and sum(found.values()) == TOKENS

    def said(self) -> bool:
        """Whether the workers' last answers share all tokens too: each has heard of its own."""
        last = [next((e for e in reversed(life.events()) if e["e"] == "yes"), None) for life in self.fleet.lives]
        held = [int(event["held"], 16) for event in last if event is not None]
        return sum(tokens.bit_count() for tokens in held) == TOKENS and sum(held) == (1 << TOKENS) - 1

    def all_done(self) -> bool:
        return self.rows("SELECT NOT EXISTS (SELECT FROM todo WHERE NOT done)") == [(True,)]

    def begin(self, nodes: list[str]) -> None:
        """Start workers, wait until they share everything, and start the producer."""
        for node in nodes:
            self.fleet.start(node)
        if not until(lambda: self.shared() and self.said(), "the first workers share everything", PATIENCE_SEC):
            raise AssertionError("the run could not begin; see errors.log in " + str(self.folder))
        self._begun = time.monotonic()
        if self._produce:
            self.producer.start()

    def finish(self) -> History:
        """End every fault, let the work be done, ask all to leave, and read what happened."""
        self.nemesis.calm()
        confirmed = self.producer.stop() if self._produce else self.rows("SELECT coalesce(max(id), 0) FROM todo")[0][0]
        until(self.shared, "everything is owned", bound_sec() + 1)
        until(self.all_done, "every task is done", PATIENCE_SEC)
        time.sleep(1.0)  # for the last answers
        history = History(TOKENS, bound_sec(), confirmed, self._begun, time.monotonic())
        self.fleet.end(LEAVE_SEC)
        with self.server.connect() as connection:
            return load(history, connection, self.fleet.lives, self.nemesis.done)
