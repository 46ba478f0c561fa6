"""Whether dead rows are removed from the tables that change all the time."""

from __future__ import annotations

from collections.abc import Iterator

from jobsync_orm.autocommit import listed
from jobsync_orm.coordinator.session import array
from jobsync_orm.operate.doctor.findings import Finding, Severity, Subject

__all__ = ["check"]

BUSY = ("job", "job_attempt", "job_worker", "token", "node", "cluster", "claim")
WHY = "a row dies with each change of state: the tables grow, and everything that reads them gets slower"


def check(subject: Subject) -> Iterator[Finding]:
    """Autovacuum that is off, for all or for a table, and tables that are mostly dead rows."""
    for setting in ("autovacuum", "track_counts"):
        if subject.rows("SELECT current_setting(:name) = 'off'", name=setting)[0][0]:
            yield Finding(
                "vacuum",
                Severity.ERROR,
                f"the server runs with {setting} = off",
                WHY,
                f"ALTER SYSTEM RESET {setting}; SELECT pg_reload_conf()",
            )
    for table, off, dead, live in subject.rows(
        f"""
        SELECT t.name, coalesce(c.reloptions && ARRAY['autovacuum_enabled=false', 'autovacuum_enabled=off',
            'autovacuum_enabled=no', 'autovacuum_enabled=0'], false),
            coalesce(s.n_dead_tup, 0), coalesce(s.n_live_tup, 0)
        FROM unnest({listed("tables", "text")}) AS t (name)
        JOIN pg_class c ON c.oid = to_regclass(t.name) LEFT JOIN pg_stat_user_tables s ON s.relid = c.oid""",
        tables=array([subject.names.sql(kind) for kind in BUSY]),
    ):
        if off:
            yield Finding(
                "vacuum",
                Severity.ERROR,
                f"autovacuum is off for table {table}",
                WHY,
                f"ALTER TABLE {table} RESET (autovacuum_enabled); VACUUM (ANALYZE) {table}",
            )
        elif dead >= subject.limits.dead_rows and dead > live:
            yield Finding(
                "vacuum",
                Severity.WARNING,
                f"table {table} has {dead} dead rows and {live} live ones",
                WHY,
                f"VACUUM (ANALYZE) {table}; if it removes nothing, look for old transactions; else raise "
                "autovacuum_vacuum_cost_limit",
            )
