"""Search jobs at a cost that does not grow with the table.

Finished jobs are in no index but the primary key's, and :meth:`JobFinder.page` walks that for as long as it takes. A
search here walks back through the ids a stretch of :data:`WALKED` jobs at a time, and says how far it has come: whoever
asks goes on from there, or does not.

| statement | locks | if the process stops right there |
|---|---|---|
| search | nothing | nothing |
"""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import Engine, text

from jobsync_orm.autocommit import Autocommit
from jobsync_orm.exceptions import InvalidJob
from jobsync_orm.models.states import JobState
from jobsync_orm.naming import Names
from jobsync_orm.operate.jobs import COLUMNS, FITS, FoundJob, JobFilter
from jobsync_orm.operate.missing import ready

__all__ = ["WALKED", "JobsFound", "search_jobs"]

# Jobs that one search looks at, at most.
WALKED = 20_000

# Characters of an error in a list.
ERROR_LENGTH = 300

LARGEST_ID = 2**63 - 1

# Of a job in a list. Its moment counts only while it waits for it.
SHOWN = {
    "run_at": "CASE WHEN j.state IN ('scheduled', 'retrying', 'blocked') THEN j.run_at END",
    "error": f"left(j.error, {ERROR_LENGTH})",
}


@dataclass(frozen=True, slots=True)
class JobsFound:
    """One page of a search.

    Attributes
    ----------
    jobs : tuple of FoundJob
        Newest first. A long error is cut off.
    before : int or None
        What to give as ``before`` to go on: there may be older jobs that have not been looked at. None: there are none.
    looked_at : int
        How many jobs this page has looked at.
    """

    jobs: tuple[FoundJob, ...]
    before: int | None
    looked_at: int


def search_jobs(
    engine: Engine,
    names: Names,
    wanted: JobFilter,
    limit: int = 50,
    *,
    id: int | None = None,
    before: int | None = None,
) -> JobsFound:
    """Jobs that fit, newest first.

    Parameters
    ----------
    engine, names : Engine, Names
        The cluster.
    wanted : JobFilter
        Which.
    limit : int
        At most so many, between 1 and :data:`WALKED`.
    id : int, optional
        The job of this id, if it fits.
    before : int, optional
        Only jobs with a lower id: ``before`` of the page before.

    Raises
    ------
    InvalidJob
        ``limit``, ``id`` or ``before`` cannot be.
    SchemaNotReady
        There are no tables.
    """
    if not 1 <= limit <= WALKED:
        raise InvalidJob(f"limit={limit!r} must be between 1 and {WALKED}")
    for name, number in (("id", id), ("before", before)):
        if number is not None and not 0 <= number <= LARGEST_ID:
            raise InvalidJob(f"{name}={number!r} must be a number between 0 and {LARGEST_ID}")
    job = names.text("job")
    # If every job fits, one more than is wanted shows whether there are older ones.
    walked = limit + 1 if wanted.empty else WALKED
    columns = ", ".join(SHOWN.get(name, f"j.{name}") for name in COLUMNS)
    found = text(f"""
        WITH walked AS MATERIALIZED (
            SELECT id, coalesce({FITS}, false) AS fits FROM {job}
            WHERE {"id = :edge" if id is not None else "id < :edge"} ORDER BY id DESC LIMIT :walked),
        page AS (SELECT id FROM walked WHERE fits ORDER BY id DESC LIMIT :most),
        far AS (SELECT min(id) AS lowest, count(*) AS looked_at FROM walked)
        SELECT far.lowest, far.looked_at, {columns}
        FROM far LEFT JOIN (page JOIN {job} j ON j.id = page.id) ON true ORDER BY j.id DESC""")
    edge = id if id is not None else LARGEST_ID if before is None else before
    with ready(names):
        rows, _ = Autocommit(engine).repeat(
            found, {**wanted.parameters(), "edge": edge, "walked": walked, "most": limit + 1}
        )
    lowest, looked_at = rows[0][:2]
    jobs = tuple(
        FoundJob(**{**dict(zip(COLUMNS, row[2:], strict=True)), "state": JobState(row[4])})
        for row in rows
        if row[2] is not None
    )
    if len(jobs) > limit:
        return JobsFound(jobs[:limit], jobs[limit - 1].id, looked_at)
    return JobsFound(jobs, lowest if id is None and looked_at == walked else None, looked_at)
