"""Transactions that have been open for long."""

from __future__ import annotations

from collections.abc import Iterator

from jobsync_orm.operate.doctor.findings import Finding, Severity, Subject

__all__ = ["check"]

WHY = (
    "vacuum removes nothing that has died since, so the job tables grow; and tokens or rows that it has locked cannot "
    "move to others"
)


def check(subject: Subject) -> Iterator[Finding]:
    """Open ones, prepared ones, and replication slots that hold back vacuum without a standby."""
    for pid, user, application, state, seconds in subject.rows(
        """
        SELECT pid, coalesce(usename, '?'), coalesce(nullif(application_name, ''), '?'), state,
            extract(epoch FROM clock_timestamp() - xact_start)::float8
        FROM pg_stat_activity
        WHERE datname = current_database() AND pid <> pg_backend_pid() AND backend_type = 'client backend'
            AND xact_start < clock_timestamp() - :seconds * interval '1 second'
        ORDER BY xact_start""",
        seconds=subject.limits.transaction_sec,
    ):
        yield Finding(
            "transactions",
            Severity.WARNING,
            f"process {pid} ({user}, {application}) has a transaction open for {seconds:.0f} s ({state})",
            WHY,
            f"SELECT pg_terminate_backend({pid})",
        )
    for gid, seconds in subject.rows(
        """
        SELECT gid, extract(epoch FROM clock_timestamp() - prepared)::float8 FROM pg_prepared_xacts
        WHERE database = current_database() AND prepared < clock_timestamp() - :seconds * interval '1 second'
        ORDER BY prepared""",
        seconds=subject.limits.transaction_sec,
    ):
        literal = gid.replace("'", "''")
        yield Finding(
            "transactions",
            Severity.WARNING,
            f"transaction {gid!r} has been prepared for {seconds:.0f} s, and neither committed nor rolled back",
            WHY,
            f"ROLLBACK PREPARED '{literal}' (or COMMIT PREPARED)",
        )
    for slot, literal in subject.rows(
        """
        SELECT slot_name::text, quote_literal(slot_name) FROM pg_replication_slots
        WHERE NOT active AND (xmin IS NOT NULL OR catalog_xmin IS NOT NULL) ORDER BY 1"""
    ):
        yield Finding(
            "transactions",
            Severity.WARNING,
            f"replication slot {slot!r} is used by nobody and keeps vacuum from working",
            WHY,
            f"start its standby again, or SELECT pg_drop_replication_slot({literal})",
        )
