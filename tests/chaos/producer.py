"""Puts tasks into lanes, without a fence, past the relay, through everything the server does."""

from __future__ import annotations

import random
import threading
import time
from typing import Any

import psycopg

from tests.chaos.model import lanes
from tests.chaos.server import Server

__all__ = ["Producer"]

# Tasks of one insert, and seconds between two.
BATCH, GAP_SEC = 6, 0.1

# While this many tasks wait, no more are made: what is left at the end has to be done too.
BACKLOG = 400


class Producer:
    """A thread that inserts tasks until it is told to stop; each is tried until the server has confirmed it."""

    def __init__(self, server: Server, seed: int) -> None:
        self._server = server
        self._random = random.Random(f"tasks/{seed}")
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="producer")
        self.confirmed = 0  # tasks 1 to this number are there
        self.failure: BaseException | None = None

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> int:
        """Stop; returns how many tasks are there."""
        self._stop.set()
        self._thread.join()
        if self.failure is not None:
            raise self.failure
        return self.confirmed

    def _run(self) -> None:
        connection: psycopg.Connection[Any] | None = None
        tasks: list[tuple[int, str]] = []
        try:
            while not self._stop.is_set() or tasks:
                # The same tasks until they are confirmed: an insert that had succeeded is not made twice.
                tasks = tasks or [
                    (self.confirmed + number, self._random.choice(lanes())) for number in range(1, BATCH + 1)
                ]
                try:
                    if connection is None:
                        connection = self._server.connect()
                    if not self._stop.is_set() and self._full(connection):
                        self._stop.wait(GAP_SEC)
                        continue
                    with connection.transaction(), connection.cursor() as cursor:
                        cursor.executemany(
                            "INSERT INTO todo (id, lane, done) VALUES (%s, %s, false) ON CONFLICT DO NOTHING", tasks
                        )
                except psycopg.OperationalError:
                    if connection is not None:
                        connection.close()
                    connection = None
                    time.sleep(GAP_SEC)
                    continue
                self.confirmed += len(tasks)
                tasks = []
                self._stop.wait(GAP_SEC)
        except BaseException as failure:
            self.failure = failure
        finally:
            if connection is not None:
                connection.close()

    @staticmethod
    def _full(connection: psycopg.Connection[Any]) -> bool:
        row = connection.execute("SELECT count(*) FROM (SELECT FROM todo WHERE NOT done LIMIT %s) t", [BACKLOG])
        return row.fetchone() == (BACKLOG,)
