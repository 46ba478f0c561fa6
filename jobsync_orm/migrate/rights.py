"""What each role needs: of the tables, the sequences and the functions. One list, for the check and for the scripts."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["HIDDEN", "SEQUENCES", "TABLES"]

_ALL = ("SELECT", "INSERT", "UPDATE", "DELETE")

# What a worker does with each table. UPDATE is also what PostgreSQL asks of who locks a row.
TABLES: Mapping[str, tuple[str, ...]] = {
    "cluster": ("SELECT", "UPDATE"),
    "node": _ALL,
    "token": ("SELECT", "UPDATE"),
    "lock": _ALL,
    "claim": _ALL,
    "checkpoint": _ALL,
    "audit": ("SELECT", "INSERT"),
    "rebalance": ("SELECT", "INSERT"),
    "job": _ALL,
    "job_attempt": ("SELECT", "INSERT", "DELETE"),
    "job_dependency": ("SELECT", "INSERT", "DELETE"),
    "job_pause": _ALL,
    "job_schedule": _ALL,
    "job_worker": _ALL,
}

# table: (sequence, rights). A worker draws from them, and after a failover leaves out numbers that may have been given.
SEQUENCES: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "node": ("ordinal_seq", ("USAGE",)),
    "claim": ("fence_seq", ("USAGE", "UPDATE")),
    "job": ("id_seq", ("USAGE",)),
}

# Columns that a monitor does not read: what the application has put there, or what its code has said of it.
HIDDEN: Mapping[str, frozenset[str]] = {
    "checkpoint": frozenset({"position"}),
    "job": frozenset({"payload", "result", "error"}),
    "job_attempt": frozenset({"error", "traceback"}),
}
