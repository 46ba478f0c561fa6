"""JSON answers, and what an error looks like: ``{"error": "..."}``, never a traceback or a server's own words."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from sqlalchemy.exc import DBAPIError, SQLAlchemyError
from sqlalchemy.exc import TimeoutError as NoneFree
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from jobsync_orm.exceptions import JobConflict, JobsyncError, OperationRefused, SchemaNotReady, UnknownJob
from jobsync_orm.logs import fields
from jobsync_orm.sqlstates import sqlstate
from jobsync_orm.web.headers import HEADERS

__all__ = ["ERRORS", "UNANSWERED", "Json", "said"]

logger = logging.getLogger("jobsync_orm.web")

QUERY_CANCELED = "57014"

# The database says nothing, or no; or the application has all connections of the engine.
UNANSWERED = (DBAPIError, NoneFree)


class Json(JSONResponse):
    """An answer that nobody keeps."""

    def __init__(self, content: Any, status_code: int = 200, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(content, status_code, {**(headers or {}), "Cache-Control": "no-store"})


def said(error: Exception) -> str:
    """An error for the person at the browser. A server's own message may name hosts and users: that is for the log."""
    if isinstance(error, JobsyncError):
        return str(error)
    if sqlstate(getattr(error, "orig", None)) == QUERY_CANCELED:
        return "the database took too long to answer"
    if isinstance(error, NoneFree):
        return "no connection to the database is free"
    return "the database does not answer"


def _of_library(request: Request, error: Exception) -> Response:
    status = 404 if isinstance(error, UnknownJob) else 409 if isinstance(error, JobConflict | OperationRefused) else 400
    return Json({"error": said(error)}, 503 if isinstance(error, SchemaNotReady) else status)


def _of_database(request: Request, error: Exception) -> Response:
    if not isinstance(error, UNANSWERED):
        raise error
    logger.warning(
        "the dashboard got no answer to %s: %s",
        *(request.url.path, getattr(error, "orig", error)),
        extra=fields("dashboard_unanswered"),
    )
    return Json({"error": said(error)}, 503)


def _of_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return Json({"error": error.detail}, error.status_code, error.headers)


async def _of_nobody(request: Request, error: Exception) -> Response:
    """An error of the application's hooks, or of ours: the server logs it. This answer passes no middleware."""
    return Json({"error": "the dashboard failed to answer this: its log says why"}, 500, HEADERS)


ERRORS: Mapping[Any, Callable[[Request, Exception], Response | Awaitable[Response]]] = {
    HTTPException: _of_http,
    JobsyncError: _of_library,
    SQLAlchemyError: _of_database,
    Exception: _of_nobody,
}
