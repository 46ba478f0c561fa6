"""Putting a job in, as part of the transaction of the caller's.

::

    with Session.begin() as session:
        order = Order(...)
        session.add(order)
        session.flush()
        queue.enqueue(session, "send_receipt", {"order_id": order.id}, key=f"customer:{order.customer_id}")

The job exists if, and only if, the order does: it is a row written in the same transaction. Its id is known at once,
and a rollback, be it to a savepoint, removes it.
"""

from __future__ import annotations

import asyncio
import datetime
from collections.abc import Callable, Coroutine, Iterable, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any, overload

from sqlalchemy import Connection, Engine, inspect
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from jobsync_orm.models.states import JobState
from jobsync_orm.observe import JobsEnqueued
from jobsync_orm.queue.commits import tell_at_commit
from jobsync_orm.queue.core import QueueCore
from jobsync_orm.queue.insertion import Insertion
from jobsync_orm.queue.new_jobs import Enqueued, NewJob
from jobsync_orm.queue.places import at, connection_of, no_place
from jobsync_orm.queue.unsent import note, wait
from jobsync_orm.queue.waker import Lane, QueueWaker
from jobsync_orm.sqlstates import repeated
from jobsync_orm.tracing import trace_column

if TYPE_CHECKING:
    from jobsync_orm.queue.places import AnyAsyncPlace, AnyPlace

__all__ = ["EnqueueCalls"]

After = int | Enqueued | Iterable[int | Enqueued]
Seconds = float | datetime.timedelta


class EnqueueCalls(QueueCore):
    """The part of a queue that puts jobs in."""

    @overload
    def enqueue(
        self,
        where: AnyPlace,
        type: str,
        payload: Mapping[str, Any] | Any = None,
        *,
        priority: int = 0,
        key: Any = None,
        idempotency_key: Any = None,
        run_at: datetime.datetime | None = None,
        delay: Seconds | None = None,
        after: After = (),
        max_retries: int | None = None,
        timeout: Seconds | None = None,
        check: bool | None = None,
    ) -> Enqueued: ...

    @overload
    def enqueue(
        self,
        where: AnyAsyncPlace,
        type: str,
        payload: Mapping[str, Any] | Any = None,
        *,
        priority: int = 0,
        key: Any = None,
        idempotency_key: Any = None,
        run_at: datetime.datetime | None = None,
        delay: Seconds | None = None,
        after: After = (),
        max_retries: int | None = None,
        timeout: Seconds | None = None,
        check: bool | None = None,
    ) -> Coroutine[Any, Any, Enqueued]: ...

    def enqueue(
        self,
        where: Any,
        type: str,
        payload: Mapping[str, Any] | Any = None,
        *,
        priority: int = 0,
        key: Any = None,
        idempotency_key: Any = None,
        run_at: datetime.datetime | None = None,
        delay: Seconds | None = None,
        after: After = (),
        max_retries: int | None = None,
        timeout: Seconds | None = None,
        check: bool | None = None,
    ) -> Any:
        """Put a job in, in the present transaction of ``where``.

        Parameters
        ----------
        where : Session, scoped_session, Connection, AsyncSession, async_scoped_session or AsyncConnection
            Whose transaction the job is part of. What a session has pending is flushed first. A session of several
            engines must have one for ``queue.models.QueuedJob``; else give its connection.
        type : str
            Which handler is to run it; 1 to 200 characters.
        payload : Mapping, or an instance of the handler's payload model
            The handler's arguments: JSON with text keys. None is an empty one.
        priority : int
            The larger goes first; a :class:`~jobsync_orm.JobPriority` or any other.
        key : str, int, UUID, optional
            Jobs of one key run one at a time, in the order of their ids, on the node that owns the key's token.
        idempotency_key : str, int, UUID, optional
            If there is a live job of this type with the same, nothing is enqueued and that one is returned.
        run_at : datetime, optional
            Not before this moment; with a time zone. One in the past is now.
        delay : float or timedelta, optional
            The same as seconds from now, by the database's clock.
        after : int, Enqueued, or several
            Jobs that must have completed before.
        max_retries : int, optional
            How often it may fail and be tried again. None takes the handler's if it is registered here, else 3.
        timeout : float or timedelta, optional
            Seconds an attempt may take. None takes the handler's if it is registered here, else 3600.
        check : bool, optional
            Whether a handler for ``type`` must be registered here. None takes the queue's ``check_types``.

        Returns
        -------
        Enqueued
            The job's id and state, and whether it is new. For an async ``where`` an awaitable of it.

        Raises
        ------
        InvalidPayload
            The payload is no JSON object PostgreSQL can keep, is too large, or does not fit its handler.
        InvalidJob
            Another value that cannot be.
        UnknownJobType
            No handler for ``type`` is registered here, and that was to be checked.
        UnknownJob
            One of ``after`` is not there.
        ConfigurationError
            ``where`` is something else, or no transaction on PostgreSQL.
        SchemaNotReady
            The queue's tables are not there, or of an older revision. PostgreSQL has ended the transaction.
        sqlalchemy.exc.DBAPIError
            With an ``idempotency_key`` under REPEATABLE READ or SERIALIZABLE, with SQLSTATE 40001: another transaction
            has enqueued the same meanwhile. Repeat the transaction.
        """
        if isinstance(where, str):  # or the arguments after it would be blamed
            raise no_place(where)
        new = NewJob(
            type,
            payload,
            priority=priority,
            key=key,
            idempotency_key=idempotency_key,
            run_at=run_at,
            delay=delay,
            after=after,
            max_retries=max_retries,
            timeout=timeout,
        )
        columns = new.columns(self, self._checks(check))
        return at(where, lambda place: self._put(place, columns))

    def submit(
        self,
        type: str,
        payload: Mapping[str, Any] | Any = None,
        *,
        priority: int = 0,
        key: Any = None,
        idempotency_key: Any = None,
        run_at: datetime.datetime | None = None,
        delay: Seconds | None = None,
        after: After = (),
        max_retries: int | None = None,
        timeout: Seconds | None = None,
        check: bool | None = None,
    ) -> Enqueued:
        """:meth:`enqueue` in a transaction of its own, for a caller that has none. The job is there on return.

        Should the connection break on the way, it may or may not be: then an ``idempotency_key`` makes it safe to call
        again.
        """
        new = NewJob(
            type,
            payload,
            priority=priority,
            key=key,
            idempotency_key=idempotency_key,
            run_at=run_at,
            delay=delay,
            after=after,
            max_retries=max_retries,
            timeout=timeout,
        )
        columns = new.columns(self, self._checks(check))

        def put() -> Enqueued:
            with self.engine.connect() as connection:
                return self._inserted(self._insertion.alone, connection, columns)

        job = repeated(put)
        self._tell_observers(job, columns)
        lanes, blocked = self._to_tell(job, columns)
        if lanes or blocked:
            self._waker.wake(lanes, blocked)
        return job

    async def submit_async(
        self,
        type: str,
        payload: Mapping[str, Any] | Any = None,
        **options: Any,
    ) -> Enqueued:
        """:meth:`submit`, with the same options, for a coroutine."""
        return await asyncio.to_thread(self.submit, type, payload, **options)

    @cached_property
    def _insertion(self) -> Insertion:
        return Insertion(self.names)

    @cached_property
    def _waker(self) -> QueueWaker:
        return QueueWaker(self.config, self.statements)

    @cached_property
    def _mapper(self) -> Any:
        return inspect(self.models.QueuedJob)

    def _checks(self, check: bool | None) -> bool:
        return self.check_types if check is None else check

    def _put(self, place: Session | Connection, columns: dict[str, str]) -> Enqueued:
        if isinstance(place, Session):
            if not place._flushing:
                place.flush()
            if self.tracing is None:
                unsent = wait(place, columns, self._mapper, self)
                if unsent is not None:
                    return unsent
        connection = self._connection(place)
        job = self._inserted(self._insertion.one, connection, columns)
        self._tell_observers(job, columns)
        lanes, blocked = self._to_tell(job, columns)
        if lanes or blocked:
            tell_at_commit(place, connection, self._waker, lanes, blocked)
        if isinstance(place, Session):
            note(connection, columns)
        return job

    def _put_begun(self, session: Session, connection: Connection, jobs: list[dict[str, str]]) -> list[int]:
        try:
            ids = self._insertion.begun(connection, jobs)
        except DBAPIError as error:
            if (told := self._not_ready(error, callers=True)) is None:
                raise
            raise told from error
        lanes = self._told_of(jobs)
        if lanes:
            tell_at_commit(session, connection, self._waker, lanes, set())
        return ids

    def _put_whole(self, engine: Engine, jobs: list[dict[str, str]]) -> list[int] | None:
        try:
            with engine.connect() as connection:
                ids = self._insertion.whole(connection, jobs)
        except DBAPIError as error:
            if (told := self._not_ready(error)) is None:
                raise
            raise told from error
        if ids is not None and (lanes := self._told_of(jobs)):
            self._waker.wake(lanes)
        return ids

    def _told_of(self, jobs: list[dict[str, str]]) -> set[Lane]:
        """Tell observers of jobs that have been put in; returns what the workers are to hear."""
        if self.audience.active:
            for columns in jobs:
                self.audience.tell(JobsEnqueued(columns["type"], 1))
        return {_lane(columns) for columns in jobs} if self.wakes else set()

    def _inserted(
        self, insert: Callable[[Connection, dict[str, str]], Enqueued], connection: Connection, columns: dict[str, str]
    ) -> Enqueued:
        try:
            if self.tracing is None:
                return insert(connection, columns)
            with self.tracing.enqueuing(columns["type"], 1) as span:
                job = insert(connection, columns | trace_column(span))
                span.written([job.id])
                return job
        except DBAPIError as error:
            if (told := self._not_ready(error, callers=True)) is None:
                raise
            raise told from error

    def _tell_observers(self, job: Enqueued, columns: dict[str, str]) -> None:
        if self.audience.active and job.created:
            self.audience.tell(JobsEnqueued(columns["type"], 1))

    def _to_tell(self, job: Enqueued, columns: dict[str, str]) -> tuple[set[Lane], set[int]]:
        """What the workers are to hear of a job: its lane if it is ready, its id if it waits for others."""
        if self.wakes and job.created:
            if job.state is JobState.PENDING:
                return {_lane(columns)}, set()
            if job.state is JobState.BLOCKED:
                return set(), {job.id}
        return set(), set()

    def dispose(self) -> None:
        """Close what the queue opened itself, and end its threads. It may be used again afterwards."""
        waker = self.__dict__.get("_waker")
        if waker is not None:
            waker.close()
        super().dispose()

    def _connection(self, place: Session | Connection) -> Connection:
        return connection_of(place, self._mapper)


def _lane(columns: Mapping[str, str]) -> Lane:
    return columns["type"], int(columns.get("priority", 0)), "key" in columns
