"""Who may look, who may write, and whether it is the dashboard's own page that asks.

A browser sends what it knows of a person (cookies, a login of the site) with every request to the site, also with one
that another site's page has caused. So a write counts only if all of this is true:

- the browser says that it comes from a page of this origin (``Sec-Fetch-Site``), or, where it does not know that
  header, the page's origin (``Origin``) is the host that was asked;
- it is JSON, and bears a token in a header of its own that equals the one in a ``SameSite=Strict`` cookie. Both are
  handed out by ``api/session``, which pages of other origins cannot read. The server keeps nothing, so any process may
  answer;
- ``auth`` knows who it is.
"""

from __future__ import annotations

import asyncio
import hmac
import inspect
import secrets
from collections.abc import Awaitable, Callable
from urllib.parse import urlsplit

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from jobsync_orm.exceptions import ConfigurationError
from jobsync_orm.web.answers import Json

__all__ = ["Access", "Auth"]

Auth = Callable[[Request], "str | Awaitable[str | None] | None"]
Endpoint = Callable[[Request], Awaitable[Response]]

COOKIE, HEADER = "jobsync_dashboard", "x-jobsync-token"


class Access:
    """The rules of one dashboard. Parameters as of :func:`~jobsync_orm.web.dashboard`."""

    def __init__(self, *, allow_writes: bool, auth: Auth | None, read_auth: Auth | None) -> None:
        if allow_writes and auth is None:
            raise ConfigurationError(
                "allow_writes=True needs auth=..., a function that says who a request comes from: without one anybody "
                "who can reach the dashboard could cancel jobs and drain nodes"
            )
        if auth is not None and not allow_writes:
            raise ConfigurationError(
                "auth=... says who may write, and nobody may without allow_writes=True; who may look is said by "
                "read_auth=..."
            )
        for name, hook in (("auth", auth), ("read_auth", read_auth)):
            if hook is not None and not callable(hook):
                raise ConfigurationError(f"{name}={type(hook).__name__} must be a function of the request")
        self._auth, self._read_auth = auth, read_auth

    def reader(self, endpoint: Endpoint) -> Endpoint:
        """``endpoint`` for those who may look."""

        async def answer(request: Request) -> Response:
            if self._read_auth is not None and await _who(self._read_auth, request) is None:
                raise HTTPException(403, "you may not look at this dashboard")
            return await endpoint(request)

        return answer

    def writer(self, endpoint: Callable[[Request, str], Awaitable[Response]]) -> Endpoint:
        """``endpoint``, which is given who it is, for those who may write."""

        async def answer(request: Request) -> Response:
            if self._auth is None:
                raise HTTPException(403, "this dashboard is read-only")
            _check_origin(request)
            _check_token(request)
            who = await _who(self._auth, request)
            if who is None:
                raise HTTPException(403, "you may not change anything here")
            return await endpoint(request, who)

        return self.reader(answer)

    async def session(self, request: Request) -> Response:
        """Who is looking, as far as that matters, and the token for what they write."""
        who = None if self._auth is None else await _who(self._auth, request)
        if who is None:
            return Json({"writes": self._auth is not None, "who": None, "token": None})
        token = request.cookies.get(COOKIE) or ""
        if len(token) < 32:
            token = secrets.token_urlsafe(32)
        answer = Json({"writes": True, "who": who, "token": token})
        path = (request.scope.get("root_path") or "") + "/"
        answer.set_cookie(
            COOKIE, token, path=path, httponly=True, samesite="strict", secure=request.url.scheme == "https"
        )
        return answer


async def _who(hook: Auth, request: Request) -> str | None:
    if inspect.iscoroutinefunction(hook) or inspect.iscoroutinefunction(getattr(hook, "__call__", None)):  # noqa: B004
        who = await hook(request)  # type: ignore[misc]
    else:
        who = await asyncio.to_thread(hook, request)
        if inspect.isawaitable(who):
            who = await who
    if who is not None and not (isinstance(who, str) and who):
        raise TypeError(f"an auth hook of the dashboard must return a name or None, not {who!r}")
    return who


def _check_origin(request: Request) -> None:
    site = request.headers.get("sec-fetch-site")
    if site is not None:
        same = site == "same-origin"
    else:
        origin = request.headers.get("origin", "")
        same = bool(origin) and urlsplit(origin).netloc.lower() == request.headers.get("host", "").lower()
    if not same:
        raise HTTPException(403, "this does not come from the dashboard's own page")


def _check_token(request: Request) -> None:
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise HTTPException(415, "what is to be done is said in JSON")
    cookie, header = request.cookies.get(COOKIE, ""), request.headers.get(HEADER, "")
    if not cookie or not hmac.compare_digest(cookie.encode(), header.encode()):
        raise HTTPException(403, "the page's token is missing or out of date: load the page again")
