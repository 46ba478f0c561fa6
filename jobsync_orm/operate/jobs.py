"""Find jobs by what is known of them: pages of a list, their number, their ids.

Finished jobs are in no index: they are found by walking the primary key, from the end that is asked for up to the last
job of the page. So a page of jobs that are rare takes as long as reading the table.

| statement | locks | if the process stops right there |
|---|---|---|
| page, count, ids, span | nothing | nothing |
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from dataclasses import dataclass

from sqlalchemy import Engine, TextClause, text

from jobsync_orm.autocommit import Autocommit, Row, listed
from jobsync_orm.coordinator.session import array
from jobsync_orm.exceptions import InvalidJob
from jobsync_orm.models.states import JobState
from jobsync_orm.naming import Names
from jobsync_orm.operate.missing import check_given, ready
from jobsync_orm.queue.options import job_type, states_among, storable

__all__ = ["FoundJob", "JobFilter", "JobFinder"]

COLUMNS = (
    *("id", "type", "state", "priority", "key", "idempotency_key", "attempt", "failures", "max_retries"),
    *("created_at", "run_at", "started_at", "finished_at", "worker", "error"),
)

# SQL that says whether a job fits the parameters of a JobFilter.
FITS = f"""
    (CAST(:types AS text) IS NULL OR type = ANY ({listed("types", "text")}))
    AND (CAST(:states AS text) IS NULL OR state = ANY ({listed("states", "text")}))
    AND (CAST(:key AS text) IS NULL OR key = CAST(:key AS text))
    AND (CAST(:error AS text) IS NULL OR position(lower(CAST(:error AS text)) IN lower(error)) > 0)"""


@dataclass(frozen=True, slots=True)
class JobFilter:
    """Which jobs are meant: those that fit everything that is given.

    Parameters
    ----------
    types : tuple of str
        Any of these. Empty: every type.
    states : tuple of JobState or str
        Any of these. Empty: every state.
    key : str, optional
        Exactly this.
    error : str, optional
        The job's error contains this, in capitals or not.

    Raises
    ------
    InvalidJob
        A value that no job can have.
    """

    types: tuple[str, ...] = ()
    states: tuple[JobState | str, ...] = ()
    key: str | None = None
    error: str | None = None

    def __post_init__(self) -> None:
        for name in self.types:
            job_type(name)
        if self.states:
            object.__setattr__(self, "states", states_among(tuple(JobState), self.states))
        for what in ("key", "error"):
            value = getattr(self, what)
            if value is not None and not storable(what, value):
                raise InvalidJob(f"{what}={value!r} must be at least one character")

    @property
    def empty(self) -> bool:
        """Whether every job is meant."""
        return not (self.types or self.states or self.key or self.error)

    def parameters(self) -> Mapping[str, object]:
        """For the statements of :class:`JobFinder`."""
        return {
            "types": array(self.types) if self.types else None,
            "states": array(self.states) if self.states else None,
            "key": self.key,
            "error": self.error,
        }


@dataclass(frozen=True, slots=True)
class FoundJob:
    """A job in a list. Its payload, result and attempts are in :meth:`~jobsync_orm.JobQueue.status`.

    Attributes
    ----------
    id, type, state, priority, key, idempotency_key
        As enqueued, and as far as it has come.
    attempt, failures, max_retries : int
        Number of the last attempt; how many have failed; how many may be tried again.
    created_at, run_at, started_at, finished_at : datetime or None
        By the database's clock. ``run_at`` is None unless the job waits for that moment.
    worker : str or None
        Who has it or had it last.
    error : str or None
        Of the last attempt.
    """

    id: int
    type: str
    state: JobState
    priority: int
    key: str | None
    idempotency_key: str | None
    attempt: int
    failures: int
    max_retries: int
    created_at: datetime.datetime
    run_at: datetime.datetime | None
    started_at: datetime.datetime | None
    finished_at: datetime.datetime | None
    worker: str | None
    error: str | None


class JobFinder:
    """The jobs of one cluster's queue.

    Parameters
    ----------
    engine : Engine
        A synchronous engine on its database.
    names : Names
        The cluster.
    """

    def __init__(self, engine: Engine, names: Names) -> None:
        check_given(engine, names)
        self._names = names
        self._database = Autocommit(engine)
        job = names.text("job")
        waits = "CASE WHEN state IN ('scheduled', 'retrying', 'blocked') THEN run_at END AS run_at"
        columns = ", ".join(waits if name == "run_at" else name for name in COLUMNS)
        self._older = text(f"""
            SELECT {columns} FROM {job} WHERE id < :edge AND {FITS} ORDER BY id DESC LIMIT :most""")
        self._newer = text(f"SELECT {columns} FROM {job} WHERE id > :edge AND {FITS} ORDER BY id LIMIT :most")
        self._count = text(f"SELECT count(*) FROM {job} WHERE {FITS}")
        self._ids = text(f"SELECT id FROM {job} WHERE {FITS} ORDER BY id")
        self._span = text(f"SELECT coalesce(min(id), 0), coalesce(max(id), 0) FROM {job}")

    def page(
        self, wanted: JobFilter, limit: int = 50, *, before: int | None = None, after: int | None = None
    ) -> list[FoundJob]:
        """Jobs, the newest first.

        Parameters
        ----------
        wanted : JobFilter
            Which.
        limit : int
            At most so many, at least 1.
        before : int, optional
            Only jobs with a lower id. The id of the last job of a page gives the next page.
        after : int, optional
            Only jobs with a higher id, and the oldest first.

        Raises
        ------
        InvalidJob
            ``limit`` is below 1, or ``before`` and ``after`` are both given.
        SchemaNotReady
            There are no tables.
        """
        if limit < 1:
            raise InvalidJob(f"limit={limit!r} must be at least 1")
        if before is not None and after is not None:
            raise InvalidJob(f"before={before} and after={after}: give one, they are two directions")
        statement, edge = (self._newer, after) if after is not None else (self._older, before)
        values = {"edge": 2**63 - 1 if edge is None else edge, "most": limit}
        rows = self._read(statement, {**wanted.parameters(), **values})
        return [FoundJob(**{**dict(zip(COLUMNS, row, strict=True)), "state": JobState(row[2])}) for row in rows]

    def count(self, wanted: JobFilter) -> int:
        """How many there are; reads the table."""
        return int(self._read(self._count, wanted.parameters())[0][0])

    def ids(self, wanted: JobFilter) -> list[int]:
        """Their ids, the oldest first; reads the table."""
        return [row[0] for row in self._read(self._ids, wanted.parameters())]

    def span(self) -> tuple[int, int]:
        """The lowest and the highest id; zeros if there is no job."""
        lowest, highest = self._read(self._span, {})[0]
        return lowest, highest

    def _read(self, statement: TextClause, values: Mapping[str, object]) -> list[Row]:
        with ready(self._names):
            return self._database.repeat(statement, values)[0]
