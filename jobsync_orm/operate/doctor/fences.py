"""Triggers of ours on the application's tables."""

from __future__ import annotations

from collections.abc import Iterator

from jobsync_orm.operate.doctor.findings import Finding, Severity, Subject

__all__ = ["check"]


def check(subject: Subject) -> Iterator[Finding]:
    """Fences, and triggers that fill ``token_id``, that are switched off."""
    names = subject.names
    rows = subject.rows(
        """
        SELECT format('%I.%I', n.nspname, c.relname), format('%I', t.tgname), starts_with(t.tgname, :fence)
        FROM pg_trigger t JOIN pg_class c ON c.oid = t.tgrelid JOIN pg_namespace n ON n.oid = c.relnamespace
        WHERE NOT t.tgisinternal AND t.tgenabled IN ('D', 'R')
            AND (starts_with(t.tgname, :fence) OR starts_with(t.tgname, :token))
        ORDER BY 1, 2""",
        fence=names.bare("fence_"),
        token=names.token_trigger(""),
    )
    for table, trigger, fence in rows:
        yield Finding(
            "fences",
            Severity.ERROR,
            f"the trigger {trigger} of table {table} is off",
            "commits of stale owners are not refused: raw SQL of a worker that was paused overwrites the next owner's"
            if fence
            else "it fills token_id: without it each INSERT, and each UPDATE of the key, is refused",
            f"ALTER TABLE {table} ENABLE TRIGGER {trigger}",
        )
