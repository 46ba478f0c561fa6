"""What happened in a run: the tables, the workers' logs, the nemesis's own record, on one time line.

Times are seconds of the machine's monotonic clock; those of the database's clock are converted. Commit times are the
server's, in whole microseconds, so that they can be compared exactly.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import psycopg

from tests.chaos.fleet import Life
from tests.chaos.nemesis import Disturbance

__all__ = ["Attempt", "Effect", "History", "Member", "Ownership", "Sweep", "Todo", "load"]


@dataclass(frozen=True, slots=True)
class Todo:
    """A row of ``todo``."""

    id: int
    token: int
    done: bool


@dataclass(frozen=True, slots=True)
class Effect:
    """A row of ``effect`` and when it was committed."""

    todo: int
    token: int
    version: int
    node: str
    incarnation: str
    epoch: int
    attempt: str
    fence: int | None
    committed_us: int


@dataclass(frozen=True, slots=True)
class Ownership:
    """A version of a token's row, and when it was committed."""

    token: int
    node: str | None
    epoch: int
    next_node: str | None
    committed_us: int


@dataclass(frozen=True, slots=True)
class Member:
    """A node came, changed or went."""

    at: float
    name: str
    ordinal: int
    gone: bool


@dataclass(frozen=True, slots=True)
class Attempt:
    """What a worker knows of one of its transactions: ``done``, ``refused``, ``failed`` or ``unknown``."""

    name: str
    todos: int
    outcome: str


@dataclass(frozen=True, slots=True)
class Sweep:
    """One worker's answers for all tokens, given at some time from ``begun`` to ``ended``; bit ``n``: yes to ``n``."""

    begun: float
    ended: float
    held: int


@dataclass(slots=True)
class History:
    """One run."""

    tokens: int
    bound_sec: float
    confirmed: int  # tasks 1 to this number were inserted
    begun: float  # observed from here
    ended: float  # to here
    todos: list[Todo] = field(default_factory=list)
    counters: dict[int, int] = field(default_factory=dict)
    audit: dict[int, int] = field(default_factory=dict)  # token -> rows of completed claims
    checkpoints: dict[int, int] = field(default_factory=dict)  # token -> version that was stored last
    effects: list[Effect] = field(default_factory=list)
    ownership: list[Ownership] = field(default_factory=list)  # for each token in order of commit
    members: list[Member] = field(default_factory=list)
    attempts: list[Attempt] = field(default_factory=list)
    sweeps: dict[tuple[str, int], list[Sweep]] = field(default_factory=dict)  # (node, life) -> in order of time
    disturbances: list[Disturbance] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)  # workers that ended by an error of their own
    clock_us: int = 0  # the database's clock minus the monotonic one

    def at(self, us: int) -> float:
        """A time of the database's on the time line."""
        return (us - self.clock_us) / 1e6


def load(
    history: History,
    connection: psycopg.Connection[Any],
    lives: Sequence[Life],
    disturbances: Iterable[Disturbance],
) -> History:
    """Fill ``history`` from the tables and the logs."""
    rows = lambda sql: connection.execute(sql).fetchall()  # noqa: E731
    micro = "(extract(epoch FROM {}) * 1000000)::bigint".format
    committed = micro("pg_xact_commit_timestamp(xmin)")
    history.clock_us = time.time_ns() // 1000 - time.monotonic_ns() // 1000
    history.todos = [Todo(*row) for row in rows("SELECT id, token_id, done FROM todo ORDER BY id")]
    history.counters = dict(rows("SELECT token_id, version FROM counter"))
    history.audit = dict(rows("SELECT token_id, count(*) FROM sync_audit GROUP BY 1"))
    history.checkpoints = dict(
        rows("SELECT token_id, (position->>'version')::bigint FROM sync_checkpoint JOIN counter ON lane = task_id")
    )
    history.effects = [
        Effect(*row)
        for row in rows(
            "SELECT todo, token_id, version, node, incarnation, epoch, attempt, fence,"
            f" {committed} FROM effect ORDER BY id"
        )
    ]
    history.ownership = [
        Ownership(*row)
        for row in rows(f"SELECT token_id, node, epoch, next_node, {committed} FROM token_log ORDER BY id")
    ]
    history.members = [
        Member(history.at(at), *rest)
        for at, *rest in rows(f"SELECT {micro('at')}, name, ordinal, gone FROM node_log ORDER BY id")
    ]
    history.disturbances = list(disturbances)
    for life in lives:
        _read(history, life)
    history.disturbances.sort(key=lambda one: one.begun)
    return history


def _read(history: History, life: Life) -> None:
    sweeps = history.sweeps.setdefault((life.node, life.number), [])
    open_attempts: dict[str, int] = {}
    outcomes = {"committed": "done", "aborted": "failed"}  # by the worker's own look afterwards
    for event in life.events():
        kind, at = event["e"], event["t"]
        if kind == "yes":
            sweeps.append(Sweep(event["begun"], at, int(event["held"], 16)))
        elif kind == "stop":
            history.disturbances.append(Disturbance(at, at, "stopped itself", life.node, ""))
        elif kind == "broken":
            history.broken.append(f"{life.node} (process {life.number}): {event['why']}")
        elif kind == "try":
            open_attempts[event["attempt"]] = len(event["todos"])
        elif kind in ("done", "refused", "failed", "found"):
            outcome = outcomes[event["status"]] if kind == "found" else kind
            # Most refusals come at the commit; those that come earlier have tried nothing.
            todos = open_attempts.pop(event["attempt"], 0)
            history.attempts.append(Attempt(event["attempt"], todos, outcome))
    history.attempts.extend(Attempt(name, todos, "unknown") for name, todos in open_attempts.items())
