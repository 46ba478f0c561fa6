"""How the queue does, in figures that cost little however long the table is.

Jobs that have not finished are in partial indexes, and are counted there: exactly, up to ``COUNTED_UP_TO`` of a state.
Finished jobs are in no index. They, and states with more jobs, are estimated from ``SAMPLED_PAGES`` random pages of the
table; a table of no more pages is read as a whole, and the count exact. ``QueueStats.estimated`` names the states whose
counts are estimates.

Rates and times are those of the attempts that ended lately. Of a queue that ends very many, the figures are of a
shorter time: as long as ``COUNTED_UP_TO`` attempts last. ``Rates.over_sec`` says how long it was.

| statement | locks | if the process stops right there |
|---|---|---|
| pages, counts, span, recent | nothing | nothing |
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

from sqlalchemy import TextClause, text

from jobsync_orm.autocommit import Autocommit, Row
from jobsync_orm.models.states import FINISHED, JobState
from jobsync_orm.naming import Names

__all__ = ["COUNTED_UP_TO", "SAMPLED_PAGES", "Figures", "Percentiles", "QueueStats", "Rates"]

COUNTED_UP_TO = 5_000
SAMPLED_PAGES = 200

# Seconds the figures of attempts cover: the longest of these with no more than COUNTED_UP_TO attempts.
SPANS = (300, 60, 10, 1)
LONG_SEC, SHORT_SEC = SPANS[0], SPANS[1]

# What is counted together, in one index.
PARTS = {
    "unkeyed": (JobState.PENDING,),
    "keyed": (JobState.PENDING,),
    "due": (JobState.SCHEDULED, JobState.RETRYING),
    "blocked": (JobState.BLOCKED,),
    "processing": (JobState.PROCESSING,),
    "first": (),
}


@dataclass(frozen=True, slots=True)
class Rates:
    """How many attempts ended per second.

    Attributes
    ----------
    over_sec : float
        In how many seconds until now.
    completed_per_sec, failed_per_sec : float
        Failed are those that count as failures, and those discarded.
    """

    over_sec: float
    completed_per_sec: float = 0.0
    failed_per_sec: float = 0.0


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Of 100 attempts 50, 95 and 99 took no longer than this, in seconds."""

    p50: float
    p95: float
    p99: float


@dataclass(frozen=True, slots=True)
class QueueStats:
    """The figures of the whole queue or of one job type, at one moment.

    Attributes
    ----------
    type : str or None
        The job type. None: all.
    counts : dict of JobState to int
        Jobs in each state, every state present.
    estimated : frozenset of JobState
        The states whose count is an estimate.
    oldest_pending_sec : float or None
        How long the oldest job that is ready has been ready, in seconds. None if there is none.
    last_minute, last_5_minutes : Rates
        How fast jobs are worked off.
    wait_sec : Percentiles or None
        Time from when a job was ready until it was begun, of those that ended in ``last_5_minutes``; of a job with
        several attempts the last one. None if there are none.
    run_sec : Percentiles or None
        Time from begin to end of an attempt, of the same.
    workers : int or None
        How many live workers run jobs of this type. None in the figures of the whole queue.
    by_type : dict of str to QueueStats
        The same for each job type there is. Empty in the figures of one type.
    """

    type: str | None
    counts: dict[JobState, int] = field(default_factory=lambda: dict.fromkeys(JobState, 0))
    estimated: frozenset[JobState] = frozenset()
    oldest_pending_sec: float | None = None
    last_minute: Rates = Rates(SHORT_SEC)
    last_5_minutes: Rates = Rates(LONG_SEC)
    wait_sec: Percentiles | None = None
    run_sec: Percentiles | None = None
    workers: int | None = None
    by_type: dict[str, QueueStats] = field(default_factory=dict)


class Figures:
    """Reads the figures of one cluster's queue."""

    def __init__(self, names: Names) -> None:
        job, attempt = names.text("job"), names.text("job_attempt")
        most = COUNTED_UP_TO
        unkeyed, keyed = "state = 'pending' AND key IS NULL", "state = 'pending' AND key IS NOT NULL"

        def age(moment: str) -> str:
            return f"CAST(extract(epoch FROM now() - {moment}) AS float8)"

        def counted(part: str, columns: str, where: str, oldest: str = "CAST(NULL AS float8)") -> str:
            return (
                f"SELECT '{part}', type, state, count(*), {oldest} FROM (SELECT {columns} FROM {job}"
                f" WHERE {where} LIMIT {most}) AS {part} GROUP BY type, state"
            )

        # Named and not read: an index that has nothing else but these rows does not hold their state.
        pending = "type, CAST('pending' AS text) AS state"

        self._pages = text(
            "SELECT pg_catalog.pg_relation_size(CAST(:table AS regclass)) / CAST(current_setting('block_size') AS int)"
        )
        self._table = names.sql("job")

        # Rows of: part, type, state, how many, seconds since the oldest was ready. Of each type and priority, and of
        # each priority of jobs with a key, the first is the oldest; from one to the next it is a leap in the index.
        self._counts = text(f"""
            WITH RECURSIVE lane AS (
                (SELECT type, priority, ready_at FROM {job} WHERE {unkeyed} ORDER BY type, priority, ready_at LIMIT 1)
                UNION ALL
                SELECT n.* FROM lane l CROSS JOIN LATERAL (
                    SELECT type, priority, ready_at FROM {job}
                    WHERE {unkeyed} AND (type, priority) > (l.type, l.priority)
                    ORDER BY type, priority, ready_at LIMIT 1) n),
            rung AS (
                (SELECT type, priority, ready_at FROM {job} WHERE {keyed} ORDER BY priority, ready_at LIMIT 1)
                UNION ALL
                SELECT n.* FROM rung r CROSS JOIN LATERAL (
                    SELECT type, priority, ready_at FROM {job} WHERE {keyed} AND priority > r.priority
                    ORDER BY priority, ready_at LIMIT 1) n)
            {counted("unkeyed", pending, unkeyed)}
            UNION ALL {counted("keyed", f"{pending}, ready_at", keyed, age("min(ready_at)"))}
            UNION ALL {counted("due", "type, state", "state IN ('scheduled', 'retrying')")}
            UNION ALL {counted("blocked", "type, state", "state = 'blocked'")}
            UNION ALL {counted("processing", "type, state", "state = 'processing'")}
            UNION ALL SELECT 'first', type, 'pending', 0, {age("min(ready_at)")}
                FROM (SELECT * FROM lane UNION ALL SELECT * FROM rung) AS heads GROUP BY type
            UNION ALL SELECT 'sample', type, state, count(*), NULL
                FROM {job} TABLESAMPLE SYSTEM (CAST(:percent AS float4)) GROUP BY type, state""")

        self._workers = text(f"""
            SELECT t.type, count(*) FROM {names.text("job_worker")} w JOIN {names.text("node")} n
                ON n.name = w.node AND n.incarnation = w.incarnation AND n.state <> 'away'
            CROSS JOIN unnest(w.types) AS t (type) GROUP BY t.type""")

        def within(seconds: str) -> str:
            return f"FROM {attempt} WHERE ended_at > now() - {seconds} * interval '1 second'"

        spans = " ".join(
            f"WHEN (SELECT count(*) FROM (SELECT 1 {within(str(seconds))} LIMIT {most}) AS span_{seconds}) < {most}"
            f" THEN {seconds}"
            for seconds in SPANS[:-1]
        )

        def percentiles(value: str) -> str:
            return f"percentile_disc(ARRAY[0.5, 0.95, 0.99]) WITHIN GROUP (ORDER BY {value})"

        def in_seconds(intervals: str) -> str:
            return f"ARRAY(SELECT CAST(extract(epoch FROM p) AS float8) FROM unnest({intervals}) AS p ORDER BY p)"

        def number(outcomes: str) -> str:
            short = f"ended_at > now() - {SHORT_SEC} * interval '1 second'"
            return f"count(*) FILTER (WHERE {outcomes}), count(*) FILTER (WHERE {outcomes} AND {short})"

        self._span = text(f"SELECT CASE {spans} ELSE {SPANS[-1]} END")

        # Rows of: type (NULL: all), completed in :seconds and in the last minute of these, failed, times. The number of
        # seconds is given, so that the planner knows how few rows there are; LIMIT keeps each job's lookup one in the
        # primary key.
        self._recent = text(f"""
            WITH recent AS MATERIALIZED (
                SELECT j.type, a.outcome, a.ended_at, a.ended_at - a.started_at AS run,
                    CASE WHEN a.attempt = j.attempt AND j.ready_at <= a.started_at
                        THEN a.started_at - j.ready_at END AS wait
                FROM (SELECT job_id, attempt, outcome, started_at, ended_at {within(":seconds")}) a CROSS JOIN LATERAL (
                    SELECT type, attempt, ready_at FROM {job} WHERE id = a.job_id LIMIT 1) j
                WHERE a.outcome NOT IN ('released', 'snoozed', 'cancelled')),
            summed (type, completed, completed_lately, failed, failed_lately, wait, run) AS (
                SELECT type, {number("outcome = 'completed'")}, {number("outcome <> 'completed'")},
                    {percentiles("wait")}, {percentiles("run")}
                FROM recent GROUP BY GROUPING SETS ((), (type)))
            SELECT type, completed, completed_lately, failed, failed_lately, {in_seconds("wait")}, {in_seconds("run")}
            FROM summed""")

    def read(self, database: Autocommit, walk: Callable[[TextClause, Mapping[str, object]], list[Row]]) -> QueueStats:
        """The figures of the whole queue, with those of each type.

        Parameters
        ----------
        database : Autocommit
            Where to read.
        walk : callable
            Executes a statement that is to walk its indexes.
        """
        pages = int(database.repeat(self._pages, {"table": self._table})[0][0][0])
        percent = min(100.0, 100.0 * SAMPLED_PAGES / max(pages, 1))
        counts = walk(self._counts, {"percent": percent})
        seconds = int(database.repeat(self._span, {})[0][0][0])
        recent = {row[0]: row for row in database.repeat(self._recent, {"seconds": seconds})[0]}
        found = _Counts(counts, percent)
        types = sorted({*found.types, *(type for type in recent if type is not None)})
        by_type = {type: _put_together(type, found.of([type]), seconds, recent.get(type)) for type in types}
        workers = {type: int(number) for type, number in database.repeat(self._workers, {})[0]}
        by_type = {type: replace(stats, workers=workers.get(type, 0)) for type, stats in by_type.items()}
        return replace(_put_together(None, found.of(types), seconds, recent.get(None)), by_type=by_type)

    def depths(self, walk: Callable[[TextClause, Mapping[str, object]], list[Row]]) -> dict[str, QueueStats]:
        """For each type how many jobs are in which state, and how old the oldest is: :meth:`read` without attempts."""
        pages = int(walk(self._pages, {"table": self._table})[0][0])
        percent = min(100.0, 100.0 * SAMPLED_PAGES / max(pages, 1))
        found = _Counts(walk(self._counts, {"percent": percent}), percent)
        return {type: QueueStats(type, *found.of([type])) for type in sorted(found.types)}


class _Counts:
    """The rows of the counting statement, put together."""

    def __init__(self, rows: Iterable[Row], percent: float) -> None:
        self._counted: Counter[tuple[str, JobState]] = Counter()
        self._sampled: Counter[tuple[str, JobState]] = Counter()
        self._oldest: dict[str, float] = {}
        parts: Counter[str] = Counter()
        for part, type, name, number, oldest in rows:
            if part == "sample":
                self._sampled[type, JobState(name)] += round(number * 100 / percent)
            else:
                self._counted[type, JobState(name)] += number
                parts[part] += number
            if oldest is not None:
                self._oldest[type] = max(oldest, self._oldest.get(type, 0.0))
        self._whole = percent == 100
        too_many = {state for part, number in parts.items() if number >= COUNTED_UP_TO for state in PARTS[part]}
        self.estimated = frozenset() if self._whole else frozenset({*FINISHED, *too_many})
        self.types = {type for type, _ in (*self._counted, *self._sampled)}

    def of(self, types: Iterable[str]) -> tuple[dict[JobState, int], frozenset[JobState], float | None]:
        """Counts, which of them are estimates, and the age of the oldest, of some types together."""
        counts = {state: sum(self._count(type, state) for type in types) for state in JobState}
        ages = [self._oldest[type] for type in types if type in self._oldest]
        return counts, self.estimated, max(ages, default=None)

    def _count(self, type: str, state: JobState) -> int:
        counted, sampled = self._counted[type, state], self._sampled[type, state]
        if self._whole or state in FINISHED:
            return sampled
        return max(counted, sampled) if state in self.estimated else counted


def _put_together(
    type: str | None,
    counted: tuple[dict[JobState, int], frozenset[JobState], float | None],
    seconds: int,
    row: Row | None,
) -> QueueStats:
    counts, estimated, oldest = counted
    lately = min(SHORT_SEC, seconds)
    if row is None:
        return QueueStats(type, counts, estimated, oldest, Rates(lately), Rates(seconds))
    _, completed, completed_lately, failed, failed_lately, wait, run = row
    return QueueStats(
        type,
        counts,
        estimated,
        oldest,
        Rates(lately, completed_lately / lately, failed_lately / lately),
        Rates(seconds, completed / seconds, failed / seconds),
        Percentiles(*wait) if wait else None,
        Percentiles(*run) if run else None,
    )
