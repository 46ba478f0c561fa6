"""Change the number of tokens of a cluster.

Which token a row has is stored in it (a generated column computes it once, when the row is written), and which token a
task has is computed by every worker from its own configuration. So a new number is for a moment at which no worker
runs, and every row has to be written anew. Both are seen to here:

* It is refused while any node is registered. The cluster's row is locked throughout, so none can join meanwhile; a
  worker with the old number in its configuration is refused afterwards (its registration names the number), also one
  that was paused all the time.
* All is one transaction: the function, the tokens, the pins, the queue's jobs, and each table with a stored column that
  the function computes. If it fails, is interrupted, or the connection breaks, nothing has changed.

What it locks, in this order, until it commits: the cluster's row; the application's tables that are rewritten, the
queue's jobs, the tokens, pins and claims, by name, against writers (readers go on, and see what was). A lock that is
not to be had within ``LOCK_SEC`` ends it, as does a deadlock with a transaction that takes them in another order. If
this process is paused, the server ends its transaction after ``IDLE_SEC``.

A row is written anew only if its token changes; each has then an old version for VACUUM to remove, so a table may take
up twice its room for a while. Triggers of the application, and the fence, are off for these updates only: nothing that
they watch changes. Sequences, defaults and identities are left alone.

| statement | locks | if the process stops right there |
|---|---|---|
| survey | nothing | nothing |
| reshard | see above | nothing has changed, or all |
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from sqlalchemy import Connection, Engine, text
from sqlalchemy.exc import OperationalError

from jobsync_orm.config import MAX_TOKENS
from jobsync_orm.exceptions import ConfigurationError, OperationRefused
from jobsync_orm.hashing import task_to_token, token_function_ddl
from jobsync_orm.naming import Names, quote
from jobsync_orm.operate.dependents import Dependents, TokenColumn, dependents
from jobsync_orm.operate.missing import check_given, no_cluster, ready
from jobsync_orm.pins import Pin, check_conflicts
from jobsync_orm.sqlstates import sqlstate
from jobsync_orm.wording import counted

__all__ = ["Resharded", "Survey", "reshard", "survey"]

# Longest that a lock is waited for, and that the server keeps the transaction of a process that does not go on.
LOCK_SEC = 10
IDLE_SEC = 60

# Pages of a table that are written by one statement.
PAGES = 2000

DEADLOCK = "40P01"
IN_USE = ("55P03", DEADLOCK)

Progress = Callable[[int, int, str], object]


@dataclass(frozen=True, slots=True)
class Survey:
    """What a new number of tokens would take.

    Attributes
    ----------
    total_before, total_after : int
    nodes : tuple of str
        Registered nodes. None may be.
    tables : tuple of TokenColumn
        What would be rewritten.
    obstacles : tuple of str
        What else is in the way, a sentence each.
    """

    total_before: int
    total_after: int
    nodes: tuple[str, ...]
    tables: tuple[TokenColumn, ...]
    obstacles: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Resharded:
    """What was done.

    Attributes
    ----------
    total_before, total_after : int
    rows : int
        Rows of the application's tables that have another token now.
    jobs : int
        The queue's jobs of which that is true.
    tables : int
        How many tables were gone through.
    took_sec : float
    """

    total_before: int
    total_after: int
    rows: int
    jobs: int
    tables: int
    took_sec: float


def survey(engine: Engine, names: Names, total_tokens: int) -> Survey:
    """Look what a new number of tokens would take; nothing is changed.

    Parameters
    ----------
    engine, names : Engine, Names
        The cluster.
    total_tokens : int
        The new number.

    Raises
    ------
    ConfigurationError
        No such number can be.
    SchemaNotReady
        There is no cluster.
    """
    check_given(engine, names)
    _check(total_tokens)
    with ready(names), engine.connect() as connection:
        before, _ = _settings(connection, names)
        found = dependents(connection, names)
        return Survey(before, total_tokens, _nodes(connection, names), found.columns, found.obstacles)


def reshard(engine: Engine, names: Names, total_tokens: int, progress: Progress | None = None) -> Resharded:
    """Give a cluster without workers another number of tokens.

    Parameters
    ----------
    engine, names : Engine, Names
        The cluster. The role must own the function and every table that is rewritten.
    total_tokens : int
        The new number. Every worker needs it in its configuration afterwards.
    progress : callable, optional
        Called with how many pages are done, how many there are, and what is being done.

    Raises
    ------
    OperationRefused
        Nodes are registered, or something else is in the way. Nothing has changed.
    LockConflict
        Two pins would share a token, and no node name matches both. Nothing has changed.
    ConfigurationError
        No such number can be.
    SchemaNotReady
        There is no cluster.
    """
    check_given(engine, names)
    _check(total_tokens)
    tell = progress or (lambda done, total, what: None)
    began = time.monotonic()
    at_once = engine.execution_options(isolation_level="READ COMMITTED")
    with ready(names), _unlocked(), at_once.begin() as connection:
        run = _Run(connection, names, total_tokens, tell)
        before = run.prepare()
        if before == total_tokens:
            return Resharded(before, before, 0, 0, 0, time.monotonic() - began)
        rows, jobs = run.rewrite()
        run.finish()
        tables = len(run.found.columns)
        tell(run.pages, run.pages, "committing")
    return Resharded(before, total_tokens, rows, jobs, tables, time.monotonic() - began)


@contextmanager
def _unlocked() -> Iterator[None]:
    """A lock that is not to be had is a reason to try again later, not an error of the server's."""
    try:
        yield
    except OperationalError as error:
        if (state := sqlstate(error.orig)) not in IN_USE:
            raise
        if state == DEADLOCK:
            raise OperationRefused(
                "somebody who writes one of these tables waits for another one that is locked here: stop what writes, "
                "and try again. Nothing has changed"
            ) from error
        raise OperationRefused(
            f"somebody holds a lock for longer than {LOCK_SEC} s: stop what writes, and try again. Nothing has changed"
        ) from error


class _Run:
    """One transaction that changes everything."""

    def __init__(self, connection: Connection, names: Names, total: int, tell: Progress) -> None:
        self._connection = connection
        self._names = names
        self._total = total
        self._tell = tell
        self._done = 0
        self.pages = 0
        self.found = Dependents((), ())

    def _execute(self, sql: str) -> int:
        return self._connection.exec_driver_sql(sql.replace("%", "%%")).rowcount

    def prepare(self) -> int:
        """Lock what has to be locked, and refuse what cannot be; the number of tokens so far."""
        names = self._names
        for setting in (
            f"lock_timeout = '{LOCK_SEC}s'",
            f"idle_in_transaction_session_timeout = '{IDLE_SEC}s'",
            "statement_timeout = 0",
            "row_security = off",  # an error rather than rows that are left out
        ):
            self._execute(f"SET LOCAL {setting}")
        before, self._hash = _settings(self._connection, names, " FOR UPDATE")
        if members := _nodes(self._connection, names):
            raise OperationRefused(
                f"{counted(len(members), 'node is', 'nodes are')} registered ({', '.join(members[:5])}"
                f"{', ...' if len(members) > 5 else ''}): stop every worker, and evict those that are dead "
                "(jobsync-orm evict NODE)"
            )
        if before == self._total:
            return before
        self.found = self._look()
        kinds = ("claim", "job", "lock", "token")
        tables = sorted({*(column.table for column in self.found.columns), *(names.sql(kind) for kind in kinds)})
        for table in tables:
            self._execute(f"LOCK TABLE ONLY {table} IN SHARE ROW EXCLUSIVE MODE")
        self._job_pages = _pages(self._connection, names.sql("job"))
        self.pages = sum(column.pages for column in self.found.columns) + self._job_pages + 1
        return before

    def _look(self) -> Dependents:
        found = dependents(self._connection, self._names)
        if found.obstacles:
            raise OperationRefused("; ".join(found.obstacles))
        return found

    def rewrite(self) -> tuple[int, int]:
        """The function, and whatever it has computed. Returns the rows and jobs that have another token now."""
        names = self._names
        function = names.sql("token_of")
        self._execute(token_function_ddl(function, self._total, self._hash))
        rows = 0
        for column in self.found.columns:
            for identity in column.identities:
                self._execute(f"ALTER TABLE {column.table} ALTER COLUMN {quote(identity)} SET GENERATED BY DEFAULT")
            for trigger in column.triggers:
                self._execute(f"ALTER TABLE {column.table} DISABLE TRIGGER {quote(trigger.name)}")
            setting = ", ".join(f"{quote(key)} = {quote(key)}" for key in column.keys)
            differs = f"{quote(column.column)} IS DISTINCT FROM ({column.expression})"
            rows += self._update(column.table, column.pages, setting, differs)
            for trigger in column.triggers:
                self._execute(f"ALTER TABLE {column.table} {trigger.enable} TRIGGER {quote(trigger.name)}")
            for identity in column.identities:
                self._execute(f"ALTER TABLE {column.table} ALTER COLUMN {quote(identity)} SET GENERATED ALWAYS")
        now = f"{function}(key)"
        differs = f"key IS NOT NULL AND token_id IS DISTINCT FROM {now}"
        return rows, self._update(names.sql("job"), self._job_pages, f"token_id = {now}", differs)

    def _update(self, table: str, pages: int, setting: str, where: str) -> int:
        """Update a table, part after part."""
        # Before PostgreSQL 14 each part would read the whole table.
        version = self._connection.dialect.server_version_info or (0,)
        step = PAGES if version >= (14,) else max(pages, 1)
        count = 0
        for start in range(0, max(pages, 1), step):
            self._tell(self._done + start, self.pages, table)
            # New versions of rows go behind what was there, or into gaps; there their token is right already.
            end = f" AND ctid < '({start + step},0)'::tid" if start + step < pages else ""
            count += self._execute(
                f"UPDATE ONLY {table} SET {setting} WHERE ctid >= '({start},0)'::tid{end} AND {where}"
            )
        self._done += pages
        return count

    def finish(self) -> None:
        """Tokens, pins and the cluster's row; and whether anything has come in between."""
        names, total = self._names, self._total
        self._tell(self._done, self.pages, "tokens and pins")
        cluster, token, lock = names.sql("cluster"), names.sql("token"), names.sql("lock")
        self._execute(f"UPDATE {cluster} SET total_tokens = {total}, epoch = epoch + 1, revision = revision + 1")
        epoch = f"(SELECT epoch FROM {cluster})"
        self._execute(f"DELETE FROM {names.sql('claim')}")
        self._execute(f"DELETE FROM {token} WHERE token_id >= {total}")
        self._execute(
            f"UPDATE {token} SET node = NULL, epoch = {epoch}, next_node = NULL, next_epoch = NULL,"
            " drain_deadline = NULL, assigned_at = clock_timestamp()"
        )
        self._execute(
            f"INSERT INTO {token} (token_id, epoch) SELECT n, {epoch} FROM generate_series(0, {total - 1}) AS n"
            " ON CONFLICT DO NOTHING"
        )
        self._execute(f"UPDATE {lock} SET token_id = {names.sql('token_of')}(task_id)")
        stored = self._connection.exec_driver_sql(
            f"SELECT task_id, node_patterns FROM {lock} WHERE expires_at IS NULL OR expires_at > clock_timestamp()"
        )
        check_conflicts(
            [],
            [
                Pin(task, task_to_token(task, total, self._hash), tuple(patterns), None)
                for task, patterns in stored
                if isinstance(patterns, list)
            ],
        )
        before = {(column.table, column.column) for column in self.found.columns}
        if {(column.table, column.column) for column in self._look().columns} != before:
            raise OperationRefused("a table with a token column was made just now: try again")


def _check(total_tokens: int) -> None:
    if not isinstance(total_tokens, int) or isinstance(total_tokens, bool) or not 1 <= total_tokens <= MAX_TOKENS:
        raise ConfigurationError(f"total_tokens={total_tokens!r} must be a whole number from 1 to {MAX_TOKENS}")


def _settings(connection: Connection, names: Names, how: str = "") -> tuple[int, str]:
    row = connection.execute(
        text(f"SELECT total_tokens, hash_function FROM {names.text('cluster')}{how}")
    ).one_or_none()
    if row is None:
        raise no_cluster(names)
    return row[0], row[1]


def _nodes(connection: Connection, names: Names) -> tuple[str, ...]:
    return tuple(row[0] for row in connection.execute(text(f"SELECT name FROM {names.text('node')} ORDER BY name")))


def _pages(connection: Connection, table: str) -> int:
    size = text("SELECT pg_relation_size(CAST(:table AS regclass)) / CAST(current_setting('block_size') AS int)")
    return int(connection.execute(size, {"table": table}).scalar_one())
