from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import httpx2 as httpx
import pytest
from sqlalchemy import Engine

from jobsync_orm import CoordinationConfig, JobQueue
from jobsync_orm.web import dashboard


class Client:
    """Asks an ASGI application, each time in an event loop of its own, and keeps its cookies.

    ``raises``: an error of the application is the test's; else the test gets what a browser would get.
    """

    def __init__(self, app: Any, base: str = "http://ops.example/", raises: bool = True) -> None:
        self.app, self.base, self.raises = app, base, raises
        self.cookies = httpx.Cookies()

    def request(self, method: str, path: str, **more: Any) -> httpx.Response:
        async def send() -> httpx.Response:
            transport = httpx.ASGITransport(app=self.app, raise_app_exceptions=self.raises)
            async with httpx.AsyncClient(transport=transport, base_url=self.base, cookies=self.cookies) as client:
                answer = await client.request(method, path, **more)
                self.cookies = client.cookies
                return answer

        return asyncio.run(send())

    def get(self, path: str, **more: Any) -> Any:
        answer = self.request("GET", path, **more)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def act(self, action: str, what: dict[str, Any], **headers: str) -> httpx.Response:
        """Post as the page does; ``headers`` replace its own."""
        token = self.get("api/session")["token"] or ""
        given = {"sec-fetch-site": "same-origin", "x-jobsync-token": token, **headers}
        return self.request("POST", f"api/act/{action}", json=what, headers=given)


@pytest.fixture
def client(engine: Engine) -> Client:
    """A dashboard for looking only."""
    return Client(dashboard(engine))


@pytest.fixture
def writer(engine: Engine) -> Client:
    """A dashboard on which everybody is Ada, who may write."""
    return Client(dashboard(engine, allow_writes=True, auth=lambda request: "ada"))


@pytest.fixture
def queue(engine: Engine) -> Iterator[JobQueue]:
    queue = JobQueue(CoordinationConfig(engine=engine))
    yield queue
    queue.dispose()
