"""How many connections are left."""

from __future__ import annotations

from collections.abc import Iterator

from jobsync_orm.operate.doctor.findings import Finding, Severity, Subject

__all__ = ["check"]


def check(subject: Subject) -> Iterator[Finding]:
    """The limits of the server, the database and the role, one finding for each that is nearly reached."""
    rows = subject.rows(
        """
        WITH sessions AS MATERIALIZED (SELECT datid, usesysid FROM pg_stat_activity WHERE datid IS NOT NULL)
        SELECT 'the server', (SELECT count(*) FROM sessions),
            current_setting('max_connections')::int - current_setting('superuser_reserved_connections')::int,
            'max_connections in postgresql.conf, and a restart'
        UNION ALL
        SELECT 'database ' || quote_ident(d.datname), (SELECT count(*) FROM sessions s WHERE s.datid = d.oid),
            d.datconnlimit, format('ALTER DATABASE %I CONNECTION LIMIT -1', d.datname)
        FROM pg_database d WHERE d.datname = current_database() AND d.datconnlimit >= 0
        UNION ALL
        SELECT 'role ' || quote_ident(r.rolname), (SELECT count(*) FROM sessions s WHERE s.usesysid = r.oid),
            r.rolconnlimit, format('ALTER ROLE %I CONNECTION LIMIT -1', r.rolname)
        FROM pg_roles r WHERE r.rolname = coalesce(CAST(:role AS text), current_user) AND r.rolconnlimit >= 0""",
        role=subject.role,
    )
    for whose, used, most, remedy in rows:
        if used >= most * subject.limits.connections:
            yield Finding(
                "connections",
                Severity.ERROR if used >= most else Severity.WARNING,
                f"{used} of the {most} connections of {whose} are in use",
                "a worker whose connection breaks cannot come back, and loses its tokens",
                f"raise the limit ({remedy}), or make the applications' pools smaller",
            )
