"""The queue's tables: one mixin per table.

What each column is for stands in ``docs/queue.md``. All timestamps are the database's. The claim path is kept small by
partial indexes: a row that is finished, or not due yet, is in none of those that a claim reads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sqlalchemy import BigInteger, Boolean, Identity, Integer, Text, func, text
from sqlalchemy.dialects.postgresql import ARRAY

from jobsync_orm.models.mixins import ANYTHING, FLOAT, TIMESTAMP, UUID, NamedIndex, optional, required, table
from jobsync_orm.models.states import LIVE, AttemptOutcome, JobState

if TYPE_CHECKING:
    from collections.abc import Iterable


__all__ = [
    "IN_LINE",
    "JobAttemptMixin",
    "JobDependencyMixin",
    "JobPauseMixin",
    "JobScheduleMixin",
    "JobWorkerMixin",
    "QueuedJobMixin",
]

# Now, even within a long transaction: a job is as old as its row, not as the transaction that wrote it.
AT_ONCE = func.clock_timestamp()

# A column that indexes begin with, and in which only sameness matters, is compared byte by byte.
NAME = Text(collation="C")
NAMES = ARRAY(Text())
NO_OBJECT = text("'{}'")
ZERO = text("0")


def in_(column: str, values: Iterable[str]) -> str:
    """SQL that says ``column`` is one of ``values``."""
    return f"{column} IN ({', '.join(repr(str(value)) for value in values)})"


# What the jobs of a key wait for: the one that runs, those before it, and one that backs off unless it lets others by.
IN_LINE = "key IS NOT NULL AND (state IN ('pending', 'processing') OR state = 'retrying' AND retry_blocks_key)"


@table(
    checks={
        "state": in_("state", JobState),
        "token_id": "(key IS NULL) = (token_id IS NULL)",
        "deadline": "(state = 'processing') = (deadline IS NOT NULL)",
    },
    named={
        "ready": NamedIndex(("type", "priority", "ready_at", "id"), "state = 'pending' AND key IS NULL"),
        "keyed": NamedIndex(("priority", "ready_at", "id"), "state = 'pending' AND key IS NOT NULL"),
        "line": NamedIndex(("key", "id"), IN_LINE),
        "one_per_key": NamedIndex(("key",), "state = 'processing' AND key IS NOT NULL", unique=True),
        "processing": NamedIndex(("incarnation",), "state = 'processing'"),
        "due": NamedIndex(("run_at",), "state IN ('scheduled', 'retrying')"),
        "blocked": NamedIndex(("id",), "state = 'blocked'"),
        "idempotency": NamedIndex(
            ("type", "idempotency_key"), f"idempotency_key IS NOT NULL AND {in_('state', LIVE)}", unique=True
        ),
    },
)
class QueuedJobMixin:
    """One row per job. Write it with :meth:`~jobsync_orm.JobQueue.enqueue` and the calls beside it only."""

    id = required(BigInteger(), Identity(), primary_key=True)
    type = required(NAME)
    state = required(Text(), server_default=text("'pending'"))
    priority = required(Integer(), server_default=ZERO)
    key = optional(NAME)
    token_id = optional(Integer())
    idempotency_key = optional(NAME)
    payload = required(ANYTHING, server_default=NO_OBJECT)
    result = optional(ANYTHING)
    created_at = required(TIMESTAMP, server_default=AT_ONCE)
    ready_at = required(TIMESTAMP, server_default=AT_ONCE)
    run_at = optional(TIMESTAMP)
    started_at = optional(TIMESTAMP)
    finished_at = optional(TIMESTAMP)
    attempt = required(Integer(), server_default=ZERO)
    failures = required(Integer(), server_default=ZERO)
    max_retries = required(Integer(), server_default=text("3"))
    timeout = required(FLOAT, server_default=text("3600"))
    deadline = optional(TIMESTAMP)
    worker = optional(Text())
    incarnation = optional(UUID)
    retry_blocks_key = required(Boolean(), server_default=text("true"))
    cancel_requested = required(Boolean(), server_default=text("false"))
    error = optional(Text())
    max_retries_given = required(Boolean(), server_default=text("true"))
    timeout_given = required(Boolean(), server_default=text("true"))
    trace = optional(Text())

    if TYPE_CHECKING:
        attempts: Any


@table(
    checks={"outcome": in_("outcome", AttemptOutcome)},
    # Pages that no vacuum has been at since would be read whatever moment is asked for.
    named={"ended_at": NamedIndex(("ended_at",), using="brin", options={"autosummarize": "on"})},
)
class JobAttemptMixin:
    """One row per attempt that has ended. The one under way is in the job's own row."""

    job_id = required(BigInteger(), primary_key=True, autoincrement=False)
    attempt = required(Integer(), primary_key=True, autoincrement=False)
    worker = optional(Text())
    started_at = required(TIMESTAMP)
    ended_at = required(TIMESTAMP, server_default=AT_ONCE)
    outcome = required(Text())
    error = optional(Text())
    traceback = optional(Text())


@table(indexes=(("job_id",),))
class JobDependencyMixin:
    """Job ``job_id`` runs after job ``after_id`` has completed."""

    after_id = required(BigInteger(), primary_key=True, autoincrement=False)
    job_id = required(BigInteger(), primary_key=True, autoincrement=False)


@table()
class JobPauseMixin:
    """A job type that is not to be taken, or, under the empty name, all of them."""

    type = required(NAME, primary_key=True)
    since = required(TIMESTAMP, server_default=AT_ONCE)
    reason = optional(Text())


@table()
class JobScheduleMixin:
    """One row per periodic job: up to which moment its firings have been enqueued."""

    name = required(NAME, primary_key=True)
    type = required(NAME)
    cron = required(Text())
    timezone = required(Text())
    fired_until = required(TIMESTAMP)
    last_job_id = optional(BigInteger())


@table()
class JobWorkerMixin:
    """One row per queue worker that runs: what it does, as of ``seen_at``."""

    node = required(Text(), primary_key=True)
    incarnation = required(UUID)
    types = required(NAMES)
    concurrency = required(Integer())
    running = required(Integer(), server_default=ZERO)
    completed = required(BigInteger(), server_default=ZERO)
    failed = required(BigInteger(), server_default=ZERO)
    started_at = required(TIMESTAMP, server_default=AT_ONCE)
    seen_at = required(TIMESTAMP, server_default=AT_ONCE)
    claimed_at = optional(TIMESTAMP)
