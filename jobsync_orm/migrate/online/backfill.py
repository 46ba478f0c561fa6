"""Give the rows that are there their tokens, a few at a time.

One batch is one statement and one transaction: it reads the next rows by primary key, locks those without a token as an
UPDATE would, **skipping those that somebody has locked**, and writes them. So it waits for nobody, can be in no
deadlock, and whoever wants one of its rows waits for one batch at most. What was skipped is looked for afterwards;
mostly there is nothing, because whoever wrote such a row has filled its token with the trigger.

Nothing is remembered: rows without a token are what is left to do. So the work can be interrupted at any moment,
also by a kill, and begun again; it then passes over the rows that are done.
"""

from __future__ import annotations

import re
import time

from sqlalchemy import Connection, TextClause, text

from jobsync_orm.exceptions import ConfigurationError, LockNotAcquired
from jobsync_orm.migrate.binding import raw
from jobsync_orm.migrate.online.column import Column, Found
from jobsync_orm.migrate.online.progress import Progress
from jobsync_orm.naming import quote
from jobsync_orm.wording import counted

__all__ = ["Pace", "backfill", "primary_key"]

_FIRST_PAUSE, _LAST_PAUSE = 0.05, 1.0


class Pace:
    """How fast to go.

    Parameters
    ----------
    batch_rows : int
        Rows of one batch, 1 to 100,000.
    rest : float
        How long to rest after each batch, in multiples of the time that the batch took.

    Raises
    ------
    ConfigurationError
        A number out of range.
    """

    def __init__(self, batch_rows: int, rest: float) -> None:
        if type(batch_rows) is not int or not 1 <= batch_rows <= 100_000:
            raise ConfigurationError(f"batch_rows={batch_rows!r} must be a whole number from 1 to 100,000")
        if not 0 <= rest <= 1000:
            raise ConfigurationError(
                f"rest={rest!r} must be a number from 0 to 1000: how many times as long as a batch"
            )
        self.batch_rows, self.rest = batch_rows, rest


def primary_key(connection: Connection, column: Column, found: Found) -> list[tuple[str, str]]:
    """``(name, type)`` of each column of the primary key, in its order; the names as they are in SQL.

    Raises
    ------
    ConfigurationError
        The table has no primary key.
    """
    ask = text(
        "SELECT a.attname, pg_catalog.format_type(a.atttypid, a.atttypmod) FROM pg_catalog.pg_index i"
        " CROSS JOIN LATERAL pg_catalog.unnest(i.indkey) WITH ORDINALITY AS k (attnum, place)"
        " JOIN pg_catalog.pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = k.attnum"
        " WHERE i.indrelid = :table AND i.indisprimary ORDER BY k.place"
    )
    key = [(quote(name), type_) for name, type_ in connection.execute(ask, {"table": found.oid})]
    if not key:
        raise ConfigurationError(
            f"{column.table} has no primary key, by which its rows could be walked through: give it one, or add the "
            "column with op.add_column, which rewrites the table"
        )
    return key


class _Statements:
    """The two statements of one table, in SQL."""

    def __init__(self, table: str, key: list[tuple[str, str]]) -> None:
        names = [name for name, _ in key]
        columns = ", ".join(names)
        of_row = ", ".join(f"r.{name}" for name in names)
        same = " AND ".join(f"r.{name} = free.{name}" for name in names)
        # Keys come and go as text, so that any type and any driver will do.
        after = ", ".join(f"CAST(CAST(\0k{place}\0 AS text) AS {type_})" for place, (_, type_) in enumerate(key))
        last = ", ".join(f"CAST({name} AS text) AS k{place}" for place, name in enumerate(names))
        backwards = ", ".join(f"{name} DESC" for name in names)
        # DEFAULT is NULL, and the trigger makes a token of it.
        written = f"written AS (UPDATE {table} AS r SET token_id = DEFAULT FROM free WHERE {same} RETURNING 1)"

        def batch(where: str) -> TextClause:
            return _text(
                f"WITH part AS (SELECT {columns} FROM {table} {where} ORDER BY {columns} LIMIT \0batch_rows\0),"
                f" free AS (SELECT {of_row} FROM {table} AS r JOIN part USING ({columns}) WHERE r.token_id IS NULL"
                f" ORDER BY {of_row} FOR NO KEY UPDATE OF r SKIP LOCKED), {written},"
                f" number AS (SELECT (SELECT count(*) FROM part) AS seen, (SELECT count(*) FROM written) AS written)"
                f" SELECT number.*, last.* FROM number LEFT JOIN"
                f" (SELECT {last} FROM part ORDER BY {backwards} LIMIT 1) AS last ON true"
            )

        self.first = batch("")
        self.next = batch(f"WHERE ({columns}) > ({after})")
        self.left = _text(
            f"WITH free AS (SELECT {of_row} FROM {table} AS r WHERE r.token_id IS NULL LIMIT \0batch_rows\0"
            f" FOR NO KEY UPDATE SKIP LOCKED), {written} SELECT count(*) FROM written"
        )
        self.lacking = raw(f"SELECT count(*) FROM (SELECT FROM {table} WHERE token_id IS NULL LIMIT 1000) AS r")


def _text(sql: str) -> TextClause:
    """SQL in which a name between two NULs, which no identifier can hold, is a parameter, and a colon is a colon."""
    return text(re.sub("\0(\\w+)\0", r":\1", sql.replace(":", r"\:")))


def backfill(connection: Connection, column: Column, found: Found, pace: Pace, patience: float) -> None:
    """Write the token of each row that has none.

    Parameters
    ----------
    connection : Connection
        In AUTOCOMMIT.
    column, found : Column, Found
        The column, and what is known of the table.
    pace : Pace
        How fast.
    patience : float
        Seconds for which to wait for rows that others have locked.

    Raises
    ------
    ConfigurationError
        The table has no primary key.
    LockNotAcquired
        Rows without a token were locked by others all the time.
    """
    statements = _Statements(column.table, primary_key(connection, column, found))
    with Progress(f"tokens of {column.table}", found.rows) as progress:
        last: dict[str, str] = {}
        while True:
            begun = time.monotonic()
            statement = statements.next if last else statements.first
            row = connection.execute(statement, {"batch_rows": pace.batch_rows, **last}).one()._mapping
            progress.advance(row["seen"])
            if row["seen"] < pace.batch_rows:
                break
            last = {name: value for name, value in row.items() if name not in ("seen", "written")}
            if row["written"] and pace.rest:
                time.sleep((time.monotonic() - begun) * pace.rest)
        _sweep(connection, statements, column, pace, patience)


def _sweep(connection: Connection, statements: _Statements, column: Column, pace: Pace, patience: float) -> None:
    """The rows that were locked when their batch came, as soon as they are free."""
    deadline = time.monotonic() + patience
    pause = _FIRST_PAUSE
    while lacking := connection.scalar(statements.lacking):
        if connection.scalar(statements.left, {"batch_rows": pace.batch_rows}):
            deadline, pause = time.monotonic() + patience, _FIRST_PAUSE
            continue
        if time.monotonic() >= deadline:
            raise LockNotAcquired(
                f"{counted(lacking, 'row', 'rows')} of {column.table} that others had locked for {patience:g} s got "
                "no token yet: end the transactions that hold them (pg_stat_activity shows them, by xact_start), and "
                "run it again"
            )
        time.sleep(pause)
        pause = min(2 * pause, _LAST_PAUSE)
