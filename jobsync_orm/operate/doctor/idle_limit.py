"""Whether the server ends sessions that hang in a transaction."""

from __future__ import annotations

from collections.abc import Iterator

from jobsync_orm.operate.doctor.findings import Finding, Severity, Subject

__all__ = ["check"]


def check(subject: Subject) -> Iterator[Finding]:
    """No limit for this role's sessions. An application may set it with each connection, which is not seen here."""
    ((limit, role),) = subject.rows(
        "SELECT setting::int, quote_ident(current_user) FROM pg_settings"
        " WHERE name = 'idle_in_transaction_session_timeout'"
    )
    if limit == 0:
        yield Finding(
            "idle limit",
            Severity.NOTE,
            f"sessions of {role} have no idle_in_transaction_session_timeout, unless the application sets it",
            "a worker that is paused inside a transaction keeps its row locks for as long as the pause lasts",
            f"ALTER ROLE {role} SET idle_in_transaction_session_timeout = '15s'",
        )
