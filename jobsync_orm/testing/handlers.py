"""Runs a handler without a database. See :func:`run_handler`."""

from __future__ import annotations

import inspect
import json
from typing import Any

from jobsync_orm.exceptions import InvalidJob
from jobsync_orm.queue import JobQueue, NewJob
from jobsync_orm.queue.payload import json_text
from jobsync_orm.queue.typed_payload import load
from jobsync_orm.testing.draining import in_event_loop
from jobsync_orm.testing.fake_context import FakeContext

__all__ = ["run_handler"]


def run_handler(queue: JobQueue, type: str, payload: Any = None, *, context: FakeContext | None = None) -> Any:
    """Call the handler of ``type`` once, as a worker would, without a database.

    Parameters
    ----------
    queue : JobQueue
        That has the handler.
    type : str
        Of the job.
    payload : mapping or model, optional
        As for :meth:`~jobsync_orm.JobQueue.enqueue`. The handler gets what would come back from the database.
    context : FakeContext, optional
        What the handler gets as ``ctx``. One without a session if not given.

    Returns
    -------
    object
        What the handler returned, as it would be stored: of a tuple a list.

    Raises
    ------
    UnknownJobType
        There is no handler.
    InvalidPayload
        The payload does not fit it, or what it returned is no JSON.
    Exception
        Whatever the handler raises, ``Retry``, ``Snooze`` and ``Discard`` too.
    """
    handler = queue.handler_of(type)
    stored = json.loads(NewJob(type, payload).columns(queue, check=True)["payload"])
    if context is None:
        context = FakeContext(queue, type, stored)
    if handler.payload is None:
        value = handler.function(context, **stored)
    else:
        value = handler.function(context, load(handler.payload, stored))
    if handler.kind == "async":
        value = in_event_loop(queue, value)
    elif inspect.iscoroutine(value):
        value.close()
        raise InvalidJob(f"the handler of {type!r} returned a coroutine, which nobody runs: wrap it in an async def")
    return None if value is None else json.loads(json_text(value, "result", queue.max_payload_bytes))
