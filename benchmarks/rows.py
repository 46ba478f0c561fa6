"""The rows of the page: which number of which step, and what it must reach."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

__all__ = ["ROWS", "Row"]

Line = Mapping[str, Any]

# More than these are all of them.
MANY_STEPS = 3


@dataclass(frozen=True)
class Row:
    """One row.

    Parameters
    ----------
    title : str
        What is measured.
    steps : tuple of str
        Steps whose results count.
    key : str
        Field of the result lines. A list in it counts as its greatest element. Null is "never" where it stands for
        seconds (``..._s``), else "not measured".
    unit : str
        Behind the numbers.
    most, least : float, optional
        What ours must reach.
    times : float, optional
        How many times the original's number ours must be at least.
    where : mapping
        Fields that a result line must have.
    worst : bool
        The greatest of all trials counts, not the median.
    scale : float
        Factor for display.
    original_steps : tuple of str, optional
        Steps of the original, if they are others.
    """

    title: str
    steps: tuple[str, ...]
    key: str
    unit: str = ""
    most: float | None = None
    least: float | None = None
    times: float | None = None
    where: Mapping[str, Any] = field(default_factory=dict)
    worst: bool = False
    scale: float = 1
    original_steps: tuple[str, ...] | None = None

    def values(self, lines: Sequence[Line], library: Literal["original", "ours"]) -> list[float]:
        """One number for each trial; infinity for what never happened."""
        steps = self.original_steps if library == "original" and self.original_steps is not None else self.steps
        found = [
            line[self.key]
            for line in lines
            if line.get("library") == library
            and line.get("step") in steps
            and self.key in line
            and all(line.get(key) == value for key, value in self.where.items())
        ]
        if self.key.endswith("_s"):
            found = [math.inf if value is None else value for value in found]
        return [
            float(max(value) if isinstance(value, list) else value) * self.scale for value in found if value is not None
        ]

    @property
    def target(self) -> str:
        unit = f" {self.unit}" if self.unit else ""
        if self.times is not None:
            return f"≥ {self.times:g} × original"
        if self.least is not None:
            return f"≥ {self.least:g}{unit}"
        if self.most is None:
            return "–"
        return "recovers" if self.most == math.inf else f"≤ {self.most:g}{unit}"

    @property
    def command(self) -> str:
        """What measures this row again."""
        steps = dict.fromkeys(self.steps + (self.original_steps or ()))
        if len(steps) > MANY_STEPS:
            return "make bench"
        full = "BENCH_MODE=full " if any(step.endswith("-steady") for step in steps) else ""
        return f"make bench {full}BENCH_ONLY={','.join(steps)}"

    def reached(self, ours: float, original: float | None) -> bool | None:
        """Whether ours is good enough; None where nothing is demanded, or there is nothing to compare with."""
        if self.times is not None:
            return None if original is None else ours >= self.times * original
        if self.least is not None:
            return ours >= self.least
        if self.most is None:
            return None
        return ours < self.most if self.most == math.inf else ours <= self.most


def _recovery(title: str, step: str, most: float, key: str = "view_s") -> tuple[Row, Row]:
    """Beside the original as it is after its start, and beside what it is after its first five minutes."""
    return (
        Row(title, (step,), key, "s", most=most),
        Row(f"{title} (original after 5 min)", (step,), key, "s", most=most, original_steps=(f"{step}-steady",)),
    )


EVENTS = (
    *("kill_follower", "kill_leader", "stop_follower", "stop_leader", "join", "swap", "pause_follower"),
    *("pause_leader", "partition-follower", "partition-leader", "outage"),
)
_STEADY = ("kill_follower-steady", "kill_leader-steady", "stop_follower-steady", "stop_leader-steady", "join-steady")
_GROWTH = {"nodes": "2->3"}

ROWS = (
    *_recovery("follower SIGKILLed: all tasks claimable again", "kill_follower", 3),
    *_recovery("leader SIGKILLed: all tasks claimable again", "kill_leader", 3),
    *_recovery("follower leaves gracefully: all tasks claimable again", "stop_follower", 1),
    *_recovery("leader leaves gracefully: all tasks claimable again", "stop_leader", 1),
    *_recovery("join: all tasks claimable by four, from the new worker's imports done", "join", 1, "view_from_start_s"),
    Row("join: the same, from the start of the new process", ("join",), "view_s", "s"),
    Row("join: tasks that nobody could claim for over 0.8 s", ("join",), "gap_tasks", most=0, worst=True),
    Row("one leaves as one joins, from the new worker's imports done", ("swap",), "view_from_start_s", "s"),
    Row("follower paused for 20 s: all its tasks claimable by the others", ("pause_follower",), "view_s", "s"),
    Row("follower cut off by the network: the others claim all", ("partition-follower",), "others_cover_s", "s"),
    Row(
        "two live workers both say yes, any event: tasks, at worst",
        EVENTS, "overlap_tasks", most=0, worst=True, original_steps=EVENTS + _STEADY,
    ),
    Row(
        "two live workers both say yes, any event: for how long, at worst",
        EVENTS, "overlap_max_s", "s", most=0, worst=True, original_steps=EVENTS + _STEADY,
    ),
    Row("database away for 20 s: all claimable again after its return", ("outage",), "covered_after_up_s", "s",
        most=math.inf),
    Row("statements per minute: a steady follower", ("load",), "follower_per_min", most=15),
    Row("statements per minute: the whole cluster of three", ("load",), "cluster_per_min", most=135),
    Row("statements per minute: a steady follower (original after 5 min)", ("load",), "follower_per_min", most=15,
        original_steps=("load-steady",)),
    Row("statements per minute: the whole cluster (original after 5 min)", ("load",), "cluster_per_min", most=135,
        original_steps=("load-steady",)),
    Row("10,000 tokens, 2 → 3 nodes, all phases: time", ("redistribution",), "ms", "ms", most=100),
    Row("10,000 tokens, 2 → 3 nodes, all phases: WAL", ("redistribution",), "wal_mb", "MB", most=2.5),
    Row("1,000,000 tokens, 2 → 3 nodes: time", ("redistribution-1m",), "ms", "s", most=6, scale=0.001),
    Row("1,000,000 tokens, 2 → 3 nodes: WAL", ("redistribution-1m",), "wal_mb", "MB", most=220),
    Row("1,000,000 tokens: leader's peak RSS", ("redistribution-1m",), "leader_peak_rss_mb", "MB", most=300),
    Row("1,000,000 tokens, 2 → 3 nodes: planning alone, CPU", ("planning",), "cpu_ms", "ms", most=250, where=_GROWTH),
    Row("planning with 20,000 pins, the owner gone, CPU", ("planning-pins",), "cpu_s", "s", most=0.1,
        where={"pins": 20_000}),
    Row("`can_claim_task` per CPU second, owned", ("hot-path",), "per_cpu_s", times=1.5,
        where={"what": "can_claim_task owned"}),
    Row("`can_claim_task` per CPU second, not owned", ("hot-path",), "per_cpu_s", times=1.5,
        where={"what": "can_claim_task not owned"}),
    Row("hash `double_sha256` per CPU second", ("hash",), "per_cpu_s", where={"what": "hash double_sha256"}),
    Row("10,000 locks registered", ("bulk",), "seconds", "s", most=0.3, where={"what": "register_locks_bulk"}),
    Row("10,000 locks registered: statements", ("bulk",), "statements", where={"what": "register_locks_bulk"}),
    Row("10,000 `add_task`", ("bulk",), "seconds", "s", where={"what": "add_task"}),
    Row("10,000 audit rows written", ("bulk",), "seconds", "s", where={"what": "write_audit"}),
    Row("10,000 tasks claimed at once", ("claims",), "seconds", "s", most=0.5, where={"what": "claim_tasks"}),
    Row("10,000 tasks claimed at once: statements", ("claims",), "statements", most=10,
        where={"what": "claim_tasks"}),
    Row("10,000 claims completed at once, with their audit rows", ("claims",), "seconds", "s", most=0.5,
        where={"what": "complete_claims"}),
    Row("10,000 tasks added at once and written to the audit: the writing", ("claims",), "seconds", "s", most=0.3,
        where={"what": "write_audit"}),
    Row("checkpoints per second, one thread", ("claims",), "per_s", where={"what": "checkpoint"}),
    Row("own memory per worker (tracemalloc)", ("memory",), "own_mb", "MB", most=1),
    Row("RSS over an application's", ("memory",), "rss_over_application_mb", "MB"),
    Row("threads beside the application's", ("memory",), "threads", most=1),
    Row("connections beside the application's", ("memory",), "connections", most=1),
    Row("30 workers at once on an empty database: balanced after the last is up", ("startup",), "after_last_up_s", "s",
        most=5),
    Row("30 workers at once on an empty database: alive at the end", ("startup",), "live_at_end", least=30),
    Row("`owned_by`, 100 of 1M rows, entities: times the same SQL text through the session", ("owned-by",),
        "entities_to_raw_entities", "×", most=1.5),
    Row("`owned_by`, the same, columns: times the same SQL text through the session", ("owned-by",),
        "columns_to_raw_columns", "×", most=1.5),
    Row("`owned_by`, the same, columns: times the SQL text through psycopg alone", ("owned-by",),
        "columns_to_psycopg", "×"),
    Row("single-row inserts, 8 clients: commits lost to the fence", ("fence",), "fenced_cost_percent", "%", most=15),
    Row("single-row inserts, 8 clients: commits lost to the fence with the trigger", ("fence",),
        "trigger_cost_percent", "%", most=30),
)  # fmt: skip
