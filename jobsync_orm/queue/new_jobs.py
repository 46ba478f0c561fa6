"""A job that is to be put in: what may be said of it, and the answer."""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Mapping
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any, Final

from jobsync_orm.coordinator.session import array
from jobsync_orm.exceptions import InvalidJob, InvalidTaskId, UnknownJobType, UnstableTaskId
from jobsync_orm.hashing import task_key
from jobsync_orm.models.states import JobState
from jobsync_orm.queue.handlers import MAX_RETRIES, TIMEOUT_SEC
from jobsync_orm.queue.options import brief, job_id, job_type, priority_number, retries, seconds
from jobsync_orm.queue.payload import payload_text
from jobsync_orm.queue.typed_payload import dump

if TYPE_CHECKING:
    from jobsync_orm.queue.core import QueueCore
    from jobsync_orm.queue.handlers import Handler

__all__ = ["LONGEST_KEY", "Enqueued", "NewJob", "id_of", "payload_of"]

# In bytes. An entry of a B-tree holds about 2,700, and a type may take 800 of them.
LONGEST_KEY = 1000

LARGEST_ID: Final = 2**63 - 1


@dataclass(frozen=True, slots=True)
class Enqueued:
    """What :meth:`~jobsync_orm.JobQueue.enqueue` has done.

    Attributes
    ----------
    id : int
        The job.
    created : bool
        Whether it is new. False if there was a live job with this type and ``idempotency_key``: then it is that one.
    state : JobState
        PENDING, SCHEDULED or BLOCKED; of a job that was there already any state of a live one.
    stuck_behind : tuple[int, ...]
        Of the jobs it is to run ``after``, those that have failed or were cancelled: it stays BLOCKED until they are
        retried and complete.
    """

    id: int
    created: bool
    state: JobState
    stuck_behind: tuple[int, ...] = ()


@dataclass(slots=True)
class NewJob:
    """A job for :meth:`~jobsync_orm.JobQueue.enqueue_many`; the fields are those of
    :meth:`~jobsync_orm.JobQueue.enqueue`."""

    type: str
    payload: Any = None
    _: KW_ONLY
    priority: int = 0
    key: Any = None
    idempotency_key: Any = None
    run_at: datetime.datetime | None = None
    delay: float | datetime.timedelta | None = None
    after: int | Enqueued | Iterable[int | Enqueued] = ()
    max_retries: int | None = None
    timeout: float | datetime.timedelta | None = None

    def columns(self, queue: QueueCore, check: bool) -> dict[str, str]:
        """:meth:`columns_without_payload`, and the payload.

        Raises
        ------
        InvalidPayload
            It cannot be kept, or does not fit its handler.
        """
        columns = self.columns_without_payload(queue, check)
        columns["payload"] = payload_of(queue, queue.handlers.get(self.type), self.payload)
        return columns

    def columns_without_payload(self, queue: QueueCore, check: bool) -> dict[str, str]:
        """What is to be stored, as text; only what is not the column's default.

        What the handler registered here says is stored as a guess: the handler of the worker that takes the job decides
        (see :mod:`~jobsync_orm.queue.statements.parts`), unless ``max_retries_given`` or ``timeout_given`` is among the
        columns. Their defaults are true, for rows written by who does not know them, so that statements
        complete what is missing here by false.

        Besides names of columns: ``delay`` is seconds from now, ``run_at`` is in ISO 8601, in UTC, ``after`` is an
        array of ids.

        Raises
        ------
        InvalidJob
            A value that cannot be.
        UnknownJobType
            ``check``, and no handler for the type is registered here.
        """
        handler = queue.handlers.get(self.type) if isinstance(self.type, str) else None
        max_retries, timeout = self.max_retries, self.timeout
        columns = {"type": self.type if handler is not None else job_type(self.type)}
        if handler is not None:
            max_retries = handler.max_retries if max_retries is None else max_retries
            timeout = handler.timeout if timeout is None else timeout
            if not handler.retry_blocks_key:
                columns["retry_blocks_key"] = "f"
        elif check:
            known = ", ".join(map(repr, sorted(queue.handlers))) or "none"
            raise UnknownJobType(
                f"no handler is registered here for jobs of type {self.type!r}; there are: {known}. Leave check out to "
                "enqueue jobs whose handlers only the workers know"
            )
        if self.priority != 0 or self.priority is False:
            columns["priority"] = str(priority_number(self.priority))
        if max_retries is not None and max_retries != MAX_RETRIES:
            columns["max_retries"] = str(retries(max_retries))
        if self.max_retries is not None:
            columns["max_retries_given"] = "t"
        if timeout is not None and timeout != TIMEOUT_SEC:
            columns["timeout"] = repr(seconds("timeout", _plain(timeout), above=0))
        if self.timeout is not None:
            columns["timeout_given"] = "t"
        if self.key is not None:
            columns["key"] = _key("key", self.key)
        if self.idempotency_key is not None:
            columns["idempotency_key"] = _key("idempotency_key", self.idempotency_key)
        self._when(columns)
        if self.after != ():
            ids = self._after()
            if ids:
                columns["after"] = array(ids)
        return columns

    def _when(self, columns: dict[str, str]) -> None:
        if self.delay is not None:
            if self.run_at is not None:
                raise InvalidJob(f"run_at={self.run_at!r} and delay={self.delay!r} contradict each other: give one")
            delay = seconds("delay", _plain(self.delay))
            if delay:
                columns["delay"] = repr(delay)
        elif self.run_at is not None:
            at = self.run_at
            if not isinstance(at, datetime.datetime):
                raise InvalidJob(f"run_at={brief(at)} must be a datetime with a time zone; for seconds use delay=")
            if at.utcoffset() is None:
                raise InvalidJob(
                    f"run_at={at!r} has no time zone, so that it would be another moment on another machine: give "
                    "datetime.now(UTC) + ..., or .astimezone() it"
                )
            try:
                columns["run_at"] = at.astimezone(datetime.UTC).isoformat()
            except OverflowError as error:
                raise InvalidJob(f"run_at={at!r} is out of range") from error

    def _after(self) -> list[int]:
        given = (self.after,) if isinstance(self.after, int | Enqueued) else self.after
        if isinstance(given, str | bytes) or not isinstance(given, Iterable):
            raise InvalidJob(f"after={brief(given)} must be ids of jobs, or what enqueue() returned for them")
        ids = [one.id if isinstance(one, Enqueued) else one for one in given]
        for id in ids:
            if not isinstance(id, int) or isinstance(id, bool) or not 0 < id <= LARGEST_ID:
                raise InvalidJob(f"after: {brief(id)} is no id of a job")
        return sorted(set(ids))


def id_of(job: int | Enqueued) -> int:
    """The id of a job that is named by it, or by what enqueueing it returned.

    Raises
    ------
    InvalidJob
        It is neither.
    """
    return job_id(job.id if isinstance(job, Enqueued) else job)


def payload_of(queue: QueueCore, handler: Handler | None, payload: Any) -> str:
    """A payload as JSON, checked against its handler if that is known here.

    Raises
    ------
    InvalidPayload
        It cannot be kept, or does not fit the handler.
    """
    if payload is None:
        payload = {}
    if handler is not None:
        if handler.payload is not None:
            payload = dump(handler.payload, payload)
        elif isinstance(payload, Mapping):
            handler.check(payload)
    return payload_text(payload, queue.max_payload_bytes)


def _plain(duration: Any) -> Any:
    return duration.total_seconds() if isinstance(duration, datetime.timedelta) else duration


def _key(name: str, key: Any) -> str:
    try:
        text = task_key(key)
    except (UnstableTaskId, InvalidTaskId) as error:
        raise InvalidJob(f"{name}: {error}".replace("task id ", "")) from error
    if len(text) * 4 > LONGEST_KEY and (size := len(text.encode())) > LONGEST_KEY:
        raise InvalidJob(
            f"{name}={brief(key)} has {size:,} bytes; at most {LONGEST_KEY:,} are allowed: give a hash of it"
        )
    return text
