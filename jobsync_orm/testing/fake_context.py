"""The first argument of a handler, for tests without a database."""

from __future__ import annotations

from collections.abc import Coroutine
from itertools import count
from typing import Any

from jobsync_orm.exceptions import SessionMisused
from jobsync_orm.models.states import JobState
from jobsync_orm.queue import CancelFlag, ClaimedJob, Enqueued, JobContext, JobQueue, NewJob
from jobsync_orm.queue.handlers import MAX_RETRIES, TIMEOUT_SEC
from jobsync_orm.queue.options import seconds as checked_seconds

__all__ = ["FakeContext"]


class FakeContext(JobContext):
    """A :class:`~jobsync_orm.JobContext` of an attempt that is in no database.

    Parameters
    ----------
    queue : JobQueue
        The queue. Its database is not touched.
    type : str
        Of the job.
    payload : mapping, optional
        Of the job, as :attr:`payload` gives it.
    id, attempt, failures, max_retries, key, priority, timeout
        Of the job. ``max_retries`` and ``timeout`` are the handler's if they are left out.
    session : Session or AsyncSession, optional
        What ``ctx.session`` or ``await ctx.async_session()`` gives. The test commits it, or rolls it back.

    Attributes
    ----------
    enqueued : list of NewJob
        What the handler has enqueued with ``ctx.enqueue``.
    extended : list of float
        The seconds it has asked for with ``ctx.extend`` and ``ctx.heartbeat``.
    """

    def __init__(
        self,
        queue: JobQueue,
        type: str = "test",
        payload: Any = None,
        *,
        id: int = 1,
        attempt: int = 1,
        failures: int = 0,
        max_retries: int | None = None,
        key: str | None = None,
        priority: int = 0,
        timeout: float | None = None,
        session: Any = None,
    ) -> None:
        stored = {} if payload is None else payload
        handler = queue.handlers.get(type)
        if max_retries is None:
            max_retries = MAX_RETRIES if handler is None else handler.max_retries
        if timeout is None:
            timeout = TIMEOUT_SEC if handler is None else handler.timeout
        job = ClaimedJob(id, type, priority, attempt, failures, max_retries, timeout, key, stored, 0, 0)
        super().__init__(queue, job, "test", CancelFlag())
        self.is_async = handler is not None and handler.kind == "async"
        self.enqueued: list[NewJob] = []
        self.extended: list[float] = []
        self._fake_session = session
        self._ids = count(id + 1)

    @property
    def session(self) -> Any:
        """The session given."""
        return self._given_session()

    async def async_session(self) -> Any:
        """The session given."""
        return self._given_session()

    def _given_session(self) -> Any:
        if self._fake_session is None:
            raise SessionMisused("this context has no session: give it one, FakeContext(queue, ..., session=session)")
        return self._fake_session

    def enqueue(self, type: str, payload: Any = None, **options: Any) -> Any:
        """Note down a job, checked as a real one would be."""
        check = options.pop("check", None)
        job = NewJob(type, payload, **options)
        job.columns(self.queue, self.queue.check_types if check is None else check)
        self.enqueued.append(job)
        done = Enqueued(next(self._ids), True, JobState.PENDING)
        return _awaitable(done) if self.is_async else done

    def extend(self, seconds: float) -> None:
        """Note it down, and raise ``JobCancelled`` if the test has set :attr:`cancelled`."""
        self.extended.append(checked_seconds("seconds", seconds, above=0))
        self.check()

    async def extend_async(self, seconds: float) -> None:
        """The same."""
        self.extend(seconds)

    async def heartbeat_async(self) -> None:
        """The same."""
        self.heartbeat()


def _awaitable(value: Enqueued) -> Coroutine[Any, Any, Enqueued]:
    async def give() -> Enqueued:
        return value

    return give()
