"""Whether the server can be written to."""

from __future__ import annotations

from collections.abc import Iterator

from jobsync_orm.operate.doctor.findings import Finding, Severity, Subject

__all__ = ["check"]


def check(subject: Subject) -> Iterator[Finding]:
    """A standby, or sessions that are read-only by default."""
    ((standby, read_only, role, database),) = subject.rows(
        "SELECT pg_is_in_recovery(), current_setting('default_transaction_read_only') = 'on',"
        " quote_ident(current_user), quote_ident(current_database())"
    )
    if standby:
        yield Finding(
            "read only",
            Severity.ERROR,
            "this server is a standby that has not been promoted",
            "no worker can join, and nothing can be enqueued",
            "connect to the primary: name all servers in the URL, with target_session_attrs=read-write",
        )
    if read_only:
        yield Finding(
            "read only",
            Severity.ERROR,
            f"sessions of {role} are read-only by default (default_transaction_read_only)",
            "heartbeats are refused: workers lose their tokens when their leases end",
            f"ALTER DATABASE {database} RESET default_transaction_read_only; "
            f"ALTER ROLE {role} RESET default_transaction_read_only",
        )
