"""What those who may write can do. Each action is one call of the queue or of :mod:`jobsync_orm.operate`.

Every one is logged with who did it and what came of it, event ``dashboard_action``; those that were refused, and those
of which nobody knows what came of them, as well. The thread that does it logs it, whether or not somebody still waits
for the answer.
What each locks stands in the module that does it.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from functools import partial
from typing import Any

from sqlalchemy import Engine
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from jobsync_orm.exceptions import JobsyncError
from jobsync_orm.logs import fields
from jobsync_orm.operate import drain, undrain
from jobsync_orm.queue import JobQueue
from jobsync_orm.web.answers import Json
from jobsync_orm.web.workbench import Workbench

__all__ = ["Acting"]

logger = logging.getLogger("jobsync_orm.web")

# Bytes of a request.
LONGEST = 10_000


class Acting:
    """The endpoint that writes.

    Parameters
    ----------
    engine, queue : Engine, JobQueue
        Where.
    bench : Workbench
        Whose threads.
    done : callable
        Called when something has been written.
    """

    def __init__(self, engine: Engine, queue: JobQueue, bench: Workbench, done: Callable[[], None]) -> None:
        self._engine, self._queue, self._bench, self._done = engine, queue, bench, done
        self._actions: dict[str, Callable[[dict[str, Any], str], str]] = {
            "retry": self._retry,
            "cancel": self._cancel,
            "pause": self._pause,
            "resume": self._resume,
            "drain": self._drain,
            "undrain": self._undrain,
        }

    async def act(self, request: Request, who: str) -> Response:
        """Do what the address names, with what the body says of it."""
        name = request.path_params["action"]
        if name not in self._actions:
            raise HTTPException(404, f"there is no action {name!r}; there are {', '.join(self._actions)}")
        body = await _body(request)
        return Json({"said": await self._bench.do(partial(self._do, name, body, who))})

    def _do(self, name: str, body: dict[str, Any], who: str) -> str:
        node = body["node"] if isinstance(body.get("node"), str) else None
        try:
            outcome = self._actions[name](body, who)
        except (JobsyncError, HTTPException) as error:
            why = error.detail if isinstance(error, HTTPException) else error
            logger.warning("%r was refused to %s %r: %s", who, name, body, why, extra=fields("dashboard_action", node))
            raise
        except Exception as error:
            logger.warning(
                "%r wanted to %s %r, and whether it was done is not known: %s",
                *(who, name, body, getattr(error, "orig", error)),
                extra=fields("dashboard_action", node),
            )
            raise
        finally:
            self._done()
        logger.info("%r did %s %r: %s", who, name, body, outcome, extra=fields("dashboard_action", node))
        return outcome

    def _retry(self, body: dict[str, Any], who: str) -> str:
        id = _given(body, "id", int)
        return f"job {id} is {self._queue.retry(id)}"

    def _cancel(self, body: dict[str, Any], who: str) -> str:
        id = _given(body, "id", int)
        state = self._queue.cancel(id)
        return f"job {id} is {state}" + (": its worker has been told to stop" if state == "processing" else "")

    def _pause(self, body: dict[str, Any], who: str) -> str:
        type, reason = _given(body, "type", str, None), _given(body, "reason", str, None)
        self._queue.pause(type, f"{who}: {reason}" if reason else who)
        return f"{'the queue' if type is None else f'type {type!r}'} is paused"

    def _resume(self, body: dict[str, Any], who: str) -> str:
        type = _given(body, "type", str, None)
        what = "the queue" if type is None else f"type {type!r}"
        return f"{what} goes on" if self._queue.resume(type) else f"{what} was not paused"

    def _drain(self, body: dict[str, Any], who: str) -> str:
        node = _given(body, "node", str)
        ordered = drain(self._engine, self._queue.names, node, by=who, reason=_given(body, "reason", str, None))
        return f"{node!r} gives up its tokens" if ordered else f"{node!r} was drained already"

    def _undrain(self, body: dict[str, Any], who: str) -> str:
        node = _given(body, "node", str)
        ended = undrain(self._engine, self._queue.names, node)
        return f"{node!r} gets tokens again" if ended else f"{node!r} was not drained"


REQUIRED: Any = object()


def _given(body: dict[str, Any], name: str, kind: type, default: Any = REQUIRED) -> Any:
    value = body.get(name)
    if value is None and default is not REQUIRED:
        return default
    if not isinstance(value, kind) or isinstance(value, bool):
        raise HTTPException(400, f"{name}={value!r} must be a {kind.__name__}")
    return value


async def _body(request: Request) -> dict[str, Any]:
    text = b""
    async for part in request.stream():
        text += part
        if len(text) > LONGEST:
            raise HTTPException(413, f"more than {LONGEST} bytes")
    try:
        body = json.loads(text)
    except (ValueError, RecursionError):
        raise HTTPException(400, "this is no JSON") from None
    if not isinstance(body, dict):
        raise HTTPException(400, "what is to be done is said in a JSON object")
    return body
