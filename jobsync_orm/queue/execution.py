"""Run a handler once, and say how the attempt has ended.

| the handler | outcome | the job |
|---|---|---|
| returns | completed | COMPLETED, with what it returned as its result |
| returns what cannot be stored as JSON, or is too large | completed | COMPLETED without a result; the error says why |
| raises an exception | failed | RETRYING after its backoff, FAILED after ``max_retries`` failures |
| fails by a conflict in the database, or a lost connection | failed | the same, but within a second |
| raises ``Retry(after=...)`` | failed | the same, after that time |
| raises ``Snooze(...)`` | snoozed | SCHEDULED; counts for nothing |
| raises ``Discard(...)`` | discarded | FAILED |
| gets a payload that does not fit it | failed | FAILED: it would not fit the next time either |
| raises ``JobCancelled`` (``ctx.check()``) | cancelled, or why it was to stop | CANCELLED, or where that leads |

A job whose work is done is not run again because of what it returned: that would do the work twice.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import random
import traceback
from time import monotonic
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy.exc import DBAPIError

from jobsync_orm.exceptions import InvalidJob, InvalidPayload, JobCancelled, JobTimeout, LeaseLost
from jobsync_orm.logs import fields
from jobsync_orm.models.states import AttemptOutcome, JobState
from jobsync_orm.queue.handlers import BACKOFF, Handler
from jobsync_orm.queue.jobs import ClaimedJob, Ending
from jobsync_orm.queue.options import seconds
from jobsync_orm.queue.outcomes import Discard, Retry, Snooze
from jobsync_orm.queue.payload import json_text
from jobsync_orm.queue.typed_payload import load
from jobsync_orm.sqlstates import CONFLICTS, sqlstate

if TYPE_CHECKING:
    from jobsync_orm.queue.context import JobContext
    from jobsync_orm.queue.core import QueueCore

__all__ = ["error_text", "execute", "execute_async", "failed", "lost", "stopped", "traceback_text"]

logger = logging.getLogger("jobsync_orm")

# After a conflict with others, or a broken connection, a job is tried again within this many seconds.
SOON_SEC = 1.0

# Characters of an error and of a traceback that are kept.
LONGEST_ERROR, LONGEST_TRACEBACK = 4_000, 20_000

# A member of an enumeration takes longer to look up than a name.
DONE: Final = AttemptOutcome.COMPLETED
COMPLETED: Final = JobState.COMPLETED


def execute(queue: QueueCore, handler: Handler, job: ClaimedJob, context: JobContext) -> Ending:
    """Call ``handler`` for ``job`` in this thread.

    Raises
    ------
    KeyboardInterrupt
        Whoever runs the process wants it to end. Everything else that a handler raises, SystemExit too, is how the
        attempt ended.
    """
    if queue.tracing is None:
        return _execute(queue, handler, job, context)
    with queue.tracing.running(job, context.worker) as span:
        ending = _execute(queue, handler, job, context)
        span.ended(ending.outcome.value, ending.error)
        return ending


def _execute(queue: QueueCore, handler: Handler, job: ClaimedJob, context: JobContext) -> Ending:
    began = monotonic()
    try:
        if handler.payload is None:
            value = handler.function(context, **job.payload)
        else:
            value = handler.function(context, load(handler.payload, job.payload))
    except KeyboardInterrupt:
        context.close()
        raise
    except BaseException as error:  # noqa: BLE001  # whatever it is, this thread goes on with the next job
        try:
            return _raised(handler, job, context, error, began)
        finally:
            context.close()
    context.over = True
    if context.transaction is not None:
        return _commit(queue, handler, job, context, value, began)
    ended = monotonic()
    if value is None:
        return Ending(job.id, job.attempt, DONE, COMPLETED, began, ended)
    return _returned(queue, handler, job, value, began, ended)


async def execute_async(queue: QueueCore, handler: Handler, job: ClaimedJob, context: JobContext) -> Ending:
    """Call the coroutine function of ``handler`` for ``job`` in the running event loop.

    Raises
    ------
    asyncio.CancelledError
        The task that runs this was cancelled, and the attempt not: ``context.cancelled`` is not set.
    KeyboardInterrupt
        Whoever runs the process wants it to end.
    """
    if queue.tracing is None:
        return await _execute_async(queue, handler, job, context)
    with queue.tracing.running(job, context.worker) as span:
        ending = await _execute_async(queue, handler, job, context)
        span.ended(ending.outcome.value, ending.error)
        return ending


async def _execute_async(queue: QueueCore, handler: Handler, job: ClaimedJob, context: JobContext) -> Ending:
    began = monotonic()
    context.is_async = True
    try:
        if handler.payload is None:
            value = await handler.function(context, **job.payload)
        else:
            value = await handler.function(context, load(handler.payload, job.payload))
        context.over = True
        if context.transaction is not None:
            return await _commit_async(queue, handler, job, context, value, began)
    except (KeyboardInterrupt, GeneratorExit):  # the latter: its loop has ended, and left it behind
        raise
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if not context.cancelled and task is not None and task.cancelling():
            raise
        return _raised(handler, job, context, error, began)
    except BaseException as error:  # noqa: BLE001  # whatever it is, the loop goes on with the next job
        return _raised(handler, job, context, error, began)
    finally:
        await context.close_async()
    ended = monotonic()
    if value is None:
        return Ending(job.id, job.attempt, DONE, COMPLETED, began, ended)
    return _returned(queue, handler, job, value, began, ended)


def stopped(handler: Handler, job: ClaimedJob, context: JobContext, began: float, ended: float) -> Ending:
    """How an attempt ends that gave way, or was made to, because it is no longer wanted (``context.cancelled``)."""
    reason = context.cancelled.reason
    if reason == "timeout":
        late = JobTimeout(f"took more than {job.timeout:g} s")
        return failed(handler, job, late, began, ended, AttemptOutcome.TIMEOUT)
    if reason == "stopping":
        return Ending(job.id, job.attempt, AttemptOutcome.RELEASED, JobState.PENDING, began, ended)
    if reason == "lost":
        return lost(job, began, ended)
    return Ending(job.id, job.attempt, AttemptOutcome.CANCELLED, JobState.CANCELLED, began, ended)


def lost(job: ClaimedJob, began: float, ended: float) -> Ending:
    """How an attempt ends whose job is another worker's, or finished, by now: nothing is to be written."""
    return Ending(job.id, job.attempt, AttemptOutcome.DIED, JobState.PENDING, began, ended, written=True)


def failed(
    handler: Handler,
    job: ClaimedJob,
    error: BaseException,
    began: float,
    ended: float,
    outcome: AttemptOutcome = AttemptOutcome.FAILED,
) -> Ending:
    """How an attempt ends that failed with ``error``: its job is tried again, or has failed for good."""
    what = error.__cause__ if isinstance(error, Retry) and error.reason is None and error.__cause__ else error
    text, trace = error_text(what), traceback_text(error)
    if job.failures >= job.max_retries or isinstance(error, InvalidPayload):
        return Ending(job.id, job.attempt, outcome, JobState.FAILED, began, ended, None, text, trace, counts=True)
    delay = error.after if isinstance(error, Retry) and error.after is not None else _delay(handler, job, what)
    return Ending(job.id, job.attempt, outcome, JobState.RETRYING, began, ended, None, text, trace, delay, counts=True)


def error_text(error: BaseException) -> str:
    """``Type: message`` as PostgreSQL can store it, cut where it is too long."""
    try:
        message = str(error)
    except BaseException as second:  # noqa: BLE001  # of the application's, as anything here
        message = f"(its message cannot be had: {type(second).__name__})"
    name = type(error).__name__
    return _storable(f"{name}: {message}" if message else name, LONGEST_ERROR)


def _raised(handler: Handler, job: ClaimedJob, context: JobContext, error: BaseException, began: float) -> Ending:
    ended = monotonic()
    given_up = isinstance(error, asyncio.CancelledError) and context.cancelled
    lease_lost = isinstance(error, LeaseLost) and context.cancelled.reason == "lost"
    if isinstance(error, JobCancelled) or given_up or lease_lost:
        return stopped(handler, job, context, began, ended)
    if isinstance(error, Snooze):
        until = None if error.until is None else error.until.timestamp()
        return Ending(
            job.id,
            job.attempt,
            AttemptOutcome.SNOOZED,
            JobState.SCHEDULED,
            began,
            ended,
            delay=error.seconds,
            until=until,
        )
    if isinstance(error, Discard):
        why = error.__cause__ if not error.reason and error.__cause__ else error
        return Ending(
            job.id,
            job.attempt,
            AttemptOutcome.DISCARDED,
            JobState.FAILED,
            began,
            ended,
            error=error_text(why),
            traceback=traceback_text(error),
        )
    if isinstance(error, TypeError) and handler.payload is None and _called_in_vain(error):
        try:
            handler.check(job.payload)
        except InvalidPayload as reason:
            return failed(handler, job, reason, began, ended)
    return failed(handler, job, error, began, ended)


def _returned(queue: QueueCore, handler: Handler, job: ClaimedJob, value: Any, began: float, ended: float) -> Ending:
    try:
        result, problem = _stored(queue, job, value)
    except InvalidJob as error:
        return failed(handler, job, error, began, ended)
    return Ending(job.id, job.attempt, DONE, COMPLETED, began, ended, result, problem)


def _commit(
    queue: QueueCore, handler: Handler, job: ClaimedJob, context: JobContext, value: Any, began: float
) -> Ending:
    transaction: Any = context.transaction
    try:
        result, problem = _stored(queue, job, value)
        waiting = transaction.commit(result, problem, began)
    except Exception as error:  # noqa: BLE001  # of the database, or of the application's events
        return _not_committed(handler, job, error, began)
    finally:
        context.close()
    return Ending(
        job.id, job.attempt, DONE, COMPLETED, began, monotonic(), result, problem, written=True, waiting=waiting
    )


async def _commit_async(
    queue: QueueCore, handler: Handler, job: ClaimedJob, context: JobContext, value: Any, began: float
) -> Ending:
    transaction: Any = context.transaction
    try:
        result, problem = _stored(queue, job, value)
        waiting = await transaction.commit(result, problem, began)
    except Exception as error:  # noqa: BLE001  # as above
        return _not_committed(handler, job, error, began)
    return Ending(
        job.id, job.attempt, DONE, COMPLETED, began, monotonic(), result, problem, written=True, waiting=waiting
    )


def _not_committed(handler: Handler, job: ClaimedJob, error: Exception, began: float) -> Ending:
    if isinstance(error, LeaseLost):
        logger.warning("%s", error, extra=fields("job_lost", job=job))
        return lost(job, began, monotonic())
    return failed(handler, job, error, began, monotonic())


def _stored(queue: QueueCore, job: ClaimedJob, value: Any) -> tuple[str | None, str | None]:
    """What is stored of what a handler returned: JSON, or why there is none."""
    if value is None:
        return None, None
    if inspect.isawaitable(value):
        if inspect.iscoroutine(value):
            value.close()
        raise InvalidJob(
            f"the handler of {job.type!r} returned a coroutine, which nobody runs: register it with kind='async', or "
            "wrap it in an async def"
        )
    try:
        return json_text(value, "result", queue.max_payload_bytes), None
    except InvalidPayload as reason:
        logger.warning(
            "job %d (%s) has completed, but its result is not stored: %s",
            job.id,
            job.type,
            reason,
            extra=fields("result_not_stored", job=job),
        )
        return None, error_text(reason)


def _is_passing(error: BaseException) -> bool:
    """Whether the database ended the work for a reason that is none of the job's."""
    return isinstance(error, DBAPIError) and (error.connection_invalidated or sqlstate(error.orig) in CONFLICTS)


def _called_in_vain(error: BaseException) -> bool:
    """Whether the call itself raised, and not the function called."""
    trace = error.__traceback__
    return trace is not None and trace.tb_next is None


def _delay(handler: Handler, job: ClaimedJob, error: BaseException) -> float:
    try:
        delay = seconds("backoff", handler.backoff(job.failures, error))
    except BaseException:
        # A job is not lost, nor tried without pause, because of it; nor does the thread end that asks.
        logger.exception(
            "the backoff of %r jobs failed; job %d waits as by default",
            handler.type,
            job.id,
            extra=fields("backoff_failed", job=job),
        )
        delay = BACKOFF(job.failures, error)
    return min(delay, SOON_SEC * random.uniform(0.1, 1)) if _is_passing(error) else delay


def traceback_text(error: BaseException) -> str | None:
    """As Python prints it, from the handler's own frame on. Its end, with what was raised, is kept in any case."""
    trace = error.__traceback__
    if trace is None:
        return None
    try:
        lines = traceback.format_exception(type(error), error, trace.tb_next or trace)
    except BaseException:  # noqa: BLE001  # of an error whose message cannot be had
        lines = traceback.format_tb(trace)
    text = "".join(lines)
    if len(text) > LONGEST_TRACEBACK:
        half = LONGEST_TRACEBACK // 2
        text = f"{text[:half]}\n[... {len(text) - 2 * half} characters ...]\n{text[-half:]}"
    return _storable(text, len(text))


def _storable(text: str, most: int) -> str:
    if len(text) > most:
        text = f"{text[: most - 3]}..."
    return text.replace("\0", "\\x00").encode("utf-8", "backslashreplace").decode()
