"""All checks, one after the other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol

from sqlalchemy.exc import DBAPIError

from jobsync_orm import migrate
from jobsync_orm.exceptions import ConfigurationError, JobsyncError
from jobsync_orm.migrate.binding import raw
from jobsync_orm.naming import quote
from jobsync_orm.operate.doctor import (
    chains,
    clocks,
    connections,
    fences,
    idle_limit,
    indexes,
    listening,
    members,
    pauses,
    pins,
    read_only,
    releases,
    tables,
    tokens,
    transactions,
    unfinished,
    unserved,
    vacuum,
)
from jobsync_orm.operate.doctor.findings import Diagnosis, Finding, Severity, Subject

__all__ = ["examine"]


class Check(Protocol):
    """One of the modules."""

    def __call__(self, subject: Subject) -> Iterator[Finding]:
        """What is not as it should be."""


# Of the server and the way to it.
SERVER: Mapping[str, Check] = {
    "read only": read_only.check,
    "clocks": clocks.check,
    "listening": listening.check,
    "connections": connections.check,
    "transactions": transactions.check,
    "idle limit": idle_limit.check,
}
# Of the cluster: these need its tables, at this release's revision.
CLUSTER: Mapping[str, Check] = {
    "members": members.check,
    "releases": releases.check,
    "tokens": tokens.check,
    "pins": pins.check,
    "indexes": indexes.check,
    "fences": fences.check,
    "unfinished": unfinished.check,
    "vacuum": vacuum.check,
    "unserved types": unserved.check,
    "pauses": pauses.check,
    "chains": chains.check,
}


def examine(subject: Subject) -> Diagnosis:
    """Run all checks.

    One that cannot be made, for a right that is missing say, is a warning of its own.

    Raises
    ------
    sqlalchemy.exc.DBAPIError
        The database cannot be reached.
    ConfigurationError
        There is no such role, or this one is no member of it.
    """
    subject.rows("SELECT 1")
    _assume(subject)
    names, findings, skipped = ["tables", *SERVER], list(_findings("tables", tables.check, subject)), tuple(CLUSTER)
    for name, check in SERVER.items():
        findings += _findings(name, check, subject)
    if _readable(subject):
        skipped = ()
        for name, check in CLUSTER.items():
            names.append(name)
            findings += _findings(name, check, subject)
    order = list(Severity)
    findings.sort(key=lambda finding: order.index(finding.severity))
    healthy = all(finding.severity is Severity.NOTE for finding in findings)
    return Diagnosis(healthy, tuple(findings), tuple(names), skipped)


def _findings(name: str, check: Check, subject: Subject) -> list[Finding]:
    try:
        return list(check(subject))
    except (DBAPIError, JobsyncError) as error:
        told = str(error.orig if isinstance(error, DBAPIError) else error).strip().split("\n", 1)[0]
        return [
            Finding(
                name,
                Severity.WARNING,
                f"this could not be checked: {told}",
                "what it would have found is not known",
                "run the doctor as a role that may: the owner of the tables, or a member of pg_monitor",
            )
        ]


def _assume(subject: Subject) -> None:
    """See that the role can be checked."""
    if subject.role is None:
        return
    try:
        with subject.engine.connect() as connection, connection.begin():
            connection.execute(raw(f"SET LOCAL ROLE {quote(subject.role)}"))
    except DBAPIError as error:
        raise ConfigurationError(f"role={subject.role!r} cannot be checked: {str(error.orig).strip()}") from error


def _readable(subject: Subject) -> bool:
    """Whether the cluster's tables are those that this release's statements are written for."""
    try:
        return migrate.current(subject.engine, appname=subject.names.appname, schema=subject.names.schema) == (
            migrate.head()
        )
    except DBAPIError:
        return False
