"""What this node has itself seen of the others, and whom that makes dead.

A row that looks old proves nothing by itself: the database may have been away, or this process may have slept. So a
node is dead only on this process's own, uninterrupted evidence:

* *silent*: its ``last_heartbeat`` was seen with the same value for ``heartbeat_timeout_sec``; or
* *freed*: the advisory lock of its session was seen held, and then free on every look for more than twice
  ``connection_grace_sec``. For a process that has just come, a heartbeat that this very server process has taken counts
  as having seen the lock held: a node beats only while it holds it. So whoever replaces the only worker need not have
  seen it alive. It counts until the own session breaks for the first time: after that, the others' may have broken with
  it, and they are given the time to come back. After a restart of the server, by itself after a crash of one of its
  backends too, or on another one that tells nothing of its history, it does not count.

Timeout and grace are those of the node in question, as its row says, so that nodes may be configured differently.
All evidence is dropped when this node's own session breaks, or when it has not looked for a while. The eviction itself
names the ``last_heartbeat`` seen, and the database checks it again together with the age by its own clock (silent) or
the lock (freed).
"""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass, field

__all__ = ["Evidence", "Observer", "Seen", "parse_seen"]

# A freed lock convicts after this many times connection_grace_sec; anything above 2 is safe.
FREED_GRACES = 2.4


@dataclass(frozen=True, slots=True)
class Seen:
    """One node's row as one look showed it."""

    name: str
    incarnation: str
    state: str
    beat: str
    age_sec: float
    backend_pid: int | None
    heartbeat_timeout_sec: float
    connection_grace_sec: float
    rejoin_grace_sec: float
    locked: bool | None
    beat_here: bool | None = None
    """Whether the server has taken its last heartbeat since it was started or has crashed."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """Why a node may be evicted: the row it is about, and whether its lock was freed (else it was silent).

    ``since`` is when it was last known to live, on this process's clock; None for one that was away in order.
    """

    name: str
    incarnation: str
    beat: str
    freed: bool
    since: float | None = field(default=None, compare=False)


@dataclass(slots=True)
class _Record:
    row: Seen
    same_since: float
    held: bool
    free_since: float | None


def parse_seen(text: str | None) -> list[Seen]:
    """The rows of a beat's answer, oldest node first."""
    return [Seen(*line) for line in json.loads(text or "[]") or []]


class Observer:
    """Collects looks and draws the conclusions.

    Parameters
    ----------
    patience_sec : float
        Longest time between two looks for them to count as one observation.
    trust_freed_locks : bool
        Whether a freed lock counts as evidence at all.
    """

    def __init__(self, patience_sec: float, trust_freed_locks: bool = True) -> None:
        self._trust_freed_locks = trust_freed_locks
        self._patience = patience_sec
        self._records: dict[str, _Record] = {}
        self._looked_at: float | None = None
        self._is_new = True  # no session of this process has been lost since it first looked

    def reset(self) -> None:
        """Forget everything: the own session is new."""
        self._is_new = self._is_new and self._looked_at is None
        self._records.clear()
        self._looked_at = None

    def look(self, rows: Collection[Seen], sent_at: float, received_at: float, known_history: bool = False) -> None:
        """Take in one look, sent and answered at these times of this process's clock, in seconds.

        ``known_history`` says whether the server is known to be the one on which the heartbeats were taken.
        """
        inherits = self._is_new and known_history
        if self._looked_at is not None and sent_at - self._looked_at > self._patience:
            self._records.clear()
        self._looked_at = received_at
        records: dict[str, _Record] = {}
        for row in rows:
            old = self._records.get(row.name)
            same_life = (
                old is not None
                and old.row.incarnation == row.incarnation
                and old.row.backend_pid == row.backend_pid
                and old.row.state != "away"
            )
            held = bool(row.locked) or (inherits and bool(row.beat_here) and row.state != "away")
            if old is None or not same_life:
                free_since = received_at if held and row.locked is False else None
                records[row.name] = _Record(row, received_at, held, free_since)
                continue
            beaten = old.row.beat != row.beat
            # A look without lock information leaves what is known of the lock as it is.
            held = held or old.held
            free_since = old.free_since
            if row.locked or beaten:
                free_since = None
            if row.locked is False and held and free_since is None:
                free_since = received_at
            records[row.name] = _Record(row, received_at if beaten else old.same_since, held, free_since)
        self._records = records

    @property
    def suspects(self) -> bool:
        """Whether some lock that was held is free now: look again soon."""
        return self._trust_freed_locks and any(record.free_since is not None for record in self._records.values())

    def verdict_at(self, asked_at: float) -> float:
        """When the next of the locks that are free has been free for long enough to convict.

        ``asked_at`` is when the last look was sent: those that it could convict are left out.
        """
        due = (
            record.free_since + FREED_GRACES * record.row.connection_grace_sec
            for record in self._records.values()
            if record.free_since is not None
        )
        return min((at for at in due if at >= asked_at), default=float("inf"))

    def dead(self, asked_at: float, among: Collection[str]) -> list[Evidence]:
        """Which of the nodes ``among`` are dead, by looks the last of which was sent at ``asked_at``."""
        found = []
        for name in among:
            record = self._records.get(name)
            if record is None:
                continue
            row = record.row
            timeout, grace = row.heartbeat_timeout_sec, row.connection_grace_sec
            freed = (
                self._trust_freed_locks
                and record.free_since is not None
                and asked_at - record.free_since > FREED_GRACES * grace
            )
            silent = asked_at - record.same_since > timeout and row.age_sec > timeout
            over = row.state == "away" and row.age_sec > row.rejoin_grace_sec
            if over or (row.state != "away" and (freed or silent)):
                since = None if row.state == "away" else record.free_since if freed else asked_at - row.age_sec
                found.append(Evidence(name, row.incarnation, row.beat, freed and row.state != "away", since))
        return found
