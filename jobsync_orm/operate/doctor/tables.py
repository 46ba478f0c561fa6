"""The tables: there, of this release's revision, with the settings that were asked for, and open to the workers."""

from __future__ import annotations

from collections.abc import Iterator

from jobsync_orm import migrate
from jobsync_orm.migrate.binding import raw
from jobsync_orm.naming import quote
from jobsync_orm.operate.doctor.findings import Finding, Severity, Subject

__all__ = ["check"]

# How the sentences of migrate.check begin or go on, what they are about, and why it matters.
KINDS = (
    ("role ", "permissions", "the first statement of a worker that needs this fails"),
    ("the cluster was created with", "settings", "a worker with another value is refused: tasks would have two owners"),
    ("does not know", "tables", "this release does not know what the newer tables mean"),
    (", behind ", "tables", "statements of this release name columns that are not there"),
    ("", "tables", "workers cannot run on these tables"),
)


def check(subject: Subject) -> Iterator[Finding]:
    """What ``jobsync-orm db check`` says."""
    with subject.engine.connect() as connection, connection.begin():
        if subject.role is not None:
            connection.execute(raw(f"SET LOCAL ROLE {quote(subject.role)}"))
        problems = migrate.check(
            connection,
            appname=subject.names.appname,
            schema=subject.names.schema,
            total_tokens=subject.total_tokens,
            hash_function=subject.hash_function,
        )
    for problem in problems:
        what, _, remedy = problem.partition(": ")
        _, about, why = next(kind for kind in KINDS if kind[0] in problem)
        yield Finding(about, Severity.ERROR, what, why, remedy)
