"""Putting many jobs in with one statement.

::

    ids = queue.enqueue_many(session, "resize", [{"image_id": id} for id in ids], priority=JobPriority.LOW)
    queue.enqueue_many(session, [NewJob("pay", {"order_id": 7}, key=7), NewJob("mail", {"to": "a@b"}, delay=60)])

The jobs travel as one JSON array, which PostgreSQL takes apart: so it is the same for each driver and one message long,
all of it is stored or nothing is, and the ids rise in the order given. What locks it takes stands in
:mod:`jobsync_orm.queue.insertion`.
"""

from __future__ import annotations

import datetime
import json
from collections import Counter
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from typing import TYPE_CHECKING, Any, overload

from sqlalchemy import Connection, TextClause, text
from sqlalchemy.exc import DBAPIError

from jobsync_orm.autocommit import listed
from jobsync_orm.exceptions import InvalidJob, InvalidPayload, JobConflict
from jobsync_orm.naming import Names
from jobsync_orm.observe import JobsEnqueued
from jobsync_orm.queue.commits import tell_at_commit
from jobsync_orm.queue.enqueue import After, EnqueueCalls, Seconds
from jobsync_orm.queue.insertion import LIVE_KEY, NOW, TRIES, Insertion, cast_text, stuck_behind, unknown_jobs
from jobsync_orm.queue.new_jobs import NewJob, payload_of
from jobsync_orm.queue.options import brief
from jobsync_orm.queue.places import at, no_place
from jobsync_orm.tracing import UNTRACED, Producing, trace_column

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

    from jobsync_orm.queue.places import AnyAsyncPlace, AnyPlace

__all__ = ["BulkCalls"]

# A jsonb array has room for 256 MB; its text may be a little shorter than what it becomes.
MOST_BYTES = 100_000_000

# [id, state] of a job that is new, or None for one that was there.
Written = list[Any]


class BulkCalls(EnqueueCalls):
    """The part of a queue that puts many jobs in at once."""

    @overload
    def enqueue_many(
        self,
        where: AnyPlace,
        type: str | Iterable[NewJob],
        payloads: Iterable[Any] | None = None,
        *,
        priority: int = 0,
        key: Any = None,
        run_at: datetime.datetime | None = None,
        delay: Seconds | None = None,
        after: After = (),
        max_retries: int | None = None,
        timeout: Seconds | None = None,
        check: bool | None = None,
    ) -> list[int]: ...

    @overload
    def enqueue_many(
        self,
        where: AnyAsyncPlace,
        type: str | Iterable[NewJob],
        payloads: Iterable[Any] | None = None,
        *,
        priority: int = 0,
        key: Any = None,
        run_at: datetime.datetime | None = None,
        delay: Seconds | None = None,
        after: After = (),
        max_retries: int | None = None,
        timeout: Seconds | None = None,
        check: bool | None = None,
    ) -> Coroutine[Any, Any, list[int]]: ...

    def enqueue_many(
        self,
        where: Any,
        type: str | Iterable[NewJob],
        payloads: Iterable[Any] | None = None,
        *,
        priority: int = 0,
        key: Any = None,
        run_at: datetime.datetime | None = None,
        delay: Seconds | None = None,
        after: After = (),
        max_retries: int | None = None,
        timeout: Seconds | None = None,
        check: bool | None = None,
    ) -> Any:
        """Put many jobs in, in the present transaction of ``where``: all of them, or none.

        Parameters
        ----------
        where : Session, scoped_session, Connection, AsyncSession, async_scoped_session or AsyncConnection
            As for :meth:`enqueue`.
        type : str or iterable of NewJob
            The type of all, whose ``payloads`` are given; or the jobs, each with options of its own.
        payloads : iterable, optional
            One per job.
        priority, key, run_at, delay, after, max_retries, timeout
            As for :meth:`enqueue`, for all of them. With NewJobs they are given in these.
        check : bool, optional
            As for :meth:`enqueue`.

        Returns
        -------
        list of int
            Their ids, in the order given. Of a NewJob whose ``idempotency_key`` a live job has, that one's. For an
            async ``where`` an awaitable of it.

        Raises
        ------
        InvalidPayload, InvalidJob, UnknownJobType, UnknownJob, ConfigurationError, sqlalchemy.exc.DBAPIError
            As for :meth:`enqueue`. The message says which of the jobs it is.
        """
        if isinstance(where, str):  # or the arguments after it would be blamed
            raise no_place(where)
        shared = NewJob(
            type if isinstance(type, str) else "jobs",
            priority=priority,
            key=key,
            run_at=run_at,
            delay=delay,
            after=after,
            max_retries=max_retries,
            timeout=timeout,
        )
        if isinstance(type, str):
            return self._put_of_a_type(where, shared, payloads, self._checks(check))
        if payloads is not None or shared != NewJob("jobs"):
            raise InvalidJob("of NewJobs each has its payload and options itself: leave the others out")
        return self._put_many(where, type, self._checks(check))

    def _put_of_a_type(self, where: Any, shared: NewJob, payloads: Iterable[Any] | None, check: bool) -> Any:
        if payloads is None or isinstance(payloads, str | bytes | dict):
            raise InvalidJob(f"payloads={brief(payloads)} must be several payloads: a list of dicts")
        handler = self.handlers.get(shared.type)
        texts = []
        for n, payload in enumerate(payloads):
            try:
                texts.append(payload_of(self, handler, payload))
            except InvalidPayload as error:
                raise InvalidPayload(f"payloads[{n}]: {error}") from error
        columns = shared.columns_without_payload(self, check)
        rows = _joined(texts)

        def put(place: Session | Connection) -> list[int]:
            connection = self._connection(place)
            if not texts:
                return []
            try:
                with self._enqueuing(columns["type"], len(texts)) as span:
                    ids, state = self._bulk.of_a_type(connection, columns | trace_column(span), rows)
                    span.written(ids)
            except DBAPIError as error:
                if (told := self._not_ready(error, callers=True)) is None:
                    raise
                raise told from error
            self.audience.tell(JobsEnqueued(columns["type"], len(ids)))
            lane = (columns["type"], int(columns.get("priority", 0)), "key" in columns)
            self._tell(place, connection, {lane} if state == "pending" else set(), ids if state == "blocked" else ())
            return ids

        return at(where, put)

    def _put_many(self, where: Any, jobs: Iterable[NewJob], check: bool) -> Any:
        given: list[dict[str, str]] = []
        for n, job in enumerate(jobs):
            if not isinstance(job, NewJob):
                raise InvalidJob(f"jobs[{n}] is {brief(job)}: give NewJob(type, payload, ...), or a type and payloads")
            try:
                given.append(job.columns(self, check))
            except InvalidJob as error:
                raise error.__class__(f"jobs[{n}]: {error}") from error

        def put(place: Session | Connection) -> list[int]:
            connection = self._connection(place)
            if not given:
                return []
            try:
                with self._enqueuing(given[0]["type"], len(given)) as span:
                    ids, new = self._bulk.of_many(connection, given, trace_column(span))
                    span.written(ids)
            except DBAPIError as error:
                if (told := self._not_ready(error, callers=True)) is None:
                    raise
                raise told from error
            if self.audience.active:
                types = Counter(columns["type"] for columns, state in zip(given, new, strict=True) if state is not None)
                for type, many in types.items():
                    self.audience.tell(JobsEnqueued(type, many))
            lanes = {
                (columns["type"], int(columns.get("priority", 0)), "key" in columns)
                for columns, state in zip(given, new, strict=True)
                if state == "pending"
            }
            self._tell(place, connection, lanes, [id for id, state in zip(ids, new, strict=True) if state == "blocked"])
            return ids

        return at(where, put)

    def _enqueuing(self, type: str, many: int) -> AbstractContextManager[Producing]:
        """The span of a call; one of several types is named by the first."""
        return UNTRACED if self.tracing is None else self.tracing.enqueuing(type, many)

    def _tell(
        self, place: Session | Connection, connection: Connection, lanes: set[Any], blocked: Iterable[int]
    ) -> None:
        waiting = set(blocked)
        if self.wakes and (lanes or waiting):
            tell_at_commit(place, connection, self._waker, lanes, waiting)

    @cached_property
    def _bulk(self) -> _Bulk:
        return _Bulk(self.names, self._insertion)


class _Bulk:
    """The statements that put many jobs of one cluster in."""

    def __init__(self, names: Names, insertion: Insertion) -> None:
        self._names = names
        self._insertion = insertion
        self._known: dict[tuple[str, ...], TextClause] = {}
        self._by_features: dict[tuple[bool, bool, bool], TextClause] = {}
        self._existing = text(
            "SELECT CAST(json_agg(json_build_array(j.type, j.idempotency_key, j.id)) AS text)"
            f" FROM jsonb_array_elements(CAST({cast_text('pairs')} AS jsonb)) AS p (v) JOIN {names.text('job')} j"
            f" ON j.type = p.v ->> 0 AND j.idempotency_key = p.v ->> 1 AND {LIVE_KEY}"
        )

    def of_a_type(self, connection: Connection, columns: dict[str, str], rows: str) -> tuple[list[int], str]:
        """Jobs that differ in their payload only: their ids in order, and their state."""
        shape = tuple(columns)
        statement = self._known.get(shape)
        if statement is None:
            statement = self._known[shape] = text(self._sql_of_a_type(shape))
        found, state, unknown, stuck = connection.execute(statement, {**columns, "rows": rows}).one()
        if unknown is not None:
            raise unknown_jobs(unknown)
        ids = sorted(json.loads(found))
        stuck_behind(ids, stuck)
        return ids, state

    def _sql_of_a_type(self, columns: tuple[str, ...]) -> str:
        job, dependency = self._names.text("job"), self._names.text("job_dependency")
        values, state = self._insertion.values(columns)
        values["payload"] = "r.v"
        unknown = stuck = "CAST(NULL AS text)"
        before = waits = only = ""
        if "after" in columns:
            before = f"""
                before AS MATERIALIZED (
                    SELECT a.id, {self._insertion.state_before()} AS state
                    FROM unnest({listed("after", "bigint")}) AS a (id) LEFT JOIN {job} j ON j.id = a.id),"""
            state = (
                f"CASE WHEN EXISTS (SELECT 1 FROM before WHERE state <> 'completed') THEN 'blocked' ELSE {state} END"
            )
            only = "WHERE NOT EXISTS (SELECT 1 FROM before WHERE state IS NULL)"
            waits = f""",
            waits AS (INSERT INTO {dependency} (after_id, job_id) SELECT before.id, new.id FROM before, new)"""
            unknown = "(SELECT CAST(json_agg(id ORDER BY id) AS text) FROM before WHERE state IS NULL)"
            stuck = "(SELECT CAST(json_agg(id ORDER BY id) AS text) FROM before WHERE state IN ('failed', 'cancelled'))"
        values["state"] = state
        return f"""
            WITH {before}
            new AS (
                INSERT INTO {job} ({", ".join(values)}) SELECT {", ".join(values.values())}
                FROM jsonb_array_elements(CAST({cast_text("rows")} AS jsonb)) WITH ORDINALITY AS r (v, n) {only}
                ORDER BY r.n
                RETURNING id, state){waits}
            SELECT CAST(json_agg(id) AS text), min(state), {unknown}, {stuck} FROM new"""

    def of_many(
        self, connection: Connection, given: Sequence[dict[str, str]], shared: Mapping[str, str]
    ) -> tuple[list[int], list[str | None]]:
        """Jobs with options of their own: their ids in order, and the states of those that are new.

        ``shared`` is the column ``trace``, of all of them, or nothing.

        Raises
        ------
        UnknownJob
            One of the jobs they are to run after is not there. None is written.
        JobConflict
            Jobs with their idempotency keys come and go faster than they can be looked at.
        """
        ids: dict[int, int] = {}
        new: list[str | None] = [None] * len(given)
        left = list(range(len(given)))
        for _ in range(TRIES):
            for n, written in zip(left, self._insert(connection, [given[n] for n in left], shared), strict=True):
                if written is not None:
                    ids[n], new[n] = written
            left = [n for n in left if n not in ids]
            if left:
                pairs = [[given[n]["type"], given[n]["idempotency_key"]] for n in left]
                found = connection.execute(self._existing, {"pairs": json.dumps(pairs)}).scalar_one()
                known = {(type, key): id for type, key, id in json.loads(found or "[]")}
                for n, pair in zip(left, pairs, strict=True):
                    if (pair[0], pair[1]) in known:
                        ids[n] = known[pair[0], pair[1]]
                left = [n for n in left if n not in ids]
            if not left:
                return [ids[n] for n in range(len(given))], new
        first = given[left[0]]
        raise JobConflict(
            f"{first['type']!r} jobs with idempotency_key={first['idempotency_key']!r} came and went {TRIES} times "
            "while one was to be enqueued"
        )

    def _insert(
        self, connection: Connection, given: list[dict[str, str]], shared: Mapping[str, str]
    ) -> list[Written | None]:
        has_after = any("after" in columns for columns in given)
        features = has_after, any("idempotency_key" in columns for columns in given), "trace" in shared
        statement = self._by_features.get(features)
        if statement is None:
            statement = self._by_features[features] = text(self._sql_of_many(*features))
        values = {"rows": _joined([_row(columns) for columns in given]), **shared}
        written, unknown, stuck = connection.execute(statement, values).one()
        if unknown is not None:
            raise unknown_jobs(unknown)
        rows: list[Written | None] = json.loads(written)
        for job, behind in json.loads(stuck or "{}").items():
            stuck_behind([int(job)], json.dumps(behind))
        return rows

    def _sql_of_many(self, has_after: bool, idempotent: bool, traced: bool) -> str:
        job, dependency = self._names.text("job"), self._names.text("job_dependency")
        sequence = f"pg_get_serial_sequence('{job.replace(chr(39), chr(39) * 2)}', 'id')"
        run_at = (
            "coalesce(CAST(g.v ->> 'run_at' AS timestamptz),"
            f" {NOW} + CAST(g.v ->> 'delay' AS float8) * interval '1 second')"
        )
        state = f"CASE WHEN {run_at} > {NOW} THEN 'scheduled' ELSE 'pending' END"
        before = waits = only = ""
        unknown = stuck = "CAST(NULL AS text)"
        if has_after:
            before = f"""
            before AS MATERIALIZED (
                SELECT g.id AS job_id, a.id AS after_id, {self._insertion.state_before()} AS state FROM given g
                CROSS JOIN LATERAL unnest(CAST(g.v ->> 'after' AS bigint[])) AS a (id)
                LEFT JOIN {job} j ON j.id = a.id),"""
            waiting = "g.id IN (SELECT job_id FROM before WHERE state <> 'completed')"
            state = f"CASE WHEN {waiting} THEN 'blocked' ELSE {state} END"
            only = "WHERE NOT EXISTS (SELECT 1 FROM before WHERE state IS NULL)"
            waits = f""",
            waits AS (
                INSERT INTO {dependency} (after_id, job_id)
                SELECT b.after_id, b.job_id FROM before b JOIN new ON new.id = b.job_id)"""
            unknown = "(SELECT CAST(json_agg(DISTINCT after_id) AS text) FROM before WHERE state IS NULL)"
            stuck = """(SELECT CAST(json_object_agg(job_id, behind) AS text) FROM (
                SELECT b.job_id, json_agg(b.after_id ORDER BY b.after_id) AS behind
                FROM before b JOIN new ON new.id = b.job_id WHERE b.state IN ('failed', 'cancelled') GROUP BY 1) s)"""
        values = {
            "id": "g.id",
            "type": "g.v ->> 'type'",
            "payload": "g.v -> 'payload'",
            "state": state,
            "priority": "coalesce(CAST(g.v ->> 'priority' AS int), 0)",
            "max_retries": "coalesce(CAST(g.v ->> 'max_retries' AS int), 3)",
            "timeout": "coalesce(CAST(g.v ->> 'timeout' AS float8), 3600)",
            "retry_blocks_key": "coalesce(CAST(g.v ->> 'retry_blocks_key' AS bool), true)",
            "max_retries_given": "CAST(g.v ->> 'max_retries_given' AS bool) IS TRUE",
            "timeout_given": "CAST(g.v ->> 'timeout_given' AS bool) IS TRUE",
            "key": "g.v ->> 'key'",
            "token_id": f"{self._names.text('token_of')}(g.v ->> 'key')",
            "idempotency_key": "g.v ->> 'idempotency_key'",
            "run_at": run_at,
        }
        if traced:
            values["trace"] = cast_text("trace")
        conflict = f"ON CONFLICT (type, idempotency_key) WHERE {LIVE_KEY} DO NOTHING" if idempotent else ""
        # The ids are drawn first, in order: which of the jobs were written is known by them.
        return f"""
            WITH given AS MATERIALIZED (
                SELECT o.v, o.n, nextval(s.name) AS id
                FROM (SELECT CAST({sequence} AS regclass) AS name OFFSET 0) s,
                    (SELECT r.v, r.n FROM jsonb_array_elements(CAST({cast_text("rows")} AS jsonb))
                        WITH ORDINALITY AS r (v, n) ORDER BY r.n) o),{before}
            new AS (
                INSERT INTO {job} ({", ".join(values)}) SELECT {", ".join(values.values())} FROM given g {only}
                ORDER BY g.n {conflict}
                RETURNING id, state){waits}
            SELECT CAST(json_agg(CASE WHEN new.id IS NOT NULL THEN json_build_array(new.id, new.state) END
                    ORDER BY g.n) AS text), {unknown}, {stuck}
            FROM given g LEFT JOIN new ON new.id = g.id"""


def _row(columns: dict[str, str]) -> str:
    others = ",".join(f'"{name}":{json.dumps(value)}' for name, value in columns.items() if name != "payload")
    return f'{{{others},"payload":{columns["payload"]}}}'


def _joined(rows: list[str]) -> str:
    joined = f"[{','.join(rows)}]"
    if len(joined) > MOST_BYTES:
        raise InvalidJob(
            f"{len(rows):,} jobs are {len(joined):,} characters long as JSON, more than {MOST_BYTES:,}: "
            "give them in several calls"
        )
    return joined
