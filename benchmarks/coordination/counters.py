"""What the server has counted: statements and WAL bytes of one database, from pg_stat_statements."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from benchmarks.coordination.cluster import connect

__all__ = ["Counters", "Totals"]

_TOTALS = """
    select coalesce(sum(s.calls) filter (where not txn), 0)::bigint,
        coalesce(sum(s.calls) filter (where txn), 0)::bigint,
        coalesce(sum(s.wal_bytes), 0)::bigint
    from (select *, query ~* '^(begin|commit|rollback)' as txn from pg_stat_statements) s
    join pg_database d on d.oid = s.dbid where d.datname = %s"""

_BY_ROLE = """
    select r.rolname, s.query, sum(s.calls)::bigint
    from pg_stat_statements s join pg_database d on d.oid = s.dbid join pg_roles r on r.oid = s.userid
    where d.datname = %s group by 1, 2"""


@dataclass(frozen=True)
class Totals:
    """Sums since some moment. ``begin_commit``: statements that only begin or end a transaction."""

    statements: int
    begin_commit: int
    wal_bytes: int

    def __sub__(self, other: Totals) -> Totals:
        return Totals(
            self.statements - other.statements,
            self.begin_commit - other.begin_commit,
            self.wal_bytes - other.wal_bytes,
        )


class Counters:
    """The counters of ``database``, read over a connection to the maintenance database, which is not counted."""

    def __init__(self, database: str) -> None:
        self._database = database
        self._connection = connect()
        there = self._connection.execute(
            "select to_regclass('pg_stat_statements') is not null"
            " and current_setting('shared_preload_libraries') like '%pg_stat_statements%'"
        ).fetchone()
        self.available: bool = bool(there and there[0])

    def totals(self) -> Totals | None:
        """None where the server does not count."""
        if not self.available:
            return None
        row = self._connection.execute(_TOTALS, (self._database,)).fetchone()
        return Totals(*row) if row else None

    def by_role(self) -> dict[tuple[str, str], int]:
        """Calls by (role, statement)."""
        rows: list[tuple[Any, ...]] = self._connection.execute(_BY_ROLE, (self._database,)).fetchall()
        return {(role, query): calls for role, query, calls in rows}
