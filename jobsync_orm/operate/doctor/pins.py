"""Pins that bind tasks to nobody."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence

from jobsync_orm.like import matches
from jobsync_orm.operate.cluster import Operations
from jobsync_orm.operate.doctor.findings import Finding, Severity, Subject
from jobsync_orm.operate.pins import StoredPin, list_pins
from jobsync_orm.wording import counted

__all__ = ["check"]

MOST = 10_000
SHOWN = 5


def check(subject: Subject) -> Iterator[Finding]:
    """Pins that match no live node, and pins that have expired."""
    stored = list_pins(subject.engine, subject.names, limit=MOST, expired=True)
    live = [node.name for node in Operations(subject.engine, subject.names).nodes() if node.condition != "away"]
    orphaned = [
        pin
        for pin in stored
        if live and not pin.expired and not any(matches(name, p) for p in pin.patterns for name in live)
    ]
    if orphaned:
        yield Finding(
            "pins",
            Severity.WARNING,
            f"{_pins(orphaned)} no live node: "
            + ", ".join(f"{pin.task_id!r} ({', '.join(pin.patterns)})" for pin in orphaned[:SHOWN])
            + (", ..." if len(orphaned) > SHOWN else ""),
            "nobody works on these tasks, nor on others that hash to the same tokens",
            "start a node whose name one of the patterns matches, or "
            f"jobsync-orm locks clear {' '.join(shlex.quote(pin.task_id) for pin in orphaned[:SHOWN])}",
        )
    expired = sum(pin.expired for pin in stored)
    if expired:
        yield Finding(
            "pins",
            Severity.NOTE,
            f"{counted(expired, 'pin has expired and is', 'pins have expired and are')} still stored",
            "they count for nothing, but the table grows",
            f"DELETE FROM {subject.names.sql('lock')} WHERE expires_at < now()",
        )


def _pins(orphaned: Sequence[StoredPin]) -> str:
    return counted(len(orphaned), "pin matches", "pins match")
